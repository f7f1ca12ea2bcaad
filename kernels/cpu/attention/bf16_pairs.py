"""Decode attention on a CPU with an instruction for bf16 pairs (AVX512-BF16), over a bf16 cache. Called by launch.py.

Queries and keys are multiplied as 32-bit words of two neighbouring elements, probabilities and values as words of two
neighbouring tokens: half the multiplications of widened fp32, and no widening. Up to four heads of a group share each
row of keys or values in registers. With AMX, tiles take the place of these loops: decode_tiles.py. Sums are fp32;
probabilities are rounded to bf16, like in FlashAttention.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu import amx, simd
from kernels.cpu.attention import decode_tiles
from kernels.cpu.attention import rows as loops
from kernels.cpu.attention.items import ARGUMENTS, items_with
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import broadcast, dot, exp2, vector_at, words_at
from kernels.cpu.features import HAS_BF16_DOT, HAS_BF16_TILES
from kernels.cpu.parallel import jit, parallel_kernel
from kernels.cpu.simd import BF16Pointer, I32Pointer, advance, load, read, splat, store, write

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
# Places of elements 0-15 and 16-31 in the sums over such pairs, and in those of decode_tiles.py.
_IN_FOURS = [[16 * (d // 4 % 2) + d // 8 * 4 + d % 4 for d in range(first, first + 16)] for first in (0, 16)]
_IN_TURNS = [[16 * (d % 2) + d // 2 for d in range(first, first + 16)] for first in (0, 16)]


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


def _store(order, doc):
    """An intrinsic: out[:32] = acc[:32] * scale, rounded to bf16; `order`: the places of elements in acc."""

    def codegen(context, builder, sig, args):
        acc, scale, out = args
        halves = [builder.load(vector_at(builder, acc, _constant(i), _F32V), align=4) for i in (0, WIDTH)]
        for i, places in enumerate(order):
            vector = builder.fmul(builder.shuffle_vector(*halves, _indices(places)), broadcast(builder, scale))
            rounded = simd.round_to_bf16(builder, vector)
            builder.store(rounded, vector_at(builder, out, _constant(i * WIDTH), rounded.type), align=2)
        return context.get_dummy_value()

    def typing(typingctx, acc, scale, out):
        return types.void(F32Pointer, types.float32, BF16Pointer), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


_store_fours, _store_turns = (
    _store(_IN_FOURS, "From _FIRST_FOURS' order."),
    _store(_IN_TURNS, "Even elements, then odd."),
)


@jit
def _score_block(q, k, ahead, num_tokens, num_queries, words, scale, scores, stride):
    """scores[i, t] for every query and the tokens of one block, four at a time."""
    for t in range(0, num_tokens, TOKENS):
        keys, later, at = advance(k, t * words), advance(ahead, t * words), advance(scores, t)
        for i in range(0, num_queries, HEADS):
            heads, queries, target = num_queries - i, advance(q, i * words), advance(at, i * stride)
            if heads >= 4:
                _scores4(queries, keys, later, words, scale, target, stride)
            elif heads == 3:
                _scores3(queries, keys, later, words, scale, target, stride)
            elif heads == 2:
                _scores2(queries, keys, later, words, scale, target, stride)
            else:
                _scores1(queries, keys, later, words, scale, target, stride)


@jit
def _add_pairs(probs, probs_stride, first, second, ahead, num_pairs, num_queries, words, acc):
    """acc[i] += the weighted pairs of one block, for every query; acc [num_queries, 2 * words]."""
    for i in range(0, num_queries, HEADS):
        heads, weights = num_queries - i, advance(probs, i * probs_stride)
        for d in range(0, words, WIDTH):
            a, b, later = advance(first, d), advance(second, d), advance(ahead, d)
            target = advance(acc, 2 * (i * words + d))
            if heads >= 4:
                _sums4(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)
            elif heads == 3:
                _sums3(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)
            elif heads == 2:
                _sums2(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)
            else:
                _sums1(weights, probs_stride, a, b, later, words, num_pairs, target, 2 * words)


@jit
def _softmax(scores, firsts, begin, end, padded, sinks):
    """Replace scores[:padded] by probabilities in bf16, zero outside begin:end; returns 1 / their sum. sinks [1] or
    null: a logit that joins the sum. firsts [padded] or null: with it, probabilities are words for tiles, see
    decode_tiles.store_halves."""
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
        if simd.address(firsts) != 0:
            decode_tiles.store_halves(firsts, scores, i, p)
        else:
            store(probs, i, p)
        total = simd.add(total, p)
    total = simd.spread_add1(total)
    if has_sink:
        total = simd.add(total, exp2(simd.fma(splat(read(sinks, 0)), splat(LOG2_E), shift)))
    return ONE / simd.first(total)


@jit
def _score_blocks(q, num_queries, head_stride, k_cache, v_cache, table, first, last, base, end, kv_head, num_heads,
                  num_kv_heads, block_size, head_dim, scale, scores, stride):  # fmt: skip
    """Scores of num_queries queries per KV head with the blocks first:last of a table, up to token `end`; the heads of
    a block are read one after the other. q and scores point to the first head's; those of the next are head_stride
    queries behind. A row of scores begins with token `base`."""
    words, lead = head_dim // 2, loops.lead(AHEAD, num_heads, first, last)
    for j in range(first, first + lead):
        for h in range(kv_head, kv_head + num_heads):
            loops.warm(loops.block(k_cache, table, j, num_kv_heads, h, block_size, head_dim), block_size, head_dim)
    for j in range(first, last):
        t = j * block_size
        n = min(block_size, end - t)
        for h in range(num_heads):
            k = words_at(loops.block(k_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim))
            ahead = loops.block_ahead(k_cache, v_cache, table, j + lead, first, last, num_kv_heads, kv_head + h,
                                      block_size, head_dim)  # fmt: skip
            i = h * head_stride
            _score_block(advance(q, i * words), k, words_at(ahead), n, num_queries, words, scale,
                         advance(scores, i * stride + t - base), stride)  # fmt: skip


@jit
def _add_blocks(probs, stride, num_queries, head_stride, v_cache, table, first, last, base, end, kv_head, num_heads,
                num_kv_heads, block_size, head_dim, zeros, acc):  # fmt: skip
    """Add the values of the blocks first:last, weighted by the probabilities of num_queries queries per KV head: see
    _score_blocks. zeros [head_dim // 2]: words."""
    words, lead = head_dim // 2, loops.lead(AHEAD, num_heads, first, last)
    for j in range(first, last):
        t = j * block_size
        n = min(block_size, end - t)
        for h in range(num_heads):
            v = words_at(loops.block(v_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim))
            later = min(j + lead, last - 1)
            ahead = words_at(loops.block(v_cache, table, later, num_kv_heads, kv_head + h, block_size, head_dim))
            i = h * head_stride
            weights, target = advance(probs, i * stride + (t - base) // 2), advance(acc, i * head_dim)
            _add_pairs(weights, stride, v, advance(v, words), ahead, n // 2, num_queries, words, target)
            if n % 2:  # rows behind the last token are undefined
                last_row = advance(v, (n - 1) * words)
                _add_pairs(advance(weights, n // 2), stride, last_row, zeros, last_row, 1, num_queries, words, target)


@jit
def _part(part, first_block, shared, seq_lens, behind, num_rows, block_size):
    """(first row, rows, first block, block behind the last, end of the tokens) of a part of the blocks: those that all
    rows share (-1), or the others of one row."""
    if part < 0:
        return 0, num_rows, 0, shared, shared * block_size
    end = np.int64(read(seq_lens, part)) - behind
    return part, 1, max(first_block, shared), (end + block_size - 1) // block_size, end


@jit
def _gather(q, q_stride, num_rows, num_heads, group, head_dim, gathered):
    """gathered [num_heads, num_rows, group, words] = the queries of the rows, which are q_stride elements apart."""
    size = group * head_dim
    for h in range(num_heads):
        for r in range(num_rows):
            source, target = advance(q, r * q_stride + h * size), advance(gathered, (h * num_rows + r) * size // 2)
            simd.copy_bytes(simd.address(target), simd.address(source), 2 * size)


@jit
def _write_rows(acc, inverses, num_rows, num_heads, group, head_dim, in_tiles, out, out_stride):
    """Write the sums of all rows, times the inverses of their probabilities' sums."""
    i = 0
    for h in range(num_heads):
        for r in range(num_rows):
            row = advance(out, r * out_stride + h * group * head_dim)
            for d in range(0, group * head_dim, 2 * WIDTH):
                inverse = read(inverses, i + d // head_dim)
                if in_tiles:
                    _store_turns(advance(acc, i * head_dim + d), inverse, advance(row, d))
                else:
                    _store_fours(advance(acc, i * head_dim + d), inverse, advance(row, d))
            i += group


@jit
def attend_rows(q, q_stride, out, out_stride, k_cache, v_cache, tables, table_stride, first, seq_lens, behind,
                num_rows, common, kv_head, num_heads, num_kv_heads, group, block_size, head_dim, scale, softcap, slopes,
                sinks):  # fmt: skip
    """See items.items_with. The queries of a group of heads share a read of each block, and those of all rows a read
    of each common block. The bits of a row do not depend on the other rows."""
    longest = np.int64(0)
    for r in range(num_rows):
        longest = max(longest, np.int64(read(seq_lens, r)) - behind)
    first_block, shared = first // block_size, common // block_size
    base = first_block * block_size  # the token of the first score
    words, queries = head_dim // 2, num_heads * num_rows * group
    stride = (longest - base + WIDTH - 1) // WIDTH * WIDTH
    in_tiles = decode_tiles.takes(block_size)
    room_words = decode_tiles.room_words(num_heads, num_rows * group, head_dim) if in_tiles else 0
    lower_words = queries * stride if in_tiles else 0
    scratch = np.empty(queries * (stride + head_dim + words + 1) + words + room_words + lower_words, np.float32)
    scores = simd.pointer_f32(scratch.ctypes.data)  # [num_heads, num_rows, group, stride]
    acc = advance(scores, queries * stride)  # [num_heads, num_rows, group, head_dim]
    zeros = words_at(advance(acc, queries * head_dim))
    gathered = advance(zeros, words)  # the queries: [num_heads, num_rows, group, words]
    room = advance(gathered, queries * words)
    inverses = simd.pointer_f32(simd.address(advance(room, room_words)))
    firsts = advance(inverses, queries)  # as scores
    sizes = np.zeros(amx.CONFIGURATION, np.int64)
    state = simd.pointer_i64(sizes.ctypes.data)
    if in_tiles:
        amx.configure(state, min(amx.ROWS, group))
    for i in range(0, queries * head_dim + words, WIDTH):
        store(acc, i, splat(ZERO))
    if num_rows == 1:
        gathered = words_at(q)
    else:
        _gather(q, q_stride, num_rows, num_heads, group, head_dim, gathered)
    heads = (kv_head, num_heads, num_kv_heads, block_size, head_dim)
    rows = (first_block, shared, seq_lens, behind, num_rows, block_size)  # the arguments of _part
    for part in range(-1 if shared > 0 else 0, num_rows):
        r, count, begin, last, end = _part(part, *rows)
        i = r * group
        if in_tiles:
            decode_tiles.score_blocks(advance(gathered, i * words), count * group, num_rows * group, k_cache, v_cache,
                                      advance(tables, r * table_stride), begin, last, base, end, *heads, scale,
                                      advance(scores, i * stride), stride, AHEAD, room)  # fmt: skip
        else:
            _score_blocks(advance(gathered, i * words), count * group, num_rows * group, k_cache, v_cache,
                          advance(tables, r * table_stride), begin, last, base, end, *heads, scale,
                          advance(scores, i * stride), stride)  # fmt: skip
    i = 0
    for h in range(num_heads):
        for r in range(num_rows):
            end = np.int64(read(seq_lens, r)) - behind - base
            padded = (end + WIDTH - 1) // WIDTH * WIDTH
            for g in range(h * group, (h + 1) * group):
                at = advance(scores, i * stride)
                if softcap != 0 or simd.address(slopes) != 0:
                    loops.adjust_scores(at, 1, 1, first - base, end, softcap, loops.heads_of(slopes, g))
                lower = advance(firsts, i * stride) if in_tiles else simd.pointer_f32(0)
                write(inverses, i, _softmax(at, lower, first - base, end, padded, loops.heads_of(sinks, g)))
                i += 1
    probs = words_at(scores)
    for part in range(-1 if shared > 0 else 0, num_rows):
        r, count, begin, last, end = _part(part, *rows)
        i = r * group
        if in_tiles:
            decode_tiles.add_blocks(state, advance(firsts, i * stride), advance(scores, i * stride), stride,
                                    count * group, num_rows * group, v_cache, advance(tables, r * table_stride), begin,
                                    last, base, end, *heads, advance(acc, i * head_dim), AHEAD, room)  # fmt: skip
        else:
            _add_blocks(advance(probs, i * stride), stride, count * group, num_rows * group, v_cache,
                        advance(tables, r * table_stride), begin, last, base, end, *heads, zeros,
                        advance(acc, i * head_dim))  # fmt: skip
    _write_rows(acc, inverses, num_rows, num_heads, group, head_dim, in_tiles, out, out_stride)
    simd.keep(scratch)
    simd.keep(sizes)


_attend_items = items_with(attend_rows)


@parallel_kernel(ARGUMENTS)
def attention_pairs_bf16(args):
    pointer = simd.pointer_bf16
    _attend_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]))
    if HAS_BF16_TILES:
        amx.release()


def supports_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """True for KV heads that serve several query heads, and head_dim a multiple of 32, on such a processor."""
    return HAS_BF16_DOT and num_heads > num_kv_heads and head_dim % MULTIPLE == 0


def supports(q: Tensor, k_cache: Tensor) -> bool:
    """True for such heads in bf16, with a cache in bf16."""
    return q.dtype == k_cache.dtype == torch.bfloat16 and supports_heads(q.shape[1], k_cache.shape[1], q.shape[2])
