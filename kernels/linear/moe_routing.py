"""Chooses the experts of each token, and sorts (token, expert) pairs for the grouped GEMMs of kernels/linear/moe.py.
Two launches; the host reads nothing back."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dispatch import tl, triton, use_triton

MAX_TILE = 4096  # router logits per program
MAX_EXPERTS = MAX_TILE // 8
NUM_WARPS = 8
CHUNKS_AT_ONCE = 16  # rows of the count table that a program adds at once


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


def route(logits: Tensor, top_k: int, normalize: bool) -> Routing:
    """logits [num_tokens, num_experts] -> the softmax in fp32, its top_k largest, divided by their sum if `normalize`.

    With `normalize` the weights equal a softmax over the top_k logits alone (Jiang et al. 2024, section 2.1). On a GPU
    the lower expert wins a tie. A row of NaN gets weights of NaN, and valid experts.
    """
    if use_triton(logits):
        return _launch_route(logits, top_k, normalize)
    return route_reference(logits, top_k, normalize)


def route_reference(logits: Tensor, top_k: int, normalize: bool) -> Routing:
    """route in torch."""
    weights, experts = logits.float().softmax(-1).topk(top_k)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights, experts.int())


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """An upper bound on the tiles that the pairs need, for any distribution over experts."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


def _chunk_tokens(num_experts: int) -> int:
    """Tokens per program."""
    return min(64, MAX_TILE // power_of_2(num_experts))


def _launch_route(logits, top_k, normalize):
    (num_tokens, num_experts), device = logits.shape, logits.device
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
            logits.contiguous(), weights, experts, counts, num_tokens,
            **_route_constants(num_experts, top_k, normalize), num_warps=NUM_WARPS,
        )  # fmt: skip
    return Routing(weights, experts, counts)


def _route_constants(num_experts, top_k, normalize):
    return {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "NORMALIZE": normalize, "SLOTS": power_of_2(top_k),
            "BLOCK_T": _chunk_tokens(num_experts), "BLOCK_E": power_of_2(num_experts)}  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
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
    chosen = tl.zeros([BLOCK_T, SLOTS], tl.int32)
    values = tl.zeros([BLOCK_T, SLOTS], tl.float32) - float("inf")
    counts = tl.zeros([BLOCK_E], tl.int32)
    for slot in tl.static_range(TOP_K):
        expert = tl.argmax(left, 1)[:, None]
        here = lanes[None, :] == expert
        values = tl.where(slots[None, :] == slot, tl.max(left, 1)[:, None], values)
        chosen = tl.where(slots[None, :] == slot, expert, chosen)
        counts += tl.sum((here & exists).to(tl.int32), 0)
        left = tl.where(here, float("-inf"), left)
    scores = tl.exp(values - best)
    scores /= (tl.sum(scores, 1) if NORMALIZE else total)[:, None]
    targets, wanted = rows[:, None] * TOP_K + slots[None, :], exists & (slots < TOP_K)[None, :]
    tl.store(weights_ptr + targets, scores, mask=wanted)
    tl.store(experts_ptr + targets, chosen, mask=wanted)
    tl.store(counts_ptr + tl.program_id(0) * NUM_EXPERTS + lanes, counts, mask=lanes < NUM_EXPERTS)


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
    """Yields Mixtral, Qwen3-MoE, a number of experts that is no power of two, and the largest number."""
    for num_experts, top_k, normalize in ((8, 2, True), (128, 8, True), (60, 4, False), (MAX_EXPERTS, 10, True)):
        label, quick = f"{top_k} of {num_experts} experts", num_experts == 128
        yield AotConfiguration(
            route_kernel, label, "bf16", _route_constants(num_experts, top_k, normalize), num_warps=NUM_WARPS,
            types={"weights_ptr": "*fp32", "experts_ptr": "*i32", "counts_ptr": "*i32"}, quick=quick,
        )  # fmt: skip
        yield AotConfiguration(
            sort_by_expert_kernel, label, "i32", _sort_constants(num_experts, top_k, 16),
            num_warps=NUM_WARPS, quick=quick,
        )  # fmt: skip
