"""The Triton attention kernels against dense attention: shapes, splits, tiles, batch invariance, variants. Run as
tests/kernels/triton_cases.py is; where a test looks at what a launch was compiled for, it watches the launches."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import decode as decode_module
from kernels.attention import prefill as prefill_module
from kernels.attention import shared as shared_module
from kernels.attention import work as work_module
from kernels.attention.choices import PREFILL, RULES, tile_choice
from kernels.attention.decode import mixed_attention, paged_attention
from kernels.attention.plan import attention_plan, attention_shape
from kernels.attention.prefill import prefill_attention
from kernels.attention.work import StepWork
from kernels.card import A100, CARDS
from kernels.dispatch import INTERPRET, OutOfResources
from kernels.kv_format import FP8, INT4, INT8
from tests.kernels.oracle import POISON, Paged, attention, fused_q, options, paged, quantized

DEVICE = torch.device("cpu" if INTERPRET else "cuda")
HALVES = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16]  # the interpreter gets bf16 wrong
# (num_heads, num_kv_heads, head_dim, block_size, dtype, case, format): every head size, block size, dtype, format and
# option, each with several of the others.
F32, F16 = torch.float32, torch.float16
PAIRS = [
    (8, 2, 64, 16, F16, "all", None), (14, 2, 64, 64, F32, "plain", INT8), (3, 3, 80, 32, F16, "alibi", None),
    (4, 1, 80, 128, F32, "window", FP8), (2, 2, 96, 16, F16, "softcap", INT4), (6, 2, 96, 64, F16, "plain", None),
    (4, 2, 112, 32, F32, "alibi", INT8), (7, 1, 112, 16, F16, "window", None), (8, 2, 128, 128, F16, "plain", FP8),
    (4, 4, 128, 64, F32, "all", None), (5, 1, 128, 16, F16, "softcap", INT8), (2, 1, 256, 16, F16, "window", INT4),
    (4, 2, 256, 128, F32, "softcap", None), (2, 2, 256, 64, F16, "alibi", FP8), (40, 1, 32, 32, F16, "all", INT8),
    (71, 1, 64, 16, F16, "plain", None), (6, 3, 24, 48, F32, "all", FP8), (16, 2, 64, 16, F16, "sinks", None),
    (8, 2, 64, 32, F16, "sinks", INT8), (5, 1, 128, 16, F16, "chunk", None), (4, 2, 64, 16, F32, "chunked sinks", FP8),
    (8, 1, 512, 16, F16, "plain", None), (4, 2, 512, 64, F16, "window", INT4), (2, 1, 512, 32, F32, "plain", INT8),
]  # fmt: skip


def half_of_them_slow(shapes):
    """All of them, for parametrize; the even ones have every head size, format and option."""
    return [*shapes[::2], *(pytest.param(shape, marks=pytest.mark.slow) for shape in shapes[1::2])]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(out, expected):
    tolerance = {torch.float32: {"atol": 3e-5, "rtol": 1e-4}, torch.float16: {"atol": 2e-3, "rtol": 2e-3},
                 torch.bfloat16: {"atol": 1.6e-2, "rtol": 1.6e-2}}[out.dtype]  # fmt: skip
    torch.testing.assert_close(out.cpu(), expected, **tolerance)


def make_plan(max_num_seqs, num_heads, num_kv_heads, head_dim, **changes):
    """A plan whose scratch space is poisoned."""
    plan = attention_plan(DEVICE, max_num_seqs=max_num_seqs, num_heads=num_heads, num_kv_heads=num_kv_heads,
                          head_dim=head_dim, batch_invariant=changes.pop("batch_invariant", False))  # fmt: skip
    plan.partial.fill_(POISON)
    return replace(plan, **changes)


def on_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def decode(data: Paged, q, plan, rows=None, scale=0.2, **kwargs):
    """Decode into a poisoned output, all rows or the given ones."""
    rows = list(range(len(q))) if rows is None else rows
    out = torch.full(q[rows].shape, POISON, dtype=q.dtype, device=DEVICE)
    kwargs = {name: on_device(value) for name, value in kwargs.items()}
    seq_lens = data.seq_lens if rows == list(range(len(data.seq_lens))) else data.seq_lens[rows]
    tensors = [on_device(x) for x in (q[rows], data.k_cache, data.v_cache, data.block_tables[rows], seq_lens)]
    return paged_attention(*tensors, scale, plan=plan, out=out, **kwargs).cpu()


def prefill(data: Paged, q, q_lens, plan, rows=None, scale=0.2, **kwargs):
    """Prefill into a poisoned output; q holds q_lens[i] rows of sequence rows[i]."""
    rows = list(range(len(q_lens))) if rows is None else rows
    out = torch.full(q.shape, POISON, dtype=q.dtype, device=DEVICE)
    kwargs = {name: on_device(value) for name, value in kwargs.items()}
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    tensors = [
        on_device(x) for x in (q, data.k_cache, data.v_cache, data.block_tables[rows], starts, data.seq_lens[rows])
    ]
    return prefill_attention(*tensors, max(q_lens), scale, plan=plan, out=out, **kwargs).cpu()


def mixed(data: Paged, q, q_lens, plan, padding=0, scale=0.2, **kwargs):
    """A step with the lengths on the device: q holds q_lens[i] rows of sequence i, then `padding` poisoned rows. An
    empty sequence has a table and a length that would read far out."""
    out = torch.full((len(q) + padding, *q.shape[1:]), POISON, dtype=q.dtype, device=DEVICE)
    kwargs = {name: on_device(value) for name, value in kwargs.items()}
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    empty = torch.tensor(q_lens) == 0
    tables = data.block_tables.masked_fill(empty[:, None], 10**8)
    seq_lens = data.seq_lens.masked_fill(empty, 2**30)
    whole = torch.full((len(out), 2 * q.shape[1], q.shape[2]), POISON, dtype=q.dtype)[:, : q.shape[1]]
    whole[: len(q)] = q
    tensors = [on_device(x) for x in (whole, data.k_cache, data.v_cache, tables, starts, seq_lens)]
    return mixed_attention(*tensors, scale, plan=plan, out=out, **kwargs).cpu()


@pytest.mark.parametrize("case, kv_format", [("plain", None), ("window", INT8), ("alibi", None), ("softcap", INT4),
                                             ("all", FP8), ("chunked sinks", None)])  # fmt: skip
@pytest.mark.parametrize(
    "num_sms, batch_invariant",
    [pytest.param(0, False, marks=pytest.mark.slow), (8, False), pytest.param(8, True, marks=pytest.mark.slow)],
)
def test_steps_whose_lengths_only_the_device_knows(case, kv_format, num_sms, batch_invariant):
    """Decodes, chunks and empty sequences in any order, before padding rows: nothing reads or writes the padding."""
    kwargs, random = options(case, 6), torch.Generator().manual_seed(len(case) + num_sms)
    q_lens = torch.tensor([0, 0, 1, 1, 2, int(torch.randint(3, 40, (1,), generator=random))])
    q_lens = q_lens[torch.randperm(6, generator=random)].tolist()
    past = torch.randint(0, 120, (6,), generator=random).tolist()
    data = paged([max(1, n) + p for n, p in zip(q_lens, past, strict=True)], 2, 32, 16, F32)
    data = quantized(data, kv_format) if kv_format else data
    q = torch.randn(sum(q_lens), 6, 32)
    plan = replace(make_plan(6, 6, 2, 32, batch_invariant=batch_invariant), num_sms=num_sms)
    out = mixed(data, q, q_lens, plan, padding=5, **kwargs)
    assert out[len(q) :].isnan().all(), "padding rows are not written"
    for i, (rows, found) in enumerate(zip(q.split(q_lens), out[: len(q)].split(q_lens), strict=True)):
        close(found, attention(rows, data.keys[i], data.values[i], 0.2, **kwargs))
    if batch_invariant:
        assert torch.equal(out[: len(q)], prefill(data, q, q_lens, plan, **kwargs))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("shape", half_of_them_slow(PAIRS), ids=str)
def test_every_head_size_block_size_format_and_option(shape, half):
    """Decode with one split and with several, and two chunks side by side, over the same sequences."""
    num_heads, num_kv_heads, head_dim, block_size, dtype, case, kv_format = shape
    dtype = half if dtype == F16 else dtype
    data = paged([150, 31], num_kv_heads, head_dim, block_size, dtype)
    data = quantized(data, kv_format) if kv_format else data
    kwargs, q_lens = options(case, num_heads), [9, 31]
    q = fused_q(sum(q_lens), num_heads, num_kv_heads, head_dim, dtype)
    expected = [attention(rows, data.keys[i], data.values[i], 0.2, **kwargs) for i, rows in enumerate(q.split(q_lens))]
    newest, ends = torch.cat([x[-1:] for x in expected]), [8, 39]
    wide = replace(data, block_tables=torch.cat([data.block_tables] * (1 + 1024 // data.block_tables.numel()), 1))
    plan = make_plan(2, num_heads, num_kv_heads, head_dim)
    for num_sms, tables in ((4, wide), (0, data)):
        close(decode(tables, q[ends], replace(plan, num_sms=num_sms), **kwargs), newest)
    close(prefill(data, q, q_lens, plan, **kwargs), torch.cat(expected))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kv_format", [FP8, INT4], ids=lambda f: f.name)
def test_what_a_later_device_runs_gives_the_same(kv_format, capability):
    """e4m3 by integer arithmetic and by the type itself; the tiles of both devices."""
    data = quantized(paged([90, 20], 2, 64, 16, F16), kv_format)
    q, plan = fused_q(60, 4, 2, 64, F16), make_plan(2, 4, 2, 64, capability=capability)
    expected = [attention(rows, data.keys[i], data.values[i], 0.2) for i, rows in enumerate(q.split([40, 20]))]
    close(prefill(data, q, [40, 20], plan), torch.cat(expected))
    close(decode(data, q[[39, 59]], plan), torch.stack([expected[0][-1], expected[1][-1]]))


@pytest.mark.parametrize("num_sms, window", [(0, 300), (1, 70), (4, 0), (40, 0)])
def test_any_number_of_chunks_and_lengths(num_sms, window):
    """A captured step keeps its grid while the lengths change: padding, one token, less than a tile, the table's end.
    Partial results that no chunk wrote are NaN and must not be read."""
    seq_lens = [1, 380, 33, 129, 64, 401]
    data = paged(seq_lens, 1, 16, 64, F32)
    data.seq_lens[2] = 0
    q = torch.randn(6, 2, 16)
    plan = replace(make_plan(6, 2, 1, 16), num_sms=num_sms, partial=torch.full((40000,), POISON, device=DEVICE))
    out = decode(data, q, plan, scale=0.25, sliding_window=window)
    assert torch.equal(out[2], torch.zeros(2, 16)), "a padding row must give zeros"
    for i in (0, 1, 3, 4, 5):
        close(out[i : i + 1], attention(q[i : i + 1], data.keys[i], data.values[i], 0.25, sliding_window=window))


@pytest.mark.slow
@pytest.mark.parametrize("case, kv_format", [("plain", None), ("window", None), ("alibi", INT8), ("all", INT4),
                                             ("sinks", None), ("chunk", None)])  # fmt: skip
def test_a_few_query_tokens_on_long_contexts(case, kv_format):
    """Short chunks and the rows of speculative verification are divided among programs; each row ignores later keys."""
    q_lens = [2, 20, 5, 1, 16]
    data = paged([400, 90, 5, 200, 31], 2, 16, 16, F32)
    data = quantized(data, kv_format) if kv_format else data
    q, kwargs = torch.randn(sum(q_lens), 6, 16), options(case, 6)
    plan = make_plan(5, 6, 2, 16)
    for num_sms in (8, 24):
        plan = replace(plan, num_sms=num_sms, partial=torch.full((600000,), POISON, device=DEVICE))
        out = prefill(data, q, q_lens, plan, **kwargs)
        for i, (rows, found) in enumerate(zip(q.split(q_lens), out.split(q_lens), strict=True)):
            close(found, attention(rows, data.keys[i], data.values[i], 0.2, **kwargs))


def test_a_plan_with_little_memory_divides_less():
    """The partial results have a fixed size: with less of it, chunks are longer."""
    data, q = paged([300], 1, 16, 16, F32), torch.randn(1, 2, 16)
    for size in (0, 5, 100, 400):
        small = make_plan(1, 2, 1, 16, partial=torch.full((size,), POISON, device=DEVICE))
        close(decode(data, q, small), attention(q, data.keys[0], data.values[0], 0.2))


def test_a_plan_for_too_few_sequences_says_so():
    data, q = paged([300], 1, 16, 16, F32), torch.randn(1, 2, 16)
    for batch_invariant in (False, True):
        plan = make_plan(1, 2, 1, 16, batch_invariant=batch_invariant)
        with pytest.raises(ValueError, match="made for 1 sequences, not 2"):
            decode(data, q, plan, rows=[0, 0])


def test_layers_of_a_step_share_the_work_maps(monkeypatch):
    """A map for each window; the same one for layers alike."""
    made = []
    monkeypatch.setattr(work_module, "make_map", lambda *a, make=work_module.make_map: made.append(a) or make(*a))
    data, q, plan, work = paged([90, 40], 1, 16, 16, F32), torch.randn(2, 2, 16), make_plan(2, 2, 1, 16), StepWork()
    data = replace(data, seq_lens=on_device(data.seq_lens))  # one tensor, as in a step
    for window in (0, 50, 0, 50):
        out = decode(data, q, plan, sliding_window=window, work=work)
        close(out[1:], attention(q[1:], data.keys[1], data.values[1], 0.2, sliding_window=window))
    assert len(made) == 2


def test_a_head_size_beyond_the_table_is_refused():
    with pytest.raises(ValueError, match="head sizes of up to 512, not 1024"):
        tile_choice(use="decode", card=A100, q_bits=16, kv_bits=16, head_dim=1024, group=1, num_rows=1, extras=False)


@pytest.mark.parametrize(
    "heads, head_dim, block_size", [((4, 2), 64, 16), ((4, 4), 96, 128), ((4, 1), 128, 64)], ids=str
)
def test_the_loop_whose_softmax_overlaps_the_tensor_cores(heads, head_dim, block_size):
    """Contexts before the chunk, chunks that end anywhere in a tile of keys, and a prompt of one tile. Blocks of 128
    tokens are read through TMA; free slots hold NaN. The launches of head size 128 have sinks."""
    q_lens, kwargs = [200, 70, 65, 64], options("sinks" if head_dim == 128 else "plain", heads[0])
    data = paged([300, 70, 129, 64], heads[1], head_dim, block_size, F16)
    q, plan = fused_q(sum(q_lens), *heads, head_dim, F16), make_plan(4, *heads, head_dim, capability=90, num_sms=1)
    shape = attention_shape(q, data.k_cache, None, 0, 0.0)
    tile, _ = prefill_module.prefill_tile(shape, plan, sum(q_lens) - 4, 200)
    assert tile.overlaps and tile.tma == (block_size >= 128) and tile.block_n == max(64, block_size)
    expected = [attention(rows, data.keys[i], data.values[i], 0.2, **kwargs) for i, rows in enumerate(q.split(q_lens))]
    close(prefill(data, q, q_lens, plan, **kwargs), torch.cat(expected))


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: str(card.capability))
@pytest.mark.parametrize("use", RULES)
@pytest.mark.parametrize("q_bits, kv_bits", [(16, 16), (16, 8), (16, 4), (32, 32), (32, 8), (32, 4)])
def test_the_table_has_a_tile_for_every_launch(use, q_bits, kv_bits, card):
    """Groups of any size that models have with a head size: 71 of Falcon-7B, 48 of StarCoder."""
    sizes = {16: (1, 71), 64: (1, 7, 71), 80: (1,), 96: (3,), 112: (8,), 128: (1, 7, 48), 256: (1, 16)}
    sizes |= {512: (1, 8)} if card.capability >= 80 else {}
    for head_dim, groups in sizes.items():
        for group in groups if q_bits == 16 else groups[:1]:
            for rows in (1, 16, 17, 64, 65, 8192):
                found = tile_choice(
                    use=use, card=card, q_bits=q_bits, kv_bits=kv_bits, head_dim=head_dim, group=group, num_rows=rows,
                    extras=rows > 64,
                )  # fmt: skip
                assert found.tile.block_m >= group


@pytest.mark.parametrize("group", [1, 3, 4])
def test_tiles_of_a_varlen_batch(group):
    """Lengths around the number of tokens in a tile, empty ones between them, all found by their search."""
    per_tile = (
        tile_choice(
            use="prefill",
            card=A100,
            q_bits=32,
            kv_bits=32,
            head_dim=16,
            group=group,
            num_rows=1 << 20,
            extras=False,
        ).tile.block_m
        // group
    )
    q_lens = [per_tile, 1, 0, per_tile + 1, 2 * per_tile - 1, 0, 3, 1, 2 * per_tile, 2]
    data = paged([n + past for n, past in zip(q_lens, [0, 40, 7, 3, 0, 1, 70, 1, 5, 0], strict=True)], 1, 16, 16, F32)
    q = torch.randn(sum(q_lens), group, 16)
    out = prefill(data, q, q_lens, make_plan(10, group, 1, 16))
    for i, (rows, found) in enumerate(zip(q.split(q_lens), out.split(q_lens), strict=True)):
        close(found, attention(rows, data.keys[i], data.values[i], 0.2))


@pytest.mark.parametrize("window", [1, 33, 64, 100])
def test_windows_that_cut_the_past_anywhere(window):
    data, q_lens = paged([150, 90, 40], 1, 16, 16, F32), [70, 1, 40]
    q = torch.randn(sum(q_lens), 2, 16)
    out = prefill(data, q, q_lens, make_plan(3, 2, 1, 16), sliding_window=window)
    for i, (rows, found) in enumerate(zip(q.split(q_lens), out.split(q_lens), strict=True)):
        close(found, attention(rows, data.keys[i], data.values[i], 0.2, sliding_window=window))


@pytest.mark.slow
@pytest.mark.parametrize("case, kv_format", [("plain", None), ("all", INT4)])
def test_batch_invariant_rows_have_the_same_bits_however_they_are_scheduled(case, kv_format):
    """Decoded alone and among others, at the end of chunks of any size, after a prefix hit of any length."""
    data = paged([70, 3, 131, 17], 2, 32, 16, F32)
    data = quantized(data, kv_format) if kv_format else data
    kwargs = options(case, 6)
    q = [torch.randn(n, 6, 32) for n in (70, 3, 131, 17)]
    plan = make_plan(4, 6, 2, 32, batch_invariant=True)
    whole = [prefill(data, rows, [len(rows)], plan, [i], **kwargs) for i, rows in enumerate(q)]
    for found, i in zip(whole, range(4), strict=True):
        close(found, attention(q[i], data.keys[i], data.values[i], 0.2, **kwargs))
    newest = torch.stack([rows[-1] for rows in q])
    together = decode(data, newest, plan, **kwargs)
    assert torch.equal(together, torch.stack([rows[-1] for rows in whole]))
    assert torch.equal(decode(data, newest, plan, rows=[2], **kwargs)[0], together[2])
    for sizes in ([1, 1, 1, 1], [5, 3, 60, 17], [33, 1, 131, 2]):  # the rest of each: cached
        chunks = [rows[-n:] for rows, n in zip(q, sizes, strict=True)]
        mixed = prefill(data, torch.cat(chunks), sizes, plan, **kwargs)
        assert torch.equal(mixed, torch.cat([rows[-n:] for rows, n in zip(whole, sizes, strict=True)]))
    for end in (1, 32, 47, 128):  # the same prompt in two chunks, cut anywhere
        part = replace(data, seq_lens=torch.tensor([70, 3, end, 17], dtype=torch.int32))
        first = prefill(part, q[2][:end], [end], plan, [2], **kwargs)
        rest = prefill(data, q[2][end:], [131 - end], plan, [2], **kwargs)
        assert torch.equal(torch.cat([first, rest]), whole[2])


def test_a_tile_that_the_card_refuses_is_replaced_at_its_first_launch(monkeypatch):
    data, plan = paged([150, 31], 2, 64, 16, F16), make_plan(2, 4, 2, 64)
    q = fused_q(39, 4, 2, 64, F16)
    expected = [attention(rows, data.keys[i], data.values[i], 0.2) for i, rows in enumerate(q.split([8, 31]))]
    kernels = []
    for module, name in ((decode_module, "paged_attention_kernel"), (prefill_module, "prefill_attention_kernel")):
        kernels.append(Refuses(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    tile_choice.cache_clear()
    close(prefill(data, q, [8, 31], plan), torch.cat(expected))
    close(decode(data, q[[7, 38]], plan), torch.stack([rows[-1] for rows in expected]))
    assert all(kernel.refused for kernel in kernels)
    tile_choice.cache_clear()


class Refuses:
    """Stands in for a kernel: the card has no room for the tile of its first launch."""

    def __init__(self, kernel):
        self.kernel, self.refused = kernel, None

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            tile = constants["BLOCK_M"], constants["BLOCK_N"], constants["num_warps"]
            self.refused = self.refused or tile
            if tile == self.refused:
                raise OutOfResources(1, 0, "shared memory")
            return self.kernel[grid](*arguments, **constants)

        return launch


class Launches:
    """Stands in for a kernel: notes what each launch is compiled for, then starts it."""

    def __init__(self, kernel):
        self.kernel, self.variants = kernel, set()

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            absent = tuple(x is None for x in arguments)
            self.variants.add((absent, *sorted(constants.items())))
            return self.kernel[grid](*arguments, **constants)

        return launch


@pytest.fixture
def launches(monkeypatch):
    watched = {}
    for module, name in ((decode_module, "paged_attention_kernel"), (work_module, "reduce_chunks_kernel"),
                         (work_module, "work_map_kernel"), (prefill_module, "prefill_attention_kernel"),
                         (shared_module, "common_keys_kernel"), (shared_module, "windows_kernel")):  # fmt: skip
        watched[name] = Launches(getattr(module, name))
        monkeypatch.setattr(module, name, watched[name])
    return watched


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("num_heads, num_kv_heads, batch_invariant", [(8, 2, False), (8, 2, True)])
def test_the_warm_up_starts_every_variant_that_steps_can(launches, num_heads, num_kv_heads, batch_invariant, dtype):
    """Steps as the last layer and the others run them: whole chunks of any length, single tokens, any batch, tables
    of any width. None is compiled for something that the warm-up has not started."""
    from engine.worker.attention_warmup import warm_up_steps

    head_dim, block_size, max_model_len = 16, 16, 1024
    data = paged([max_model_len], num_kv_heads, head_dim, block_size, dtype)
    plan = make_plan(16, num_heads, num_kv_heads, head_dim, batch_invariant=batch_invariant)
    fused = on_device(fused_q(max_model_len, num_heads, num_kv_heads, head_dim, dtype))
    caches = on_device(data.k_cache), on_device(data.v_cache)
    shape = attention_shape(fused, caches[0], None, 0, 0.0)

    def run(num_tokens, num_decodes, tables, seq_lens, starts, longest, outputs, plan=plan):
        q = fused[:num_tokens]
        if num_decodes:
            paged_attention(q, *caches, tables, seq_lens, 0.2, plan=plan)
        else:
            prefill_attention(q, *caches, tables, starts, seq_lens, longest, 0.2, plan=plan)
            first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
            paged_attention(q.index_select(0, first), *caches, *outputs, 0.2, plan=plan)

    for input_ids, m in warm_up_steps(shape, plan, max_model_len, DEVICE):
        outputs = (m.outputs.block_tables, m.outputs.seq_lens) if m.outputs else None
        run(len(input_ids), m.num_decodes, m.block_tables, m.seq_lens, m.cu_seqlens_q, m.max_seqlen_q, outputs, m.plan)
    warm = {name: set(watched.variants) for name, watched in launches.items()}
    assert bool(warm["windows_kernel"]) == (dtype == F16 and not batch_invariant)
    plans = (plan, replace(plan, num_sms=0))
    expected = {prefill_module.prefill_tile(shape, p, 0, n) for n in range(2, max_model_len) for p in plans}
    assert batch_invariant or len(warm["prefill_attention_kernel"]) == len(expected)
    ones = torch.ones(16, dtype=torch.int32, device=DEVICE)
    for width in (1, 3, 20, 64):
        tables = torch.zeros((16, width), dtype=torch.int32, device=DEVICE)
        for n in (1, 3, 16):
            run(n, n, tables[:n], ones[:n], None, 0, None)
        for n in (2, 3, 5, 9, 17, 33):
            starts = torch.tensor([0, n], dtype=torch.int32, device=DEVICE)
            run(n, 0, tables[:1], ones[:1] * n, starts, n, (tables[:1], ones[:1]))
    assert {name: set(watched.variants) for name, watched in launches.items()} == warm


def _memory(rule):
    return rule.programs * (rule.tile.block_m + rule.tile.block_n * rule.tile.num_stages)


def test_rules_are_in_the_order_in_which_they_match():
    """A rule that a wider one above hides, on every card, would never be used."""
    for rules in RULES.values():
        for i, rule in enumerate(rules):
            hiding = [
                other for other in rules[:i]
                if set(other.instructions) >= set(rule.instructions) and other.q_bits == rule.q_bits
                and other.kv_bits >= rule.kv_bits and other.block_d >= rule.block_d and other.max_rows >= rule.max_rows
                and other.extras >= rule.extras and other.block_size <= rule.block_size
                and _memory(other) <= _memory(rule)
            ]  # fmt: skip
            assert not hiding, f"{rule} is hidden by {hiding[0]}"
    assert PREFILL
