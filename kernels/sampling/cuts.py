"""Finds where top-k and top-p cut the rows of a batch on a GPU: steps 1 to 4 of kernels/sampling/draw.py.

An edge is a distance (the bits of an fp32 >= 0, which have the order of the distances) at which the number and the
weight of the tokens up to it are known, for every chunk of the row. Each row has 19 edges: its limit, which min-p and
the range of fp32 weights set, 6 fixed distances, and up to 12 refined ones; -1 stands for an edge that a row lacks. A
cut lies in a window, between the last edge that is too near and the first that suffices.
"""

from collections.abc import Iterator

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dispatch import tl, triton
from kernels.sampling.logits import CHANGED_TYPES, CHUNK, NUM_WARPS, load_logits, num_chunks

NUM_FIXED, NUM_REFINED = 6, 12
FIXED_STEP = 2.0  # fixed distances 2, 4 ... 12; exp(-12) is 6e-6 of the largest weight
NUM_EDGES = 1 + NUM_FIXED + NUM_REFINED
EDGE_BLOCK = power_of_2(NUM_EDGES)
CAPACITY = 32768  # tokens in a row's list
FROM_START = 4096  # a list of at most this many tokens starts at distance 0: its sums are then float64 throughout
REFINE_ABOVE = 8192  # tokens: a longer window is refined
TOKENS_PER_SAMPLE = 32  # at most
DEVIATIONS = 5.0  # standard errors between an estimated cut and its outer edges: one row in 10**6 is beyond them
GATHER_WARPS = 16  # the prefix sum takes registers: 8 elements per thread
REFINE_WARPS = 16
WINDOW_WARPS = 4
WINDOW_FIELDS = 8  # numbers per row in `windows`; 6 are used


def chunk_constants(vocab_size: int) -> dict[str, int | float]:
    """The compile-time sizes that all steps share."""
    n = num_chunks(vocab_size)
    sizes = {"VOCAB": vocab_size, "NUM_CHUNKS": n, "BLOCK_C": power_of_2(n), "CHUNK": CHUNK}
    return sizes | {"NUM_FIXED": NUM_FIXED, "NUM_EDGES": NUM_EDGES, "FIXED_STEP": FIXED_STEP}


def window_constants(vocab_size: int) -> dict[str, int | float]:
    """The compile-time arguments of the steps that choose windows."""
    return chunk_constants(vocab_size) | {"EDGE_BLOCK": EDGE_BLOCK, "FROM_START": FROM_START}


def refine_constants(vocab_size: int) -> dict[str, int | float]:
    """The compile-time arguments of refine_kernel."""
    sample = {"SAMPLE": max(1024, power_of_2(vocab_size) // TOKENS_PER_SAMPLE), "DEVIATIONS": DEVIATIONS}
    return window_constants(vocab_size) | sample | {"REFINE_ABOVE": REFINE_ABOVE}


def list_constants(vocab_size: int) -> dict[str, int | float]:
    """The compile-time arguments of window_kernel."""
    return window_constants(vocab_size) | {"CAPACITY": CAPACITY, "WINDOW_FIELDS": WINDOW_FIELDS}


def gather_constants(vocab_size: int) -> dict[str, int | float]:
    """The compile-time arguments of gather_kernel."""
    taken = ("VOCAB", "NUM_CHUNKS", "CHUNK", "CAPACITY", "WINDOW_FIELDS")
    return {name: size for name, size in list_constants(vocab_size).items() if name in taken}


@triton.jit
def distances(source, offs, VOCAB: tl.constexpr):
    """Distances fp32 >= 0 of the tokens `offs` of a row; NaN, beyond every bound, past the vocabulary.

    source: (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, number of the draw, row, logits_stride)
    """
    logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride = source
    x = load_logits(logits_ptr, values_ptr, flags_ptr, row, offs, logits_stride, VOCAB)
    y = tl.div_rn(tl.load(largest_ptr + row) - x, tl.load(temperature_ptr + i))
    return tl.where(offs < VOCAB, tl.abs(y), float("nan"))  # abs: -0.0 has the bits of a negative number


@triton.jit
def limit_of(log_min_p_ptr, i):
    """Bits of the largest distance that min-p keeps, at most 104: beyond it a weight exp(-distance) is 0 in fp32."""
    return tl.minimum(0.0 - tl.load(log_min_p_ptr + i), 104.0).to(tl.int32, bitcast=True)


@triton.jit
def _store_sums(y, bits, edge, at, counts_ptr, masses_ptr):
    """Write the number (unless counts_ptr is None) and the weight of the tokens up to an edge."""
    near = bits <= edge
    tl.store(masses_ptr + at, tl.sum(tl.where(near, tl.exp(-y), 0.0), 0))
    if counts_ptr is not None:
        tl.store(counts_ptr + at, tl.sum(near.to(tl.int32), 0))


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
    CHUNK: tl.constexpr,
    NUM_FIXED: tl.constexpr,
    NUM_EDGES: tl.constexpr,
    FIXED_STEP: tl.constexpr,
):
    """Grid (n, num_chunks): writes counts int32 and masses fp32 [n, NUM_EDGES, num_chunks] of the limit (edge 0) and of
    the fixed distances. counts_ptr None: writes the masses of the limit only.
    """
    i, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + i)
    source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
    y = distances(source, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
    bits = y.to(tl.int32, bitcast=True)
    limit = limit_of(log_min_p_ptr, i)
    at = i * (NUM_EDGES * NUM_CHUNKS) + chunk
    _store_sums(y, bits, limit, at, counts_ptr, masses_ptr)
    if counts_ptr is not None:
        for j in tl.static_range(NUM_FIXED):
            edge = tl.minimum(limit, _fixed(i * 0 + j + 1, FIXED_STEP))
            _store_sums(y, bits, edge, at + (1 + j) * NUM_CHUNKS, counts_ptr, masses_ptr)


@triton.jit
def _fixed(j, FIXED_STEP: tl.constexpr):
    """Bits of the j-th fixed distance."""
    return (j.to(tl.float32) * FIXED_STEP).to(tl.int32, bitcast=True)


@triton.jit
def edges_of(refined_ptr, i, limit, NUM_FIXED: tl.constexpr, NUM_EDGES: tl.constexpr, FIXED_STEP: tl.constexpr,
              EDGE_BLOCK: tl.constexpr):  # fmt: skip
    """int32 [EDGE_BLOCK]: the edges of a row. refined_ptr None: without the refined ones."""
    j = tl.arange(0, EDGE_BLOCK)
    fixed = tl.minimum(limit, _fixed(j, FIXED_STEP))
    edges = tl.where(j == 0, limit, tl.where(j <= NUM_FIXED, fixed, -1))
    if refined_ptr is not None:
        first: tl.constexpr = 1 + NUM_FIXED
        is_refined = (j >= first) & (j < NUM_EDGES)
        at = refined_ptr + i * (NUM_EDGES - first) + j - first
        edges = tl.maximum(edges, tl.load(at, mask=is_refined, other=-1))
    return edges


@triton.jit
def sums_of(ptr, edges, i, NUM_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, NUM_EDGES: tl.constexpr,
             EDGE_BLOCK: tl.constexpr):  # fmt: skip
    """[EDGE_BLOCK, BLOCK_C]: counts or masses of a row, 0 where there is no edge or no chunk."""
    j, chunk = tl.arange(0, EDGE_BLOCK)[:, None], tl.arange(0, BLOCK_C)[None, :]
    at = ptr + (i * NUM_EDGES + j) * NUM_CHUNKS + chunk
    return tl.load(at, mask=(edges[:, None] >= 0) & (chunk < NUM_CHUNKS), other=0)


@triton.jit
def up_to(edges, sums, edge):
    """The sum up to an edge; 0 for -1. Sums grow with their edges, also when they are rounded."""
    return tl.max(tl.where(edges <= edge, sums, 0), 0)


@triton.jit
def _window(edges, sums, least, most, limit):
    """(low, high): the last edge whose sum is below `least`, and the first whose sum is at least `most`."""
    low = tl.max(tl.where(sums < least, edges, -1), 0)
    high = tl.min(tl.where((edges >= 0) & (sums >= most), edges, limit), 0)
    return low, high


@triton.jit
def _shortened(low, high, count, FROM_START: tl.constexpr):
    """A window with its list in mind: no list for a single distance, and from the start if few tokens are in reach."""
    low = tl.where((low < high) & (count <= FROM_START), -1, low)
    return tl.where(high - low == 1, high, low)


@triton.jit
def _windows(edges, counts, masses, top_k, top_p, limit, VOCAB: tl.constexpr, FROM_START: tl.constexpr):
    """(low, high) of the cut of top-k and (low, high) of that of top-p; counts and masses: [EDGE_BLOCK].

    A filter that is off has the window of the filter before it; low == high: the cut is known.
    """
    k_low, k_high = limit, limit
    if top_k < VOCAB:
        k_low, k_high = _window(edges, counts, top_k, top_k, limit)
    most = up_to(edges, masses, k_high)
    least = up_to(edges, masses, tl.where(k_high - k_low == 1, k_high, k_low))
    k_low = _shortened(k_low, k_high, up_to(edges, counts, k_high), FROM_START)
    p_low, p_high = k_low, k_high
    if top_p < 1.0:
        p_low, p_high = _window(edges, masses, top_p * least, top_p * most, limit)
        p_high = tl.minimum(p_high, k_high)
        p_low = _shortened(tl.minimum(p_low, p_high), p_high, up_to(edges, counts, p_high), FROM_START)
    return k_low, k_high, p_low, p_high


@triton.jit
def _list_sizes(edges, counts, k_low, k_high, p_low, p_high):
    """Tokens in one of the two windows; edges [EDGE_BLOCK] or [EDGE_BLOCK, 1], as the counts need it."""
    by_k = up_to(edges, counts, k_high) - up_to(edges, counts, k_low)
    by_p = up_to(edges, counts, p_high) - up_to(edges, counts, p_low)
    low, high = tl.maximum(k_low, p_low), tl.minimum(k_high, p_high)
    return by_k + by_p - tl.maximum(up_to(edges, counts, high) - up_to(edges, counts, low), 0)


@triton.jit
def _sample_cut(bits, values, low, high, needed):
    """(below, at): distances between low and high that enclose the one up to which the sample's values reach `needed`.

    They enclose a single token of the sample, or are neighbours and enclose tokens of one distance.
    """
    inside = (bits > low) & (bits <= high)
    start = low
    low_count = low * 0
    high_count = tl.sum(inside.to(tl.int32), 0)
    while (high - low > 1) & (high_count - low_count > 1):
        middle = low + (high - low) // 2
        near = (bits > start) & (bits <= middle)
        count = tl.sum(near.to(tl.int32), 0)
        suffices = tl.sum(tl.where(near, values, 0.0), 0) >= needed
        high = tl.where(suffices, middle, high)
        high_count = tl.where(suffices, count, high_count)
        low = tl.where(suffices, low, middle)
        low_count = tl.where(suffices, low_count, count)
    return low, high


@triton.jit
def _shares(bits, values, place):
    """(share of the sample's values up to a place, standard error of their sum there if the sum of all is known).

    At share f the variance is (1 - f)^2 * (sum of squares before) + f^2 * (sum of squares after).
    """
    before = tl.where(bits <= place, values, 0.0)
    after = values - before
    share = tl.sum(before, 0) / tl.maximum(tl.sum(values, 0), 1e-30)
    rest = 1.0 - share
    return share, tl.sqrt(rest * rest * tl.sum(before * before, 0) + share * share * tl.sum(after * after, 0))


@triton.jit
def _around(bits, values, low, high, needed, known, needed_error, j, edges, DEVIATIONS: tl.constexpr):
    """Put three pairs into edges[0:6]: both sides of the estimated place between low and high at which the row's values
    reach `needed`, of `known` between them; of a place far below it; and of one far above. j: numbers of the edges.

    A place is between two tokens of the sample, or its pair encloses tied tokens. needed_error: standard error of
    `needed`.
    """
    inside = tl.where((bits > low) & (bits <= high), values, 0.0)
    sampled = tl.maximum(tl.sum(inside, 0), 1e-30)
    known = tl.maximum(known.to(tl.float32), 1e-30)
    needed = needed.to(tl.float32) * (sampled / known)
    margin = sampled * 0.0
    for step in range(3):  # a loop, so that the search is compiled once
        below, above = _sample_cut(bits, values, low, high, needed + tl.where(step == 1, -margin, margin))
        edges = tl.where(j == 2 * step, below, tl.where(j == 2 * step + 1, above, edges))
        if step == 0:
            _, error = _shares(bits, inside, above)
            margin = DEVIATIONS * (error + needed_error * (sampled / known))
            # Near an end of the row no token of the sample may lie beyond the cut: add 12 tokens of the sample.
            margin += 12.0 * tl.max(tl.where(bits > below, inside, 0.0), 0)
    return edges


@triton.jit
def refine_kernel(
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
    refined_ptr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_FIXED: tl.constexpr,
    NUM_EDGES: tl.constexpr,
    FIXED_STEP: tl.constexpr,
    EDGE_BLOCK: tl.constexpr,
    FROM_START: tl.constexpr,
    SAMPLE: tl.constexpr,
    DEVIATIONS: tl.constexpr,
    REFINE_ABOVE: tl.constexpr,
):
    """Grid (n,): refined int32 [n, 12], six edges around each estimated cut of a row with long windows; else -1.

    The estimate is from SAMPLE tokens, one at a pseudo-random place in each of as many equal parts of the vocabulary.
    """
    i = tl.program_id(0)
    limit = limit_of(log_min_p_ptr, i)
    top_k, top_p = tl.load(top_k_ptr + i), tl.load(top_p_ptr + i)
    edges = edges_of(None, i, limit, NUM_FIXED, NUM_EDGES, FIXED_STEP, EDGE_BLOCK)
    counts = tl.sum(sums_of(counts_ptr, edges, i, NUM_CHUNKS, BLOCK_C, NUM_EDGES, EDGE_BLOCK), 1)
    masses = tl.sum(sums_of(masses_ptr, edges, i, NUM_CHUNKS, BLOCK_C, NUM_EDGES, EDGE_BLOCK).to(tl.float64), 1)
    k_low, k_high, p_low, p_high = _windows(edges, counts, masses, top_k, top_p, limit, VOCAB, FROM_START)
    j = tl.arange(0, EDGE_BLOCK)
    refined = tl.full((EDGE_BLOCK,), -1, tl.int32)
    if _list_sizes(edges, counts, k_low, k_high, p_low, p_high) > REFINE_ABOVE:
        s = tl.arange(0, SAMPLE)
        start, stop = s.to(tl.int64) * VOCAB // SAMPLE, (s + 1).to(tl.int64) * VOCAB // SAMPLE
        jitter = ((s * 40503) & 65535).to(tl.int64)  # Knuth's multiplicative hash
        offs = (start + (jitter * (stop - start) >> 16)).to(tl.int32)
        row = tl.load(rows_ptr + i)
        source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
        y = distances(source, offs, VOCAB)
        bits = y.to(tl.int32, bitcast=True)
        weights = tl.where(bits <= limit, tl.exp(-y), 0.0)
        total = up_to(edges, masses, k_high)
        total_error = (i * 0).to(tl.float32)
        if k_low < k_high:
            base, base_mass = up_to(edges, counts, k_low), up_to(edges, masses, k_low)
            ones = tl.full((SAMPLE,), 1.0, tl.float32)
            known = up_to(edges, counts, k_high) - base
            refined = _around(bits, ones, k_low, k_high, top_k - base, known, total_error, j, refined, DEVIATIONS)
            cut = tl.max(tl.where(j == 1, refined, -1), 0)
            inside = tl.where((bits > k_low) & (bits <= k_high), weights, 0.0)
            share, error = _shares(bits, inside, cut)
            known = (total - base_mass).to(tl.float32)
            total = base_mass + known * share
            total_error = known * error / tl.maximum(tl.sum(inside, 0), 1e-30)
        if (top_p < 1.0) & (p_low < p_high):
            base_mass = up_to(edges, masses, p_low)
            known = up_to(edges, masses, p_high) - base_mass
            needed = top_p * total - base_mass
            refined = _around(bits, weights, p_low, p_high, needed, known, total_error, j - 6, refined, DEVIATIONS)
    num_refined: tl.constexpr = NUM_EDGES - 1 - NUM_FIXED
    tl.store(refined_ptr + i * num_refined + j, refined, mask=j < num_refined)


@triton.jit
def reweigh_kernel(
    logits_ptr,
    values_ptr,
    flags_ptr,
    largest_ptr,
    rows_ptr,
    temperature_ptr,
    log_min_p_ptr,
    logits_stride,
    refined_ptr,
    counts_ptr,
    masses_ptr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_FIXED: tl.constexpr,
    NUM_EDGES: tl.constexpr,
    FIXED_STEP: tl.constexpr,
):
    """Grid (n, num_chunks): writes counts and masses of the refined edges; reads no logits of a row without any."""
    i, chunk = tl.program_id(0), tl.program_id(1)
    first: tl.constexpr = 1 + NUM_FIXED
    refined_ptr += i * (NUM_EDGES - first)
    # six edges each for top-k and top-p: a refined cut has at least its first pair's upper edge
    if (tl.load(refined_ptr + 1) >= 0) | (tl.load(refined_ptr + 7) >= 0):
        row = tl.load(rows_ptr + i)
        source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
        y = distances(source, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
        bits = y.to(tl.int32, bitcast=True)
        limit = limit_of(log_min_p_ptr, i)
        for j in range(NUM_EDGES - first):
            edge = tl.load(refined_ptr + j)
            if edge >= 0:
                at = (i * NUM_EDGES + first + j) * NUM_CHUNKS + chunk
                _store_sums(y, bits, tl.minimum(edge, limit), at, counts_ptr, masses_ptr)


@triton.jit
def window_kernel(
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    refined_ptr,
    counts_ptr,
    masses_ptr,
    starts_ptr,
    windows_ptr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_FIXED: tl.constexpr,
    NUM_EDGES: tl.constexpr,
    FIXED_STEP: tl.constexpr,
    EDGE_BLOCK: tl.constexpr,
    FROM_START: tl.constexpr,
    CAPACITY: tl.constexpr,
    WINDOW_FIELDS: tl.constexpr,
):
    """Grid (n,): chooses the windows of a row, and the place of each chunk's tokens in its list.

    starts int32 [n, num_chunks]: the chunk's place. windows int32 [n, 8]: the two windows, the length of the list (-1:
    too long, none is written) and the number of tokens below the window of top-k.
    """
    i = tl.program_id(0)
    limit = limit_of(log_min_p_ptr, i)
    top_k, top_p = tl.load(top_k_ptr + i), tl.load(top_p_ptr + i)
    edges = edges_of(refined_ptr, i, limit, NUM_FIXED, NUM_EDGES, FIXED_STEP, EDGE_BLOCK)
    by_chunk = sums_of(counts_ptr, edges, i, NUM_CHUNKS, BLOCK_C, NUM_EDGES, EDGE_BLOCK)
    counts = tl.sum(by_chunk, 1)
    masses = tl.sum(sums_of(masses_ptr, edges, i, NUM_CHUNKS, BLOCK_C, NUM_EDGES, EDGE_BLOCK).to(tl.float64), 1)
    k_low, k_high, p_low, p_high = _windows(edges, counts, masses, top_k, top_p, limit, VOCAB, FROM_START)
    sizes = _list_sizes(edges[:, None], by_chunk, k_low, k_high, p_low, p_high)
    size = tl.sum(sizes, 0)
    size = tl.where(size <= CAPACITY, size, -1)
    chunks = tl.arange(0, BLOCK_C)
    starts = tl.where(size < 0, chunks * CHUNK, tl.cumsum(sizes, 0) - sizes)
    tl.store(starts_ptr + i * NUM_CHUNKS + chunks, starts, mask=chunks < NUM_CHUNKS)
    windows_ptr += i * WINDOW_FIELDS
    tl.store(windows_ptr, k_low)
    tl.store(windows_ptr + 1, k_high)
    tl.store(windows_ptr + 2, p_low)
    tl.store(windows_ptr + 3, p_high)
    tl.store(windows_ptr + 4, size)
    tl.store(windows_ptr + 5, up_to(edges, counts, k_low))


@triton.jit
def gather_kernel(
    logits_ptr,
    values_ptr,
    flags_ptr,
    largest_ptr,
    rows_ptr,
    temperature_ptr,
    logits_stride,
    starts_ptr,
    windows_ptr,
    candidates_ptr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    WINDOW_FIELDS: tl.constexpr,
):
    """Grid (n, num_chunks): lists the distances of the chunk's tokens in the windows at the chunk's place of the list.
    A chunk without such tokens reads no logits."""
    i, chunk = tl.program_id(0), tl.program_id(1)
    windows_ptr += i * WINDOW_FIELDS
    size, starts_ptr = tl.load(windows_ptr + 4), starts_ptr + i * NUM_CHUNKS + chunk
    before = tl.load(starts_ptr)
    after = tl.load(starts_ptr + 1, mask=chunk < NUM_CHUNKS - 1, other=size)
    if (size > 0) & (before < after):
        k_low, k_high = tl.load(windows_ptr), tl.load(windows_ptr + 1)
        p_low, p_high = tl.load(windows_ptr + 2), tl.load(windows_ptr + 3)
        row = tl.load(rows_ptr + i)
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        source = (logits_ptr, values_ptr, flags_ptr, largest_ptr, temperature_ptr, i, row, logits_stride)
        y = distances(source, offs, VOCAB)
        bits = y.to(tl.int32, bitcast=True)
        listed = ((bits > k_low) & (bits <= k_high)) | ((bits > p_low) & (bits <= p_high))
        place = tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + i.to(tl.int64) * CAPACITY + before + place, y, mask=listed)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields kernels with and without filters and changed rows."""
    types = CHANGED_TYPES | dict.fromkeys(("largest_ptr", "temperature_ptr", "log_min_p_ptr", "masses_ptr"), "*fp32")
    types |= {"rows_ptr": "*i64", "top_k_ptr": "*i64", "top_p_ptr": "*fp64", "candidates_ptr": "*fp32"}
    types |= dict.fromkeys(("counts_ptr", "refined_ptr", "starts_ptr", "windows_ptr"), "*i32")
    for dtype, vocab_size, changed in (("bf16", 128256, False), ("bf16", 128256, True), ("fp32", 50257, False)):
        label, aligned = f"vocabulary {vocab_size}" + " changed" * changed, ("logits_stride",) * (vocab_size % 16 == 0)
        absent = {} if changed else dict.fromkeys(CHANGED_TYPES)
        shared = chunk_constants(vocab_size) | absent
        for kernel, name, constants, num_warps in (
            (weigh_kernel, "filters", shared, NUM_WARPS),
            (weigh_kernel, "plain", shared | {"counts_ptr": None}, NUM_WARPS),
            (refine_kernel, "filters", refine_constants(vocab_size) | absent, REFINE_WARPS),
            (reweigh_kernel, "filters", shared, NUM_WARPS),
            (window_kernel, "filters", list_constants(vocab_size), WINDOW_WARPS),
            (gather_kernel, "filters", gather_constants(vocab_size) | absent, GATHER_WARPS),
        ):
            yield AotConfiguration(
                kernel, f"{label} {name}", dtype, constants, num_warps=num_warps, types=types,
                multiples_of_16=aligned, quick=changed,
            )  # fmt: skip
