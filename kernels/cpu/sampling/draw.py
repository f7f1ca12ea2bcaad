"""The draw of a token on a CPU, from logits: penalties, temperature, min_p, top_k, top_p and the inverse of the
cumulative distribution, a row at a time and without an operator of torch between them.

kernels/sampling/draw.py has the order of the filters and does the same on a GPU.

min_p and top_k give a bound before any weight is known: only the tokens within it are listed, weighed and drawn from.
top_p alone needs all weights: sums of the weights within a few distances tell between which two of them the nucleus
ends, and only the tokens between are listed, to find the exact end.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
    fill,
    largest_of,
    list_within,
    num_buckets_of,
    source_of,
    to_distances,
    widen_row,
)
from kernels.cpu.sampling.penalties import History, has_penalty, penalise
from kernels.cpu.sampling.search import NUM_BINS, cut_by
from kernels.cpu.simd import WIDTH, advance, load, read, splat, store, write
from kernels.sampling import FAILED

Array = npt.NDArray[Any]

NEAREST, FURTHEST = np.float32(1e-3), np.float32(-87)  # no distance is above 0, and weights below e ** -87 are 0
FIFTH = np.float32(0.2)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_11, SHIFT_27, SHIFT_30, SHIFT_31 = (np.uint64(n) for n in (11, 27, 30, 31))
ONE = np.uint64(1)


@jit
def _place_of(values, largest, top):
    """The first token with the logit `top`."""
    bucket = 0
    while read(largest, bucket) != top:
        bucket += 1
    token = bucket * BUCKET
    while read(values, token) != top:
        token += 1
    return token


@jit
def _masses(values, weights, num_buckets, edges):
    """The weights of the tokens whose distance is at least each of four edges, added in fp32."""
    bounds = splat(edges[0]), splat(edges[1]), splat(edges[2]), splat(edges[3])
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    for i in range(0, num_buckets * BUCKET, WIDTH):
        distance, weight = load(values, i), load(weights, i)
        a = simd.add(a, simd.at_least(distance, bounds[0], weight))
        b = simd.add(b, simd.at_least(distance, bounds[1], weight))
        c = simd.add(c, simd.at_least(distance, bounds[2], weight))
        d = simd.add(d, simd.at_least(distance, bounds[3], weight))
    return (
        simd.first(simd.spread_add1(a)), simd.first(simd.spread_add1(b)),
        simd.first(simd.spread_add1(c)), simd.first(simd.spread_add1(d)),
    )  # fmt: skip


@jit
def _bracket(values, weights, num_buckets, needed, far):
    """(near, far): the nearest tokens whose weights reach `needed` end with one whose distance is below `near` and at
    least the new `far`. Each round leaves a fifth, and two where `needed` is too near to an edge for sums of fp32."""
    near = NEAREST
    for _ in range(3):
        step = (far - near) * FIFTH
        edges = near + step, near + (step + step), far - (step + step), far - step
        masses = _masses(values, weights, num_buckets, edges)
        for i in range(4):
            if masses[i] < 0.9999 * needed:
                near = edges[i]
            elif masses[i] > 1.0001 * needed:
                far = edges[i]
                break
    return near, far


@jit
def _list_between(values, weights, num_buckets, largest, near, far, distances, masses):
    """List the distances below `near` and at least `far`, and their weights. Returns their number, and the sum of the
    weights from `near` on."""
    n, before, bound = 0, 0.0, splat(near)
    for bucket in range(num_buckets):
        if read(largest, bucket) >= far:
            begin, part = bucket * BUCKET, splat(ZERO)
            for i in range(begin, begin + BUCKET, WIDTH):
                part = simd.add(part, simd.at_least(load(values, i), bound, load(weights, i)))
            before += np.float64(simd.first(simd.spread_add1(part)))
            for i in range(begin, begin + BUCKET):  # without a branch that is hard to foretell
                distance = read(values, i)
                write(distances, n, distance)
                write(masses, n, read(weights, i))
                n += 1 if (distance < near) & (distance >= far) else 0
    return n, before


@jit
def _leave(values, weights, num_buckets, bound):
    """Weights 0 for distances below the bound."""
    least = splat(bound)
    for i in range(0, num_buckets * BUCKET, WIDTH):
        store(weights, i, simd.at_least(load(values, i), least, load(weights, i)))


@jit
def _nucleus(values, size, weights, total, top_p, largest, top, temperature, distances, listed, masses):
    """The distance of the last token of a row's nucleus, without another filter. `largest`: logits of the buckets."""
    num_buckets, needed = num_buckets_of(size), top_p * total
    to_distances(largest, 0, num_buckets, top, temperature)
    least = (1.0 - top_p) * total / size  # tokens that weigh less hold no more than what top_p leaves out
    far = np.float32(max(FURTHEST, math.log(least) - 0.001)) if least > 0.0 else FURTHEST
    near, far = _bracket(values, weights, num_buckets, needed, far)
    n, before = _list_between(values, weights, num_buckets, largest, near, far, distances, listed)
    return cut_by(distances, listed, n, needed - before, masses)


@jit
def _cut(values, n, bound, tokens):
    """Leave the listed tokens whose distance is `bound` or nearer. Returns their number."""
    kept = 0
    for i in range(n):
        distance = read(values, i)
        write(tokens, kept, read(tokens, i))
        write(values, kept, distance)
        kept += 1 if distance >= bound else 0
    return kept


@jit
def _weigh(values, weights, num_buckets):
    """weights = exp(distances)"""
    for i in range(0, num_buckets * BUCKET, WIDTH):
        store(weights, i, simd.exp(load(values, i)))


@jit
def _sum_buckets(weights, num_buckets, sums):
    """`sums` gets the sum of each bucket. Returns their sum."""
    total = 0.0
    for bucket in range(num_buckets):
        part = splat(ZERO)
        for i in range(bucket * BUCKET, bucket * BUCKET + BUCKET, WIDTH):
            part = simd.add(part, load(weights, i))
        mass = np.float64(simd.first(simd.spread_add1(part)))
        write(sums, bucket, mass)
        total += mass
    return total


@jit
def _weigh_list(values, weights, n, sums):
    """The weights of n listed distances, and the sums of their buckets. Returns the sum of all."""
    num_buckets = num_buckets_of(n)
    fill(values, n, num_buckets * BUCKET, NO_BOUND)
    _weigh(values, weights, num_buckets)
    return _sum_buckets(weights, num_buckets, sums)


@jit
def _inverse_cdf(weights, num_buckets, sums, target):
    """The first place at which the cumulative weight exceeds `target`; never one of weight 0. If rounding leaves none,
    the last with a weight."""
    total, before, bucket = 0.0, 0.0, 0
    for i in range(num_buckets):
        if read(sums, i) > 0.0:
            before, bucket = total, i
            total += read(sums, i)
            if total > target:
                break
    place, reached = bucket * BUCKET, before
    for i in range(bucket * BUCKET, bucket * BUCKET + BUCKET):
        if read(weights, i) > ZERO:
            place = i
            reached += np.float64(read(weights, i))
            if reached > target:
                break
    return place


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
def _draw(values, size, temperature, log_min_p, top_k, top_p, uniform, weights, tokens, more, largest, sums, masses):
    """temperature 0: the most likely token. Overwrites the logits `values`; `more` is room as `tokens` and `values`."""
    num_buckets = num_buckets_of(size)
    top = largest_of(values, num_buckets, largest)
    if not NO_BOUND < top < np.float32(np.inf):
        return FAILED
    if temperature == ZERO:
        return _place_of(values, largest, top)
    if log_min_p == NO_BOUND and top_k >= size:
        to_distances(values, 0, num_buckets * BUCKET, top, temperature)
        _weigh(values, weights, num_buckets)
        total = _sum_buckets(weights, num_buckets, sums)
        if top_p < 1.0:
            room = simd.pointer_f32(simd.address(tokens))
            bound = _nucleus(values, size, weights, total, top_p, largest, top, temperature, room, more, masses)
            _leave(values, weights, num_buckets, bound)
            total = _sum_buckets(weights, num_buckets, sums)
        return _inverse_cdf(weights, num_buckets, sums, uniform * total)
    bound = bound_of(largest, num_buckets, log_min_p, top_k, top, temperature, masses)
    n = list_within(values, num_buckets, largest, bound, top, temperature, tokens)
    if top_k < n:
        n = _cut(values, n, cut_by(values, simd.pointer_f32(0), n, np.float64(top_k), masses), tokens)
    total = _weigh_list(values, weights, n, sums)
    if top_p < 1.0:
        n = _cut(values, n, cut_by(values, weights, n, top_p * total, masses), tokens)
        total = _weigh_list(values, weights, n, sums)
    return np.int64(read(tokens, _inverse_cdf(weights, num_buckets_of(n), sums, uniform * total)))


@parallel_kernel("18q")
def _draw_rows(args):
    size, token_ids = args[5], simd.pointer_i64(args[6])
    logit_rows, places, temperature = args[7], args[8], simd.pointer_f32(args[9])
    log_min_p, top_k, top_p = simd.pointer_f32(args[10]), simd.pointer_i64(args[11]), simd.pointer_f64(args[12])
    uniform, seeds, positions = simd.pointer_f64(args[13]), simd.pointer_i64(args[14]), simd.pointer_i64(args[15])
    histories, num_prompt, factors = args[16], simd.pointer_i64(args[17]), simd.pointer_f32(args[18])
    max_tokens = args[19]
    num_buckets = num_buckets_of(size)
    whole = num_buckets * BUCKET
    room = np.empty(4 * whole + num_buckets + WIDTH, np.float32)
    more_room = np.empty(num_buckets + NUM_BINS, np.float64)
    values, sums = simd.pointer_f32(room.ctypes.data), simd.pointer_f64(more_room.ctypes.data)
    weights, masses = advance(values, whole), advance(sums, num_buckets)
    tokens, more = simd.pointer_i32(simd.address(advance(weights, whole))), advance(weights, 2 * whole)
    largest = advance(more, whole)
    item = next_item(args)
    while item < args[1]:
        row = read(simd.pointer_i64(logit_rows), item) if logit_rows != 0 else item
        place = read(simd.pointer_i64(places), item) if places != 0 else item
        widen_row(args[2], args[3] != 0, row * args[4], size, values)
        if histories != 0 and has_penalty(advance(factors, 3 * place)):
            penalise(
                values, advance(simd.pointer_i32(histories), place * max_tokens), read(num_prompt, place),
                read(positions, item), advance(factors, 3 * place), tokens,
            )  # fmt: skip
        number = read(uniform, place) if args[13] != 0 else _uniform(read(seeds, place), read(positions, item))
        token = _draw(
            values, size, read(temperature, place),
            read(log_min_p, place) if args[10] != 0 else NO_BOUND,
            read(top_k, place) if args[11] != 0 else size,
            read(top_p, place) if args[12] != 0 else 1.0,
            number, weights, tokens, more, largest, sums, masses,
        )  # fmt: skip
        write(token_ids, item, token)
        item = next_item(args)
    simd.keep(room)
    simd.keep(more_room)


def draw(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    log_min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """A token of each of `rows` (int64 [n]) of logits [rows, vocab_size] (fp32 or bf16, dense), int64 [n]; FAILED for a
    row with NaN or +inf, or without a logit above -inf. [n]: temperature and log_min_p float32 (0: the most likely
    token; -inf: off), uniform float64 in [0, 1), top_k int64 (vocab_size: off), top_p float64 (1: off)."""
    token_ids = empty((len(rows),), torch.int64)
    _draw_rows(
        len(rows), *source_of(logits), token_ids.data_ptr(), rows.data_ptr(), 0, temperature.data_ptr(),
        address_of(log_min_p), address_of(top_k), address_of(top_p), uniform.data_ptr(), 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    return token_ids


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The draws of all live sequences, as arrays that never move, and those of a step; contiguous.

    [max_rows]: temperature float32, 0 for the most likely token; log_min_p float32; top_k int64; top_p float64; seed
    uint64; `history` for penalties. A step: rows int64, of these arrays, and positions int64, of the tokens to draw:
    so many tokens of the history come before.
    """

    temperature: Array
    log_min_p: Array
    top_k: Array
    top_p: Array
    seed: Array
    history: History
    rows: Array
    positions: Array

    def draw(self, logits: Tensor) -> Tensor:
        """A token of each row of logits [n, vocab_size], int64 [n], for the first n of `rows`; FAILED as in `draw`."""
        token_ids = empty((len(logits),), torch.int64)
        filters = [array.ctypes.data for array in (self.temperature, self.log_min_p, self.top_k, self.top_p)]
        _draw_rows(
            len(logits), *source_of(logits), token_ids.data_ptr(), 0, self.rows.ctypes.data, *filters, 0,
            self.seed.ctypes.data, self.positions.ctypes.data, *self.history.addresses(),
        )  # fmt: skip
        return token_ids
