"""The loops of paged attention on a CPU over the rows of one block: scores, softmax, sums. Called by launch.py.

q, k and v are adjacent rows of head_dim numbers. k and v point to fp32, to bf16 or to codes of a quantised page.
"lanes" is 4 for a quad of heads, whose scores are stored token by token, and 1 for a single head. `ahead` is the block
of a later iteration, to prefetch.
"""

import numpy as np

from kernels.cpu import codes, simd
from kernels.cpu.elementwise.activations import tanh
from kernels.cpu.parallel import jit
from kernels.cpu.simd import WIDTH, advance, fma, load, load_pair, read, splat, store, write
from kernels.kv_format import PARAMETER_BYTES

NEG_INF = np.float32(-np.inf)
ZERO = np.float32(0)


@jit
def widen(x, n, scale, out, cache, spare):
    """out[:n] = x * scale in fp32, in load_pair(cache)'s order (n a multiple of 16; the last 16 may have no pair)."""
    if codes.bits(cache) != 0:
        target = spare if codes.is_int4(cache) else out
        for d in range(0, n, WIDTH):
            store(target, d, simd.mul(load(x, d), splat(scale)))
        if codes.is_int4(cache):
            halves(spare, out, n, True)
        return
    paired = n // 32 * 32
    for d in range(0, paired, 32):
        a, b = load_pair(x, d)
        store(out, d, simd.mul(a, splat(scale)))
        store(out, d + 16, simd.mul(b, splat(scale)))
    if paired < n:
        store(out, paired, simd.mul(load(x, paired), splat(scale)))


@jit
def narrow(acc, n, scale, out, cache, spare):
    """The inverse of widen, rounded to out's dtype."""
    if codes.bits(cache) != 0:
        if codes.is_int4(cache):
            halves(acc, spare, n, False)
        source = spare if codes.is_int4(cache) else acc
        for d in range(0, n, WIDTH):
            store(out, d, simd.mul(load(source, d), splat(scale)))
        return
    paired = n // 32 * 32
    for d in range(0, paired, 32):
        simd.store_pair(out, d, simd.mul(load(acc, d), splat(scale)), simd.mul(load(acc, d + 16), splat(scale)))
    if paired < n:
        store(out, paired, simd.mul(load(acc, paired), splat(scale)))


@jit
def halves(x, out, n, apart):
    """Convert between rows in order and rows in int4's order: sixteen numbers of each half in turn, in a small group at
    the end eight of each."""
    at = 0
    while at < n:
        size = 16 if at + 32 <= n else 8
        for part in range(2):
            for i in range(size):
                plain, paired = part * (n // 2) + at // 2 + i, at + part * size + i
                write(out, paired if apart else plain, read(x, plain if apart else paired))
        at += 2 * size


@jit
def parameters(cache, words, t, num_tokens, block_size, lanes):
    """(scales, minima, number) of the tokens from t on, repeated for the lanes of their scores."""
    if lanes == 4:
        return codes.parameters_quad(cache, words, t, num_tokens), 4
    if t + WIDTH <= block_size:
        return codes.parameters_many(cache, words, t, num_tokens), WIDTH
    return codes.parameters_four(cache, words, t, num_tokens), 4


@jit
def scale_scores(cache, words, num_tokens, block_size, lanes, q_sum, scores):
    """score := score * scale + minimum * q_sum for the tokens of one block."""
    total, t = load(q_sum, 0), 0
    while t < num_tokens:
        (scale, least), step = parameters(cache, words, t, num_tokens, block_size, lanes)
        score = simd.mul(load(scores, t * lanes), scale)
        store(scores, t * lanes, fma(least, total, score) if codes.is_int4(cache) else score)
        t += step


@jit
def scale_probs(cache, words, num_tokens, block_size, lanes, probs, least_sum):
    """least_sum += prob * minimum, then prob := prob * scale, for the tokens of one block."""
    total, t = load(least_sum, 0), 0
    while t < num_tokens:
        (scale, least), step = parameters(cache, words, t, num_tokens, block_size, lanes)
        p = load(probs, t * lanes)
        if codes.is_int4(cache):
            total = fma(p, least, total)
        store(probs, t * lanes, simd.mul(p, scale))
        t += step
    store(least_sum, 0, total)


@jit
def sum_queries(wide_q, head_dim, lanes, q_sum):
    """q_sum[i] = the sum of query i % lanes."""
    for h in range(lanes):
        total = splat(ZERO)
        for d in range(0, head_dim, WIDTH):
            total = simd.add(total, load(wide_q, h * head_dim + d))
        for i in range(h, WIDTH, lanes):
            write(q_sum, i, simd.first(simd.spread_add1(total)))


@jit
def add_minima(least_sum, lanes, head_dim, acc):
    """Add the sum of prob * minimum over the tokens to every element of head h's row."""
    total = simd.spread_add4(load(least_sum, 0)) if lanes == 4 else simd.spread_add1(load(least_sum, 0))
    store(least_sum, 0, total)
    for h in range(lanes):
        value = splat(read(least_sum, h))
        for d in range(0, head_dim, WIDTH):
            at = h * head_dim + d
            store(acc, at, simd.add(load(acc, at), value))


@jit
def scores_single(q, k, ahead, num_tokens, head_dim, scores):
    """scores[t] = q . k[t]; k [block_size, head_dim]. Four tokens at a time, so block_size is a multiple of 4."""
    paired = head_dim // 32 * 32
    for t in range(0, num_tokens, 4):
        k0, k1, k2, k3 = t * head_dim, (t + 1) * head_dim, (t + 2) * head_dim, (t + 3) * head_dim
        s0 = s1 = s2 = s3 = splat(ZERO)
        for d in range(0, paired, 32):
            q_a, q_b = load(q, d), load(q, d + 16)
            simd.prefetch_pair(ahead, k0 + d)
            simd.prefetch_pair(ahead, k1 + d)
            simd.prefetch_pair(ahead, k2 + d)
            simd.prefetch_pair(ahead, k3 + d)
            a, b = load_pair(k, k0 + d)
            s0 = fma(q_b, b, fma(q_a, a, s0))
            a, b = load_pair(k, k1 + d)
            s1 = fma(q_b, b, fma(q_a, a, s1))
            a, b = load_pair(k, k2 + d)
            s2 = fma(q_b, b, fma(q_a, a, s2))
            a, b = load_pair(k, k3 + d)
            s3 = fma(q_b, b, fma(q_a, a, s3))
        if paired < head_dim:
            x = load(q, paired)
            s0 = fma(x, load(k, k0 + paired), s0)
            s1 = fma(x, load(k, k1 + paired), s1)
            s2 = fma(x, load(k, k2 + paired), s2)
            s3 = fma(x, load(k, k3 + paired), s3)
        simd.store_sums4(scores, t, s0, s1, s2, s3)


@jit
def scores_quad(q, k, ahead, num_tokens, head_dim, scores):
    """scores[t, h] = q[h] . k[t] for four heads; q [4, head_dim], k [num_tokens, head_dim]."""
    paired = head_dim // 32 * 32
    q1, q2, q3 = head_dim, 2 * head_dim, 3 * head_dim
    for t in range(num_tokens):
        s0 = s1 = s2 = s3 = splat(ZERO)
        for d in range(0, paired, 32):
            simd.prefetch_pair(ahead, t * head_dim + d)
            a, b = load_pair(k, t * head_dim + d)
            s0 = fma(load(q, d + 16), b, fma(load(q, d), a, s0))
            s1 = fma(load(q, q1 + d + 16), b, fma(load(q, q1 + d), a, s1))
            s2 = fma(load(q, q2 + d + 16), b, fma(load(q, q2 + d), a, s2))
            s3 = fma(load(q, q3 + d + 16), b, fma(load(q, q3 + d), a, s3))
        if paired < head_dim:
            a = load(k, t * head_dim + paired)
            s0 = fma(load(q, paired), a, s0)
            s1 = fma(load(q, q1 + paired), a, s1)
            s2 = fma(load(q, q2 + paired), a, s2)
            s3 = fma(load(q, q3 + paired), a, s3)
        simd.store_sums4(scores, 4 * t, s0, s1, s2, s3)


@jit
def accumulate_single(probs, v, ahead, num_tokens, head_dim, acc):
    """acc += sum over t of probs[t] * v[t]; v [num_tokens, head_dim]. acc stays in registers during the loop."""
    paired = head_dim // 32 * 32
    for d in range(0, paired, 32):
        even, odd = load(acc, d), load(acc, d + 16)
        for t in range(num_tokens):
            p = splat(read(probs, t))
            simd.prefetch_pair(ahead, t * head_dim + d)
            a, b = load_pair(v, t * head_dim + d)
            even, odd = fma(p, a, even), fma(p, b, odd)
        store(acc, d, even)
        store(acc, d + 16, odd)
    if paired < head_dim:
        last = load(acc, paired)
        for t in range(num_tokens):
            last = fma(splat(read(probs, t)), load(v, t * head_dim + paired), last)
        store(acc, paired, last)


@jit
def accumulate_quad(probs, v, ahead, num_tokens, head_dim, acc):
    """acc[h] += sum over t of probs[t, h] * v[t] for four heads; acc [4, head_dim]."""
    paired = head_dim // 32 * 32
    r1, r2, r3 = head_dim, 2 * head_dim, 3 * head_dim
    for d in range(0, paired, 32):
        a0, a1, a2, a3 = load(acc, d), load(acc, r1 + d), load(acc, r2 + d), load(acc, r3 + d)
        b0, b1, b2, b3 = load(acc, d + 16), load(acc, r1 + d + 16), load(acc, r2 + d + 16), load(acc, r3 + d + 16)
        for t in range(num_tokens):
            simd.prefetch_pair(ahead, t * head_dim + d)
            a, b = load_pair(v, t * head_dim + d)
            p = splat(read(probs, 4 * t))
            a0, b0 = fma(p, a, a0), fma(p, b, b0)
            p = splat(read(probs, 4 * t + 1))
            a1, b1 = fma(p, a, a1), fma(p, b, b1)
            p = splat(read(probs, 4 * t + 2))
            a2, b2 = fma(p, a, a2), fma(p, b, b2)
            p = splat(read(probs, 4 * t + 3))
            a3, b3 = fma(p, a, a3), fma(p, b, b3)
        store(acc, d, a0)
        store(acc, r1 + d, a1)
        store(acc, r2 + d, a2)
        store(acc, r3 + d, a3)
        store(acc, d + 16, b0)
        store(acc, r1 + d + 16, b1)
        store(acc, r2 + d + 16, b2)
        store(acc, r3 + d + 16, b3)
    if paired < head_dim:
        for h in range(4):
            last = load(acc, h * head_dim + paired)
            for t in range(num_tokens):
                last = fma(splat(read(probs, 4 * t + h)), load(v, t * head_dim + paired), last)
            store(acc, h * head_dim + paired, last)


@jit
def adjust_scores(scores, lanes, num_heads, begin, end, softcap, slopes):
    """Apply the soft cap, then ALiBi, whose distances count from the newest token, end - 1. Scores before `begin` and
    behind `end`, up to whole vectors, are undefined afterwards."""
    if softcap != 0:
        cap, inverse = splat(softcap), splat(np.float32(1) / softcap)
        for i in range(begin * lanes // WIDTH * WIDTH, end * lanes, WIDTH):
            store(scores, i, simd.mul(tanh(simd.mul(load(scores, i), inverse)), cap))
    if simd.address(slopes) != 0:
        for t in range(begin, end):
            for h in range(num_heads):
                s = read(scores, t * lanes + h) - read(slopes, h) * np.float32(end - 1 - t)
                write(scores, t * lanes + h, np.float32(s))


@jit
def softmax_rows(scores, lanes, num_heads, begin, end, padded, sinks):
    """scores[t] := exp(score - max), zero outside begin:end; writes 1 / sum of each lane behind the scores. sinks
    [num_heads] or null: a logit of each head joins its maximum and its sum."""
    for i in range(begin * lanes):
        write(scores, i, NEG_INF)
    for i in range(end * lanes, padded):
        write(scores, i, NEG_INF)
    top = splat(NEG_INF)
    for i in range(0, padded, WIDTH):
        top = simd.maximum(top, load(scores, i))
    top = simd.spread_max4(top) if lanes == 4 else simd.spread_max1(top)
    has_sinks = simd.address(sinks) != 0
    if has_sinks:
        for i in range(WIDTH):
            h = i % lanes
            write(scores, padded + i, read(sinks, h) if h < num_heads else NEG_INF)
        top = simd.maximum(top, load(scores, padded))
    total = splat(ZERO)
    for i in range(0, padded, WIDTH):
        p = simd.exp(simd.sub(load(scores, i), top))
        store(scores, i, p)
        total = simd.add(total, p)
    total = simd.spread_add4(total) if lanes == 4 else simd.spread_add1(total)
    if has_sinks:
        total = simd.add(total, simd.exp(simd.sub(load(scores, padded), top)))
    store(scores, padded, simd.div(splat(np.float32(1)), total))


@jit
def block(cache, table, j, num_kv_heads, kv_head, block_size, head_dim):
    """Pointer to the rows of one KV head in the sequence's j-th block: elements of a float cache or bytes of a page."""
    size = block_size * head_dim
    if codes.bits(cache) != 0:
        size = size * codes.bits(cache) // 8 + block_size * PARAMETER_BYTES
    return advance(cache, (np.int64(read(table, j)) * num_kv_heads + kv_head) * size)


@jit
def lead(num_blocks, num_heads, first_block, last_block):
    """Blocks to prefetch ahead, so that num_blocks blocks of one head are on their way."""
    return min(max(1, num_blocks // num_heads), last_block - first_block)


@jit
def block_ahead(k_cache, v_cache, table, j, first_block, last_block, num_kv_heads, kv_head, block_size, head_dim):
    """The keys of the j-th block or, behind the last block, the values from the first block on: keys are read first."""
    if j < last_block:
        return block(k_cache, table, j, num_kv_heads, kv_head, block_size, head_dim)
    return block(v_cache, table, first_block + j - last_block, num_kv_heads, kv_head, block_size, head_dim)


@jit
def words(rows, block_size, head_dim):
    """Pointer to the parameters behind the codes of a page."""
    return simd.pointer_f32(simd.address(rows) + block_size * head_dim * codes.bits(rows) // 8)


@jit
def warm(rows, block_size, head_dim):
    """Prefetch the first blocks of a sequence; later blocks are prefetched while earlier blocks are used."""
    for i in range(0, block_size * head_dim, 32):
        simd.prefetch_pair(rows, i)
    if codes.bits(rows) != 0:
        simd.prefetch_pair(words(rows, block_size, head_dim), 0)


@jit
def find_sequence(cu_seqlens_q, num_seqs, row):
    """The last sequence that begins at or before `row`, found by bisection."""
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if read(cu_seqlens_q, middle) <= row:
            low = middle
        else:
            high = middle - 1
    return low


@jit
def heads_of(numbers, head):
    """The numbers (slopes, sinks) from a head on; null stays null."""
    return advance(numbers, head) if simd.address(numbers) != 0 else numbers
