"""Keys that sequences of a step share: windows against a plain loop, decode against dense attention. Run as
tests/kernels/triton_cases.py is."""

import random
from dataclasses import replace

import pytest
import torch

from kernels.attention import shared as shared_module
from kernels.attention.aot_cases import case as model_case
from kernels.attention.decode import mixed_attention, paged_attention
from kernels.attention.plan import attention_plan
from kernels.attention.shared import LEAST_MEMBERS, WINDOW_ROWS, find_windows, shares_keys
from kernels.attention.work import StepWork
from kernels.dispatch import INTERPRET, device_sizes
from kernels.kv_format import INT8
from tests.kernels.oracle import POISON, Paged, attention, options, paged, share

DEVICE = torch.device("cpu" if INTERPRET else "cuda")
HALF = torch.float16 if INTERPRET else torch.bfloat16  # the interpreter gets bf16 wrong
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[HALF]
LEAST_KEYS = 64  # here; fewer than in a server, so that the dense oracle is quick
KEYS = 64  # of a tile of decode


@pytest.fixture(autouse=True)
def few_keys(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(shared_module, "LEAST_KEYS", LEAST_KEYS)


def plain_windows(tables, q_lens, seq_lens, block_size, members):
    """[(shared keys, number of sequences if it is a window's first)] of each sequence."""
    common = [0] * len(seq_lens)
    for i in range(1, len(seq_lens)):
        blocks = (min(seq_lens[i - 1], seq_lens[i]) - 1) // block_size
        if q_lens[i - 1] == q_lens[i] == 1 and blocks > 0:
            equal = (tables[i - 1][:blocks] == tables[i][:blocks]).tolist()
            keys = [*equal, False].index(False) * block_size // KEYS * KEYS
            common[i] = keys if keys >= LEAST_KEYS else 0
    found, i = [(0, 0)] * len(seq_lens), 0
    while i < len(seq_lens):
        end = i + 1
        while end < len(seq_lens) and common[end] and end - i < members:
            end += 1
        if end - i >= LEAST_MEMBERS:
            keys = min(common[i + 1 : end])
            found[i:end] = [(keys, end - i if j == i else 0) for j in range(i, end)]
        i = end
    return found


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_windows_are_those_of_a_plain_loop(group, block_size, seed):
    """Runs of any length, across the borders of programs; sequences without rows, with several, and too short ones."""
    rng = random.Random(seed)
    for num_seqs in (4, 5, 70, rng.randint(80, 200)):
        tables = torch.full((num_seqs, 40), 10**6, dtype=torch.int32)
        for i in range(num_seqs):
            tables[i] = torch.arange(40) + 1000 * i
            first = rng.choice((3, 8, 20, 40)) if i and rng.random() < 0.93 else 0
            tables[i, :first] = tables[i - 1, :first]
        q_lens = [rng.choice((0, 2)) if rng.random() < 0.03 else 1 for _ in range(num_seqs)]
        lengths = (300, 640, 39 * block_size), (1, 64, 65)
        seq_lens = [rng.choice(lengths[rng.random() < 0.03]) for _ in range(num_seqs)]
        starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        shape = replace(model_case("bf16", 4 * group, 4, 64).shape, block_size=block_size)
        found = find_windows(
            tables.to(DEVICE), starts.to(DEVICE), torch.tensor(seq_lens, dtype=torch.int32).to(DEVICE), shape,
            shape.tile("decode", device_sizes(DEVICE)[0], group),
        )  # fmt: skip
        expected = plain_windows(tables, q_lens, seq_lens, block_size, WINDOW_ROWS // group)
        assert found.tolist() == [list(entry) for entry in expected]
        if num_seqs >= 70:
            assert any(count for _, count in expected)


def shared_batch(lengths, runs, kv_heads, head_dim, block_size) -> Paged:
    """Sequences of these lengths; runs: (first, end, blocks) of neighbours that share their first blocks."""
    data = paged(lengths, kv_heads, head_dim, block_size, HALF)
    for first, end, blocks in runs:
        for i in range(first + 1, end):
            share(data, i, blocks)
    return data


def watched(monkeypatch):
    """The WorkMaps of decode launches."""
    maps, inner = [], StepWork.find

    def find(self, use, *given, **options):
        work = inner(self, use, *given, **options)
        maps.extend([work] if use == "decode" else [])
        return work

    monkeypatch.setattr(StepWork, "find", find)
    return maps


def window_items(work) -> list[list[int]]:
    return [item for item in work.items.tolist() if item[0] >= 0 and item[3] == -2]


def make_plan(data: Paged, num_seqs, num_heads, num_sms):
    plan = attention_plan(DEVICE, max_num_seqs=num_seqs, num_heads=num_heads, num_kv_heads=data.k_cache.shape[1],
                          head_dim=data.k_cache.shape[3])  # fmt: skip
    plan.partial.fill_(POISON)
    return replace(plan, num_sms=num_sms)


def close(found, expected):
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def decode_shapes():
    """Every shape on cards of three sizes, for parametrize. The first shape has each card in the quick tests, each
    shape one card."""
    shapes = [
        ((8, 2), 64, 16, "plain"), ((7, 1), 128, 16, "plain"), ((2, 2), 80, 128, "plain"), ((8, 2), 64, 32, "sinks"),
        ((4, 2), 64, 16, "softcap"),
    ]  # fmt: skip
    cards = (1, 8, 132)
    return [
        pytest.param(*shape, num_sms, marks=[pytest.mark.slow] * (i > 0 and i % 3 != j))
        for i, shape in enumerate(shapes)
        for j, num_sms in enumerate(cards)
    ]


@pytest.mark.parametrize("heads, head_dim, block_size, case, num_sms", decode_shapes())
def test_decode_reads_shared_keys_once(heads, head_dim, block_size, case, num_sms, monkeypatch):
    """A run longer than a window, one of another prefix, sequences of their own, and one of which all is shared."""
    maps, blocks = watched(monkeypatch), 128 // block_size
    lengths = [150 + 13 * i for i in range(11)] + [400, 401, 470, 430, 5, 64]
    data = shared_batch(lengths, [(0, 11, blocks), (11, 15, 3 * blocks)], heads[1], head_dim, block_size)
    q, kwargs = torch.randn(len(lengths), heads[0], head_dim).to(HALF), options(case, heads[0])
    plan = make_plan(data, len(lengths), heads[0], num_sms)
    out = torch.full(q.shape, POISON, dtype=HALF, device=DEVICE)
    tensors = [x.to(DEVICE) for x in (q, data.k_cache, data.v_cache, data.block_tables, data.seq_lens)]
    on_device = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    paged_attention(*tensors, 0.2, plan=plan, out=out, **on_device)
    for i in range(len(lengths)):
        close(out[i : i + 1], attention(q[i : i + 1], data.keys[i], data.values[i], 0.2, **kwargs))
    items = window_items(maps[0])
    assert {(item[0], item[2]) for item in items} >= {(11, 4)} and max(item[5] for item in items) == 384
    members = WINDOW_ROWS // (heads[0] // heads[1])
    assert (0, min(members, 11)) in {(item[0], item[2]) for item in items}
    if num_sms == 132:
        assert len(items) > 2, "few windows are divided into chunks"


def test_rows_of_one_sequence_and_chunks_beside_them(monkeypatch):
    """Draft tokens are rows with one block table; a prompt's chunk, an empty sequence and padding take no part."""
    maps = watched(monkeypatch)
    lengths, q_lens = [300, 301, 302, 303, 304, 200, 90, 40], [1, 1, 1, 1, 1, 3, 1, 0]
    data = shared_batch([304] * 5 + lengths[5:], [(0, 5, 19)], 2, 64, 16)  # 304 tokens fill 19 blocks
    q = torch.randn(sum(q_lens) + 4, 4, 64).to(HALF)
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor([*lengths[:7], 2**30], dtype=torch.int32)
    tables = data.block_tables.clone()
    tables[7] = 10**8
    out = torch.full(q.shape, POISON, dtype=HALF, device=DEVICE)
    tensors = [x.to(DEVICE) for x in (q, data.k_cache, data.v_cache, tables, starts, seq_lens)]
    mixed_attention(*tensors, 0.2, plan=make_plan(data, 8, 4, 8), out=out)
    for i in range(7):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        close(out[rows], attention(q[rows], data.keys[i][: lengths[i]], data.values[i][: lengths[i]], 0.2))
    assert out[sum(q_lens) :].isnan().all()
    assert {(item[0], item[2], item[5]) for item in window_items(maps[0])} >= {(0, 5, 256)}


@pytest.mark.parametrize("num_seqs, length", [(4, 1024), (8, 1024), (24, 1024), (60, 700), (5, 40)])
def test_without_windows_the_chunks_are_those_of_other_launches(num_seqs, length):
    """24 sequences of 1024 tokens may not be divided although a step with windows has room for it."""
    shape = model_case("bf16", 32, 8, 128).shape
    plan = attention_plan(DEVICE, max_num_seqs=64, num_heads=32, num_kv_heads=8, head_dim=128)
    plan, tile = replace(plan, num_sms=132), shape.tile("decode", 90, 4)
    lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=DEVICE)
    tables = torch.arange(num_seqs * 64, dtype=torch.int32, device=DEVICE).view(num_seqs, 64)
    starts = plan.decode_starts(num_seqs)
    plain, windows = (
        StepWork().find("decode", shape, plan, tile, num_seqs, 1024, starts, lengths, block_tables=given)
        for given in (None, tables)
    )
    used = plain.items[:, 0] >= 0
    assert torch.equal(used, windows.items[: len(used), 0] >= 0) and plain.num_splits.equal(windows.num_splits)
    assert torch.equal(plain.items[used][:, :7], windows.items[: len(used)][used][:, :7])
    assert torch.equal(plain.splits[: plain.num_splits], windows.splits[: plain.num_splits])


def test_a_plan_with_little_memory_reads_every_sequence(monkeypatch):
    maps = watched(monkeypatch)
    data = shared_batch([300] * 6, [(0, 6, 16)], 2, 64, 16)
    q = torch.randn(6, 4, 64).to(HALF)
    plan = make_plan(data, 6, 4, 8)
    tensors = [x.to(DEVICE) for x in (q, data.k_cache, data.v_cache, data.block_tables, data.seq_lens)]
    whole = paged_attention(*tensors, 0.2, plan=plan)
    few = replace(plan, partial=plan.partial[: 11 * 4 * 65])
    assert few.window_rows(model_case("bf16", 4, 2, 64).shape) == 11
    close(paged_attention(*tensors, 0.2, plan=few), whole.cpu())
    assert maps[0].rows is not None and maps[1].rows is None


def test_which_launches_look_for_windows():
    def shares(*model, num_seqs=4, capability=90, **changes):
        shape = replace(model_case(*model).shape, **changes)
        return shares_keys(shape, shape.tile("decode", capability, shape.group), num_seqs)

    assert shares("bf16", 32, 8, 128) and shares("bf16", 32, 8, 128, capability=80) and shares("fp16", 16, 1, 64)
    assert not shares("bf16", 32, 8, 128, num_seqs=3) and not shares("fp32", 32, 8, 128)
    assert not shares("bf16", 17, 1, 64) and not shares("bf16", 32, 8, 128, capability=89)  # tiles of 32 keys
    assert not shares("bf16", 32, 8, 256) and not shares("bf16", 32, 8, 128, kv_format=INT8)
    for option in ({"sliding_window": 64}, {"attention_chunk": 64}, {"has_alibi": True}):
        assert not shares("bf16", 32, 8, 128, **option)
