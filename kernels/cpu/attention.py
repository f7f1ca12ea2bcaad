"""Paged attention on a CPU: decode reads the blocks of the cache in place and widens bf16 in registers.

The query heads that share a KV head are taken four at a time ("quad"), so that a widened row of K or V serves four
heads; a group of three is padded to a quad and what else is left over goes head by head. Scores of a quad are stored
token by token, four floats each; those of a single head one float each ("lanes" 4 or 1).

Codes of a quantised cache are widened in registers, too; a key's scale meets its scores and a value's its
probabilities, so that the loops over a row are the same for every format.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import codes, simd
from kernels.cpu.parallel import jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, fma, load, load_pair, read, splat, store, write
from kernels.kv_format import PARAMETER_BYTES
from kernels.kv_quantize import kv_format_of

NEG_INF = np.float32(-np.inf)
ZERO = np.float32(0)
ROWS_PER_ITEM = 8
# Blocks to ask for in advance. 64 sequences of 160 tokens took 1.7 ms without, 1.2 ms with 2 into L1, 0.9 ms with 4
# into L2 (one thread, 12 heads, 4 KV heads, head size 64, bf16).
AHEAD = 4


@jit
def _widen(x, n, scale, out, cache, spare):
    """out[:n] = x * scale in fp32, in the order of load_pair(cache) (n a multiple of 16; the last 16 may be unpaired)."""
    if codes.bits(cache) != 0:
        target = spare if codes.is_int4(cache) else out
        for d in range(0, n, WIDTH):
            store(target, d, simd.mul(load(x, d), splat(scale)))
        if codes.is_int4(cache):
            _halves(spare, out, n, True)
        return
    paired = n // 32 * 32
    for d in range(0, paired, 32):
        a, b = load_pair(x, d)
        store(out, d, simd.mul(a, splat(scale)))
        store(out, d + 16, simd.mul(b, splat(scale)))
    if paired < n:
        store(out, paired, simd.mul(load(x, paired), splat(scale)))


@jit
def _narrow(acc, n, scale, out, cache, spare):
    """The inverse of _widen, rounding to out's dtype."""
    if codes.bits(cache) != 0:
        if codes.is_int4(cache):
            _halves(acc, spare, n, False)
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
def _halves(x, out, n, apart):
    """Between rows in order and rows in int4's order: eight of the first half, eight of the second in a small
    group at the end, else sixteen of each."""
    at = 0
    while at < n:
        size = 16 if at + 32 <= n else 8
        for part in range(2):
            for i in range(size):
                plain, paired = part * (n // 2) + at // 2 + i, at + part * size + i
                write(out, paired if apart else plain, read(x, plain if apart else paired))
        at += 2 * size


@jit
def _parameters(cache, words, t, num_tokens, block_size, lanes):
    """Scales and minima of the tokens from t on, spread over the lanes of their scores, and how many tokens they are."""
    if lanes == 4:
        return codes.parameters_quad(cache, words, t, num_tokens), 4
    if t + WIDTH <= block_size:
        return codes.parameters_many(cache, words, t, num_tokens), WIDTH
    return codes.parameters_four(cache, words, t, num_tokens), 4


@jit
def _scale_scores(cache, words, num_tokens, block_size, lanes, q_sum, scores):
    """score * scale + minimum * q_sum, in place, for the tokens of one block."""
    total, t = load(q_sum, 0), 0
    while t < num_tokens:
        (scale, least), step = _parameters(cache, words, t, num_tokens, block_size, lanes)
        score = simd.mul(load(scores, t * lanes), scale)
        store(scores, t * lanes, fma(least, total, score) if codes.is_int4(cache) else score)
        t += step


@jit
def _scale_probs(cache, words, num_tokens, block_size, lanes, probs, least_sum):
    """least_sum += prob * minimum; then prob * scale, in place, for the tokens of one block."""
    total, t = load(least_sum, 0), 0
    while t < num_tokens:
        (scale, least), step = _parameters(cache, words, t, num_tokens, block_size, lanes)
        p = load(probs, t * lanes)
        if codes.is_int4(cache):
            total = fma(p, least, total)
        store(probs, t * lanes, simd.mul(p, scale))
        t += step
    store(least_sum, 0, total)


@jit
def _sum_queries(wide_q, head_dim, lanes, q_sum):
    """q_sum[i] = the sum of query i % lanes."""
    for h in range(lanes):
        total = splat(ZERO)
        for d in range(0, head_dim, WIDTH):
            total = simd.add(total, load(wide_q, h * head_dim + d))
        for i in range(h, WIDTH, lanes):
            write(q_sum, i, simd.first(simd.spread_add1(total)))


@jit
def _add_minima(least_sum, lanes, head_dim, acc):
    """Every element of head h's row gets the sum of prob * minimum over its tokens."""
    total = simd.spread_add4(load(least_sum, 0)) if lanes == 4 else simd.spread_add1(load(least_sum, 0))
    store(least_sum, 0, total)
    for h in range(lanes):
        value = splat(read(least_sum, h))
        for d in range(0, head_dim, WIDTH):
            at = h * head_dim + d
            store(acc, at, simd.add(load(acc, at), value))


@jit
def _scores_single(q, k, ahead, num_tokens, head_dim, scores):
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
def _scores_quad(q, k, ahead, num_tokens, head_dim, scores):
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
def _accumulate_single(probs, v, ahead, num_tokens, head_dim, acc):
    """acc += sum over t of probs[t] * v[t]; v [num_tokens, head_dim]. acc stays in registers over the tokens."""
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
def _accumulate_quad(probs, v, ahead, num_tokens, head_dim, acc):
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
def _adjust_scores(scores, lanes, num_heads, begin, end, softcap, slopes):
    """Soft cap, then ALiBi (which counts back from the newest token, end - 1)."""
    for t in range(begin, end):
        for h in range(num_heads):
            s = read(scores, t * lanes + h)
            if softcap != 0:
                s = softcap * np.float32(np.tanh(s / softcap))
            if simd.address(slopes) != 0:
                s = s - read(slopes, h) * np.float32(end - 1 - t)
            write(scores, t * lanes + h, np.float32(s))


@jit
def _softmax_rows(scores, lanes, begin, end, padded):
    """scores[t] -> exp(score - max), zero outside begin:end, in place; writes 1 / sum of each lane after the scores."""
    for i in range(begin * lanes):
        write(scores, i, NEG_INF)
    for i in range(end * lanes, padded):
        write(scores, i, NEG_INF)
    top = splat(NEG_INF)
    for i in range(0, padded, WIDTH):
        top = simd.maximum(top, load(scores, i))
    top = simd.spread_max4(top) if lanes == 4 else simd.spread_max1(top)
    total = splat(ZERO)
    for i in range(0, padded, WIDTH):
        p = simd.exp(simd.sub(load(scores, i), top))
        store(scores, i, p)
        total = simd.add(total, p)
    total = simd.spread_add4(total) if lanes == 4 else simd.spread_add1(total)
    store(scores, padded, simd.div(splat(np.float32(1)), total))


@jit
def _block(cache, table, j, num_kv_heads, kv_head, block_size, head_dim):
    """The rows of one KV head in the sequence's j-th block: elements of a float cache, bytes of a page of codes."""
    size = block_size * head_dim
    if codes.bits(cache) != 0:
        size = size * codes.bits(cache) // 8 + block_size * PARAMETER_BYTES
    return advance(cache, (np.int64(read(table, j)) * num_kv_heads + kv_head) * size)


@jit
def _words(rows, block_size, head_dim):
    """The parameters behind the codes of a page."""
    return simd.pointer_f32(simd.address(rows) + block_size * head_dim * codes.bits(rows) // 8)


@jit
def _warm(rows, block_size, head_dim):
    """Ask for the first blocks of a sequence; later ones are asked for while their predecessors are used."""
    for i in range(0, block_size * head_dim, 32):
        simd.prefetch_pair(rows, i)
    if codes.bits(rows) != 0:
        simd.prefetch_pair(_words(rows, block_size, head_dim), 0)


@jit
def _attend_heads(q, out, k_cache, v_cache, table, seq_len, kv_head, num_kv_heads, group, block_size, head_dim,
                  scale, window, softcap, slopes):  # fmt: skip
    """One query row and one KV head; q and out [group, head_dim]. A block is read once for all heads of the group."""
    first = max(0, seq_len - window) if window > 0 else 0
    first_block, last_block = first // block_size, (seq_len + block_size - 1) // block_size
    begin, end = first - first_block * block_size, seq_len - first_block * block_size
    quads = (group + 1) // 4  # three or four heads left make a quad
    singles = max(0, group - 4 * quads)
    rows = 4 * quads + singles
    row = ((last_block - first_block) * block_size + WIDTH - 1) // WIDTH * WIDTH
    stride = row + WIDTH  # scores of one head, with room for the reciprocal sums behind them
    scratch = np.empty(rows * (stride + 2 * head_dim + 2 * WIDTH) + head_dim, np.float32)
    scores = simd.pointer_f32(scratch.ctypes.data)
    wide_q = advance(scores, rows * stride)
    acc = advance(wide_q, rows * head_dim)
    q_sums = advance(acc, rows * head_dim)  # a Vec for each quad and single head, at its first row
    least_sums = advance(q_sums, rows * WIDTH)
    spare = advance(least_sums, rows * WIDTH)
    for i in range(group * head_dim, rows * head_dim, WIDTH):
        store(wide_q, i, splat(ZERO))
    for g in range(group):
        _widen(advance(q, g * head_dim), head_dim, scale, advance(wide_q, g * head_dim), k_cache, spare)
    for i in range(0, rows * head_dim, WIDTH):
        store(acc, i, splat(ZERO))
    if codes.bits(k_cache) != 0:
        for g in range(0, rows):
            store(least_sums, g * WIDTH, splat(ZERO))
        for quad in range(quads):
            _sum_queries(advance(wide_q, 4 * quad * head_dim), head_dim, 4, advance(q_sums, 4 * quad * WIDTH))
        for g in range(4 * quads, rows):
            _sum_queries(advance(wide_q, g * head_dim), head_dim, 1, advance(q_sums, g * WIDTH))
    for j in range(first_block, min(first_block + AHEAD, last_block)):
        _warm(_block(k_cache, table, j, num_kv_heads, kv_head, block_size, head_dim), block_size, head_dim)
    for j in range(first_block, last_block):
        k = _block(k_cache, table, j, num_kv_heads, kv_head, block_size, head_dim)
        ahead = _block(k_cache, table, min(j + AHEAD, last_block - 1), num_kv_heads, kv_head, block_size, head_dim)
        t = (j - first_block) * block_size
        n = min(block_size, end - t)
        for quad in range(quads):
            at = advance(scores, 4 * (quad * stride + t))
            _scores_quad(advance(wide_q, 4 * quad * head_dim), k, ahead, n, head_dim, at)
        for g in range(4 * quads, rows):
            _scores_single(
                advance(wide_q, g * head_dim), k, ahead, block_size, head_dim, advance(scores, g * stride + t)
            )
        if codes.bits(k) != 0:
            simd.prefetch_pair(_words(ahead, block_size, head_dim), 0)
            words = _words(k, block_size, head_dim)
            for quad in range(quads):
                at = advance(scores, 4 * (quad * stride + t))
                _scale_scores(k, words, n, block_size, 4, advance(q_sums, 4 * quad * WIDTH), at)
            for g in range(4 * quads, rows):
                _scale_scores(k, words, n, block_size, 1, advance(q_sums, g * WIDTH), advance(scores, g * stride + t))
    for j in range(first_block, min(first_block + AHEAD, last_block)):
        _warm(_block(v_cache, table, j, num_kv_heads, kv_head, block_size, head_dim), block_size, head_dim)
    for quad in range(quads):
        at = advance(scores, 4 * quad * stride)
        if softcap != 0 or simd.address(slopes) != 0:
            _adjust_scores(at, 4, min(4, group - 4 * quad), begin, end, softcap, _slopes_of(slopes, 4 * quad))
        _softmax_rows(at, 4, begin, end, 4 * row)
    for g in range(4 * quads, rows):
        at = advance(scores, g * stride)
        if softcap != 0 or simd.address(slopes) != 0:
            _adjust_scores(at, 1, 1, begin, end, softcap, _slopes_of(slopes, g))
        _softmax_rows(at, 1, begin, end, row)
    for j in range(first_block, last_block):
        v = _block(v_cache, table, j, num_kv_heads, kv_head, block_size, head_dim)
        ahead = _block(v_cache, table, min(j + AHEAD, last_block - 1), num_kv_heads, kv_head, block_size, head_dim)
        t = (j - first_block) * block_size
        n = min(block_size, end - t)
        if codes.bits(v) != 0:
            simd.prefetch_pair(_words(ahead, block_size, head_dim), 0)
            words = _words(v, block_size, head_dim)
            for quad in range(quads):
                at = advance(scores, 4 * (quad * stride + t))
                _scale_probs(v, words, n, block_size, 4, at, advance(least_sums, 4 * quad * WIDTH))
            for g in range(4 * quads, rows):
                _scale_probs(
                    v, words, n, block_size, 1, advance(scores, g * stride + t), advance(least_sums, g * WIDTH)
                )
        for quad in range(quads):
            at = advance(scores, 4 * (quad * stride + t))
            _accumulate_quad(at, v, ahead, n, head_dim, advance(acc, 4 * quad * head_dim))
        for g in range(4 * quads, rows):
            _accumulate_single(advance(scores, g * stride + t), v, ahead, n, head_dim, advance(acc, g * head_dim))
    if codes.bits(v_cache) != 0:
        for quad in range(quads):
            _add_minima(advance(least_sums, 4 * quad * WIDTH), 4, head_dim, advance(acc, 4 * quad * head_dim))
        for g in range(4 * quads, rows):
            _add_minima(advance(least_sums, g * WIDTH), 1, head_dim, advance(acc, g * head_dim))
    for g in range(group):
        at = 4 * (g // 4) * stride + 4 * row + g % 4 if g < 4 * quads else g * stride + row
        _narrow(advance(acc, g * head_dim), head_dim, read(scores, at), advance(out, g * head_dim), v_cache, spare)


@jit
def _slopes_of(slopes, head):
    """slopes + head, but null stays null."""
    return advance(slopes, head) if simd.address(slopes) != 0 else slopes


@jit
def _attend(args, row, seq, kv_head, seq_len, q, k_cache, v_cache, out):
    """Query row `row` of sequence `seq` over the first seq_len tokens of the sequence, for one KV head."""
    num_kv_heads, group, block_size, head_dim = args[8], args[9], args[10], args[11]
    tables, table_stride, q_stride, window = simd.pointer_i32(args[6]), args[12], args[13], args[14]
    slopes = _slopes_of(simd.pointer_f32(args[7]), kv_head * group)
    scale, softcap = np.float32(simd.as_float(args[15])), np.float32(simd.as_float(args[16]))
    head = kv_head * group * head_dim
    out_rows = advance(out, row * num_kv_heads * group * head_dim + head)
    if seq_len > 0:
        table = advance(tables, seq * table_stride)
        _attend_heads(
            advance(q, row * q_stride + head), out_rows, k_cache, v_cache, table, seq_len, kv_head, num_kv_heads, group,
            block_size, head_dim, scale, window, softcap, slopes,
        )  # fmt: skip
    else:
        for d in range(0, group * head_dim, WIDTH):
            store(out_rows, d, splat(ZERO))


@jit
def _attention_items(args, q, k_cache, v_cache, out):
    """Items are (KV head, a few query rows), so that neighbours in time read the same keys.

    Without cu_seqlens_q (null) every sequence has one row: decode.
    """
    seq_lens, cu_seqlens_q = simd.pointer_i32(args[17]), simd.pointer_i32(args[18])
    num_seqs, num_rows, rows_per_item = args[19], args[20], args[21]
    decode = simd.address(cu_seqlens_q) == 0
    items_per_head = (num_rows + rows_per_item - 1) // rows_per_item
    item = next_item(args)
    while item < args[1]:
        kv_head, begin = item // items_per_head, item % items_per_head * rows_per_item
        seq = begin if decode else _find_sequence(cu_seqlens_q, num_seqs, begin)
        for row in range(begin, min(num_rows, begin + rows_per_item)):
            behind = 0  # tokens of the sequence after this row's
            if decode:
                seq = row
            else:
                while row >= read(cu_seqlens_q, seq + 1):
                    seq += 1
                behind = np.int64(read(cu_seqlens_q, seq + 1)) - 1 - row
            _attend(args, row, seq, kv_head, np.int64(read(seq_lens, seq)) - behind, q, k_cache, v_cache, out)
        item = next_item(args)


@jit
def _find_sequence(cu_seqlens_q, num_seqs, row):
    """The last sequence that begins at or before `row`, by bisection."""
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if read(cu_seqlens_q, middle) <= row:
            low = middle
        else:
            high = middle - 1
    return low


@parallel_kernel("13q2d5q")
def _attention_bf16(args):
    pointer = simd.pointer_bf16
    _attention_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]))


@parallel_kernel("13q2d5q")
def _attention_bf16_int8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int8
    _attention_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel("13q2d5q")
def _attention_bf16_fp8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_fp8
    _attention_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel("13q2d5q")
def _attention_bf16_int4(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int4
    _attention_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel("13q2d5q")
def _attention_f32(args):
    pointer = simd.pointer_f32
    _attention_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]))


@parallel_kernel("13q2d5q")
def _attention_f32_int8(args):
    pointer, page = simd.pointer_f32, codes.pointer_int8
    _attention_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel("13q2d5q")
def _attention_f32_fp8(args):
    pointer, page = simd.pointer_f32, codes.pointer_fp8
    _attention_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel("13q2d5q")
def _attention_f32_int4(args):
    pointer, page = simd.pointer_f32, codes.pointer_int4
    _attention_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


_KERNELS = {
    (torch.bfloat16, "auto"): _attention_bf16,
    (torch.bfloat16, "int8"): _attention_bf16_int8,
    (torch.bfloat16, "fp8"): _attention_bf16_fp8,
    (torch.bfloat16, "int4"): _attention_bf16_int4,
    (torch.float32, "auto"): _attention_f32,
    (torch.float32, "int8"): _attention_f32_int8,
    (torch.float32, "fp8"): _attention_f32_fp8,
    (torch.float32, "int4"): _attention_f32_int4,
}


def supports_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *int_tensors: Tensor) -> bool:
    """bf16 or fp32, caches the same or quantised, head_dim a multiple of 16 and block_size of 4, heads of q side by side, int32 metadata."""
    return (
        q.dtype in (torch.bfloat16, torch.float32)
        and k_cache.dtype == v_cache.dtype
        and (k_cache.dtype == q.dtype or kv_format_of(k_cache) is not None)
        and q.shape[2] % WIDTH == 0
        and k_cache.shape[2] % 4 == 0
        and q.stride(2) == 1
        and q.stride(1) == q.shape[2]
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and all(x.dtype == torch.int32 and x.is_contiguous() for x in int_tensors)
    )


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
                    alibi_slopes: Tensor | None, sliding_window: int, softcap: float) -> Tensor:  # fmt: skip
    """See kernels.paged_attention."""
    options = (scale, alibi_slopes, sliding_window, softcap)
    return _launch(q, k_cache, v_cache, block_tables, seq_lens, 0, 1, *options)


def prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, cu_seqlens_q: Tensor,
                      seq_lens: Tensor, scale: float, alibi_slopes: Tensor | None, sliding_window: int,
                      softcap: float) -> Tensor:  # fmt: skip
    """See kernels.prefill_attention. Each row is computed as decode would: the same bits, however it was scheduled."""
    options = (scale, alibi_slopes, sliding_window, softcap)
    return _launch(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q.data_ptr(), ROWS_PER_ITEM, *options)


def _launch(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, rows_per_item, scale, alibi_slopes,
            sliding_window, softcap):  # fmt: skip
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    kv_format = kv_format_of(k_cache)
    kernel = _KERNELS[q.dtype, "auto" if kv_format is None else kv_format.name]
    kernel(
        -(-num_rows // rows_per_item) * num_kv_heads,
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), block_tables.data_ptr(),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        num_kv_heads, num_heads // num_kv_heads, block_size, head_dim, block_tables.stride(0), q.stride(0),
        sliding_window, scale, softcap, seq_lens.data_ptr(), cu_seqlens_q, seq_lens.shape[0], num_rows, rows_per_item,
    )  # fmt: skip
    return out
