"""The work map of a step: which program of an attention kernel computes which keys of which sequence.

The lengths of a step's sequences are known on the device only, when a CUDA graph is replayed. One small kernel per step
divides each unit of work (a sequence that decodes, or a tile of query tokens) into chunks of keys of one size and lists
the chunks: `items`. The attention kernels of all layers then start one program per item and KV head, in a grid that
depends on shapes alone; programs beyond the last item end at once. The kernel chooses the chunk size so that the
programs of the step fill the device evenly, whatever the mix of lengths: FlashInfer's plan (Ye et al., 2025) and
Stream-K (Osama et al., 2023) divide work likewise, on the host. Programs look nothing up: the map kernel writes the
items out, because a binary search over cumulative counts would be a chain of loads in each program of each layer.

A unit of one chunk is written to the output at once. The chunks of a longer unit leave partial results, which
reduce_chunks_kernel adds in the order of the keys. A second launch was chosen over a reduction by the program that
arrives last: it needs neither counters, which a failed launch would leave wrong, nor ordering between programs, and
costs about 2 us per layer (an estimate). The result depends on the chunk size, never on the order of arrival.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.attention.aot_cases import POINTERS, attention_cases
from kernels.attention.choices import Tile
from kernels.attention.plan import AttentionPlan, AttentionShape
from kernels.attention.shared import LEAST_MEMBERS, find_windows, shares_keys
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import tl, triton

NUM_SIZES = 128  # chunk sizes to choose from
MIN_CHUNK_TILES = 2  # the least of a chunk that has partial results; 1 and 4 took as long on an H100


@dataclass(frozen=True, slots=True)
class WorkMap:
    """The chunks of a step.

    items int32 [most items, 8]: sequence (-1: no item), first row of q, query tokens, position of the first one, first
    key (a multiple of the tile), end of the keys, row of the partial results (-1: the unit has one chunk), unused. A
    position of -2 marks keys of a window (kernels/attention/shared.py): its query tokens are those of as many
    sequences, and its row counts from the first row of each.
    splits int32 [most units of several chunks, 4], of which num_splits int32 [1] are used: first row of q, query
    tokens, first row of the partial results, chunks.
    max_rows: rows of partial results that the chunks may take; 0: no unit is divided.
    rows int32 [sequences]: the first row of the partial results of each divided sequence; None: no windows.
    """

    items: Tensor
    splits: Tensor
    num_splits: Tensor
    max_rows: int
    rows: Tensor | None = None


class StepWork:
    """The work maps of one step, each made by the first layer that needs it: layers differ by windows and
    heads at most.

    Serves one forward pass: the lengths must not change while it is in use.
    """

    __slots__ = ("_maps",)

    def __init__(self) -> None:
        self._maps: dict[tuple[object, ...], WorkMap] = {}

    def find(
        self,
        use: str,
        shape: AttentionShape,
        plan: AttentionPlan,
        tile: Tile,
        num_rows: int,
        max_tokens: int,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        min_queries: int = 1,
        block_tables: Tensor | None = None,
    ) -> WorkMap:
        """The map of the step's sequences for launches of `tile`. use: "decode" or "prefill"; num_rows: rows of q;
        max_tokens: the tokens that the block tables have room for, 0 if no unit may be divided; block_tables: those of
        a decode launch that reads keys of windows once; the rest: see launch_decode and launch_prefill."""
        tokens = 1 if use == "decode" else tile.block_m // shape.group
        num_seqs = len(seq_lens)
        key = (use, tokens, tile.block_n, shape.num_kv_heads, shape.head_dim, shape.sliding_window,
               shape.attention_chunk, min_queries, num_rows, num_seqs,
               seq_lens.data_ptr(), cu_seqlens_q.data_ptr())  # fmt: skip
        if (work := self._maps.get(key)) is not None:
            return work
        num_units = num_seqs if use == "decode" else num_rows // tokens + num_seqs
        max_chunks = 0
        if max_tokens > MIN_CHUNK_TILES * tile.block_n:
            max_chunks = plan.max_chunks(use, shape.num_kv_heads, tokens * shape.num_heads, shape.head_dim)
        windows = None
        if block_tables is not None:
            windows = find_windows(block_tables, cu_seqlens_q, seq_lens, shape, tile)
        work = self._maps[key] = make_map(
            use, cu_seqlens_q, seq_lens, num_units, max_chunks, plan.slots(use, shape.kv_format), min_queries,
            work_constants(use, shape, tile), windows, plan.window_rows(shape),
        )  # fmt: skip
        return work


def work_constants(use: str, shape: AttentionShape, tile: Tile) -> dict[str, int | bool]:
    """The compile-time arguments of work_map_kernel."""
    return {
        "IS_DECODE": use == "decode",
        "TOKENS": 1 if use == "decode" else tile.block_m // shape.group,
        "BLOCK_N": tile.block_n,
        "WINDOW": shape.sliding_window,
        "CHUNK": shape.attention_chunk,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "NUM_SIZES": NUM_SIZES,
        "BLOCK_U": 64,
        "BLOCK_K": 32,
    }


def make_map(
    use: str, cu_seqlens_q: Tensor, seq_lens: Tensor, num_units: int, max_chunks: int, slots: int, min_queries: int,
    constants: dict[str, int | bool], windows: Tensor | None = None, window_rows: int = 0,
) -> WorkMap:  # fmt: skip
    """Launch work_map_kernel. num_units: the largest number of units; max_chunks: the most chunks of units that are
    divided, outside windows; slots: programs that the device runs at once; windows: see find_windows; window_rows: rows
    of partial results that there may be with them."""
    num_seqs, max_rows, max_splits, num_items = len(seq_lens), max_chunks, max_chunks // 2, num_units + max_chunks
    if windows is not None:
        max_rows, max_splits = window_rows, num_seqs
        num_items = num_units + max(max_chunks, num_seqs // LEAST_MEMBERS)
    sizes = [8 * num_items, 4 * max_splits, 0 if windows is None else num_seqs, 1]
    items, splits, rows, num_splits = torch.empty(sum(sizes), dtype=torch.int32, device=seq_lens.device).split(sizes)
    work_map_kernel[(1,)](
        cu_seqlens_q, seq_lens, windows, items, splits, rows if windows is not None else None, num_splits, num_seqs,
        num_units, num_items, max_rows, max_chunks, slots, num_seqs.bit_length(),
        1 if use == "decode" else min_queries, **constants, num_warps=8,
    )  # fmt: skip
    return WorkMap(items.view(-1, 8), splits.view(-1, 4), num_splits, max_rows, None if windows is None else rows)


@triton.jit(
    do_not_specialize=["num_seqs", "num_units", "num_items", "max_rows", "max_chunks", "slots", "search_steps",
                       "min_queries"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q_ptr", "seq_lens_ptr", "windows_ptr", "splits_ptr", "rows_ptr", "num_splits_ptr",
    ],
)  # fmt: skip
def work_map_kernel(
    cu_seqlens_q_ptr, seq_lens_ptr, windows_ptr, items_ptr, splits_ptr, rows_ptr, num_splits_ptr, num_seqs, num_units,
    num_items, max_rows, max_chunks, slots, search_steps, min_queries,
    IS_DECODE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, NUM_SIZES: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program writes the whole map, BLOCK_U units at a time: see WorkMap.

    Units are listed from the last one backwards, because the tiles at the end of a prompt have most keys and are to
    start first. The keys of a window are chunks of its own, listed behind those of its first sequence; each sequence
    has a row of partial results for each of them, before those of its own keys.
    """
    size = num_units * 0 + (1 << 30)
    if max_rows > 0:
        size = choose_size(
            cu_seqlens_q_ptr, seq_lens_ptr, windows_ptr, num_seqs, num_units, num_items, max_rows, max_chunks, slots,
            search_steps, min_queries, IS_DECODE, TOKENS, BLOCK_N, WINDOW, CHUNK, NUM_KV_HEADS, NUM_SIZES, BLOCK_U,
        )  # fmt: skip
    next_item, next_row, next_split = num_units * 0, num_units * 0, num_units * 0
    for first in range(0, num_units, BLOCK_U):
        exists, seq, q_row, tokens, first_pos, begin, end = load_units(
            cu_seqlens_q_ptr, seq_lens_ptr, windows_ptr, num_units - 1 - first - tl.arange(0, BLOCK_U), num_seqs,
            search_steps, min_queries, IS_DECODE, TOKENS, BLOCK_N, WINDOW, CHUNK,
        )  # fmt: skip
        tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
        chunks = tl.where(exists, tl.maximum((tiles + size - 1) // size, 1), 0)  # without a key: one chunk of zeros
        keys = tl.minimum(tiles, size) * BLOCK_N
        shared, shared_items = chunks * 0, chunks * 0
        if windows_ptr is not None:
            members = tl.load(windows_ptr + seq * 2 + 1, mask=exists, other=0)
            shared = tl.where(exists, (begin // BLOCK_N + size - 1) // size, 0)
            shared_items = tl.where(members > 0, shared, 0)
        is_split = chunks + shared > 1
        rows = tl.where(is_split, chunks + shared, 0)
        num_new = chunks + shared_items
        item, row = next_item + tl.cumsum(num_new, 0) - num_new, next_row + tl.cumsum(rows, 0) - rows
        split_ptr = splits_ptr + (next_split + tl.cumsum(is_split.to(tl.int32), 0) - 1) * 4
        tl.store(split_ptr, q_row, mask=is_split)
        tl.store(split_ptr + 1, tokens, mask=is_split)
        tl.store(split_ptr + 2, row, mask=is_split)
        tl.store(split_ptr + 3, rows, mask=is_split)
        store_items(
            items_ptr, item, chunks, seq, q_row, tokens, first_pos, begin, keys, end,
            tl.where(is_split, row + shared, -1), is_split.to(tl.int32), BLOCK_U, BLOCK_K,
        )  # fmt: skip
        if windows_ptr is not None:
            tl.store(rows_ptr + seq, row, mask=exists)
            zero, keys = seq * 0, tl.minimum(begin // BLOCK_N, size) * BLOCK_N
            store_items(
                items_ptr, item + chunks, shared_items, seq, q_row, members, zero - 2, zero, keys, begin,
                zero, zero + 1, BLOCK_U, BLOCK_K,
            )  # fmt: skip
        next_item += tl.sum(num_new, 0)
        next_row += tl.sum(rows, 0)
        next_split += tl.sum(is_split.to(tl.int32), 0)
    for first in range(next_item, num_items, NUM_SIZES):
        unused = first + tl.arange(0, NUM_SIZES)
        tl.store(items_ptr + unused * 8, unused * 0 - 1, mask=unused < num_items)
    tl.store(num_splits_ptr, next_split)


@triton.jit
def store_items(
    items_ptr, item, chunks, seq, q_row, tokens, first_pos, begin, keys, end, row, row_step,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the items of `chunks` chunks of each of BLOCK_U units, from `item` on: see WorkMap. Chunk i has `keys` keys
    from begin + i * keys on, and row `row + i * row_step`."""
    for first_chunk in range(0, tl.max(chunks, 0), BLOCK_K):
        chunk = (first_chunk + tl.arange(0, BLOCK_K))[None, :] + tl.zeros([BLOCK_U, 1], tl.int32)
        mask = chunk < chunks[:, None]
        item_ptr = items_ptr + (item[:, None] + chunk) * 8
        chunk_begin = begin[:, None] + chunk * keys[:, None]
        tl.store(item_ptr, seq[:, None] + chunk * 0, mask=mask)
        tl.store(item_ptr + 1, q_row[:, None] + chunk * 0, mask=mask)
        tl.store(item_ptr + 2, tokens[:, None] + chunk * 0, mask=mask)
        tl.store(item_ptr + 3, first_pos[:, None] + chunk * 0, mask=mask)
        tl.store(item_ptr + 4, chunk_begin, mask=mask)
        tl.store(item_ptr + 5, tl.minimum(chunk_begin + keys[:, None], end[:, None]), mask=mask)
        tl.store(item_ptr + 6, row[:, None] + chunk * row_step[:, None], mask=mask)


@triton.jit
def choose_size(
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    windows_ptr,
    num_seqs,
    num_units,
    num_items,
    max_rows,
    max_chunks,
    slots,
    search_steps,
    min_queries,
    IS_DECODE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SIZES: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Tiles per chunk with the least estimated time, in tiles.

    n programs of at most m tiles that `slots` slots take one after the other end after at most ceil(n / slots) * m
    tiles, and after at most (all tiles / slots) + m (Graham, 1969). The estimate is the smaller bound. A program costs
    one tile more than its keys, and the reduction two, which are not measured yet. The sizes are 8 per power of two,
    from 2 on, and an endless one: no chunks.
    """
    number = NUM_SIZES - 1 - tl.arange(0, NUM_SIZES)  # the largest size first: it wins a tie
    sizes = ((8 + number % 8) << (number // 8)) >> 2
    sizes = tl.where(number == NUM_SIZES - 1, 1 << 30, sizes)
    programs, rows = tl.zeros([NUM_SIZES], tl.int32), tl.zeros([NUM_SIZES], tl.int32)
    alone = rows  # rows of units outside windows
    total, longest = num_units * 0, num_units * 0
    for first in range(0, num_units, BLOCK_U):
        exists, seq, _, _, _, begin, end = load_units(
            cu_seqlens_q_ptr, seq_lens_ptr, windows_ptr, num_units - 1 - first - tl.arange(0, BLOCK_U), num_seqs,
            search_steps, min_queries, IS_DECODE, TOKENS, BLOCK_N, WINDOW, CHUNK,
        )  # fmt: skip
        tiles = tl.where(exists, (end - begin + BLOCK_N - 1) // BLOCK_N, 0)
        chunks = (tiles[None, :] + sizes[:, None] - 1) // sizes[:, None]
        if windows_ptr is not None:
            is_first = tl.load(windows_ptr + seq * 2 + 1, mask=exists, other=0) > 0
            shared_tiles = tl.where(exists, begin // BLOCK_N, 0)
            shared = (shared_tiles[None, :] + sizes[:, None] - 1) // sizes[:, None]
            chunks = tl.maximum(chunks, exists.to(tl.int32)[None, :])
            programs += tl.sum(chunks + tl.where(is_first[None, :], shared, 0), 1)
            chunks += shared
            alone += tl.sum(tl.where((shared_tiles == 0)[None, :] & (chunks > 1), chunks, 0), 1)
            shared_tiles = tl.where(is_first, shared_tiles, 0)
            total += tl.sum(shared_tiles, 0)
            longest = tl.maximum(longest, tl.max(shared_tiles, 0))
        else:
            programs += tl.sum(tl.maximum(chunks, exists.to(tl.int32)[None, :]), 1)
        rows += tl.sum(tl.where(chunks > 1, chunks, 0), 1)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    launched = programs.to(tl.int64) * NUM_KV_HEADS
    chunk = (tl.minimum(sizes, longest) + 1).to(tl.int64)
    rounds = (launched + slots - 1) // slots
    mean = (total.to(tl.int64) * NUM_KV_HEADS + launched + slots - 1) // slots
    cost = tl.minimum(rounds * chunk, mean + chunk) + tl.where(rows > 0, 2, 0)
    alone = rows if windows_ptr is None else alone
    fits = (rows <= max_rows) & (alone <= max_chunks) & (programs <= num_items)
    cost = tl.where(fits, cost, 1 << 60)
    best = tl.argmin(cost, 0)
    return tl.sum(tl.where(tl.arange(0, NUM_SIZES) == best, sizes, 0), 0)


@triton.jit
def load_units(
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    windows_ptr,
    unit,
    num_seqs,
    search_steps,
    min_queries,
    IS_DECODE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(exists, sequence, first row of q, query tokens, position of the first one, first key as a multiple of BLOCK_N,
    end of the keys) of each unit; a number below 0 is no unit.

    Decode: unit i is sequence i, if it has exactly one row; its first key comes after those of its window. Prefill: up
    to TOKENS query tokens of a sequence of at least min_queries rows. There, units of sequence i are numbered from
    cu_seqlens_q[i] // TOKENS + i. That leaves enough numbers for every sequence, because
    ceil((b - a) / T) <= floor(b / T) - floor(a / T) + 1. A binary search finds the sequence; an unused number gives a
    token past the sequence's end.
    """
    exists = unit >= 0
    seq, first_token = tl.maximum(unit, 0), unit * 0
    if not IS_DECODE:
        seq, high = unit * 0, unit * 0 + num_seqs - 1
        for _ in range(search_steps):
            middle = (seq + high + 1) // 2
            is_after = tl.load(cu_seqlens_q_ptr + middle) // TOKENS + middle > unit
            high = tl.where(is_after, middle - 1, high)
            seq = tl.where(is_after, seq, middle)
        first_token = (unit - tl.load(cu_seqlens_q_ptr + seq) // TOKENS - seq) * TOKENS
    q_begin = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_begin
    if IS_DECODE:
        exists &= q_len == 1
    else:
        exists &= (first_token < q_len) & (q_len >= min_queries)
    seq_len = tl.load(seq_lens_ptr + seq, mask=exists, other=0)
    first_pos = seq_len - q_len + first_token
    end = tl.maximum(tl.minimum(seq_len, first_pos + TOKENS), 0)
    begin = first_pos * 0
    if WINDOW > 0 or CHUNK > 0:
        begin = first_key(first_pos, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    if windows_ptr is not None:
        begin = tl.load(windows_ptr + seq * 2, mask=exists, other=0)
    return exists, seq, q_begin + first_token, tl.minimum(TOKENS, q_len - first_token), first_pos, begin, end


@triton.jit
def first_key(query_pos, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query sees, in a layer with a sliding window, an attention_chunk or both."""
    first = query_pos * 0
    if WINDOW > 0:
        first = tl.maximum(query_pos + 1 - WINDOW, 0)
    if CHUNK > 0:
        first = tl.maximum(first, tl.maximum(query_pos, 0) // CHUNK * CHUNK)
    return first


@triton.jit(
    do_not_specialize=["max_tokens"],
    do_not_specialize_on_alignment=["lse_ptr", "splits_ptr", "num_splits_ptr"],
)
def reduce_chunks_kernel(
    partial_ptr,
    lse_ptr,
    splits_ptr,
    num_splits_ptr,
    sinks_ptr,
    out_ptr,
    max_tokens,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Grid (max_tokens * num_heads, programs): adds the chunks of each divided unit of at most max_tokens query tokens,
    in the order of the keys, each weighted by its share of the whole softmax. Rows of partial results [max_tokens *
    num_heads, HEAD_DIM] and of lse [max_tokens * num_heads] are ordered by KV head, token, and head of the group.
    sinks: see store_result.
    """
    wait_for_inputs(PDL)
    num_heads = tl.num_programs(0) // max_tokens
    place = tl.program_id(0)
    kv_head, token = place // (max_tokens * GROUP), place // GROUP % max_tokens
    head = kv_head * GROUP + place % GROUP
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    for split in range(tl.program_id(1), tl.load(num_splits_ptr), tl.num_programs(1)):
        q_row, tokens = tl.load(splits_ptr + split * 4), tl.load(splits_ptr + split * 4 + 1)
        first, count = tl.load(splits_ptr + split * 4 + 2), tl.load(splits_ptr + split * 4 + 3)
        if token < tokens:
            acc = tl.zeros([BLOCK_D], tl.float32)
            top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
            for chunk in range(0, count, BLOCK_S):
                exists = chunk + offs_s < count
                row = (first + chunk + offs_s).to(tl.int64) * tl.num_programs(0) + place
                lse = tl.load(lse_ptr + row, mask=exists, other=float("-inf"))
                mask = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
                values = tl.load(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
                new_top = tl.maximum(top, tl.max(lse, 0))
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights, decay = tl.exp2(lse - shift), tl.exp2(top - shift)
                acc = acc * decay + tl.sum(values * weights[:, None], 0)
                total = total * decay + tl.sum(weights, 0)
                top = new_top
            if sinks_ptr is not None:
                total += tl.exp2(tl.load(sinks_ptr + head) * 1.4426950408889634 - top)
            out_at = out_ptr + ((q_row + token).to(tl.int64) * num_heads + head) * HEAD_DIM
            result = acc / tl.where(total > 0.0, total, 1.0)
            tl.store(out_at + offs_d, result.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


def reduce_chunks(
    work: WorkMap, plan: AttentionPlan, shape: AttentionShape, tokens: int, sinks: Tensor | None, out: Tensor
) -> None:
    """Launch reduce_chunks_kernel after the attention kernel, if a unit can have several chunks. sinks and out: those
    of the attention kernel; tokens: query tokens per unit."""
    if work.max_rows == 0:
        return
    rows = tokens * shape.num_heads
    values, lse = plan.partial_results(work.max_rows, rows, shape.head_dim)
    # programs enough to fill the device; each takes several units if there are more
    programs = max(1, min(len(work.splits), 16 * plan.num_sms // rows))
    reduce_chunks_kernel[(rows, programs)](
        values, lse, work.splits, work.num_splits, sinks, out, tokens, **reduce_constants(shape),
        num_warps=reduce_warps(shape), **launch_options(out.device),
    )  # fmt: skip


def reduce_warps(shape: AttentionShape) -> int:
    """Warps of a program of the reduction: 4 would spill with the largest head sizes."""
    return 4 if shape.head_dim <= 128 else 8


def reduce_constants(shape: AttentionShape) -> dict[str, int]:
    """The compile-time arguments of reduce_chunks_kernel."""
    return {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": max(16, power_of_2(shape.head_dim)),
        "BLOCK_S": 32 if shape.head_dim <= 256 else 16,
    }


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the maps of decode and of two tiles of prefill, and the reduction, for one model of each head size."""
    head_sizes = set()
    types = POINTERS | {"splits_ptr": "*i32", "num_splits_ptr": "*i32"}
    for case in attention_cases(capability):
        shape, options = case.shape, {"types": types, "quick": case.quick}
        if shape.head_dim in head_sizes:
            continue
        head_sizes.add(shape.head_dim)
        for use, num_rows in (("decode", shape.group), ("prefill", 16), ("prefill", 1 << 20)):
            tile = shape.tile(use, capability, num_rows)
            constants = work_constants(use, shape, tile)
            name = f"{use} {constants['TOKENS']} tokens d{shape.head_dim}"
            plain = constants | {"windows_ptr": None, "rows_ptr": None}
            yield AotConfiguration(work_map_kernel, name, "int32", plain, num_warps=8, **options)
            if use == "decode" and shares_keys(shape, tile, LEAST_MEMBERS):
                yield AotConfiguration(work_map_kernel, f"{name} windows", "int32", constants, num_warps=8, **options)
        for has_sinks in (False, True) if shape.head_dim == 64 else (False,):
            constants = reduce_constants(shape) | pdl_constants(capability) | ({} if has_sinks else {"sinks_ptr": None})
            yield AotConfiguration(
                reduce_chunks_kernel, f"d{shape.head_dim}" + " sinks" * has_sinks, case.dtype, constants,
                num_warps=reduce_warps(shape), **options,
            )  # fmt: skip
