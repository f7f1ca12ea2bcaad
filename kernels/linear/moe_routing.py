"""Chooses the experts of each token, and sorts (token, expert) pairs for the grouped GEMMs of kernels/linear/moe.py.
Two launches; the host reads nothing back."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dispatch import cpu_kernels, tl, triton, use_triton

MAX_TILE = 4096  # router logits per program
MAX_EXPERTS = MAX_TILE // 8
NUM_WARPS = 8
CHUNKS_AT_ONCE = 16  # rows of the count table that a program adds at once
SUM_FLOOR = 1e-20  # the least divisor of normalised weights: sigmoids may all be 0

SCORINGS = ("softmax", "sigmoid", "sparsemixer")


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How the router's logits choose the experts of a token and weigh them.

    scoring "softmax" or "sigmoid" turns logits into scores; the top_k experts with the largest scores are chosen, and
    their scores are the weights. A correction per expert may be added to the scores for the choice alone (Wang et al.
    2024, "Auxiliary-loss-free load balancing"). With num_groups > 1, experts i * n to i * n + n - 1 form group i, and
    only the groups_per_token groups with the largest sum of two best scores take part (DeepSeek-AI 2024, "DeepSeek-V3",
    section 2.1.2).

    "sparsemixer" is inference of Liu et al. 2024, "GRIN", section 2: top_k rounds of a maximum over the experts left.
    The weight is a softmax over those experts left whose logit s has (max - s) / max(|s|, max) <= 2 * jitter.
    """

    top_k: int
    normalize: bool  # divide the weights of a token by their sum
    scoring: str = "softmax"
    scaling: float = 1.0  # factor of the weights
    num_groups: int = 1
    groups_per_token: int = 1
    jitter: float = 0.0  # with "sparsemixer"


@dataclass(frozen=True, slots=True)
class Routing:
    """The top_k experts of every token, best first, and their weights."""

    weights: Tensor  # fp32 [num_tokens, top_k]
    experts: Tensor  # int32 [num_tokens, top_k]
    counts: Tensor | None = None  # GPU: int32 [num_chunks, num_experts], pairs of each expert in a chunk of tokens


@dataclass(frozen=True, slots=True)
class Order:
    """Pairs sorted by expert, and the tiles that cover them: a tile has at most block_m rows, all of one expert.

    Masks pad an expert's last tile to block_m rows, so no buffer has padding.
    """

    pairs: Tensor  # int32 [num_tokens * top_k]: token * top_k + slot
    tiles: Tensor  # int32 [3, max_tiles]: expert (-1: no tile), first row in `pairs`, end of the expert's rows
    block_m: int


def route(
    logits: Tensor, rule: RoutingRule, correction: Tensor | None = None, factors: Tensor | None = None
) -> Routing:
    """logits [num_tokens, num_experts], correction [num_experts] -> experts and weights by the rule, computed in fp32.

    With "softmax" and `normalize` the weights equal a softmax over the top_k logits alone (Jiang et al. 2024, section
    2.1). factors fp32 [num_experts] multiply the weights of their experts. The lower expert wins a tie where a kernel
    routes. A row of NaN gets weights of NaN, and valid experts.
    """
    if use_triton(logits):
        routing = _launch_route(logits, rule, correction)
    elif (cpu := cpu_kernels()) and cpu.routing.supports_route(logits, rule.top_k, rule.scoring, correction, factors):
        return _route_on_cpu(logits, rule, correction, factors)
    else:
        routing = route_reference(logits, rule, correction)
    if factors is None:
        return routing
    return replace(routing, weights=routing.weights * factors[routing.experts.long()])


def _route_on_cpu(logits: Tensor, rule: RoutingRule, correction: Tensor | None, factors: Tensor | None) -> Routing:
    weights, experts = cpu_kernels().routing.route(  # type: ignore[union-attr]
        logits, correction, factors, top_k=rule.top_k, scoring=rule.scoring, normalizes=rule.normalize,
        scaling=rule.scaling, num_groups=rule.num_groups, groups_per_token=rule.groups_per_token, jitter=rule.jitter,
        floor=SUM_FLOOR,
    )  # fmt: skip
    return Routing(weights, experts)


def route_reference(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> Routing:
    """route in torch."""
    if rule.scoring == "sparsemixer":
        return _sparsemixer(logits.float(), rule)
    scores = logits.float().sigmoid() if rule.scoring == "sigmoid" else logits.float().softmax(-1)
    if correction is None and rule.num_groups == 1:
        weights, experts = scores.topk(rule.top_k)
    else:
        choice = scores if correction is None else scores + correction.float()
        experts = _best_groups(choice, rule).topk(rule.top_k).indices
        weights = scores.gather(-1, experts)
    if rule.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=SUM_FLOOR)
    return Routing(weights if rule.scaling == 1.0 else weights * rule.scaling, experts.int())


def _best_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """choice [num_tokens, num_experts], with -inf where the expert's group does not take part."""
    if rule.num_groups == 1:
        return choice
    by_group = choice.unflatten(-1, (rule.num_groups, -1))
    groups = by_group.topk(2).values.sum(-1).topk(rule.groups_per_token).indices
    left_out = torch.ones(by_group.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, groups, False)
    return by_group.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)


def _sparsemixer(logits: Tensor, rule: RoutingRule) -> Routing:
    left, weights, experts = logits.clone(), [], []
    for _ in range(rule.top_k):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * rule.jitter
        weights.append(1 / (left - best).exp().masked_fill(far, 0.0).sum(-1))
        experts.append(expert.int())
        left.scatter_(-1, expert, float("-inf"))
    return Routing(torch.stack(weights, -1), torch.cat(experts, -1))


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """An upper bound on the tiles that the pairs need, for any distribution over experts."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


def _chunk_tokens(num_experts: int) -> int:
    """Tokens per program."""
    return min(64, MAX_TILE // power_of_2(num_experts))


def _launch_route(logits, rule, correction):
    (num_tokens, num_experts), device, top_k = logits.shape, logits.device, rule.top_k
    if not top_k <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"top_k {top_k} of {num_experts} experts: top_k is too large, or there are more than {MAX_EXPERTS}"
        )
    block = _chunk_tokens(num_experts)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    counts = torch.empty((-(-num_tokens // block), num_experts), dtype=torch.int32, device=device)
    if num_tokens:
        route_kernel[(len(counts),)](
            logits.contiguous(), correction, weights, experts, counts, num_tokens,
            **_route_constants(num_experts, rule), num_warps=NUM_WARPS,
        )  # fmt: skip
    return Routing(weights, experts, counts)


def _route_constants(num_experts, rule):
    return {"NUM_EXPERTS": num_experts, "TOP_K": rule.top_k, "NORMALIZE": rule.normalize, "SCORING": rule.scoring,
            "SCALING": rule.scaling, "JITTER": rule.jitter, "GROUPS": rule.num_groups,
            "GROUPS_PER_TOKEN": rule.groups_per_token, "SUM_FLOOR": SUM_FLOOR, "SLOTS": power_of_2(rule.top_k),
            "BLOCK_T": _chunk_tokens(num_experts), "BLOCK_E": power_of_2(num_experts),
            "BLOCK_G": power_of_2(rule.num_groups)}  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCORING: tl.constexpr,
    SCALING: tl.constexpr,
    JITTER: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    SUM_FLOOR: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Grid (num_chunks,): routes BLOCK_T tokens by TOP_K rounds of a maximum over the remaining experts."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes, slots = tl.arange(0, BLOCK_E), tl.arange(0, SLOTS)
    exists, real = (rows < num_tokens)[:, None], (lanes < NUM_EXPERTS)[None, :]
    offsets = rows[:, None].to(tl.int64) * NUM_EXPERTS + lanes[None, :]
    logits = tl.load(logits_ptr + offsets, mask=exists & real, other=0.0).to(tl.float32)
    # every comparison with NaN is false: the maximum could be a lane without an expert
    left = tl.where(real & (logits == logits), logits, float("-inf"))
    best = tl.max(left, 1)[:, None]
    total = tl.sum(tl.exp(left - best), 1)
    BY_LOGIT: tl.constexpr = SCORING != "sigmoid" and correction_ptr is None and GROUPS == 1
    scores = logits
    if not BY_LOGIT:
        scores = 1.0 / (1.0 + tl.exp(-logits)) if SCORING == "sigmoid" else tl.exp(left - best) / total[:, None]
        choice = scores
        if correction_ptr is not None:
            choice += tl.load(correction_ptr + lanes, mask=lanes < NUM_EXPERTS, other=0.0).to(tl.float32)[None, :]
        left = tl.where(real & (choice == choice), choice, float("-inf"))
        if GROUPS > 1:
            left = _keep_best_groups(left, lanes, NUM_EXPERTS // GROUPS, GROUPS, GROUPS_PER_TOKEN, BLOCK_T, BLOCK_G)
    chosen = tl.zeros([BLOCK_T, SLOTS], tl.int32)
    values = tl.zeros([BLOCK_T, SLOTS], tl.float32) - (float("inf") if BY_LOGIT and SCORING == "softmax" else 0.0)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for slot in tl.static_range(TOP_K):
        expert = tl.argmax(left, 1)[:, None]
        here = lanes[None, :] == expert
        if SCORING == "sparsemixer":
            value = _sparsemixer_weight(left, logits, JITTER)
        elif BY_LOGIT:
            value = tl.max(left, 1)
        else:
            value = tl.sum(tl.where(here, scores, 0.0), 1)
        values = tl.where(slots[None, :] == slot, value[:, None], values)
        chosen = tl.where(slots[None, :] == slot, expert, chosen)
        counts += tl.sum((here & exists).to(tl.int32), 0)
        left = tl.where(here, float("-inf"), left)
    if BY_LOGIT and SCORING == "softmax":
        values = tl.exp(values - best)
        values /= (tl.sum(values, 1) if NORMALIZE else total)[:, None]
    elif NORMALIZE:
        values /= tl.maximum(tl.sum(values, 1), SUM_FLOOR)[:, None]
    targets, wanted = rows[:, None] * TOP_K + slots[None, :], exists & (slots < TOP_K)[None, :]
    tl.store(weights_ptr + targets, values * SCALING, mask=wanted)
    tl.store(experts_ptr + targets, chosen, mask=wanted)
    tl.store(counts_ptr + tl.program_id(0) * NUM_EXPERTS + lanes, counts, mask=lanes < NUM_EXPERTS)


@triton.jit
def _sparsemixer_weight(left, logits, JITTER: tl.constexpr):
    """The weight of each row's best expert among those left, see RoutingRule."""
    best = tl.max(left, 1)[:, None]
    far = (best - logits) / tl.maximum(tl.abs(logits), best) > 2 * JITTER
    return 1.0 / tl.sum(tl.where(far, 0.0, tl.exp(left - best)), 1)


@triton.jit
def _keep_best_groups(
    choice,
    lanes,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """choice [BLOCK_T, BLOCK_E], with -inf for the experts of groups that do not take part."""
    group_of, groups = (lanes // SIZE)[None, :], tl.arange(0, BLOCK_G)[None, :]
    sums = tl.zeros([BLOCK_T, BLOCK_G], tl.float32) - float("inf")
    for group in tl.static_range(GROUPS):
        members = tl.where(group_of == group, choice, float("-inf"))
        first = tl.argmax(members, 1)[:, None]
        two = tl.max(members, 1) + tl.max(tl.where(lanes[None, :] == first, float("-inf"), members), 1)
        sums = tl.where(groups == group, two[:, None], sums)
    kept = tl.zeros_like(choice) - float("inf")
    for _ in tl.static_range(GROUPS_PER_TOKEN):
        group = tl.argmax(sums, 1)[:, None]
        kept = tl.where(group_of == group, choice, kept)
        sums = tl.where(groups == group, float("-inf"), sums)
    return kept


def sort_by_expert(routing: Routing, block_m: int) -> Order:
    """Counting sort of the pairs that `route` made on a GPU; num_tokens is at least 1."""
    num_tokens, top_k = routing.experts.shape
    num_chunks, num_experts = routing.counts.shape
    device, num_tiles = routing.experts.device, max_tiles(num_tokens * top_k, num_experts, block_m)
    constants = _sort_constants(num_experts, top_k, block_m)
    pairs = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=device)
    sort_by_expert_kernel[(max(num_chunks, -(-num_tiles // constants["BLOCK_T"])),)](
        routing.experts, routing.counts, pairs, tiles, num_tokens, num_chunks, num_tiles, **constants,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return Order(pairs, tiles, block_m)


def _sort_constants(num_experts, top_k, block_m):
    return {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "BLOCK_M": block_m, "BLOCK_T": _chunk_tokens(num_experts),
            "BLOCK_E": power_of_2(num_experts), "BLOCK_C": CHUNKS_AT_ONCE}  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "num_tiles"])
def sort_by_expert_kernel(
    experts_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_tokens,
    num_chunks,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each program places the pairs of BLOCK_T tokens and describes BLOCK_T tiles. Each adds up the whole count table
    itself, which is small: cheaper than a further launch."""
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK_E)
    total, before = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunk = (first + tl.arange(0, BLOCK_C))[:, None]
        known = (chunk < num_chunks) & (lanes < NUM_EXPERTS)[None, :]
        counts = tl.load(counts_ptr + chunk * NUM_EXPERTS + lanes[None, :], mask=known, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(chunk < program, counts, 0), 0)
    ends = tl.cumsum(total, 0)
    _place_pairs(experts_ptr, pairs_ptr, ends - total + before, lanes, num_tokens, TOP_K, BLOCK_T)
    needed = (total + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(needed, 0)
    tile = (program * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    mine = (tile >= (tile_ends - needed)[None, :]) & (tile < tile_ends[None, :])  # True for one expert at most
    expert = tl.sum(tl.where(mine, lanes[None, :] + 1, 0), 1) - 1
    starts = (ends - total)[None, :] + (tile - (tile_ends - needed)[None, :]) * BLOCK_M
    target, inside = tiles_ptr + program * BLOCK_T + tl.arange(0, BLOCK_T), tl.sum(tile, 1) < num_tiles
    tl.store(target, expert, mask=inside)
    tl.store(target + num_tiles, tl.sum(tl.where(mine, starts, 0), 1), mask=inside)
    tl.store(target + 2 * num_tiles, tl.sum(tl.where(mine, ends[None, :], 0), 1), mask=inside)


@triton.jit
def _place_pairs(experts_ptr, pairs_ptr, position, lanes, num_tokens, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr):
    """position [BLOCK_E]: place of the next pair of each expert."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + rows * TOP_K + slot, mask=rows < num_tokens, other=-1)
        one_hot = (expert[:, None] == lanes[None, :]).to(tl.int32)
        rank = tl.cumsum(one_hot, 0) - one_hot
        target = tl.sum(one_hot * (position[None, :] + rank), 1)
        tl.store(pairs_ptr + target, rows * TOP_K + slot, mask=rows < num_tokens)
        position += tl.sum(one_hot, 0)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields Mixtral, Qwen3-MoE, a number of experts that is no power of two, the largest number, GLM-4.5, ERNIE 4.5,
    a choice of groups as in DeepSeek-V3, and Phi-3.5-MoE."""
    grouped = RoutingRule(8, True, "sigmoid", scaling=2.5, num_groups=8, groups_per_token=4)
    rules = ((8, RoutingRule(2, True), False), (128, RoutingRule(8, True), False), (60, RoutingRule(4, False), False),
             (MAX_EXPERTS, RoutingRule(10, True), False), (160, RoutingRule(8, True, "sigmoid", scaling=2.5), True),
             (64, RoutingRule(6, True), True), (256, grouped, True),
             (16, RoutingRule(2, False, "sparsemixer", jitter=0.01), False))  # fmt: skip
    for num_experts, rule, corrected in rules:
        label, quick = f"{rule.top_k} of {num_experts} experts, {rule.scoring}", num_experts in (128, 256)
        types = {"weights_ptr": "*fp32", "experts_ptr": "*i32", "counts_ptr": "*i32", "correction_ptr": "*fp32"}
        yield AotConfiguration(
            route_kernel, label, "bf16",
            _route_constants(num_experts, rule) | ({} if corrected else {"correction_ptr": None}),
            num_warps=NUM_WARPS, types=types, quick=quick,
        )  # fmt: skip
        yield AotConfiguration(
            sort_by_expert_kernel, label, "i32", _sort_constants(num_experts, rule.top_k, 16),
            num_warps=NUM_WARPS, quick=quick,
        )  # fmt: skip
