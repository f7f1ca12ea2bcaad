"""The products of decode attention in tiles of AMX (kernels/cpu/amx.py), for bf16_pairs.py.

A query row has few queries per KV head, but a block has sixteen tokens and more. Keys and values are read where they
lie in the cache: scores are multiplied the other way round, sixteen keys by up to sixteen queries, and then transposed;
values are weighted as words of two numbers (amx.py). Neither the scores nor the sums of a row depend on the rows that
share its tiles.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import amx, simd
from kernels.cpu.attention import rows as loops
from kernels.cpu.attention.transpose import transposed, transposed_quarters
from kernels.cpu.codes import WIDTH, F32Pointer, Vec
from kernels.cpu.dots import broadcast, never, vector_at, words_at
from kernels.cpu.features import HAS_BF16_TILES
from kernels.cpu.parallel import jit
from kernels.cpu.simd import I32Pointer, advance, splat, store

SQUARE = amx.ROWS * amx.ROWS  # scores of sixteen keys and queries
CHUNK = 64  # tokens whose values are added before the next head's
FEW = 4  # queries that are transposed in quarters of vectors: a third of the instructions

ZERO = np.float32(0)

_F32V, _I32V, _I64 = ir.VectorType(ir.FloatType(), WIDTH), ir.VectorType(ir.IntType(32), WIDTH), ir.IntType(64)


def _number(value):
    return ir.Constant(_I64, value)


def _indices(places):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(places))


@intrinsic
def _transpose_queries(typingctx, queries, stride, count, target):
    """target[w, i] = word w of query i, for sixteen words of `count` queries, 1 to 16, whose rows are `stride` words
    apart. Columns behind those of the queries are undefined."""

    def codegen(context, builder, sig, args):
        queries, stride, count, target = args
        last = builder.sub(count, _number(1))

        def row(i):
            there = builder.icmp_signed("<", _number(i), count)
            index = builder.mul(builder.select(there, _number(i), last), stride)
            return builder.load(vector_at(builder, queries, index, _I32V), align=2)

        def put(vector, word):
            builder.store(vector, vector_at(builder, target, _number(word * WIDTH), vector.type), align=4)

        with builder.if_else(builder.icmp_signed("<=", count, _number(FEW))) as (few, many):
            with few:
                for i, vector in enumerate(transposed_quarters(builder, [row(i) for i in range(FEW)])):
                    for lane in range(4):
                        place = _indices(range(4 * lane, 4 * lane + 4))
                        put(builder.shuffle_vector(vector, vector, place), 4 * lane + i)
            with many:
                for i, vector in enumerate(transposed(builder, [row(i) for i in range(WIDTH)])):
                    put(vector, i)
        return context.get_dummy_value()

    return types.void(I32Pointer, types.int64, types.int64, I32Pointer), codegen


@intrinsic
def _put_scores(typingctx, square, scale, count, scores, stride):
    """scores[i, :16] = scale * square[:, i] for `count` queries, 1 to 16; square [16, 16]."""

    def codegen(context, builder, sig, args):
        square, scale, count, scores, stride = args
        factor = broadcast(builder, scale)

        def put(vectors):
            for i, vector in enumerate(vectors):
                with builder.if_then(builder.icmp_signed("<", _number(i), count)):
                    place = vector_at(builder, scores, builder.mul(stride, _number(i)), _F32V)
                    builder.store(builder.fmul(vector, factor), place, align=4)

        with builder.if_else(builder.icmp_signed("<=", count, _number(FEW))) as (few, many):
            with few:
                four = ir.VectorType(ir.FloatType(), 4)
                rows = [
                    builder.load(vector_at(builder, square, _number(t * WIDTH), four), align=4) for t in range(WIDTH)
                ]
                vectors = []
                for i in range(4):  # lanes of tokens i, 4 + i, 8 + i and 12 + i
                    eights = [builder.shuffle_vector(rows[j + i], rows[j + 4 + i], _indices(range(8))) for j in (0, 8)]
                    vectors.append(builder.shuffle_vector(*eights, _indices(range(WIDTH))))
                put(transposed_quarters(builder, vectors))
            with many:
                places = [vector_at(builder, square, _number(t * WIDTH), _F32V) for t in range(WIDTH)]
                put(transposed(builder, [builder.load(place, align=4) for place in places]))
        return context.get_dummy_value()

    return types.void(F32Pointer, types.float32, types.int64, F32Pointer, types.int64), codegen


@jit
def takes(block_size):
    """True if blocks of this size are multiplied in tiles."""
    return HAS_BF16_TILES and block_size % amx.ROWS == 0


@jit
def room_words(num_heads, num_queries, head_dim):
    """32-bit words that score_blocks needs for num_heads KV heads, with num_queries queries each."""
    return num_heads * ((num_queries + amx.ROWS - 1) // amx.ROWS) * (SQUARE + amx.ROWS * head_dim // 2)


@jit
def _score_blocks(q, num_queries, head_stride, k_cache, v_cache, table, first, last, base, end, kv_head, num_heads,
                  num_kv_heads, block_size, head_dim, scale, scores, stride, ahead_blocks, room):  # fmt: skip
    """As _score_blocks in bf16_pairs.py; rows of scores are written in sixteens. The tiles have sizes for up to 16
    rows. ahead_blocks: blocks of a head to prefetch; room: see room_words."""
    words, lead = head_dim // 2, loops.lead(ahead_blocks, num_heads, first, last)
    tiles = (num_queries + amx.ROWS - 1) // amx.ROWS
    squares, queries = simd.pointer_f32(simd.address(room)), advance(room, num_heads * tiles * SQUARE)
    for h in range(num_heads):
        for tile in range(tiles):
            i = tile * amx.ROWS
            source, target = (h * head_stride + i) * words, (h * tiles + tile) * amx.ROWS * words
            for w in range(0, words, amx.DEPTH):
                _transpose_queries(advance(q, source + w), words, min(amx.ROWS, num_queries - i),
                                   advance(queries, target + w * amx.ROWS))  # fmt: skip
    for j in range(first, first + lead):
        for h in range(kv_head, kv_head + num_heads):
            loops.warm(loops.block(k_cache, table, j, num_kv_heads, h, block_size, head_dim), block_size, head_dim)
    for j in range(first, last):
        for t in range(0, min(block_size, end - j * block_size), amx.ROWS):
            for h in range(num_heads):
                k = words_at(loops.block(k_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim))
                ahead = loops.block_ahead(k_cache, v_cache, table, j + lead, first, last, num_kv_heads, kv_head + h,
                                          block_size, head_dim)  # fmt: skip
                for tile in range(h * tiles, (h + 1) * tiles):
                    amx.multiply_keys(advance(k, t * words), words, advance(queries, tile * amx.ROWS * words),
                                      words // amx.DEPTH, advance(squares, tile * SQUARE))  # fmt: skip
                loops.warm(advance(ahead, t * head_dim), amx.ROWS, head_dim)
            for h in range(num_heads):  # late enough for the tiles to be in memory
                for tile in range(tiles):
                    i = tile * amx.ROWS
                    place = (h * head_stride + i) * stride + j * block_size + t - base
                    _put_scores(advance(squares, (h * tiles + tile) * SQUARE), scale, min(amx.ROWS, num_queries - i),
                                advance(scores, place), stride)  # fmt: skip


@intrinsic
def store_halves(typingctx, firsts, seconds, index, probs):
    """Sixteen probabilities as words, rounded to bf16: seconds[index :] in the upper half, firsts[index :] in the
    lower."""

    def codegen(context, builder, sig, args):
        firsts, seconds, index, probs = args
        lower = builder.zext(simd.round_to_bf16(builder, probs), _I32V)
        upper = builder.shl(lower, ir.Constant(_I32V, [16] * WIDTH))
        for target, words in ((firsts, lower), (seconds, upper)):
            builder.store(words, vector_at(builder, target, index, _I32V), align=4)
        return context.get_dummy_value()

    return types.void(F32Pointer, F32Pointer, types.int64, Vec), codegen


@jit
def _whole_tile(v, num_rows, words, spare):
    """Sixteen rows of values: where they lie, or with zeros behind the first num_rows, because rows behind the last
    token are undefined and may hold NaN."""
    if num_rows >= amx.ROWS:
        return v
    simd.copy_bytes(simd.address(spare), simd.address(v), 4 * num_rows * words)
    numbers = simd.pointer_f32(simd.address(spare))
    for i in range(num_rows * words, amx.ROWS * words, WIDTH):
        store(numbers, i, splat(ZERO))
    return spare


@jit
def _add_head(firsts, seconds, stride, v_cache, table, begin, stop, base, end, kv_head, num_kv_heads, block_size,
              head_dim, acc, spare):  # fmt: skip
    """acc += the weighted values of the blocks begin:stop of one KV head, for the queries of a tile."""
    words = head_dim // 2
    for d in range(0, head_dim, 64):
        wide, sums = head_dim - d >= 64, advance(acc, d)
        if wide:
            amx.load4(sums, head_dim)
        else:
            amx.load2(sums, head_dim)
        for j in range(begin, stop):
            v = words_at(loops.block(v_cache, table, j, num_kv_heads, kv_head, block_size, head_dim))
            first = j * block_size
            for t in range(first, min(first + block_size, end), amx.ROWS):
                rows = _whole_tile(advance(v, (t - first) * words), end - t, words, spare)
                lower, upper = advance(firsts, t - base), advance(seconds, t - base)
                if wide:
                    amx.weigh4(lower, upper, stride, advance(rows, d // 2), words)
                else:
                    amx.weigh2(lower, upper, stride, advance(rows, d // 2), words)
        if wide:
            amx.store4(sums, head_dim)
        else:
            amx.store2(sums, head_dim)


@jit
def _add_blocks(state, firsts, seconds, stride, num_queries, head_stride, v_cache, table, first, last, base, end,
                kv_head, num_heads, num_kv_heads, block_size, head_dim, acc, ahead_blocks, spare):  # fmt: skip
    """Add the values of the blocks first:last, weighted by the probabilities of num_queries queries per KV head, see
    store_halves. acc: of 32 elements the even ones, then the odd ones. spare [16, head_dim / 2]: words."""
    lead, per_chunk = loops.lead(ahead_blocks, num_heads, first, last), max(1, CHUNK // block_size)
    tiles = (num_queries + amx.ROWS - 1) // amx.ROWS
    size = (num_queries + tiles - 1) // tiles
    for begin in range(first, last, per_chunk):
        stop = min(last, begin + per_chunk)
        for tile in range(tiles):
            i = tile * size
            amx.configure(state, min(size, num_queries - i))
            for h in range(num_heads):
                for j in range(begin + lead, min(stop + lead, last) if tile == 0 else 0):
                    loops.warm(loops.block(v_cache, table, j, num_kv_heads, kv_head + h, block_size, head_dim),
                               block_size, head_dim)  # fmt: skip
                at = h * head_stride + i
                lower, upper, sums = advance(firsts, at * stride), advance(seconds, at * stride), at * head_dim
                _add_head(lower, upper, stride, v_cache, table, begin, stop, base, end, kv_head + h, num_kv_heads,
                          block_size, head_dim, advance(acc, sums), spare)  # fmt: skip


score_blocks, add_blocks = (_score_blocks, _add_blocks) if HAS_BF16_TILES else (never, never)
