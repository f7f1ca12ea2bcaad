"""Draws tokens from filtered distributions on a GPU: min-p, top-k and top-p by threshold search, without sorting.

The weight of a token is exp(-y), where y = (largest logit - logit) / temperature is its distance. A filter keeps the
tokens up to some distance. Floats >= 0 have the order of their bits, so a bisection over integers finds the distance
exactly, and tied tokens are kept or cut together. Three steps:

1. `weigh_kernel` counts, for every chunk of a row, the tokens within each of a few fixed distances, and sums their
weight. 2. `gather_kernel` chooses the smallest of these distances that certainly includes every token that the filters
keep, and writes its tokens to a short list, in the order of their ids. 3. `draw_kernel` searches that list, in
registers and L1, then maps one uniform number through the inverse of the cumulative distribution, in token-id order. If
the list would be too long (nearly flat distributions), it searches the row itself, with one read of the row from L2 per
bit.

Rows with only a temperature or min-p skip the list: the uniform number picks a chunk, then the token inside the chunk.
Each of the first two steps reads the logits once; the rest is small. So the lower bound of a step is three reads of the
logits (two without filters), including the read of logits.largest_logits: at copy bandwidth for large batches, faster
if the rows stay in L2. Sums of many weights are float64 and have a fixed order, so a row's token does not depend on its
batch. The idea that only the cut is needed and not the order is from FlashInfer, "Sorting-Free GPU Kernels for LLM
Sampling", 2025-03-10 (which rejects tokens where this file searches).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dispatch import tl, triton
from kernels.sampling.logits import CHANGED_TYPES, CHUNK, NUM_WARPS, ChangedLogits, load_logits, num_chunks

NUM_PIVOTS, PIVOT_STEP = 8, 1.5  # fixed distances 1.5, 3 ... 12; exp(-12) is 6e-6 of the largest weight
CAPACITY = 8192  # tokens in a row's list
GATHER_WARPS = 16  # the prefix sum takes registers: 8 elements per thread
DRAW_BLOCK, DRAW_WARPS = 1024, 8  # tokens per iteration of the last step: float64 prefix sums, 4 elements per thread
# Step 1 sums weights in fp32. If the mass within a fixed distance exceeds a nucleus by less than this share, the next
# distance is used.
MASS_MARGIN = 2e-6


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
    counts = candidates = candidate_ids = list_sizes = None
    if top_k is not None or top_p is not None:
        if top_k is None:
            top_k = torch.full((n,), vocab_size, dtype=torch.int64, device=device)
        if top_p is None:
            top_p = torch.ones(n, dtype=torch.float64, device=device)
        counts = torch.empty((n, NUM_PIVOTS, chunks), dtype=torch.int32, device=device)
        candidates = torch.empty((n, CAPACITY), dtype=torch.float32, device=device)
        candidate_ids = torch.empty((n, CAPACITY), dtype=torch.int32, device=device)
        list_sizes = torch.empty(n, dtype=torch.int32, device=device)
    masses = torch.empty((n, NUM_PIVOTS + 1, chunks), dtype=torch.float32, device=device)
    values, flags = (changed.values, changed.flags) if changed else (None, None)
    source = (logits, values, flags, largest, rows, temperature, log_min_p, logits.stride(0))
    meta = chunk_constants(vocab_size)
    weigh_kernel[(n, chunks)](*source, counts, masses, **meta, num_warps=NUM_WARPS)
    if counts is not None:
        gather_kernel[(n, chunks)](
            *source, top_k, top_p, counts, masses, candidates, candidate_ids, list_sizes,
            CAPACITY=CAPACITY, MASS_MARGIN=MASS_MARGIN, **meta, num_warps=GATHER_WARPS,
        )  # fmt: skip
    draw_kernel[(n,)](
        *source, top_k, top_p, uniform, masses, candidates, candidate_ids, list_sizes, token_ids,
        **draw_constants(vocab_size), num_warps=DRAW_WARPS,
    )  # fmt: skip


def chunk_constants(vocab_size: int) -> dict[str, int | float]:
    """The compile-time arguments of the first two steps."""
    n = num_chunks(vocab_size)
    sizes = {"VOCAB": vocab_size, "NUM_CHUNKS": n, "BLOCK_C": power_of_2(n), "BLOCK": CHUNK}
    return sizes | {"NUM_PIVOTS": NUM_PIVOTS, "PIVOT_STEP": PIVOT_STEP}


def draw_constants(vocab_size: int) -> dict[str, int]:
    """The compile-time arguments of the last step."""
    n = num_chunks(vocab_size)
    sizes = {"VOCAB": vocab_size, "NUM_CHUNKS": n, "BLOCK_C": power_of_2(n), "BLOCK": DRAW_BLOCK}
    return sizes | {"CHUNK": CHUNK, "CAPACITY": CAPACITY, "NUM_PIVOTS": NUM_PIVOTS}


@triton.jit
def _distances(source, offs, VOCAB: tl.constexpr):
    """Distances fp32 >= 0 of the tokens `offs` of a row; NaN, beyond every bound, past the vocabulary.

    source: (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, number of the draw, row, logits_stride)
    """
    logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride = source
    x = load_logits(logits_ptr, values_ptr, flags_ptr, row, offs, logits_stride, VOCAB)
    y = tl.div_rn(tl.load(largest_ptr + row) - x, tl.load(temperature_ptr + i))
    return tl.where(offs < VOCAB, y, float("nan"))


@triton.jit
def weigh_kernel(
    logits_ptr,
    values_ptr,
    flags_ptr,
    largest_ptr,
    rows_ptr,
    temperature_ptr,
    log_min_p_ptr,
    logits_stride,
    counts_ptr,
    masses_ptr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    PIVOT_STEP: tl.constexpr,
):
    """Grid (n, num_chunks): writes counts int32 [n, NUM_PIVOTS, num_chunks] and masses fp32 [n, NUM_PIVOTS + 1,
    num_chunks] of the tokens that min-p keeps, for each fixed distance; the last mass is that of all these tokens.
    counts_ptr None: writes the last mass only.
    """
    i, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + i)
    source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
    y = _distances(source, chunk * BLOCK + tl.arange(0, BLOCK), VOCAB)
    limit = 0.0 - tl.load(log_min_p_ptr + i)
    weights = tl.where(y <= limit, tl.exp(-y), 0.0)
    at = masses_ptr + i * ((NUM_PIVOTS + 1) * NUM_CHUNKS) + chunk
    tl.store(at + NUM_PIVOTS * NUM_CHUNKS, tl.sum(weights, 0))
    if counts_ptr is not None:
        for j in tl.static_range(NUM_PIVOTS):
            near = y <= tl.minimum(limit, PIVOT_STEP * (j + 1))
            tl.store(at + j * NUM_CHUNKS, tl.sum(tl.where(near, weights, 0.0), 0))
            tl.store(counts_ptr + (i * NUM_PIVOTS + j) * NUM_CHUNKS + chunk, tl.sum(near.to(tl.int32), 0))


@triton.jit
def gather_kernel(
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
    counts_ptr,
    masses_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    list_sizes_ptr,
    CAPACITY: tl.constexpr,
    MASS_MARGIN: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    PIVOT_STEP: tl.constexpr,
):
    """Grid (n, num_chunks): lists the chunk's tokens within the chosen distance, behind those of earlier chunks.

    list_sizes int32 [n] is 0 for rows without a list: no filter, no distance that suffices, or too many tokens.
    """
    i, chunk = tl.program_id(0), tl.program_id(1)
    limit = 0.0 - tl.load(log_min_p_ptr + i)
    top_k, top_p = tl.load(top_k_ptr + i), tl.load(top_p_ptr + i)
    chunks = tl.arange(0, BLOCK_C)
    mask = chunks < NUM_CHUNKS
    mass_at = masses_ptr + i * ((NUM_PIVOTS + 1) * NUM_CHUNKS) + chunks
    needed = tl.sum(tl.load(mass_at + NUM_PIVOTS * NUM_CHUNKS, mask=mask, other=0.0).to(tl.float64), 0)
    needed *= top_p + MASS_MARGIN
    pivot, size, before = (i * 0).to(tl.float32), i * 0, i * 0
    for j in tl.static_range(NUM_PIVOTS - 1, -1, -1):  # so that the smallest distance that suffices is kept last
        counts = tl.load(counts_ptr + (i * NUM_PIVOTS + j) * NUM_CHUNKS + chunks, mask=mask, other=0)
        count = tl.sum(counts, 0)
        mass = tl.sum(tl.load(mass_at + j * NUM_CHUNKS, mask=mask, other=0.0).to(tl.float64), 0)
        suffices = (PIVOT_STEP * (j + 1) >= limit) | tl.where(top_k < VOCAB, count >= top_k, mass >= needed)
        pivot = tl.where(suffices, PIVOT_STEP * (j + 1), pivot)
        size = tl.where(suffices, count, size)
        before = tl.where(suffices, tl.sum(tl.where(chunks < chunk, counts, 0), 0), before)
    is_filtered = (top_k < VOCAB) | (top_p < 1.0)
    size = tl.where(is_filtered & (size <= CAPACITY), size, 0)
    if chunk == 0:
        tl.store(list_sizes_ptr + i, size)
    if size > 0:
        row = tl.load(rows_ptr + i)
        offs = chunk * BLOCK + tl.arange(0, BLOCK)
        source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
        y = _distances(source, offs, VOCAB)
        near = y <= tl.minimum(limit, pivot)
        list_at = i.to(tl.int64) * CAPACITY + before
        place = tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + list_at + place, y, mask=near)
        tl.store(candidate_ids_ptr + list_at + place, offs, mask=near)


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
    uniform_ptr,
    masses_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    list_sizes_ptr,
    token_ids_ptr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Grid (n,). top_k_ptr None: no row has a filter except min-p, and there are no lists."""
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    uniform = tl.load(uniform_ptr + i)
    bound = (0.0 - tl.load(log_min_p_ptr + i)).to(tl.int32, bitcast=True)  # bits of the largest kept distance
    source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
    if top_k_ptr is None:
        token_id = _draw_from_row(
            source, masses_ptr, uniform, bound, VOCAB, NUM_CHUNKS, BLOCK_C, CHUNK, BLOCK, NUM_PIVOTS
        )
    else:
        top_k, top_p = tl.load(top_k_ptr + i), tl.load(top_p_ptr + i)
        if (top_k < VOCAB) | (top_p < 1.0):
            list_at = i.to(tl.int64) * CAPACITY
            size = tl.load(list_sizes_ptr + i)
            row_mass = tl.sum(_chunk_masses(masses_ptr, i, NUM_CHUNKS, BLOCK_C, NUM_PIVOTS), 0)
            token_id = _draw_filtered(
                candidates_ptr + list_at, size, source, uniform, bound, top_k, top_p, row_mass, VOCAB, BLOCK
            )
            if size > 0:
                token_id = tl.load(candidate_ids_ptr + list_at + token_id)
        else:
            token_id = _draw_from_row(
                source, masses_ptr, uniform, bound, VOCAB, NUM_CHUNKS, BLOCK_C, CHUNK, BLOCK, NUM_PIVOTS
            )
    largest = tl.load(largest_ptr + row)
    failed = (largest == float("inf")) | (largest == float("-inf"))
    tl.store(token_ids_ptr + row, tl.where(failed, 0, token_id).to(tl.int64))


@triton.jit
def _draw_from_row(
    source, masses_ptr, uniform, bound, VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, NUM_PIVOTS: tl.constexpr,
):  # fmt: skip
    """The token of a row without top-k and top-p: picks a chunk by the weights of step 1, then a token in it."""
    begin, before, target = _chunk_of(masses_ptr, source[5], uniform, NUM_CHUNKS, BLOCK_C, CHUNK, NUM_PIVOTS)
    return _token_above(None, begin, source, begin, begin + CHUNK, before, target, bound, VOCAB, BLOCK)


@triton.jit
def _draw_filtered(
    list_ptr, size, source, uniform, bound, top_k, top_p, row_mass, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The index, in the list or in the row, of the token of a row with top-k or top-p. row_mass: mass before both."""
    end = tl.where(size > 0, size, VOCAB)
    if top_k < VOCAB:
        bound = _nearest_bound(list_ptr, size, source, end, bound, top_k.to(tl.float64), VOCAB, BLOCK, False)
    _, total = _within(list_ptr, size, source, end, bound, VOCAB, BLOCK, True)
    if (size > 0) & (top_k >= VOCAB):
        total = row_mass  # top_p is a share of this mass; the list lacks the tokens beyond its distance
    if top_p < 1.0:
        bound = _nearest_bound(list_ptr, size, source, end, bound, top_p * total, VOCAB, BLOCK, True)
        _, total = _within(list_ptr, size, source, end, bound, VOCAB, BLOCK, True)
    return _token_above(list_ptr, size, source, size * 0, end, total * 0.0, uniform * total, bound, VOCAB, BLOCK)


@triton.jit
def _tile(list_ptr, size, source, offs, VOCAB: tl.constexpr):
    """Distances at `offs` of the list if there is one (size > 0), else of the row."""
    if list_ptr is None:
        return _distances(source, offs, VOCAB)
    else:
        if size > 0:
            y = tl.load(list_ptr + offs, mask=offs < size, other=float("nan"))
        else:
            y = _distances(source, offs, VOCAB)
        return y


@triton.jit
def _within(list_ptr, size, source, end, bound, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """The number, or with BY_MASS the weight, of those of the first `end` tokens whose distance has at most `bound`
    bits."""
    count = end * 0
    mass = count.to(tl.float64)
    for start in range(0, end, BLOCK):
        y = _tile(list_ptr, size, source, start + tl.arange(0, BLOCK), VOCAB)
        near = y.to(tl.int32, bitcast=True) <= bound
        count += tl.sum(near.to(tl.int32), 0)
        if BY_MASS:
            mass += tl.sum(tl.where(near, tl.exp(-y), 0.0).to(tl.float64), 0)
    return count, mass


@triton.jit
def _nearest_bound(
    list_ptr, size, source, end, bound, needed, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr
):
    """The smallest distance (as bits) that includes `needed` tokens, or that weight; `bound` if none suffices.

    Ends early once a single token is left between the two ends of the interval: all distances there give the same set.
    """
    low = bound * 0 - 1
    high = bound
    low_count = bound * 0
    high_count, _ = _within(list_ptr, size, source, end, bound, VOCAB, BLOCK, False)
    while (high - low > 1) & (high_count - low_count > 1):
        middle = low + (high - low) // 2
        count, mass = _within(list_ptr, size, source, end, middle, VOCAB, BLOCK, BY_MASS)
        found = mass if BY_MASS else count.to(tl.float64)
        suffices = found >= needed
        high = tl.where(suffices, middle, high)
        high_count = tl.where(suffices, count, high_count)
        low = tl.where(suffices, low, middle)
        low_count = tl.where(suffices, low_count, count)
    return high


@triton.jit
def _chunk_masses(masses_ptr, i, NUM_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, NUM_PIVOTS: tl.constexpr):
    """float64 [BLOCK_C]: the weight per chunk of the tokens that min-p keeps."""
    chunk = tl.arange(0, BLOCK_C)
    at = masses_ptr + (i * (NUM_PIVOTS + 1) + NUM_PIVOTS) * NUM_CHUNKS + chunk
    return tl.load(at, mask=chunk < NUM_CHUNKS, other=0.0).to(tl.float64)


@triton.jit
def _chunk_of(
    masses_ptr, i, uniform, NUM_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):  # fmt: skip
    """(first token, weight before, target) of the chunk in which the cumulative weight passes uniform * total."""
    chunk = tl.arange(0, BLOCK_C)
    mass = _chunk_masses(masses_ptr, i, NUM_CHUNKS, BLOCK_C, NUM_PIVOTS)
    target = uniform * tl.sum(mass, 0)
    above = (tl.cumsum(mass, 0) > target) & (mass > 0.0)
    first = tl.min(tl.where(above, chunk, BLOCK_C), 0)
    first = tl.where(first < BLOCK_C, first, tl.max(tl.where(mass > 0.0, chunk, 0), 0))
    return first * CHUNK, tl.sum(tl.where(chunk < first, mass, 0.0), 0), target


@triton.jit
def _token_above(
    list_ptr, size, source, begin, end, before, target, bound, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first index in [begin, end) at which the cumulative weight, starting at `before`, is above target; if
    rounding leaves none, the last index with a weight."""
    found = begin * 0 - 1
    last = begin * 0
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        y = _tile(list_ptr, size, source, offs, VOCAB)
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
    types |= {"counts_ptr": "*i32", "candidates_ptr": "*fp32", "candidate_ids_ptr": "*i32", "list_sizes_ptr": "*i32"}
    types |= {"token_ids_ptr": "*i64"}
    for dtype, vocab_size, changed in (("bf16", 128256, False), ("bf16", 128256, True), ("fp32", 50257, False)):
        label, aligned = f"vocabulary {vocab_size}" + " changed" * changed, ("logits_stride",) * (vocab_size % 16 == 0)
        more = {"types": types, "multiples_of_16": aligned, "quick": changed}
        absent = {} if changed else dict.fromkeys(CHANGED_TYPES)
        chunked, drawing = (absent | sizes(vocab_size) for sizes in (chunk_constants, draw_constants))
        gathering = chunked | {"CAPACITY": CAPACITY, "MASS_MARGIN": MASS_MARGIN}
        plain = dict.fromkeys(("top_k_ptr", "top_p_ptr", "candidates_ptr", "candidate_ids_ptr", "list_sizes_ptr"))
        for kernel, name, constants, num_warps in (
            (weigh_kernel, "filters", chunked, NUM_WARPS),
            (weigh_kernel, "plain", chunked | {"counts_ptr": None}, NUM_WARPS),
            (gather_kernel, "filters", gathering, GATHER_WARPS),
            (draw_kernel, "filters", drawing, DRAW_WARPS),
            (draw_kernel, "plain", drawing | plain, DRAW_WARPS),
        ):
            # ptxas may keep a few numbers on the stack to fit another program on the SM (triton 3.6, fp32)
            max_spill = 8 if kernel is draw_kernel else 0
            yield AotConfiguration(
                kernel, f"{label} {name}", dtype, constants, num_warps=num_warps, max_spill=max_spill, **more
            )
