"""Quantised pages: the arithmetic against its error bounds, and writes and attention on a CPU against the reference."""

import pytest
import torch

from kernels.attention.decode import paged_attention, paged_attention_reference
from kernels.attention.prefill import prefill_attention, prefill_attention_reference
from kernels.cache.quantize import dequantize_rows, quantize_rows, read_pages, split_pages
from kernels.cache.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference
from kernels.cpu.attention import tiles
from kernels.dispatch import cpu_kernels
from kernels.kv_format import FP8, INT4, INT8, KV_FORMATS, find_kv_format
from tests.kernels.oracle import attention, empty_pages, fused_q, options, paged, quantized

# (num_heads, num_kv_heads, head_dim, block_size): singles, padded and exact quads, quads with rest; the smallest rows,
# rows that end in half a vector of int4, blocks of other lengths than a vector
SHAPES = [(3, 3, 32, 8), (2, 1, 16, 8), (12, 4, 64, 16), (7, 1, 80, 16), (8, 2, 128, 4), (5, 1, 48, 24)]
SEQ_LENS = [1, 17, 33, 70]
Q_LENS = [1, 5, 33, 0]
DTYPES = [torch.float32, torch.bfloat16]
BF16_TOLERANCE = {"atol": 2e-2, "rtol": 1.6e-2}  # of tiles, which round keys, values and probabilities to bf16

each_format = pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def round_trip(x, kv_format):
    return dequantize_rows(*quantize_rows(x, kv_format), kv_format)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
def test_errors_stay_within_half_a_step(head_dim):
    """The bounds that follow from the formats; 1.001 allows for the rounding of the arithmetic itself."""
    x = torch.randn(500, head_dim) * torch.logspace(-12, 12, 500)[:, None] + torch.randn(500, 1)
    largest, (low, high) = x.abs().amax(1, keepdim=True), (f(1, keepdim=True) for f in (x.amin, x.amax))
    errors = {kv_format: (round_trip(x, kv_format) - x).abs() for kv_format in KV_FORMATS.values()}
    assert (errors[INT8] <= 1.001 * largest / 254).all()
    # e4m3: half of the last of three mantissa bits, or half of the smallest step, 2^-9
    assert (errors[FP8] <= 1.001 * torch.maximum(x.abs() / 16, largest / 448 / 1024)).all()
    # int4: and what rounding scale and minimum to bf16 (2^-9 of them) moves the ends of the range
    assert (errors[INT4] <= (high - low) / 30 + 2**-8 * (high - low + low.abs())).all()


def test_fp8_codes_are_torchs():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.view(torch.float8_e4m3fn).float().isfinite()
    rows = dequantize_rows(codes[finite][None], torch.tensor([1.0]).view(torch.int32), FP8)
    assert torch.equal(rows[0], codes.view(torch.float8_e4m3fn).float()[finite])
    assert torch.equal(round_trip(rows, FP8), rows), "a row of e4m3 numbers up to 448 comes back as it was"


@each_format
@pytest.mark.parametrize("row", [0.0, 3.0, -1e-38, 1e-20, 3e38], ids=str)
def test_constant_and_extreme_rows(kv_format, row):
    x = torch.full((1, 32), row)
    rtol = 2**-8 if kv_format is INT4 else 1e-6
    torch.testing.assert_close(round_trip(x, kv_format), x, rtol=rtol, atol=1e-30)


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("write", [reshape_and_cache, reshape_and_cache_reference])
def test_a_row_that_is_not_finite_reads_as_nan_and_no_other_does(kv_format, bad, write):
    x = torch.randn(3, 2, 32)
    x[1, 0, 7] = bad
    caches = [empty_pages(1, 2, 32, 8, kv_format) for _ in range(2)]
    write(x, x, *caches, torch.arange(3))
    rows = read_pages(caches[1])[0, :, :3].transpose(0, 1)
    assert rows[1, 0].isnan().all() and rows.isnan().sum() == 32


@each_format
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim, num_kv_heads", [(16, 1), (20, 3), (32, 4), (64, 2), (80, 2), (128, 1)])
def test_writes_equal_the_reference_byte_for_byte(kv_format, dtype, head_dim, num_kv_heads):
    """Rows of a fused qkv tensor, padding skipped, and no byte of another slot touched."""
    qkv = torch.randn(300, 2 * num_kv_heads + 3, head_dim).to(dtype) * 3
    qkv[7], qkv[8, :, 1:] = 0.0, 0.0
    key, value = qkv[:, 3 : num_kv_heads + 3], qkv[:, num_kv_heads + 3 :]
    slots = torch.randperm(400)[:300]
    slots[4] = -1
    found, expected = ([empty_pages(50, num_kv_heads, head_dim, 8, kv_format) for _ in range(2)] for _ in range(2))
    reshape_and_cache(key, value, *found, slots)
    reshape_and_cache_reference(key, value, *expected, slots)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.isfinite(read_pages(got).transpose(1, 2).flatten(0, 1)[slots[slots >= 0]]).all()


@each_format
def test_what_is_written_does_not_depend_on_the_step_that_writes_it(kv_format):
    x, slots = torch.randn(40, 2, 64).bfloat16(), torch.randperm(64)[:40]
    at_once, one_by_one = ([empty_pages(4, 2, 64, 16, kv_format) for _ in range(2)] for _ in range(2))
    reshape_and_cache(x, x, *at_once, slots)
    for t in reversed(range(40)):
        reshape_and_cache(x[t : t + 1], x[t : t + 1], *one_by_one, slots[t : t + 1])
    assert torch.equal(at_once[0].view(torch.uint8), one_by_one[0].view(torch.uint8))


@each_format
def test_copying_index_b_of_each_tensor_copies_a_block(kv_format):
    """Copy-on-write, swapping and the tiers rely on it: the scales lie with the data."""
    x = torch.randn(16, 2, 32)
    caches = [empty_pages(3, 2, 32, 16, kv_format) for _ in range(2)]
    reshape_and_cache(x, x + 1, *caches, torch.arange(16))
    before = [read_pages(cache)[0].clone() for cache in caches]
    for cache in caches:
        assert cache.is_contiguous() and cache.shape[0] == 3
        cache[2] = cache[0]
        cache[0] = torch.zeros_like(cache[0])
    assert all(torch.equal(read_pages(cache)[2], rows) for cache, rows in zip(caches, before, strict=True))


@pytest.mark.parametrize("block_size", [4, 8, 16, 24, 128])
@pytest.mark.parametrize("head_dim", [16, 20, 32, 64, 80, 128])
@each_format
def test_parameters_are_aligned(kv_format, head_dim, block_size):
    """They are read as 32-bit words, four at a time; split_pages gives views, not copies."""
    cache = empty_pages(3, 2, head_dim, block_size, kv_format)
    codes, parameters = split_pages(cache)
    assert codes.shape == (3, 2, block_size, kv_format.row_bytes(head_dim)) and parameters.shape == (3, 2, block_size)
    assert parameters.data_ptr() - cache.data_ptr() == block_size * kv_format.row_bytes(head_dim)
    assert (block_size * kv_format.row_bytes(head_dim)) % 4 == 0
    parameters.fill_(7)
    assert (split_pages(cache)[1] == 7).all()


def test_names_and_sizes():
    assert [f.width(64) for f in (INT8, FP8, INT4)] == [68, 68, 36]
    assert find_kv_format("auto") is None and find_kv_format("int4") is INT4
    with pytest.raises(ValueError, match="int4 packs two numbers into a byte and head_dim 33 is odd"):
        INT4.row_bytes(33)


@each_format
@pytest.mark.parametrize("case", ["plain", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decode", [paged_attention, paged_attention_reference])
def test_decode(decode, dtype, shape, case, kv_format):
    num_heads, num_kv_heads, head_dim, block_size = shape
    data = quantized(paged(SEQ_LENS, num_kv_heads, head_dim, block_size, dtype), kv_format)
    q, kwargs = fused_q(len(SEQ_LENS), num_heads, num_kv_heads, head_dim, dtype), options(case, num_heads)
    arguments = q, data.k_cache, data.v_cache, data.block_tables, data.seq_lens
    assert cpu_kernels().attention.supports_attention(*arguments), "else this would compare torch with torch"
    out = decode(*arguments, 0.3, **kwargs)
    expected = [attention(q[i : i + 1], data.keys[i], data.values[i], 0.3, **kwargs) for i in range(len(SEQ_LENS))]
    torch.testing.assert_close(out, torch.cat(expected))


@each_format
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
@pytest.mark.parametrize("prefill", [prefill_attention, prefill_attention_reference])
def test_prefill_whole_chunked_and_empty(prefill, shape, kv_format):
    num_heads, num_kv_heads, head_dim, block_size = shape
    data = quantized(paged(SEQ_LENS, num_kv_heads, head_dim, block_size, torch.float32), kv_format)
    cu_seqlens_q = torch.tensor([0, *torch.tensor(Q_LENS).cumsum(0).tolist()], dtype=torch.int32)
    q, kwargs = fused_q(sum(Q_LENS), num_heads, num_kv_heads, head_dim, torch.float32), options("all", num_heads)
    out = prefill(q, data.k_cache, data.v_cache, data.block_tables, cu_seqlens_q, data.seq_lens, max(Q_LENS), 0.3,
                  **kwargs)  # fmt: skip
    rows = q.split(Q_LENS)
    expected = [attention(rows[i], data.keys[i], data.values[i], 0.3, **kwargs) for i in range(len(SEQ_LENS))]
    torch.testing.assert_close(out, torch.cat(expected))


@pytest.mark.parametrize("kv_format, tolerance", [(INT8, 0.02), (FP8, 0.06), (INT4, 0.3)], ids=KV_FORMATS)
def test_against_attention_over_what_was_never_quantised(kv_format, tolerance):
    """Normal keys and values, scores of deviation 1: the largest error of 2,560 outputs, whose deviation is 0.16."""
    data = paged([100, 300], 2, 64, 16, torch.float32)
    pages = quantized(data, kv_format)
    q = torch.randn(2, 8, 64)
    out = paged_attention(q, pages.k_cache, pages.v_cache, data.block_tables, data.seq_lens, 0.125)
    exact = torch.cat([attention(q[i : i + 1], data.keys[i], data.values[i], 0.125) for i in range(2)])
    error = (out - exact).abs().max()
    assert tolerance / 10 < error < tolerance


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch_or_on_how_it_was_scheduled(dtype, kv_format):
    data = quantized(paged([40, 3, 90, 17], 2, 64, 16, dtype), kv_format)
    q = torch.randn(4, 6, 64).to(dtype)
    arguments = data.k_cache, data.v_cache, data.block_tables, data.seq_lens
    one = data.k_cache, data.v_cache, data.block_tables[2:3]
    together, alone = paged_attention(q, *arguments, 0.125), paged_attention(q[2:3], *one, data.seq_lens[2:3], 0.125)
    assert torch.equal(together[2:3], alone)
    rows = torch.cat([torch.randn(5, 6, 64).to(dtype), q[2:3]])
    cu_seqlens_q = torch.tensor([0, 6], dtype=torch.int32)
    prefilled = prefill_attention(rows, *one, cu_seqlens_q, data.seq_lens[2:3], 6, 0.125)[5:]
    if tiles.supports(rows, data.k_cache):  # they decode the codes to bf16
        torch.testing.assert_close(prefilled, alone, **BF16_TOLERANCE)
    else:
        assert torch.equal(prefilled, alone)


@each_format
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("head_dim, block_size", [(32, 16), (64, 48), (128, 32)])
def test_tiles_of_a_prompt(kv_format, group, head_dim, block_size):
    """Whole, and cut anywhere: the same bits. The rest of the last block holds NaN."""
    data = quantized(paged([150], 2, head_dim, block_size, torch.bfloat16), kv_format)
    q = torch.randn(150, 2 * group, head_dim).bfloat16()
    assert tiles.supports(q, data.k_cache) == tiles.MULTIPLIES_PAIRS

    def prefill(begin, end):
        cu_seqlens_q = torch.tensor([0, end - begin], dtype=torch.int32)
        seq_lens = torch.tensor([end], dtype=torch.int32)
        arguments = data.k_cache, data.v_cache, data.block_tables, cu_seqlens_q, seq_lens
        return prefill_attention(q[begin:end], *arguments, end - begin, 0.3)

    whole = prefill(0, 150)
    torch.testing.assert_close(whole, attention(q, data.keys[0], data.values[0], 0.3), **BF16_TOLERANCE)
    ends = [1, 64, 67, 150]
    assert torch.equal(torch.cat([prefill(a, b) for a, b in zip([0, *ends], ends, strict=False)]), whole)
