"""The logits of a row on a CPU, by buckets of 64 tokens, of which the largest logits are found first.

A row of 150,000 logits in fp32 fills the L2 of a core. The largest of each bucket tell which few buckets later steps
have to read.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise.work import DTYPES
from kernels.cpu.parallel import jit
from kernels.cpu.sampling.search import cut_by
from kernels.cpu.simd import WIDTH, advance, load, read, splat, store, write

BUCKET = 64  # tokens whose largest logit or sum of weights is known before their places matter
NO_BOUND, ZERO = np.float32(-np.inf), np.float32(0)


@jit
def num_buckets_of(size):
    return (size + BUCKET - 1) // BUCKET


@jit
def fill(values, begin, end, value):
    for i in range(begin, end):
        write(values, i, value)


@jit
def widen(x, size, values):
    """Copy the logits, and fill the last bucket with -inf."""
    whole = size // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        store(values, i, load(x, i))
    for i in range(whole, size):
        write(values, i, read(x, i))
    fill(values, size, num_buckets_of(size) * BUCKET, NO_BOUND)


@jit
def widen_row(logits, is_bf16, start, size, values):
    """`widen` the row that begins with number `start` of the logits at this address."""
    if is_bf16:
        widen(advance(simd.pointer_bf16(logits), start), size, values)
    else:
        widen(advance(simd.pointer_f32(logits), start), size, values)


@jit
def largest_of(values, num_buckets, largest):
    """The largest logit; NaN if any is NaN. `largest` gets that of each bucket."""
    best, nan = NO_BOUND, splat(ZERO)
    for bucket in range(num_buckets):
        most = splat(NO_BOUND)
        for i in range(bucket * BUCKET, bucket * BUCKET + BUCKET, WIDTH):
            v = load(values, i)
            most, nan = simd.larger(v, most), simd.keep_nan(nan, v)
        top = simd.first(simd.spread_max1(most))
        write(largest, bucket, top)
        best = max(best, top)
    return best + simd.first(simd.spread_add1(nan))


@jit
def to_distances(values, begin, end, top, temperature):
    """Logits to distances in place: (logit - top) / temperature, at most 0."""
    largest, divisor = splat(top), splat(temperature)
    for i in range(begin, end, WIDTH):
        store(values, i, simd.distance(load(values, i), largest, divisor))


@jit
def list_within(values, num_buckets, largest, bound, top, temperature, tokens):
    """List the tokens whose distance is `bound` or nearer, in order: `tokens`, and their distances at the start of
    `values`. Returns their number. largest: distances, too."""
    n = 0
    for bucket in range(num_buckets):
        if read(largest, bucket) >= bound:
            begin = bucket * BUCKET
            to_distances(values, begin, begin + BUCKET, top, temperature)
            for i in range(begin, begin + BUCKET):  # without a branch that is hard to foretell
                distance = read(values, i)
                write(tokens, n, np.int32(i))
                write(values, n, distance)
                n += 1 if distance >= bound else 0
    return n


@jit
def bound_of(largest, num_buckets, log_min_p, top_k, top, temperature, masses):
    """A distance beyond which neither min_p nor top_k leaves a token. Makes distances of the buckets' largest."""
    to_distances(largest, 0, num_buckets, top, temperature)
    if top_k > num_buckets:
        return log_min_p
    return max(log_min_p, cut_by(largest, simd.pointer_f32(0), num_buckets, np.float64(top_k), masses))


def source_of(logits: Tensor) -> tuple[int, ...]:
    """Logits [rows, vocab_size] as arguments of a kernel: address, whether they are bf16, stride, vocab_size."""
    assert logits.dtype in DTYPES and logits.stride(1) == 1
    return logits.data_ptr(), logits.dtype == torch.bfloat16, logits.stride(0), logits.shape[1]


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
