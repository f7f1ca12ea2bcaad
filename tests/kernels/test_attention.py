"""Decode and prefill attention: the reference and the CPU kernels against dense attention over the same tokens."""

import math
import os
import subprocess
import sys

import pytest
import torch

from kernels.attention.decode import mixed_attention, paged_attention, paged_attention_reference
from kernels.attention.plan import AttentionPlan
from kernels.attention.prefill import prefill_attention, prefill_attention_reference
from kernels.attention.whole import BLOCK_SIZE, supports_whole_attention, whole_attention
from kernels.cpu.attention import tiles as attention_tiles
from kernels.dispatch import cpu_kernels
from tests.kernels.oracle import attention, fused_q, options, paged, share

# (num_heads, num_kv_heads, head_dim, block_size): single heads, padded and exact quads, quads with rest, odd head sizes
SHAPES = [(3, 3, 32, 8), (12, 4, 64, 16), (7, 1, 80, 16), (8, 2, 128, 4), (5, 1, 112, 24), (2, 2, 256, 128),
          (9, 3, 96, 48)]  # fmt: skip
SEQ_LENS = [1, 17, 33, 70]
Q_LENS = [1, 5, 33, 0]
DTYPES = [torch.float32, torch.bfloat16]
# Tiles and dots round probabilities to bf16, as kernels for matrix units do: 8 bits of values up to about 3. Scores of
# 256 numbers in fp32 differ by the order of their sums.
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1.3e-6}, torch.bfloat16: {"atol": 1e-2, "rtol": 1.6e-2}}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=["kernel", "reference"])
def decode(request):
    return paged_attention if request.param == "kernel" else paged_attention_reference


@pytest.fixture(params=["kernel", "reference"])
def prefill(request):
    return prefill_attention if request.param == "kernel" else prefill_attention_reference


def test_the_compiled_kernels_are_what_is_tested():
    assert cpu_kernels() is not None, "numba is a dependency: without it these tests would compare torch with torch"


CASES = ["plain", "window", "softcap", "alibi", "all", "sinks", "chunk", "chunked sinks"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(decode, dtype, shape, case):
    num_heads, num_kv_heads, head_dim, block_size = shape
    data = paged(SEQ_LENS, num_kv_heads, head_dim, block_size, dtype)
    q = fused_q(len(SEQ_LENS), num_heads, num_kv_heads, head_dim, dtype)
    kwargs = options(case, num_heads)
    out = decode(q, data.k_cache, data.v_cache, data.block_tables, data.seq_lens, 0.3, **kwargs)
    expected = [attention(q[i : i + 1], data.keys[i], data.values[i], 0.3, **kwargs) for i in range(len(SEQ_LENS))]
    torch.testing.assert_close(out, torch.cat(expected), **TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [*SHAPES[1:4], *SHAPES[5:]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_whole_chunked_and_empty(prefill, dtype, shape, case):
    num_heads, num_kv_heads, head_dim, block_size = shape
    data = paged(SEQ_LENS, num_kv_heads, head_dim, block_size, dtype)
    cu_seqlens_q = torch.tensor([0, *torch.tensor(Q_LENS).cumsum(0).tolist()], dtype=torch.int32)
    q = fused_q(sum(Q_LENS), num_heads, num_kv_heads, head_dim, dtype)
    kwargs = options(case, num_heads)
    out = prefill(q, data.k_cache, data.v_cache, data.block_tables, cu_seqlens_q, data.seq_lens, max(Q_LENS), 0.3,
                  **kwargs)  # fmt: skip
    rows = q.split(Q_LENS)
    expected = [attention(rows[i], data.keys[i], data.values[i], 0.3, **kwargs) for i in range(len(SEQ_LENS))]
    torch.testing.assert_close(out, torch.cat(expected), **TOLERANCE[dtype])


@pytest.mark.parametrize("num_tokens, num_rows, head_dim", [(20_000, 1, 64), (60, 60, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_needs_much_scratch(dtype, num_tokens, num_rows, head_dim):
    """Long contexts, and tiles of wide heads."""
    data = paged([num_tokens], 1, head_dim, 32, dtype)
    q = torch.randn(num_rows, 8, head_dim).to(dtype)
    arguments = data.k_cache, data.v_cache, data.block_tables
    expected = attention(q, data.keys[0], data.values[0], 0.1)
    first_rows = torch.tensor([0, num_rows], dtype=torch.int32)
    prefilled = prefill_attention(q, *arguments, first_rows, data.seq_lens, num_rows, 0.1)
    torch.testing.assert_close(prefilled, expected, **TOLERANCE[dtype])
    decoded = paged_attention(q[-1:], *arguments, data.seq_lens, 0.1)
    torch.testing.assert_close(decoded, expected[-1:], **TOLERANCE[dtype])


def test_scratch_lives_as_long_as_its_kernel():
    """With this setting glibc gives freed memory back at once, and who still reads it is killed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "much_scratch"]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_result_goes_where_it_is_wanted():
    """Decode rows and prefill rows of a mixed step are slices of one output."""
    data = paged([9, 20], 2, 32, 8, torch.float32)
    q, caches = torch.randn(6, 4, 32), (data.k_cache, data.v_cache)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    out = torch.full(q.shape, float("nan"))
    decoded = paged_attention(q[:1], *caches, data.block_tables[:1], data.seq_lens[:1], 0.3, out=out[:1])
    prefilled = prefill_attention(
        q[1:], *caches, data.block_tables[1:], starts, data.seq_lens[1:], 5, 0.3, out=out[1:]
    )  # fmt: skip
    assert decoded.data_ptr() == out.data_ptr() and prefilled.data_ptr() == out[1:].data_ptr()
    torch.testing.assert_close(out[:1], attention(q[:1], data.keys[0], data.values[0], 0.3))
    torch.testing.assert_close(out[1:], attention(q[1:], data.keys[1], data.values[1], 0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_kernel_reads_or_writes_rows_behind_the_last_sequence(dtype):
    """The rows of a bucket that a step leaves empty, even all of them."""
    data = paged([9, 20], 2, 32, 8, dtype)
    q, caches = torch.randn(100, 4, 32).to(dtype), (data.k_cache, data.v_cache)
    for counts in ([1, 5], [0, 20], [0, 0]):
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        out = torch.full(q.shape, 7.0, dtype=dtype)
        mixed_attention(q, *caches, data.block_tables, starts, data.seq_lens, 0.3, out=out)
        rows = q[: sum(counts)].split(counts)
        expected = [attention(rows[i], data.keys[i], data.values[i], 0.3) for i in range(2)]
        torch.testing.assert_close(out[: sum(counts)], torch.cat(expected), **TOLERANCE[dtype])
        assert (out[sum(counts) :] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_computes_no_row_for_sequences_without_one(dtype):
    """Samples that are forked in a step of decodes have lengths, but no row."""
    data = paged([9, 20, 33, 12, 40], 2, 32, 16, dtype)
    q, out = torch.randn(5, 4, 32).to(dtype), torch.full((5, 4, 32), 7.0, dtype=dtype)
    paged_attention(q[:3], data.k_cache, data.v_cache, data.block_tables, data.seq_lens, 0.3, out=out[:3])
    assert (out[3:] == 7.0).all()


def test_a_padding_row_gives_zeros(decode):
    data = paged([9, 4], 2, 32, 8, torch.float32)
    data.seq_lens[1] = 0
    out = decode(torch.randn(2, 4, 32), data.k_cache, data.v_cache, data.block_tables, data.seq_lens, 0.3)
    assert out[0].abs().sum() > 0 and torch.equal(out[1], torch.zeros(4, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch_or_on_how_it_was_scheduled(dtype):
    """The same bits alone, among others, and on one thread or two; with a plan for that, also as the end of a
    prefill."""
    data = paged([40, 3, 90, 17], 2, 64, 16, dtype)
    q = torch.randn(4, 6, 64).to(dtype)
    arguments = data.k_cache, data.v_cache, data.block_tables, data.seq_lens
    together = paged_attention(q, *arguments, 0.125)
    alone = paged_attention(q[2:3], data.k_cache, data.v_cache, data.block_tables[2:3], data.seq_lens[2:3], 0.125)
    assert torch.equal(together[2:3], alone)
    rows = torch.cat([torch.randn(5, 6, 64).to(dtype), q[2:3]])
    plan = AttentionPlan(0, 0, torch.empty(0), torch.empty(0), batch_invariant=True)
    prefilled = prefill_attention(
        rows, data.k_cache, data.v_cache, data.block_tables[2:3], cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32),
        seq_lens=data.seq_lens[2:3], max_seqlen_q=6, scale=0.125, plan=plan,
    )  # fmt: skip
    assert torch.equal(prefilled[5:], alone)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(paged_attention(q, *arguments, 0.125), together)
    finally:
        torch.set_num_threads(threads)


def assert_rows_are_as_alone(data, q, num_rows, kwargs):
    """Each row has the bits that it has alone, and the first num_rows are right. Results may have gaps behind rows."""

    def decode(rows, out=None):
        tables, lens = data.block_tables[rows].contiguous(), data.seq_lens[rows].contiguous()
        return paged_attention(q[rows], data.k_cache, data.v_cache, tables, lens, 0.3, out=out, **kwargs)

    wide, size = torch.full((len(q), q[0].numel() + 32), 7.0, dtype=q.dtype), q[0].numel()
    together = decode(slice(0, None), wide[:, :size].view(q.shape))
    assert torch.equal(together, torch.cat([decode(slice(i, i + 1)) for i in range(len(q))]))
    assert (wide[:, size:] == 7.0).all()
    expected = [attention(q[i : i + 1], data.keys[i], data.values[i], 0.3, **kwargs) for i in range(num_rows)]
    torch.testing.assert_close(together[:num_rows], torch.cat(expected), **TOLERANCE[q.dtype])


@pytest.mark.parametrize("num_rows", [3, 20, 40])  # with two threads: one, two and four heads of four
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(12, 4, 64, 16), (4, 4, 32, 8), (12, 6, 32, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_item_of_several_heads_gives_the_bits_of_one(dtype, shape, case, num_rows):
    """The number and the lengths of rows choose how many KV heads an item has; a single row has a share of them for
    each thread."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    seq_lens = [20 + 3 * i % 29 for i in range(num_rows)] + [0, 1]
    data = paged(seq_lens, num_kv_heads, head_dim, block_size, dtype)
    q = fused_q(len(seq_lens), num_heads, num_kv_heads, head_dim, dtype)
    assert_rows_are_as_alone(data, q, num_rows, options(case, num_heads))


@pytest.mark.parametrize("num_rows", [20, 60])  # with two threads and four KV heads: items of four rows, and eight
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(12, 4, 64, 16), (14, 2, 96, 48), (40, 2, 64, 16), (8, 4, 32, 4)], ids=str)
def test_sequences_that_begin_with_the_same_blocks_give_the_bits_of_each_alone(shape, case, num_rows):
    """Samples of one prompt, prompts with a common beginning of any length, and sequences of their own between them."""
    (num_heads, num_kv_heads, head_dim, block_size), dtype = shape, torch.bfloat16
    seq_lens = [144 + 17 * i % 60 for i in range(num_rows)] + [0, 150]  # the first ends with what it has in common
    data = paged(seq_lens, num_kv_heads, head_dim, block_size, dtype)
    for i in range(1, num_rows):
        share(data, i, (0 if i % 9 == 4 else 96 if i % 5 == 3 else 144) // block_size)
    q = fused_q(len(seq_lens), num_heads, num_kv_heads, head_dim, dtype)
    assert_rows_are_as_alone(data, q, num_rows, options(case, num_heads))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(12, 4, 64, 16), (4, 4, 32, 16), (14, 2, 96, 48)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_recorded_step_serves_any_numbers_of_sequences_up_to_its_own(dtype, shape, case):
    """The kernels read them when they run. Sequences with common blocks, empty ones, and padding of either kind."""
    (num_heads, num_kv_heads, head_dim, block_size), capacity = shape, 130
    data = paged([150 + 7 * i % 40 for i in range(20)] + [3, 90, 64], num_kv_heads, head_dim, block_size, dtype)
    for i in range(1, 20):
        share(data, i, (96 if i % 5 == 3 else 144) // block_size)
    q, kwargs = fused_q(capacity, num_heads, num_kv_heads, head_dim, dtype), options(case, num_heads)
    tables = torch.zeros((capacity, data.block_tables.shape[1]), dtype=torch.int32)
    seq_lens, starts = (torch.zeros(capacity + extra, dtype=torch.int32) for extra in (0, 1))
    counts, caches = torch.zeros(2, dtype=torch.int64), (data.k_cache, data.v_cache)
    cpu = cpu_kernels()
    program = cpu.program.record(
        lambda: mixed_attention(q, *caches, tables, starts, seq_lens, 0.3, counts=counts, **kwargs),
        cpu.program.Workspace(),
    )
    for num_decodes, chunks in ((20, [3, 70, 0]), (0, [2, 17, 64]), (1, []), (7, [0, 90]), (0, [])):
        sequences = [*range(num_decodes), *range(20, 20 + len(chunks))]
        lengths = torch.tensor([0, *[1] * num_decodes, *chunks]).cumsum(0).to(torch.int32)
        counts[:] = torch.tensor([num_decodes, len(sequences)])
        tables[: len(sequences)], seq_lens[: len(sequences)] = data.block_tables[sequences], data.seq_lens[sequences]
        starts[: len(lengths)] = lengths
        program.result.fill_(7.0)
        out, n, end = program(), num_decodes, int(lengths[-1])
        decoded = paged_attention(q[:n], *caches, data.block_tables[:n], data.seq_lens[:n], 0.3, **kwargs)
        rest = data.block_tables[sequences[n:]], lengths[n:] - n, data.seq_lens[sequences[n:]]
        assert torch.equal(out[:n], decoded)
        assert torch.equal(out[n:end], prefill_attention(q[n:end], *caches, *rest, 70, 0.3, **kwargs))
        assert (out[end:] == 7.0).all(), "no kernel writes padding"


LONG_CASES = {
    "plain": {},
    "window": {"sliding_window": 70},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.3, 6)},
    "chunk": {"attention_chunk": 90, "sinks": torch.linspace(-1.0, 3.0, 6), "sliding_window": 85},
}


@pytest.mark.parametrize("case", LONG_CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prompt_has_the_same_bits_however_it_is_cut(dtype, case):
    """In one piece, in chunks that start and end anywhere, behind a cached prefix, beside others, on two threads."""
    data = paged([150, 200], 2, 64, 16, dtype)
    q = torch.randn(350, 6, 64).to(dtype)

    def prefill(first_seq, rows, seq_lens):
        tables = data.block_tables[first_seq : first_seq + len(rows)]
        cu_seqlens_q = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0)], dtype=torch.int32)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        longest = max(len(r) for r in rows)
        return prefill_attention(
            torch.cat(rows),
            data.k_cache,
            data.v_cache,
            tables,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=lengths,
            max_seqlen_q=longest,
            scale=0.1,
            **LONG_CASES[case],
        )

    whole = prefill(0, [q[:150], q[150:]], [150, 200])
    ends = [1, 64, 65, 113, 200]
    pieces = [prefill(1, [q[150 + a : 150 + b]], [b]) for a, b in zip([0, *ends], ends, strict=False)]
    assert torch.equal(torch.cat(pieces), whole[150:])
    expected = attention(q[300:], data.keys[1], data.values[1], 0.1, **LONG_CASES[case])
    torch.testing.assert_close(whole[300:], expected, **TOLERANCE[dtype])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(prefill(0, [q[100:150], q[180:]], [150, 200]), torch.cat([whole[100:150], whole[180:]]))
    finally:
        torch.set_num_threads(threads)


TRENDS = {
    "drift": lambda t: 0.03 * t,  # a few powers of two in all: the first shift serves every tile
    "climb": lambda t: 0.5 * t,
    "jumps": lambda t: 40.0 * (t // 64),
    "fall": lambda t: -0.5 * t,
    "spike": lambda t: 60.0 if t == 130 else 0.0,
    "extremes": lambda t: 1e4 * (t % 3 - 1),
    "rows apart": lambda t: 0.0,
}


@pytest.mark.parametrize("trend", TRENDS)
@pytest.mark.parametrize("case", ["plain", "window"])
def test_a_prompt_whose_scores_rise_and_fall(case, trend):
    """The sums of a row follow its largest score; neither the trend nor rows beside it change its bits."""
    data = paged([270], 2, 32, 16, torch.bfloat16)
    for t in range(270):
        data.keys[0][t, :, 0] = TRENDS[trend](t)
        data.k_cache[data.block_tables[0, t // 16], :, t % 16, 0] = TRENDS[trend](t)
    q = torch.randn(270, 4, 32).bfloat16()
    q[..., 0] = torch.linspace(-200, 200, 270)[:, None] if trend == "rows apart" else 1.0
    if trend == "rows apart":
        q[::2] *= 30

    def prefill(begin, end):
        return prefill_attention(
            q[begin:end], data.k_cache, data.v_cache, data.block_tables, max_seqlen_q=end - begin, scale=1.0,
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32), **LONG_CASES[case],
        )  # fmt: skip

    whole = prefill(0, 270)
    expected = attention(q, data.keys[0], data.values[0], 1.0, **LONG_CASES[case])
    torch.testing.assert_close(whole, expected, **TOLERANCE[torch.bfloat16])
    ends = [1, 66, 67, 131, 203, 270]
    pieces = [prefill(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_at_the_limit_of_exponents_counts(dtype):
    """Tiles rescale a row from an exponent of 8 on. 200 heads whose second largest score is within two floats of it, so
    that the exponent is above 8 or not, depending on how it is rounded. All values are 1, and so are their means."""
    to_exponent = torch.tensor(0.125 * math.log2(math.e))
    first = torch.rand(200) * 30
    second = (8 + first * to_exponent) / to_exponent
    second += (torch.arange(200) % 5 - 2) * 2.0**-18  # floats from 32 to 64 are so far apart
    data = paged([128], 200, 32, 16, dtype)
    keys, values = (torch.zeros(128, 200, 32, dtype=dtype) for _ in range(2))
    for token, rest in ((0, first), (64, second)):
        for i in range(3):  # bf16 numbers whose sum is the score
            keys[token, :, i] = rest.bfloat16()
            rest = rest - rest.bfloat16().float()
    for cache, rows in ((data.k_cache, keys), (data.v_cache, values + 1)):
        cache[data.block_tables[0, :8].long()] = rows.view(8, 16, 200, 32).transpose(1, 2)
    q = torch.ones(128, 200, 32, dtype=dtype)
    starts = torch.tensor([0, 128], dtype=torch.int32)
    out = prefill_attention(q, data.k_cache, data.v_cache, data.block_tables, starts, data.seq_lens, 128, 0.125)
    torch.testing.assert_close(out, torch.ones_like(out), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_never_read_what_lies_behind_a_sequence(dtype):
    """The rest of its last block may hold anything: here NaN."""
    if not attention_tiles.MULTIPLIES_PAIRS:
        pytest.skip("tiles need AVX2")
    data = paged([37, 65], 2, 32, 16, dtype)
    for seq, length in enumerate((37, 65)):
        last = data.block_tables[seq, length // 16]
        for cache in (data.k_cache, data.v_cache):
            cache[last, :, length % 16 :] = torch.nan
    q = torch.randn(30, 4, 32).to(dtype)
    assert attention_tiles.supports(q, data.k_cache)
    starts = torch.tensor([0, 10, 30], dtype=torch.int32)
    out = prefill_attention(q, data.k_cache, data.v_cache, data.block_tables, starts, data.seq_lens, 20, 0.3)
    expected = [attention(rows, data.keys[i], data.values[i], 0.3) for i, rows in enumerate(q.split([10, 20]))]
    torch.testing.assert_close(out, torch.cat(expected), **TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim, block_size, dtype", [(20, 8, torch.float32), (32, 6, torch.bfloat16),
                                                         (64, 16, torch.float16)])  # fmt: skip
def test_layouts_that_the_cpu_kernel_does_not_cover_go_to_the_reference(head_dim, block_size, dtype):
    data = paged(SEQ_LENS, 2, head_dim, block_size, dtype)
    q = torch.randn(len(SEQ_LENS), 4, head_dim).to(dtype)
    arguments = data.k_cache, data.v_cache, data.block_tables, data.seq_lens
    assert not cpu_kernels().attention.supports_attention(q, *arguments)
    expected = [attention(q[i : i + 1], data.keys[i], data.values[i], 0.3) for i in range(len(SEQ_LENS))]
    torch.testing.assert_close(paged_attention(q, *arguments, 0.3), torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest():
    data = paged([30], 1, 32, 16, torch.float32)
    q = torch.randn(1, 1, 32) * 300
    out = paged_attention(q, data.k_cache, data.v_cache, data.block_tables, data.seq_lens, 1.0)
    torch.testing.assert_close(out, attention(q, data.keys[0], data.values[0], 1.0))


def dense_both_ways(q, keys, values, scale, window):
    """Each token attends to all tokens, or to those nearer than the window. fp64."""
    group, places = q.shape[1] // keys.shape[1], torch.arange(len(q))
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if window:
        scores = scores.masked_fill((places[:, None] - places).abs() >= window, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(2), values).to(q.dtype)


@pytest.mark.parametrize("window", [0, 1, 5, 64, 70])
@pytest.mark.parametrize("shape", [(3, 3, 32), (12, 4, 64), (4, 1, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_token_attends_to_its_whole_sequence(dtype, shape, window):
    """Sequences shorter and longer than a tile of 64 keys and than an item of 96 rows, in blocks in any order; a
    sequence has the bits that it has alone."""
    num_heads, num_kv_heads, head_dim = shape
    lengths = [1, 17, 64, 65, 130, 200]
    assert supports_whole_attention(torch.device("cpu"), dtype, head_dim) == attention_tiles.MULTIPLIES_PAIRS
    if not attention_tiles.MULTIPLIES_PAIRS:
        pytest.skip("tiles need AVX2")
    data = paged(lengths, num_kv_heads, head_dim, BLOCK_SIZE, dtype)
    q = fused_q(sum(lengths), num_heads, num_kv_heads, head_dim, dtype)

    def attend(rows, first, end):
        starts = torch.tensor([0, *torch.tensor(lengths[first:end]).cumsum(0)], dtype=torch.int32)
        tables, seq_lens = data.block_tables[first:end], data.seq_lens[first:end]
        caches = data.k_cache, data.v_cache
        return whole_attention(rows, *caches, tables, starts, seq_lens, head_dim**-0.5, sliding_window=window)

    together = attend(q, 0, len(lengths)).split(lengths)
    for i, rows in enumerate(q.split(lengths)):
        expected = dense_both_ways(rows, data.keys[i], data.values[i], head_dim**-0.5, window)
        torch.testing.assert_close(together[i], expected, **TOLERANCE[dtype])
        assert torch.equal(attend(rows, i, i + 1), together[i])


def test_fp32_prefill_is_as_exact_as_torch():
    """Scores of up to 15, whose largest comes anywhere: a row's sums are rescaled on the way."""
    lengths, scale = [500], 0.125
    data = paged(lengths, 4, 64, 16, torch.float32)
    q = 3 * torch.randn(500, 4, 64)
    starts = torch.tensor([0, 500], dtype=torch.int32)
    ours = prefill_attention(q, data.k_cache, data.v_cache, data.block_tables, starts, data.seq_lens, 500, scale)
    dense = [x.transpose(0, 1)[None] for x in (q, data.keys[0], data.values[0])]
    options = {"is_causal": True, "scale": scale}
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in dense), **options)
    theirs = torch.nn.functional.scaled_dot_product_attention(*dense, **options)
    assert (ours - exact[0].transpose(0, 1)).norm() < 2 * (theirs - exact).norm()
