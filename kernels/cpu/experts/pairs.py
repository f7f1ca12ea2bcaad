"""Pairs of a token and one of its experts on a CPU: sorted by expert, gathered, and summed by token."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise.work import CHUNK
from kernels.cpu.linear.places import BLOCKS_BEFORE, END, ENTRY, EXPERT, FIRST, HEADER, RowGroups
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, fma, load, mul, read, splat, store, write


@jit
def _write_table(starts, num_experts, most_rows, table):
    """See kernels/cpu/linear/places.py. starts[e]: the first row of expert e."""
    blocks = entries = 0
    for expert in range(num_experts):
        begin, end = read(starts, expert), read(starts, expert + 1)
        if end > begin:
            entry = advance(table, HEADER + entries * ENTRY)
            write(entry, EXPERT, expert)
            write(entry, FIRST, begin)
            write(entry, END, end)
            write(entry, BLOCKS_BEFORE, blocks)
            blocks += (end - begin + most_rows - 1) // most_rows
            entries += 1
    write(table, 0, blocks)
    write(table, 1, entries)
    write(table, 2, most_rows)


@parallel_kernel("8q")
def _sort_pairs(args):
    """A counting sort, by one thread. starts: room for one number per expert, and one more."""
    experts, starts, order, places, table = (
        simd.pointer_i32(args[2]), simd.pointer_i64(args[3]), simd.pointer_i32(args[4]), simd.pointer_i32(args[5]),
        simd.pointer_i64(args[6]),
    )  # fmt: skip
    num_pairs, num_experts, most_rows = args[7], args[8], args[9]
    if next_item(args) > 0:
        return
    for expert in range(num_experts + 1):
        write(starts, expert, 0)
    for pair in range(num_pairs):
        expert = np.int64(read(experts, pair)) + 1
        write(starts, expert, read(starts, expert) + 1)
    for expert in range(num_experts):
        write(starts, expert + 1, read(starts, expert + 1) + read(starts, expert))
    _write_table(starts, num_experts, most_rows, table)
    for pair in range(num_pairs):
        expert = np.int64(read(experts, pair))
        row = read(starts, expert)
        write(order, row, np.int32(pair))
        write(places, pair, np.int32(row))
        write(starts, expert, row + 1)


@parallel_kernel("9q")
def _gather_pairs(args):
    """Work items are rows: out[i] = x[token of pair i], times the pair's weight if there are weights."""
    x, pairs, weights, out = (
        simd.pointer_bf16(args[2]), simd.pointer_i32(args[3]), simd.pointer_f32(args[4]), simd.pointer_bf16(args[5])
    )  # fmt: skip
    size, stride, top_k, num_pairs, per_item = args[6], args[7], args[8], args[9], args[10]
    item = next_item(args)
    while item < args[1]:
        for i in range(item * per_item, min(num_pairs, (item + 1) * per_item)):
            pair = np.int64(read(pairs, i))
            source, target = advance(x, pair // top_k * stride), advance(out, i * size)
            if simd.address(weights) == 0:
                simd.copy_bytes(simd.address(target), simd.address(source), 2 * size)
            else:
                weight = splat(read(weights, pair))
                for column in range(0, size, WIDTH):
                    store(target, column, mul(load(source, column), weight))
        item = next_item(args)


@parallel_kernel("8q")
def _sum_pairs(args):
    """Work items are tokens: the sum of a token's results over its experts, best first, in fp32."""
    results, weights, places, out = (
        simd.pointer_bf16(args[2]), simd.pointer_f32(args[3]), simd.pointer_i32(args[4]), simd.pointer_bf16(args[5])
    )  # fmt: skip
    size, top_k, num_tokens, per_item = args[6], args[7], args[8], args[9]
    item = next_item(args)
    while item < args[1]:
        for token in range(item * per_item, min(num_tokens, (item + 1) * per_item)):
            for column in range(0, size, WIDTH):
                total = splat(np.float32(0))
                for pair in range(token * top_k, (token + 1) * top_k):
                    result = load(results, np.int64(read(places, pair)) * size + column)
                    if simd.address(weights) == 0:
                        total = simd.add(total, result)
                    else:
                        total = fma(result, splat(read(weights, pair)), total)
                store(out, token * size + column, total)
        item = next_item(args)


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs token * top_k + slot, sorted by expert. order int32 [num_pairs]: the pair of each row; places int32
    [num_pairs]: the row of each pair."""

    order: Tensor
    places: Tensor
    groups: RowGroups


def sort_pairs(experts: Tensor, num_experts: int, most_rows: int) -> SortedPairs:
    """experts int32 [num_tokens, top_k]. most_rows: of a block, see places.py."""
    num_pairs = experts.numel()
    order, places = empty((num_pairs,), torch.int32), empty((num_pairs,), torch.int32)
    starts = empty((num_experts + 1,), torch.int64)
    table = empty((HEADER + min(num_experts, num_pairs) * ENTRY,), torch.int64)
    _sort_pairs(
        1, experts.data_ptr(), starts.data_ptr(), order.data_ptr(), places.data_ptr(), table.data_ptr(),
        num_pairs, num_experts, most_rows,
    )  # fmt: skip
    most_blocks = min(num_experts, num_pairs) + num_pairs // most_rows
    return SortedPairs(order, places, RowGroups(table, num_experts, most_blocks))


def gather_pairs(x: Tensor, pairs: SortedPairs, top_k: int, weights: Tensor | None) -> Tensor:
    """The inputs of all pairs in their order, times weights fp32 [num_tokens, top_k] if there are some: x bf16
    [num_tokens, size] with dense rows -> [num_pairs, size]."""
    num_pairs, size = len(pairs.order), x.shape[1]
    out, per_item = empty((num_pairs, size), x.dtype), max(1, CHUNK // size)
    _gather_pairs(
        -(-num_pairs // per_item), x.data_ptr(), pairs.order.data_ptr(), 0 if weights is None else weights.data_ptr(),
        out.data_ptr(), size, x.stride(0), top_k, num_pairs, per_item,
    )  # fmt: skip
    return out


def sum_pairs(results: Tensor, pairs: SortedPairs, num_tokens: int, weights: Tensor | None) -> Tensor:
    """Sums of the results [num_pairs, size], in the order of `pairs`, over the experts of each token; weighted where
    there are weights fp32 [num_tokens, top_k] -> [num_tokens, size]."""
    size, top_k = results.shape[1], len(results) // num_tokens
    out, per_item = empty((num_tokens, size), results.dtype), max(1, CHUNK // (size * top_k))
    _sum_pairs(
        -(-num_tokens // per_item), results.data_ptr(), 0 if weights is None else weights.data_ptr(),
        pairs.places.data_ptr(), out.data_ptr(), size, top_k, num_tokens, per_item,
    )  # fmt: skip
    return out
