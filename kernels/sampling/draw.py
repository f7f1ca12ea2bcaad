"""Draws tokens from filtered distributions on a GPU: min-p, top-k and top-p by threshold search, without sorting.

The weight of a token is exp(-y), where y = (largest logit - logit) / temperature is its distance. A filter keeps the
tokens up to some distance. Floats >= 0 have the order of their bits, so a bisection over integers finds the distance
exactly, and tied tokens are kept or cut together. Five steps; 1 to 4 are in kernels/sampling/cuts.py, and those over
chunks have one program per 4096 tokens, so that a single row of 128k occupies 32 multiprocessors:

1. `weigh_kernel` counts, for every chunk of a row, the tokens within each of a few fixed distances, and sums their
weight. So the cut of each filter is known to lie between two of them.
2. `refine_kernel`: where more than 8192 tokens lie between (nearly flat distributions), a sample of every 32nd token
estimates the cut. It chooses six distances around the estimate, in pairs that enclose possible ties.
3. `reweigh_kernel` does step 1 for these distances.
4. `window_kernel` finds the last two known points around each cut, and `gather_kernel` writes the distances between
them to a short list, in the order of the token ids.
5. `draw_kernel` bisects that list, in L1, picks the chunk in which the cumulative distribution passes the uniform
number, and reads that chunk once more to find the token.

Full reads of the logits: step 1, step 4, and step 3 for rows with a long window; largest_logits reads them before. So a
flat row is read 4 times, another filtered row 3 times, a row with only a temperature or min-p 2 times, plus one chunk.
256 flat rows of 128256 in bf16 are 66 MB a read, 263 MB in all: 0.10 ms at 2.7 TB/s (80 % of an H100's bandwidth).
The kernels of 256 such rows take 0.61 ms in all there, those of top_p 0.95 0.39 ms (measured in two calls), those of
temperature alone 0.05 ms. The sums over seven edges in step 1 (0.13 ms) and the prefix sum in step 4 (0.19 ms) take
more time than the reads.

If the list would still be longer than 32768 tokens, step 5 searches the row itself, with one program and one read per
bit. By the estimate's error, one flat row in 10**6 needs this, and more rows that combine a top-k of thousands with
top-p. Counts are exact. Sums of weights over a chunk are fp32, all others float64, each in a fixed order, so a row's
token does not depend on its batch. The idea that only the cut is needed and not the order is from FlashInfer,
"Sorting-Free GPU Kernels for LLM Sampling", 2025-03-10 (which rejects tokens where this file searches); that of
splitters from a sample is from Ribizel and Anzt, "Parallel selection on GPUs", 2020.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.dispatch import tl, triton
from kernels.sampling import cuts
from kernels.sampling.cuts import distances, edges_of, limit_of, sums_of, up_to
from kernels.sampling.logits import CHANGED_TYPES, NUM_WARPS, ChangedLogits, num_chunks

DRAW_BLOCK, DRAW_WARPS = 1024, 8  # tokens per iteration of the last step: float64 prefix sums, 4 elements per thread


def draw_tokens(
    logits: Tensor,
    changed: ChangedLogits | None,
    largest: Tensor,
    token_ids: Tensor,
    *,
    rows: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    log_min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> None:
    """Draw one token for each row of `rows` int64 [n] (distinct) and write it to token_ids int64 [all rows].

    logits and largest: those of largest_logits; temperature fp32 > 0 and uniform float64 in [0, 1), [n] each. log_min_p
    fp32 (-inf: off), top_k int64 (vocabulary: off) and top_p float64 (1: off) apply in this order, each to the tokens
    that the filter before it left; None: off for every row. A row that failed (see largest_logits) gets token 0.
    """
    n, vocab_size = len(rows), logits.shape[1]
    if n == 0:
        return
    device, chunks = logits.device, num_chunks(vocab_size)
    if log_min_p is None:
        log_min_p = torch.full((n,), -torch.inf, dtype=torch.float32, device=device)
    masses = torch.empty((n, cuts.NUM_EDGES, chunks), dtype=torch.float32, device=device)
    values, flags = (changed.values, changed.flags) if changed else (None, None)
    source = (logits, values, flags, largest, rows, temperature, log_min_p, logits.stride(0))
    meta = cuts.chunk_constants(vocab_size)
    if top_k is None and top_p is None:
        cuts.weigh_kernel[(n, chunks)](*source, None, masses, **meta, num_warps=NUM_WARPS)
        found = None, None, None, masses, None, None, None
    else:
        if top_k is None:
            top_k = torch.full((n,), vocab_size, dtype=torch.int64, device=device)
        if top_p is None:
            top_p = torch.ones(n, dtype=torch.float64, device=device)
        counts = torch.empty((n, cuts.NUM_EDGES, chunks), dtype=torch.int32, device=device)
        refined = torch.empty((n, cuts.NUM_REFINED), dtype=torch.int32, device=device)
        candidates = torch.empty((n, cuts.CAPACITY), dtype=torch.float32, device=device)
        starts = torch.empty((n, chunks), dtype=torch.int32, device=device)
        windows = torch.empty((n, cuts.WINDOW_FIELDS), dtype=torch.int32, device=device)
        cuts.weigh_kernel[(n, chunks)](*source, counts, masses, **meta, num_warps=NUM_WARPS)
        cuts.refine_kernel[(n,)](
            *source, top_k, top_p, counts, masses, refined,
            **cuts.refine_constants(vocab_size), num_warps=cuts.REFINE_WARPS,
        )  # fmt: skip
        cuts.reweigh_kernel[(n, chunks)](*source, refined, counts, masses, **meta, num_warps=NUM_WARPS)
        cuts.window_kernel[(n,)](
            log_min_p, top_k, top_p, refined, counts, masses, starts, windows,
            **cuts.list_constants(vocab_size), num_warps=cuts.WINDOW_WARPS,
        )  # fmt: skip
        cuts.gather_kernel[(n, chunks)](
            *source[:6], logits.stride(0), starts, windows, candidates,
            **cuts.gather_constants(vocab_size), num_warps=cuts.GATHER_WARPS,
        )  # fmt: skip
        found = top_k, top_p, refined, masses, candidates, starts, windows
    draw_kernel[(n,)](*source, *found, uniform, token_ids, **draw_constants(vocab_size), num_warps=DRAW_WARPS)


def draw_constants(vocab_size: int) -> dict[str, int | float]:
    """The compile-time arguments of the last step."""
    sizes = {"EDGE_BLOCK": cuts.EDGE_BLOCK, "CAPACITY": cuts.CAPACITY, "WINDOW_FIELDS": cuts.WINDOW_FIELDS}
    return cuts.chunk_constants(vocab_size) | sizes | {"BLOCK": DRAW_BLOCK}


@triton.jit
def draw_kernel(
    logits_ptr,
    values_ptr,
    flags_ptr,
    largest_ptr,
    rows_ptr,
    temperature_ptr,
    log_min_p_ptr,
    logits_stride,
    top_k_ptr,
    top_p_ptr,
    refined_ptr,
    masses_ptr,
    candidates_ptr,
    starts_ptr,
    windows_ptr,
    uniform_ptr,
    token_ids_ptr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_FIXED: tl.constexpr,
    NUM_EDGES: tl.constexpr,
    FIXED_STEP: tl.constexpr,
    EDGE_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    WINDOW_FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (n,). top_k_ptr None: no row has a filter except min-p, and there are no windows."""
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
    chunks = tl.arange(0, BLOCK_C)
    low = limit_of(log_min_p_ptr, i)
    bound = low  # the last distance that is kept; the weights up to `low` are known per chunk
    list_ptr, size, end = None, i * 0, i * 0
    if top_k_ptr is None:
        at = masses_ptr + i * (NUM_EDGES * NUM_CHUNKS) + chunks
        known = tl.load(at, mask=chunks < NUM_CHUNKS, other=0.0).to(tl.float64)
    else:
        list_ptr = candidates_ptr + i.to(tl.int64) * CAPACITY
        size = tl.load(windows_ptr + i * WINDOW_FIELDS + 4)
        end = tl.where(size < 0, VOCAB, size)
        edges = edges_of(refined_ptr, i, low, NUM_FIXED, NUM_EDGES, FIXED_STEP, EDGE_BLOCK)
        by_chunk = sums_of(masses_ptr, edges, i, NUM_CHUNKS, BLOCK_C, NUM_EDGES, EDGE_BLOCK).to(tl.float64)
        masses = tl.sum(by_chunk, 1)
        filters = tl.load(top_k_ptr + i), tl.load(top_p_ptr + i)
        low, bound = _cut(
            list_ptr, size, source, end, windows_ptr + i * WINDOW_FIELDS, edges, masses, filters, low, VOCAB, BLOCK
        )
        known = up_to(edges[:, None], by_chunk, low)
    total = tl.sum(known, 0)
    if list_ptr is not None:
        total += _between(list_ptr, size, source, end, low, bound, VOCAB, BLOCK, True)[1]
    target = tl.load(uniform_ptr + i) * total
    # The first chunk in which the weight passes the target, or reaches the total if the target was rounded up to it.
    first, last, before = i * 0, i * 0 + NUM_CHUNKS - 1, total * 0.0
    if NUM_CHUNKS > 1:  # Triton 3.6 fails to compile a loop that never runs
        while first < last:
            middle = (first + last) // 2
            mass = tl.sum(tl.where(chunks <= middle, known, 0.0), 0)
            if list_ptr is not None:
                stop = tl.load(starts_ptr + i * NUM_CHUNKS + middle + 1)
                mass += _between(list_ptr, size, source, stop, low, bound, VOCAB, BLOCK, True)[1]
            reached = (mass > target) | (mass >= total)
            last = tl.where(reached, middle, last)
            first = tl.where(reached, first, middle + 1)
            before = tl.where(reached, before, mass)
    token_id = _token_above(source, first * CHUNK, before, target, bound, VOCAB, CHUNK, BLOCK)
    largest = tl.load(largest_ptr + row)
    failed = (largest == float("inf")) | (largest == float("-inf"))
    tl.store(token_ids_ptr + row, tl.where(failed, 0, token_id).to(tl.int64))


@triton.jit
def _cut(
    list_ptr, size, source, end, windows_ptr, edges, masses, filters, limit, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(low, bound): bound is the last distance that top-k and top-p keep, low an edge at or below it."""
    top_k, top_p = filters
    k_low, bound = tl.load(windows_ptr), tl.load(windows_ptr + 1)
    low, p_high = tl.load(windows_ptr + 2), tl.load(windows_ptr + 3)
    if top_k < VOCAB:
        needed = (top_k - tl.load(windows_ptr + 5)).to(tl.float64)
        bound = _nearest_bound(list_ptr, size, source, end, k_low, bound, needed, VOCAB, BLOCK, False)
    if top_p < 1.0:
        total = up_to(edges, masses, limit)
        if top_k < VOCAB:
            total = up_to(edges, masses, k_low)
            total += _between(list_ptr, size, source, end, k_low, bound, VOCAB, BLOCK, True)[1]
        elif p_high == limit:  # so that fp32 sums and the list's cannot disagree about the end of the row
            total = up_to(edges, masses, low)
            total += _between(list_ptr, size, source, end, low, p_high, VOCAB, BLOCK, True)[1]
        needed = top_p * total - up_to(edges, masses, low)
        bound = tl.maximum(tl.minimum(p_high, bound), low)
        bound = _nearest_bound(list_ptr, size, source, end, low, bound, needed, VOCAB, BLOCK, True)
    return low, bound


@triton.jit
def _tile(list_ptr, size, source, offs, stop, VOCAB: tl.constexpr):
    """Distances at the places `offs` before `stop` of the list if there is one, else of the row; NaN after it."""
    if size < 0:
        y = tl.where(offs < stop, distances(source, offs, VOCAB), float("nan"))
    else:
        y = tl.load(list_ptr + offs, mask=offs < stop, other=float("nan"))
    return y


@triton.jit
def _between(list_ptr, size, source, stop, low, bound, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """(number, weight with BY_MASS) of those of the first `stop` tokens whose distances have bits in (low, bound]."""
    count = stop * 0
    mass = count.to(tl.float64)
    for start in range(0, stop, BLOCK):
        y = _tile(list_ptr, size, source, start + tl.arange(0, BLOCK), stop, VOCAB)
        bits = y.to(tl.int32, bitcast=True)
        near = (bits > low) & (bits <= bound)
        count += tl.sum(near.to(tl.int32), 0)
        if BY_MASS:
            mass += tl.sum(tl.where(near, tl.exp(-y), 0.0).to(tl.float64), 0)
    return count, mass


@triton.jit
def _nearest_bound(
    list_ptr, size, source, end, low, bound, needed, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr
):
    """The smallest distance (as bits) in (low, bound] with `needed` tokens, or that weight, above `low`; else `bound`.

    Ends early once a single token is left between the two ends of the interval: all distances there give the same set.
    """
    start = low
    high = bound
    low_count = bound * 0
    high_count, _ = _between(list_ptr, size, source, end, start, bound, VOCAB, BLOCK, False)
    while (high - low > 1) & (high_count - low_count > 1):
        middle = low + (high - low) // 2
        count, mass = _between(list_ptr, size, source, end, start, middle, VOCAB, BLOCK, BY_MASS)
        found = mass if BY_MASS else count.to(tl.float64)
        suffices = found >= needed
        high = tl.where(suffices, middle, high)
        high_count = tl.where(suffices, count, high_count)
        low = tl.where(suffices, low, middle)
        low_count = tl.where(suffices, low_count, count)
    return high


@triton.jit
def _token_above(
    source, begin, before, target, bound, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first token of the chunk at `begin` at which the cumulative weight, starting at `before`, is above target; if
    rounding leaves none, the last token with a weight."""
    found = begin * 0 - 1
    last = begin * 0
    for start in range(begin, begin + CHUNK, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        y = distances(source, offs, VOCAB)
        weights = tl.where(y.to(tl.int32, bitcast=True) <= bound, tl.exp(-y), 0.0).to(tl.float64)
        above = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
        first = tl.min(tl.where(above, offs, 2147483647), 0)
        found = tl.where((found < 0) & (first < 2147483647), first, found)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, offs, 0), 0))
        before += tl.sum(weights, 0)
    return tl.where(found < 0, last, found)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields kernels with and without filters and changed rows."""
    types = CHANGED_TYPES | dict.fromkeys(("largest_ptr", "temperature_ptr", "log_min_p_ptr", "masses_ptr"), "*fp32")
    types |= {"rows_ptr": "*i64", "top_k_ptr": "*i64", "top_p_ptr": "*fp64", "uniform_ptr": "*fp64"}
    types |= dict.fromkeys(("refined_ptr", "starts_ptr", "windows_ptr"), "*i32")
    types |= {"candidates_ptr": "*fp32", "token_ids_ptr": "*i64"}
    plain = dict.fromkeys(("top_k_ptr", "top_p_ptr", "refined_ptr", "candidates_ptr", "starts_ptr", "windows_ptr"))
    variants = (("bf16", 128256, False), ("bf16", 128256, True), ("fp32", 50257, False), ("bf16", 2048, True))
    for dtype, vocab_size, changed in variants:
        label, aligned = f"vocabulary {vocab_size}" + " changed" * changed, ("logits_stride",) * (vocab_size % 16 == 0)
        constants = draw_constants(vocab_size) | ({} if changed else dict.fromkeys(CHANGED_TYPES))
        for name, absent in (("filters", {}), ("plain", plain)):
            # ptxas may keep a few numbers on the stack to fit another program on the SM (triton 3.6, fp32)
            yield AotConfiguration(
                draw_kernel, f"{label} {name}", dtype, constants | absent, num_warps=DRAW_WARPS, types=types,
                multiples_of_16=aligned, quick=changed, max_spill=8,
            )  # fmt: skip
