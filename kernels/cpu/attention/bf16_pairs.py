"""Decode attention on a CPU with an instruction for bf16 pairs (AVX512-BF16), over a bf16 cache. Called by launch.py.

Queries and keys are multiplied as 32-bit words of two neighbouring elements, probabilities and values as words of two
neighbouring tokens: half the multiplications of widened fp32, and no widening. Up to four heads of a group share each
row of keys or values in registers. Sums are fp32; probabilities are rounded to bf16, like in FlashAttention.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import simd
from kernels.cpu.attention import rows as loops
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import broadcast, dot, exp2, vector_at, words_at
from kernels.cpu.parallel import jit
from kernels.cpu.simd import BF16Pointer, I32Pointer, advance, load, read, splat, store

MULTIPLE = 2 * WIDTH  # head_dim must be a multiple of this
HEADS = 4  # heads of a microkernel: sixteen accumulators of scores
TOKENS = 4  # tokens of a microkernel of scores
AHEAD = 4  # blocks to prefetch, see launch.py
NEG_INF = np.float32(-np.inf)
ZERO, ONE, LOG2_E = np.float32(0), np.float32(1), np.float32(np.log2(np.e))

_F32V, _I32V, _I64 = ir.VectorType(ir.FloatType(), WIDTH), ir.VectorType(ir.IntType(32), WIDTH), ir.IntType(64)
_I16V2 = ir.VectorType(ir.IntType(16), 2 * WIDTH)
# One instruction each: pairs from two rows of 32 elements, of elements 0-3, 8-11, 16-19 and 24-27, or of the others.
_FIRST_FOURS = [8 * lane + i + row for lane in range(4) for i in range(4) for row in (0, 32)]
_LAST_FOURS = [place + 4 for place in _FIRST_FOURS]
# Places of elements 0-15 and 16-31 in the sums over such pairs.
_IN_ORDER = [[16 * (d // 4 % 2) + d // 8 * 4 + d % 4 for d in range(first, first + 16)] for first in (0, 16)]


def _constant(value):
    return ir.Constant(_I64, value)


def _indices(places):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)


def _scores(heads):
    """An intrinsic: scores[h, t] = scale * q[h] . k[t] for `heads` heads and four tokens; strides in elements read."""

    def codegen(context, builder, sig, args):
        q, k, ahead, words, scale, scores, stride = args
        cells = [(h, t) for h in range(heads) for t in range(TOKENS)]
        totals = {cell: cgutils.alloca_once_value(builder, ir.Constant(_F32V, [0.0] * WIDTH)) for cell in cells}
        with cgutils.for_range(builder, builder.lshr(words, _constant(4))) as loop:
            at = builder.mul(loop.index, _constant(WIDTH))
            row = lambda i: builder.add(builder.mul(words, _constant(i)), at)  # noqa: E731
            for t in range(TOKENS):
                simd.prefetch(builder, builder.gep(ahead, [row(t)]))
            keys = [builder.load(vector_at(builder, k, row(t), _I32V), align=2) for t in range(TOKENS)]
            for h, t in cells:
                if t == 0:
                    query = builder.load(vector_at(builder, q, row(h), _I32V), align=2)
                builder.store(dot(builder, builder.load(totals[h, t]), query, keys[t]), totals[h, t])
        for h in range(heads):
            sums = simd.sums4(builder, *(builder.load(totals[h, t]) for t in range(TOKENS)))
            four = builder.shuffle_vector(
                broadcast(builder, scale), ir.Constant(_F32V, ir.Undefined), _indices([0] * 4)
            )
            where = vector_at(builder, scores, builder.mul(stride, _constant(h)), sums.type)
            builder.store(builder.fmul(sums, four), where, align=4)
        return context.get_dummy_value()

    def typing(typingctx, q, k, ahead, words, scale, scores, stride):
        i64 = types.int64
        return types.void(I32Pointer, I32Pointer, I32Pointer, i64, types.float32, F32Pointer, i64), codegen

    return intrinsic(typing)


def _sums(heads):
    """An intrinsic: acc[h, :32] += the pairs' probs[h, i] * (first[i], second[i]), in _FIRST_FOURS' order.

    first and second point to the rows of the pairs' tokens, `words` 32-bit words per row; the rows of a pair are two
    rows behind those of the pair before. probs, one word per pair, and acc have a stride from head to head.
    """

    def codegen(context, builder, sig, args):
        probs, probs_stride, first, second, ahead, words, num_pairs, acc, acc_stride = args
        cells = [(h, half) for h in range(heads) for half in range(2)]
        targets, totals = {}, {}
        for h, half in cells:
            index = builder.add(builder.mul(acc_stride, _constant(h)), _constant(WIDTH * half))
            targets[h, half] = vector_at(builder, acc, index, _F32V)
            totals[h, half] = cgutils.alloca_once_value(builder, builder.load(targets[h, half], align=4))
        with cgutils.for_range(builder, num_pairs) as loop:
            at = builder.mul(builder.mul(loop.index, words), _constant(2))
            for index in (at, builder.add(at, words)):
                simd.prefetch(builder, builder.gep(ahead, [index]))
            rows = [builder.load(vector_at(builder, row, at, _I16V2), align=2) for row in (first, second)]
            pairs = [
                builder.bitcast(builder.shuffle_vector(*rows, _indices(places)), _I32V)
                for places in (_FIRST_FOURS, _LAST_FOURS)
            ]
            for h, half in cells:
                if half == 0:
                    index = builder.add(builder.mul(probs_stride, _constant(h)), loop.index)
                    prob = broadcast(builder, builder.load(builder.gep(probs, [index])))
                builder.store(dot(builder, builder.load(totals[h, half]), prob, pairs[half]), totals[h, half])
        for cell in cells:
            builder.store(builder.load(totals[cell]), targets[cell], align=4)
        return context.get_dummy_value()

    def typing(typingctx, probs, probs_stride, first, second, ahead, words, num_pairs, acc, acc_stride):
        i64 = types.int64
        return types.void(I32Pointer, i64, I32Pointer, I32Pointer, I32Pointer, i64, i64, F32Pointer, i64), codegen

    return intrinsic(typing)


_scores1, _scores2, _scores3, _scores4 = (_scores(heads) for heads in range(1, HEADS + 1))
_sums1, _sums2, _sums3, _sums4 = (_sums(heads) for heads in range(1, HEADS + 1))


@intrinsic
def _store_in_order(typingctx, acc, scale, out):
    """out[:32] = acc[:32] * scale, rounded to bf16, from _FIRST_FOURS' order."""

    def codegen(context, builder, sig, args):
        acc, scale, out = args
        halves = [builder.load(vector_at(builder, acc, _constant(i), _F32V), align=4) for i in (0, WIDTH)]
        for i, places in enumerate(_IN_ORDER):
            vector = builder.fmul(builder.shuffle_vector(*halves, _indices(places)), broadcast(builder, scale))
            rounded = simd.round_to_bf16(builder, vector)
            builder.store(rounded, vector_at(builder, out, _constant(i * WIDTH), rounded.type), align=2)
        return context.get_dummy_value()

    return types.void(F32Pointer, types.float32, BF16Pointer), codegen


@jit
def _score_block(q, k, ahead, num_tokens, group, words, scale, scores, stride):
    """scores[g, t] for every head of the group and the tokens of one block, four at a time."""
    for t in range(0, num_tokens, TOKENS):
        keys, later, at = advance(k, t * words), advance(ahead, t * words), advance(scores, t)
        for g in range(0, group, HEADS):
            heads, queries, target = group - g, advance(q, g * words), advance(at, g * stride)
            if heads >= 4:
                _scores4(queries, keys, later, words, scale, target, stride)
            elif heads == 3:
                _scores3(queries, keys, later, words, scale, target, stride)
            elif heads == 2:
                _scores2(queries, keys, later, words, scale, target, stride)
            else:
                _scores1(queries, keys, later, words, scale, target, stride)


@jit
def _add_pairs(probs, probs_stride, first, second, ahead, num_pairs, group, words, acc):
    """acc[g] += the weighted pairs of one block, for every head of the group; acc [group, 2 * words]."""
    for g in range(0, group, HEADS):
        heads, weights = group - g, advance(probs, g * probs_stride)
        for d in range(0, words, WIDTH):
            a, b, later = advance(first, d), advance(second, d), advance(ahead, d)
            target = advance(acc, 2 * (g * words + d))
            if heads >= 4:
                _sums4(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)
            elif heads == 3:
                _sums3(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)
            elif heads == 2:
                _sums2(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)
            else:
                _sums1(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)


@jit
def _softmax(scores, begin, end, padded, sinks):
    """Replace scores[:padded] by probabilities in bf16, zero outside begin:end; returns 1 / their sum. sinks [1] or
    null: a logit that joins the sum."""
    for i in range(begin):
        simd.write(scores, i, NEG_INF)
    for i in range(end, padded):
        simd.write(scores, i, NEG_INF)
    top = splat(NEG_INF)
    for i in range(0, padded, WIDTH):
        top = simd.larger(load(scores, i), top)
    top = simd.spread_max1(top)
    has_sink = simd.address(sinks) != 0
    if has_sink:
        top = simd.larger(top, splat(read(sinks, 0)))
    shift, total = simd.mul(top, splat(-LOG2_E)), splat(ZERO)
    probs = simd.pointer_bf16(simd.address(scores))  # half as wide: each word is read before it is overwritten
    for i in range(0, padded, WIDTH):
        p = exp2(simd.fma(load(scores, i), splat(LOG2_E), shift))
        store(probs, i, p)
        total = simd.add(total, p)
    total = simd.spread_add1(total)
    if has_sink:
        total = simd.add(total, exp2(simd.fma(splat(read(sinks, 0)), splat(LOG2_E), shift)))
    return ONE / simd.first(total)


@jit
def attend_heads(q, out, k_cache, v_cache, table, first, seq_len, kv_head, num_heads, num_kv_heads, group, block_size,
                 head_dim, scale, softcap, slopes, sinks):  # fmt: skip
    """Attention of one query row for num_heads KV heads from kv_head on; q and out [num_heads, group, head_dim].

    All query heads of a group share a read of each block. The heads of a block are read one after the other: they are
    neighbours in memory.
    """
    first_block, last_block = first // block_size, (seq_len + block_size - 1) // block_size
    begin, end = first - first_block * block_size, seq_len - first_block * block_size
    words, query_heads = head_dim // 2, num_heads * group
    row = ((last_block - first_block) * block_size + WIDTH - 1) // WIDTH * WIDTH
    scratch = np.empty(query_heads * (row + head_dim) + words, np.float32)
    scores = simd.pointer_f32(scratch.ctypes.data)
    acc = advance(scores, query_heads * row)
    zeros = advance(acc, query_heads * head_dim)
    for i in range(0, query_heads * head_dim + words, WIDTH):
        store(acc, i, splat(ZERO))
    lead = loops.lead(AHEAD, num_heads, first_block, last_block)
    for j in range(first_block, first_block + lead):
        for h in range(kv_head, kv_head + num_heads):
            loops.warm(loops.block(k_cache, table, j, num_kv_heads, h, block_size, head_dim), block_size, head_dim)
    for j in range(first_block, last_block):
        t = (j - first_block) * block_size
        n = min(block_size, end - t)
        for h in range(num_heads):
            k = words_at(loops.block(k_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim))
            ahead = loops.block_ahead(k_cache, v_cache, table, j + lead, first_block, last_block, num_kv_heads,
                                      kv_head + h, block_size, head_dim)  # fmt: skip
            _score_block(words_at(advance(q, h * group * head_dim)), k, words_at(ahead), n, group, words, scale,
                         advance(scores, h * group * row + t), row)  # fmt: skip
    for g in range(query_heads):
        at = advance(scores, g * row)
        if softcap != 0 or simd.address(slopes) != 0:
            loops.adjust_scores(at, 1, 1, begin, end, softcap, loops.heads_of(slopes, g))
    inverses = np.empty(query_heads, np.float32)
    for g in range(query_heads):
        inverses[g] = _softmax(advance(scores, g * row), begin, end, row, loops.heads_of(sinks, g))
    probs = words_at(scores)
    for j in range(first_block, last_block):
        t = (j - first_block) * block_size
        n = min(block_size, end - t)
        for h in range(num_heads):
            v = words_at(loops.block(v_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim))
            later = min(j + lead, last_block - 1)
            ahead = words_at(loops.block(v_cache, table, later, num_kv_heads, kv_head + h, block_size, head_dim))
            weights, target = advance(probs, h * group * row + t // 2), advance(acc, h * group * head_dim)
            _add_pairs(weights, row, v, advance(v, words), ahead, n // 2, group, words, target)
            if n % 2:  # rows behind the last token are undefined
                last = advance(v, (n - 1) * words)
                _add_pairs(advance(weights, n // 2), row, last, words_at(zeros), last, 1, group, words, target)
    for g in range(query_heads):
        for d in range(0, head_dim, 2 * WIDTH):
            _store_in_order(advance(acc, g * head_dim + d), inverses[g], advance(out, g * head_dim + d))
    simd.keep(scratch)
