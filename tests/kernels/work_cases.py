"""The work map against a plain loop over sequences, and the balance of the programs that it starts. Run as
tests/kernels/triton_cases.py is."""

import heapq
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.attention.aot_cases import case
from kernels.attention.choices import Tile
from kernels.attention.work import WorkMap, make_map, work_constants
from kernels.dispatch import INTERPRET

DEVICE = torch.device("cpu" if INTERPRET else "cuda")


def plain_units(use, q_lens, seq_lens, tokens, block_n, window, min_queries, chunk=0):
    """(sequence, first row, query tokens, position of the first, first key, end of the keys) of each unit of work."""
    units, row = [], 0
    for seq, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        wanted = q_len == 1 if use == "decode" else q_len >= max(1, min_queries)
        for first in range(0, q_len if wanted else 0, tokens):
            pos = seq_len - q_len + first
            end = max(0, min(seq_len, pos + tokens))
            first_key = max(0, pos + 1 - window) if window else 0
            first_key = max(first_key, pos - pos % chunk) if chunk else first_key
            begin = first_key // block_n * block_n
            units.append((seq, row + first, min(tokens, q_len - first), pos, begin, end))
        row += q_len
    return units


def build(use, q_lens, seq_lens, *, num_kv_heads=1, tokens=1, block_n=64, window=0, max_rows=64, slots=16,
          min_queries=1, chunk=0) -> WorkMap:  # fmt: skip
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    num_units = len(q_lens) if use == "decode" else sum(q_lens) // tokens + len(q_lens)
    shape = replace(case("bf16", num_kv_heads, num_kv_heads, 64).shape, sliding_window=window, attention_chunk=chunk)
    constants = work_constants(use, shape, Tile(tokens, block_n, 4, 3))
    return make_map(use, starts, lengths, num_units, max_rows, slots, min_queries, constants)


def check(work: WorkMap, units, block_n: int) -> list[int]:
    """The items cover the keys of every unit once, in chunks of one size; returns the tiles of each item."""
    items = [item for item in work.items.tolist() if item[0] >= 0]
    assert all(item[0] == -1 for item in work.items.tolist()[len(items) :]), "the items come first"
    found = defaultdict(list)
    for seq, row, tokens, pos, begin, end, partial, _ in items:
        found[seq, row, tokens, pos].append((begin, end, partial))
    assert set(found) == {unit[:4] for unit in units}
    splits = {(row, tokens): (first, count) for row, tokens, first, count in work.splits[: work.num_splits].tolist()}
    rows, sizes = [], set()
    for unit in units:
        chunks = sorted(found[unit[:4]])
        assert chunks[0][0] == unit[4] and chunks[-1][1] == unit[5]
        assert all(a[1] == b[0] for a, b in pairwise(chunks)), "no gap and no overlap"
        assert all(begin % block_n == 0 for begin, _, _ in chunks)
        if len(chunks) == 1:
            assert chunks[0][2] == -1 and unit[1:3] not in splits
            continue
        partial = [chunk[2] for chunk in chunks]
        assert splits.pop(unit[1:3]) == (partial[0], len(chunks))
        assert partial == list(range(partial[0], partial[0] + len(chunks))), "partial results in the order of the keys"
        rows += partial
        sizes |= {end - begin for begin, end, _ in chunks[:-1]}
    assert not splits and sorted(rows) == list(range(len(rows))) and len(rows) <= work.max_rows
    assert len(sizes) <= 1
    return [-(-(end - begin) // block_n) for _, _, _, _, begin, end, _, _ in items]


LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096, 131072)


@pytest.mark.parametrize("seed", range(12))
def test_the_map_is_that_of_a_plain_loop(seed):
    """Lengths 0, 1, at the edges of tiles and 128k; windows; 1 to 512 sequences; empty ones; any room for chunks."""
    rng = random.Random(seed)
    for num_seqs in (1, 2, rng.randint(3, 70), 512 if seed == 0 else rng.randint(3, 130)):
        use, block_n = rng.choice(["decode", "prefill"]), rng.choice([16, 64])
        tokens = 1 if use == "decode" else rng.choice([1, 4, 16])
        q_lens = [rng.choice((0, 1, 1, 1, 2, tokens, tokens + 1, rng.randint(1, 60))) for _ in range(num_seqs)]
        seq_lens = [
            n + rng.choice(LENGTHS) if n != 1 else rng.choice((*LENGTHS, rng.randint(1, 40000))) for n in q_lens
        ]
        window, min_queries = rng.choice([0, 0, 1, 64, 100, 4096]), rng.choice([1, 2])
        options = {"tokens": tokens, "block_n": block_n, "window": window, "min_queries": min_queries,
                   "chunk": rng.choice([0, 0, 5, 64, 1000])}  # fmt: skip
        work = build(use, q_lens, seq_lens, max_rows=rng.choice([0, 1, 2, 33, 264]), slots=rng.choice([1, 16, 264]),
                     num_kv_heads=rng.choice([1, 8]), **options)  # fmt: skip
        check(work, plain_units(use, q_lens, seq_lens, **options), block_n)


def longest_slot(tiles: list[int], num_kv_heads: int, slots: int) -> int:
    """Tiles of the slot that ends last if each program starts on the slot that is free first, as a GPU starts them."""
    busy = [0] * slots
    for n in tiles:
        for _ in range(num_kv_heads):
            heapq.heapreplace(busy, busy[0] + n)
    return max(busy)


H100_SLOTS = 264  # two programs on each of 132 SMs
MIXES = {
    **{f"{n} x {length}": [length] * n for n in (1, 2, 3, 4, 8, 12, 16, 17, 24, 32, 48, 64, 96)
       for length in (1024, 8192)},
    "1 x 128k": [131072], "2 x 128k": [131072] * 2, "256 x 1k": [1024] * 256,
    "63 x 1k + 1 x 32k": [1024] * 63 + [32768],
    "255 x 1k + 1 x 128k": [1024] * 255 + [131072], "1 to 48 thousand": [1000 * n for n in range(1, 49)],
}  # fmt: skip


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_decode_is_balanced_for_every_mix(num_kv_heads):
    """The slot that ends last has at most 1.25 times the mean and one chunk; and at most 1.5 times the mean, or 1.25
    times in most mixes, where the mean is 8 tiles or more. No model of time: tiles of keys are counted."""
    ratios = {}
    for name, seq_lens in MIXES.items():
        max_rows = 4 * H100_SLOTS // num_kv_heads
        work = build("decode", [1] * len(seq_lens), seq_lens, max_rows=max_rows, slots=H100_SLOTS,
                     num_kv_heads=num_kv_heads)  # fmt: skip
        tiles = check(work, plain_units("decode", [1] * len(seq_lens), seq_lens, 1, 64, 0, 1), 64)
        mean = sum(tiles) * num_kv_heads / H100_SLOTS
        last = longest_slot(tiles, num_kv_heads, H100_SLOTS)
        assert last <= 1.25 * mean + max(tiles), name
        if mean >= 8:
            ratios[name] = last / mean
    assert max(ratios.values()) <= 1.5, max(ratios, key=ratios.__getitem__)
    assert sorted(ratios.values())[len(ratios) * 3 // 4] <= 1.25
