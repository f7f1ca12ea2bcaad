"""The scores of decode attention in tiles of AMX (kernels/cpu/amx.py), for bf16_pairs.py.

A query row has few queries per KV head, but a block has sixteen keys and more. So scores are multiplied the other way
round: sixteen keys, read where they lie in the cache, by up to sixteen queries; then they are transposed. A score does
not depend on the queries that share its tile. Values are weighted by vectors: their pairs would have to be written to
memory for the tiles, and a row alone would take longer.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import amx, simd
from kernels.cpu.attention import rows as loops
from kernels.cpu.attention.transpose import transposed, transposed_quarters
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.dots import broadcast, never, vector_at, words_at
from kernels.cpu.features import HAS_BF16_TILES
from kernels.cpu.parallel import jit
from kernels.cpu.simd import I32Pointer, advance

SQUARE = amx.ROWS * amx.ROWS  # scores of sixteen keys and queries
FEW = 4  # queries that are transposed in quarters of vectors: a third of the instructions

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
    """True if keys in blocks of this size are multiplied in tiles."""
    return HAS_BF16_TILES and block_size % amx.ROWS == 0


@jit
def room_words(num_heads, num_queries, head_dim):
    """32-bit words that score_blocks needs for num_heads KV heads, with num_queries queries each."""
    return num_heads * ((num_queries + amx.ROWS - 1) // amx.ROWS) * (SQUARE + amx.ROWS * head_dim // 2)


@jit
def _score_blocks(q, num_queries, head_stride, k_cache, v_cache, table, first, last, base, end, kv_head, num_heads,
                  num_kv_heads, block_size, head_dim, scale, scores, stride, ahead_blocks, room):  # fmt: skip
    """As _score_blocks in bf16_pairs.py; rows of scores are written in sixteens. The tiles have the sizes for 16 rows.
    ahead_blocks: blocks of a head to prefetch; room: see room_words."""
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


score_blocks = _score_blocks if HAS_BF16_TILES else never
