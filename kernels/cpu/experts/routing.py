"""The experts of each token on a CPU, by the rule of kernels/linear/moe_routing.py; and a router in fp32."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.elementwise.work import CHUNK, DTYPES
from kernels.cpu.parallel import empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, fma, load, read, splat, store_some

MAX_EXPERTS = 512
MAX_TOP_K = 64
SOFTMAX, SIGMOID, SPARSEMIXER = range(3)
SCORINGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "sparsemixer": SPARSEMIXER}
ROWS = 4  # rows that a router in fp32 multiplies together
MAX_ROUTER_ROWS = 128  # more rows are left to torch: its product reads the weight less often
LOWEST = -np.inf


@jit
def _best(scores, count, num_chosen, chosen):
    """chosen[:num_chosen] := the places of the largest of scores[:count], best first; the lower place wins a tie. NaN
    counts as -inf."""
    known = 0
    for i in range(count):
        score = scores[i] if scores[i] == scores[i] else LOWEST
        if known == num_chosen:
            last = scores[chosen[known - 1]]
            if not score > (last if last == last else LOWEST):
                continue
            known -= 1
        at = known
        while at > 0:
            before = scores[chosen[at - 1]]
            if not score > (before if before == before else LOWEST):
                break
            chosen[at] = chosen[at - 1]
            at -= 1
        chosen[at] = i
        known += 1


@jit
def _keep_best_groups(choice, num_experts, num_groups, num_kept, sums, kept):
    """choice := -inf outside the groups with the largest sums of two."""
    size = num_experts // num_groups
    for group in range(num_groups):
        first = second = LOWEST
        for i in range(group * size, (group + 1) * size):
            if choice[i] > first:
                first, second = choice[i], first
            elif choice[i] > second:
                second = choice[i]
        sums[group] = first + second
    _best(sums, num_groups, num_kept, kept)
    for group in range(num_groups):
        stays = False
        for i in range(num_kept):
            stays |= kept[i] == group
        if not stays:
            for i in range(group * size, (group + 1) * size):
                choice[i] = LOWEST


@jit
def _sparsemixer(logits, left, num_experts, top_k, jitter, chosen, weights):
    """Rounds of a maximum, each with a softmax over the experts left that are near it."""
    for i in range(num_experts):
        left[i] = logits[i]
    for slot in range(top_k):
        _best(left, num_experts, 1, chosen[slot:])
        best, total = left[chosen[slot]], 0.0
        for i in range(num_experts):
            if not (best - logits[i]) / max(abs(logits[i]), best) > 2 * jitter:
                total += np.exp(left[i] - best)
        weights[slot] = 1 / total
        left[chosen[slot]] = LOWEST


@jit
def _scored(logits, num_experts, scoring, scores):
    """scores[:num_experts] := the softmax or the sigmoids of the logits."""
    if scoring == SIGMOID:
        for i in range(num_experts):
            scores[i] = 1 / (1 + np.exp(-logits[i]))
        return
    largest, total = LOWEST, 0.0
    for i in range(num_experts):
        largest = max(largest, logits[i])
    for i in range(num_experts):
        scores[i] = np.exp(logits[i] - largest)
        total += scores[i]
    for i in range(num_experts):
        scores[i] /= total


@jit
def _route_items(args, rows_of_logits, correction):
    weights_out, experts_out, factors = (
        simd.pointer_f32(args[4]), simd.pointer_i32(args[5]), simd.pointer_f32(args[6])
    )  # fmt: skip
    rows, stride, num_experts, top_k, scoring, normalizes = args[7], args[8], args[9], args[10], args[11], args[12]
    num_groups, groups_per_token, per_item = args[13], args[14], args[15]
    is_ranked_by_score = scoring == SIGMOID or num_groups > 1 or simd.address(correction) != 0
    scaling, jitter, floor = simd.as_float(args[16]), simd.as_float(args[17]), simd.as_float(args[18])
    logits, scores, choice = np.empty(MAX_EXPERTS), np.empty(MAX_EXPERTS), np.empty(MAX_EXPERTS)
    chosen, kept, sums = np.empty(MAX_TOP_K, np.int64), np.empty(MAX_EXPERTS, np.int64), np.empty(MAX_EXPERTS)
    weights = np.empty(MAX_TOP_K)
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            for i in range(num_experts):
                logit = read(rows_of_logits, row * stride + i)
                logits[i] = logit if logit == logit else np.float32(LOWEST)
            if scoring == SPARSEMIXER:
                _sparsemixer(logits, choice, num_experts, top_k, jitter, chosen, weights)
            else:
                _scored(logits, num_experts, scoring, scores)
                for i in range(num_experts):
                    choice[i] = scores[i] if is_ranked_by_score else logits[i]
                    if simd.address(correction) != 0:
                        choice[i] += read(correction, i)
                if num_groups > 1:
                    _keep_best_groups(choice, num_experts, num_groups, groups_per_token, sums, kept)
                _best(choice, num_experts, top_k, chosen)
                for slot in range(top_k):
                    weights[slot] = scores[chosen[slot]]
            total = 1.0
            if normalizes:
                total = 0.0
                for slot in range(top_k):
                    total += weights[slot]
                total = max(total, floor)
            for slot in range(top_k):
                weight = weights[slot] / total * scaling
                if simd.address(factors) != 0:
                    weight *= read(factors, chosen[slot])
                simd.write(weights_out, row * top_k + slot, np.float32(weight))
                simd.write(experts_out, row * top_k + slot, np.int32(chosen[slot]))
        item = next_item(args)


@parallel_kernel("14q3d")
def _route_bf16(args):
    _route_items(args, simd.pointer_bf16(args[2]), simd.pointer_f32(args[3]))


@parallel_kernel("14q3d")
def _route_f32(args):
    _route_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]))


def supports_route(logits: Tensor, top_k: int, scoring: str, correction: Tensor | None, factors: Tensor | None) -> bool:
    """True for logits bf16 or fp32 with dense rows, and a correction and factors in fp32."""
    return (
        logits.dtype in DTYPES
        and logits.stride(1) == 1
        and top_k <= logits.shape[1] <= MAX_EXPERTS
        and top_k <= MAX_TOP_K
        and scoring in SCORINGS
        and all(tensor is None or tensor.dtype == torch.float32 for tensor in (correction, factors))
    )


def route(
    logits: Tensor,
    correction: Tensor | None,
    factors: Tensor | None,
    *,
    top_k: int,
    scoring: str,
    normalizes: bool,
    scaling: float,
    num_groups: int,
    groups_per_token: int,
    jitter: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """logits [num_tokens, num_experts] -> weights fp32 and experts int32 [num_tokens, top_k], see
    kernels.linear.moe_routing.route."""
    rows, num_experts = logits.shape
    weights, experts = empty((rows, top_k), torch.float32), empty((rows, top_k), torch.int32)
    per_item = max(1, CHUNK // (8 * num_experts))
    kernel = _route_bf16 if logits.dtype == torch.bfloat16 else _route_f32
    kernel(
        -(-rows // per_item), logits.data_ptr(), 0 if correction is None else correction.data_ptr(),
        weights.data_ptr(), experts.data_ptr(), 0 if factors is None else factors.data_ptr(), rows, logits.stride(0),
        num_experts, top_k, SCORINGS[scoring], normalizes, num_groups, groups_per_token, per_item,
        scaling, jitter, floor,
    )  # fmt: skip
    return weights, experts


@jit
def _multiply_router(x, stride, rows, weight, size, num_experts, column, out):
    """out[:rows, column : column + 16] of `weight` [size, 16], for up to four rows."""
    zero = splat(np.float32(0))
    first, second, third, fourth = zero, zero, zero, zero
    last = rows - 1
    b, c, d = advance(x, min(1, last) * stride), advance(x, min(2, last) * stride), advance(x, last * stride)
    for i in range(size):
        factors = load(weight, i * WIDTH)
        first = fma(splat(read(x, i)), factors, first)
        second = fma(splat(read(b, i)), factors, second)
        third = fma(splat(read(c, i)), factors, third)
        fourth = fma(splat(read(d, i)), factors, fourth)
    count = min(WIDTH, num_experts - column)
    store_some(out, column, first, count)
    if rows > 1:
        store_some(out, num_experts + column, second, count)
    if rows > 2:
        store_some(out, 2 * num_experts + column, third, count)
    if rows > 3:
        store_some(out, 3 * num_experts + column, fourth, count)


@jit
def _router_items(args, x):
    weight, out = simd.pointer_f32(args[3]), simd.pointer_f32(args[4])
    rows, stride, size, num_experts = args[5], args[6], args[7], args[8]
    vectors = (num_experts + WIDTH - 1) // WIDTH
    item = next_item(args)
    while item < args[1]:
        row, vector = item // vectors * ROWS, item % vectors
        part = advance(weight, vector * size * WIDTH)
        _multiply_router(advance(x, row * stride), stride, min(ROWS, rows - row), part, size, num_experts,
                         vector * WIDTH, advance(out, row * num_experts))  # fmt: skip
        item = next_item(args)


@parallel_kernel("7q")
def _router_bf16(args):
    _router_items(args, simd.pointer_bf16(args[2]))


@parallel_kernel("7q")
def _router_f32(args):
    _router_items(args, simd.pointer_f32(args[2]))


def pack_router(weight: Tensor) -> Tensor:
    """fp32 [num_experts, hidden] -> [vectors, hidden, 16], padded by zeros."""
    padded = F.pad(weight.float(), (0, 0, 0, -len(weight) % WIDTH))
    return padded.unflatten(0, (-1, WIDTH)).transpose(1, 2).contiguous()


def supports_router(x: Tensor) -> bool:
    """True for a few rows of bf16 or fp32."""
    return x.dtype in DTYPES and x.ndim == 2 and x.stride(1) == 1 and 0 < len(x) <= MAX_ROUTER_ROWS


def router(x: Tensor, packed: Tensor, num_experts: int) -> Tensor:
    """x [num_tokens, hidden] -> logits fp32 [num_tokens, num_experts], with sums in fp32. packed: of pack_router."""
    rows, size = x.shape
    out = empty((rows, num_experts), torch.float32)
    kernel = _router_bf16 if x.dtype == torch.bfloat16 else _router_f32
    kernel(
        len(packed) * -(-rows // ROWS), x.data_ptr(), packed.data_ptr(), out.data_ptr(), rows, x.stride(0), size,
        num_experts,
    )  # fmt: skip
    return out
