"""Logprobs on a CPU: of one token of each row, and the highest of the row. See kernels/sampling/logprobs.py."""

import math

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.sampling.buckets import (
    BUCKET,
    NO_BOUND,
    ZERO,
    address_of,
    bound_of,
    largest_of,
    list_within,
    num_buckets_of,
    source_of,
    widen_row,
)
from kernels.cpu.sampling.search import NUM_BINS
from kernels.cpu.simd import WIDTH, advance, load, read, splat, write

ONE, INFINITY = np.float32(1), np.float32(np.inf)


@jit
def _log_sum(values, num_buckets, top):
    """The logarithm of the sum of exp(logit - top); NaN if the largest logit is not finite."""
    if not NO_BOUND < top < INFINITY:
        return np.nan
    total, largest = 0.0, splat(top)
    for bucket in range(num_buckets):
        part = splat(ZERO)
        for i in range(bucket * BUCKET, bucket * BUCKET + BUCKET, WIDTH):
            part = simd.add(part, simd.exp(simd.sub(load(values, i), largest)))
        total += np.float64(simd.first(simd.spread_add1(part)))
    return math.log(total)


@jit
def _rank(values, size, logit):
    above = np.int32(1)
    for i in range(size):
        above += np.int32(1) if read(values, i) > logit else np.int32(0)
    return above


@jit
def _keep_highest(values, tokens, n, k, logprobs, top_ids):
    """Sort the k highest of the n listed tokens into logprobs and top_ids; of equal ones the lower id comes first.
    Fewer than k are listed only where a logit is NaN."""
    count = 0
    for i in range(n, k):
        write(top_ids, i, 0)
    for i in range(n):
        value = read(values, i)
        if count < k or value > read(logprobs, k - 1):
            at = min(count, k - 1)
            while at > 0 and value > read(logprobs, at - 1):
                write(logprobs, at, read(logprobs, at - 1))
                write(top_ids, at, read(top_ids, at - 1))
                at -= 1
            write(logprobs, at, value)
            write(top_ids, at, np.int64(read(tokens, i)))
            count = min(count + 1, k)


@parallel_kernel("9q")
def _score_rows(args):
    size, token_ids, k = args[5], simd.pointer_i64(args[6]), args[7]
    logprobs, ranks, top_ids = simd.pointer_f32(args[8]), simd.pointer_i32(args[9]), simd.pointer_i64(args[10])
    num_buckets = num_buckets_of(size)
    whole = num_buckets * BUCKET
    room, masses = np.empty(2 * whole + num_buckets + WIDTH, np.float32), np.empty(NUM_BINS, np.float64)
    values = simd.pointer_f32(room.ctypes.data)
    tokens, largest = simd.pointer_i32(simd.address(advance(values, whole))), advance(values, 2 * whole)
    item = next_item(args)
    while item < args[1]:
        widen_row(args[2], args[3] != 0, item * args[4], size, values)
        top = largest_of(values, num_buckets, largest)
        own, out = read(values, read(token_ids, item)), advance(logprobs, item * (1 + k))
        if args[9] != 0:
            write(ranks, item, _rank(values, size, own))
        log_sum = _log_sum(values, num_buckets, top)
        write(out, 0, own - top)
        if k > 0:
            bound = bound_of(largest, num_buckets, NO_BOUND, k, top, ONE, simd.pointer_f64(masses.ctypes.data))
            n = list_within(values, num_buckets, largest, bound, top, ONE, tokens)
            _keep_highest(values, tokens, n, k, advance(out, 1), advance(top_ids, item * k))
        for i in range(1 + k):
            write(out, i, np.float32(np.float64(read(out, i)) - log_sum))
        item = next_item(args)
    simd.keep(room)
    simd.keep(masses)


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int, with_ranks: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """See kernels.sampling.logprobs."""
    rows = len(logits)
    logprobs, top_ids = empty((rows, 1 + k), torch.float32), empty((rows, k), torch.int64)
    ranks = empty((rows,), torch.int32) if with_ranks else None
    _score_rows(
        rows, *source_of(logits), token_ids.data_ptr(), k, logprobs.data_ptr(), address_of(ranks), top_ids.data_ptr()
    )
    return logprobs, ranks, top_ids
