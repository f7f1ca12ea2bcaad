"""The draw of a token on a CPU, from logits: temperature, min_p, nucleus and the inverse of the cumulative
distribution, a row at a time and without an operator of torch between them.

kernels/sampling/draw.py has the order of the filters and does the same on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise import DTYPES
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.sampling.nucleus import NUM_BINS, SIGN, search
from kernels.cpu.simd import WIDTH, advance, load, read, splat, store, write
from kernels.sampling import FAILED

Array = npt.NDArray[Any]

BUCKET = 64  # tokens whose weights are summed before their places matter
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_11, SHIFT_27, SHIFT_30, SHIFT_31 = (np.uint64(n) for n in (11, 27, 30, 31))
ONE = np.uint64(1)


@jit
def _largest(x, size):
    """The largest logit; NaN if any is NaN."""
    whole = size // WIDTH * WIDTH
    largest, nan = splat(np.float32(-np.inf)), splat(np.float32(0))
    for i in range(0, whole, WIDTH):
        v = load(x, i)
        largest, nan = simd.maximum(largest, v), simd.keep_nan(nan, v)
    for i in range(whole, size):
        v = splat(read(x, i))
        largest, nan = simd.maximum(largest, v), simd.keep_nan(nan, v)
    return simd.first(simd.spread_max1(largest)) + simd.first(simd.spread_add1(nan))


@jit
def _weigh(x, size, largest, temperature, distances, weights):
    """distances = (x - largest) / temperature, at most 0; weights = exp(distances)."""
    whole = size // WIDTH * WIDTH
    top, divisor = splat(largest), splat(temperature)
    for i in range(0, whole, WIDTH):
        v = simd.div(simd.sub(load(x, i), top), divisor)
        store(distances, i, v)
        store(weights, i, simd.exp(v))
    for i in range(whole, size):
        v = simd.div(simd.sub(splat(read(x, i)), top), divisor)
        write(distances, i, simd.first(v))
        write(weights, i, simd.first(simd.exp(v)))


@jit
def _cut(distances, weights, size, threshold):
    """Weights 0 for distances below the threshold."""
    for i in range(size):
        kept = read(weights, i) if read(distances, i) >= threshold else np.float32(0)
        write(weights, i, kept)


@jit
def _inverse_cdf(weights, size, uniform, sums):
    """The first token at which the cumulative weight exceeds uniform * total; never one of weight 0. Weights behind
    `size` are 0 up to a whole bucket."""
    num_buckets = (size + BUCKET - 1) // BUCKET
    total = 0.0
    for bucket in range(num_buckets):
        part = splat(np.float32(0))
        for i in range(0, BUCKET, WIDTH):
            part = simd.add(part, load(weights, bucket * BUCKET + i))
        mass = np.float64(simd.first(simd.spread_add1(part)))
        write(sums, bucket, mass)
        total += mass
    target, before, bucket = uniform * total, 0.0, 0
    for i in range(num_buckets):
        if read(sums, i) > 0.0:
            bucket = i  # if rounding leaves no bucket above the target, the last with a weight
            if before + read(sums, i) > target:
                break
            before += read(sums, i)
    token, reached = bucket * BUCKET, before
    for i in range(bucket * BUCKET, min(size, bucket * BUCKET + BUCKET)):
        if read(weights, i) > np.float32(0):
            token = i
            reached += np.float64(read(weights, i))
            if reached > target:
                break
    return token


@jit
def _mix(x):
    x = (x ^ (x >> SHIFT_30)) * MIX_1
    x = (x ^ (x >> SHIFT_27)) * MIX_2
    return x ^ (x >> SHIFT_31)


@jit
def _uniform(seed, position):
    """See engine/worker/sampling/sampling_rows.py: output number `position` of a SplitMix64 generator."""
    state = _mix(np.uint64(seed) + GOLDEN) + (np.uint64(position) + ONE) * GOLDEN
    return np.float64(_mix(state) >> SHIFT_11) * 2.0**-53


@jit
def _draw(x, size, temperature, log_min_p, top_p, uniform, distances, weights, sums, masses):
    """temperature 0: the most likely token."""
    largest = _largest(x, size)
    if not np.float32(-np.inf) < largest < np.float32(np.inf):
        return FAILED
    if temperature == np.float32(0):
        token = 0
        while read(x, token) != largest:
            token += 1
        return token
    _weigh(x, size, largest, temperature, distances, weights)
    if log_min_p > np.float32(-np.inf):
        _cut(distances, weights, size, log_min_p)
    if top_p < 1.0:
        bits = search(simd.pointer_i32(simd.address(distances)), weights, size, masses, top_p)
        if bits >= 0:
            write(simd.pointer_i32(simd.address(masses)), 0, np.int32(bits - SIGN))
            _cut(distances, weights, size, read(simd.pointer_f32(simd.address(masses)), 0))
    return _inverse_cdf(weights, size, uniform, sums)


@jit
def _draw_items(args, logits):
    stride, size, token_ids, logit_rows, places = args[3], args[4], args[5], args[6], args[7]
    temperature, log_min_p = simd.pointer_f32(args[8]), simd.pointer_f32(args[9])
    top_p, uniform = simd.pointer_f64(args[10]), simd.pointer_f64(args[11])
    seeds, positions = simd.pointer_i64(args[12]), simd.pointer_i64(args[13])
    whole = (size + BUCKET - 1) // BUCKET * BUCKET
    room, more_room = np.empty(2 * whole, np.float32), np.empty(whole // BUCKET + NUM_BINS, np.float64)
    distances, sums = simd.pointer_f32(room.ctypes.data), simd.pointer_f64(more_room.ctypes.data)
    weights, masses = advance(distances, whole), advance(sums, whole // BUCKET)
    for i in range(size, whole):
        write(weights, i, np.float32(0))
    item = next_item(args)
    while item < args[1]:
        row = read(simd.pointer_i64(logit_rows), item) if logit_rows != 0 else item
        place = read(simd.pointer_i64(places), item) if places != 0 else item
        number = read(uniform, place) if args[11] != 0 else _uniform(read(seeds, place), read(positions, item))
        token = _draw(
            advance(logits, row * stride), size, read(temperature, place),
            read(log_min_p, place) if args[9] != 0 else np.float32(-np.inf),
            read(top_p, place) if args[10] != 0 else 1.0,
            number, distances, weights, sums, masses,
        )  # fmt: skip
        write(simd.pointer_i64(token_ids), item, token)
        item = next_item(args)
    simd.keep(room)
    simd.keep(more_room)


@parallel_kernel("12q")
def _draw_bf16(args):
    _draw_items(args, simd.pointer_bf16(args[2]))


@parallel_kernel("12q")
def _draw_wide(args):
    """For fp32: the logits of a bf16 model are widened where penalties or biases change them."""
    _draw_items(args, simd.pointer_f32(args[2]))


def supports_draw(logits: Tensor) -> bool:
    """True for dense rows."""
    return logits.dtype in DTYPES and logits.stride(1) == 1


def draw(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    log_min_p: Tensor | None,
    top_p: Tensor | None,
) -> Tensor:
    """A token of each of `rows` (int64 [n]) of logits [rows, vocab_size], int64 [n]; FAILED for a row with NaN or +inf,
    or without a logit above -inf. float32 [n]: temperature, log_min_p; float64 [n]: uniform in [0, 1), top_p."""
    token_ids = empty((len(rows),), torch.int64)
    kernel = _draw_bf16 if logits.dtype == torch.bfloat16 else _draw_wide
    kernel(
        len(rows), logits.data_ptr(), logits.stride(0), logits.shape[1], token_ids.data_ptr(), rows.data_ptr(), 0,
        temperature.data_ptr(), 0 if log_min_p is None else log_min_p.data_ptr(),
        0 if top_p is None else top_p.data_ptr(), uniform.data_ptr(), 0, 0,
    )  # fmt: skip
    return token_ids


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The draws of all live sequences, as arrays that never move, and those of a step; contiguous.

    [max_rows]: temperature float32, 0 for the most likely token; log_min_p float32; top_p float64; seed uint64. A step:
    rows int64, of these arrays, and positions int64, of the tokens to draw.
    """

    temperature: Array
    log_min_p: Array
    top_p: Array
    seed: Array
    rows: Array
    positions: Array

    def draw(self, logits: Tensor) -> Tensor:
        """A token of each row of logits [n, vocab_size], int64 [n], for the first n of `rows`; FAILED as in `draw`."""
        token_ids = empty((len(logits),), torch.int64)
        kernel = _draw_bf16 if logits.dtype == torch.bfloat16 else _draw_wide
        addresses = [array.ctypes.data for array in (self.temperature, self.log_min_p, self.top_p)]
        kernel(
            len(logits), logits.data_ptr(), logits.stride(0), logits.shape[1], token_ids.data_ptr(), 0,
            self.rows.ctypes.data, *addresses, 0, self.seed.ctypes.data, self.positions.ctypes.data,
        )  # fmt: skip
        return token_ids
