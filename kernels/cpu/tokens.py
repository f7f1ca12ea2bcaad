"""The two ends of a step on a CPU: token ids to rows of the embedding, and logits to the most likely tokens."""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise.work import CHUNK, DTYPES
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, load, read, splat, store, write
from kernels.sampling import FAILED

PART = 1024  # logits of which the largest is known before its place is looked for


@jit
def _embed_row(row, position_row, has_position, size, scale, out):
    factor = splat(np.float32(scale))
    for i in range(0, size, WIDTH):
        store(out, i, simd.add(load(row, i), load(position_row, i)) if has_position else simd.mul(load(row, i), factor))


@jit
def _embed_items(args, table, out, position_table):
    ids, positions = simd.pointer_i64(args[2]), simd.pointer_i64(args[5])
    rows, size, per_item, offset, scale = args[7], args[8], args[9], args[10], simd.as_float(args[11])
    has_position = args[6] != 0
    item = next_item(args)
    while item < args[1]:
        for i in range(item * per_item, min(rows, (item + 1) * per_item)):
            place = read(positions, i) + offset if has_position else 0
            _embed_row(advance(table, read(ids, i) * size), advance(position_table, place * size), has_position, size,
                       scale, advance(out, i * size))  # fmt: skip
        item = next_item(args)


@parallel_kernel("9qd")
def _embed_bf16(args):
    pointer = simd.pointer_bf16
    _embed_items(args, pointer(args[3]), pointer(args[4]), pointer(args[6]))


@parallel_kernel("9qd")
def _embed_f32(args):
    pointer = simd.pointer_f32
    _embed_items(args, pointer(args[3]), pointer(args[4]), pointer(args[6]))


def supports_embed(
    ids: Tensor, weight: Tensor, scale: float, positions: Tensor | None, position_weight: Tensor | None
) -> bool:
    """True for dense tables of the same dtype with rows of whole vectors. No family has a scale and positions."""
    tables = [weight] if position_weight is None else [weight, position_weight]
    return (
        weight.dtype in DTYPES
        and (scale == 1.0 or position_weight is None)
        and weight.shape[1] % WIDTH == 0
        and all(table.is_contiguous() and table.dtype == weight.dtype for table in tables)
        and all(ids.is_contiguous() and ids.dtype == torch.int64 for ids in (ids, positions) if ids is not None)
    )


def embed(
    ids: Tensor, weight: Tensor, scale: float, positions: Tensor | None, position_weight: Tensor | None, offset: int
) -> Tensor:
    """See kernels.elementwise.embedding. No id and no position is checked."""
    size = weight.shape[1]
    out = empty((len(ids), size), weight.dtype)
    per_item = max(1, CHUNK // size)
    learned = position_weight is not None and positions is not None
    kernel = _embed_bf16 if weight.dtype == torch.bfloat16 else _embed_f32
    kernel(
        -(-len(ids) // per_item), ids.data_ptr(), weight.data_ptr(), out.data_ptr(),
        positions.data_ptr() if learned else 0, position_weight.data_ptr() if learned else 0,
        len(ids), size, per_item, offset, scale,
    )  # fmt: skip
    return out


@jit
def _largest_of(x, begin, end, nan):
    """(the largest of x[begin : end] in every lane, `nan` with NaN where the part has any)."""
    whole = begin + (end - begin) // WIDTH * WIDTH
    largest = splat(np.float32(-np.inf))
    for i in range(begin, whole, WIDTH):
        v = load(x, i)
        largest, nan = simd.maximum(largest, v), simd.keep_nan(nan, v)
    for i in range(whole, end):
        v = splat(read(x, i))
        largest, nan = simd.maximum(largest, v), simd.keep_nan(nan, v)
    return simd.spread_max1(largest), nan


@jit
def _most_likely(x, size):
    best, start, nan = np.float32(-np.inf), 0, splat(np.float32(0))
    for begin in range(0, size, PART):
        largest, nan = _largest_of(x, begin, min(size, begin + PART), nan)
        if simd.first(largest) > best:
            best, start = simd.first(largest), begin
    if not (np.float32(-np.inf) < best < np.float32(np.inf)) or np.isnan(simd.first(simd.spread_add1(nan))):
        return FAILED
    while read(x, start) != best:
        start += 1
    return start


@jit
def _most_likely_items(args, logits):
    token_ids, size, stride = simd.pointer_i64(args[3]), args[4], args[5]
    item = next_item(args)
    while item < args[1]:
        write(token_ids, item, _most_likely(advance(logits, item * stride), size))
        item = next_item(args)


@parallel_kernel("4q")
def _most_likely_bf16(args):
    _most_likely_items(args, simd.pointer_bf16(args[2]))


@parallel_kernel("4q")
def _most_likely_wide(args):
    """For fp32: the logits of a bf16 model are widened where masks, penalties or biases change them."""
    _most_likely_items(args, simd.pointer_f32(args[2]))


def supports_most_likely(logits: Tensor) -> bool:
    """True for dense rows."""
    return logits.dtype in DTYPES and logits.stride(1) == 1


def most_likely(logits: Tensor) -> Tensor:
    """See kernels.sampling.greedy."""
    token_ids = empty((len(logits),), torch.int64)
    kernel = _most_likely_bf16 if logits.dtype == torch.bfloat16 else _most_likely_wide
    kernel(len(logits), logits.data_ptr(), token_ids.data_ptr(), logits.shape[1], logits.stride(0))
    return token_ids
