"""Prefill attention on a CPU, in bf16 or fp32: tiles of query rows against tiles of keys.

FlashAttention's loop (Dao 2023, algorithm 1) for one KV head: a tile of keys is repacked once and then serves every
query row of the tile and every head of the group. Tiles of keys start at multiples of their size, and a tile outside of
a row's window leaves its sums as they are, so a row's result does not depend on the chunks of the prompt.

bf16 is multiplied in pairs, 32-bit "words" of two numbers (kernels/cpu/dots.py); a word of fp32 is one number. Codes of
a quantised cache are decoded to the dtype of the queries as a tile is repacked, which costs a tenth of the arithmetic.
Decode (launch.py) multiplies them in fp32.
"""

from functools import partial, reduce

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu import amx, codes, simd
from kernels.cpu.attention.rows import block, find_sequence, heads_of, words
from kernels.cpu.attention.transpose import transposed
from kernels.cpu.codes import WIDTH, F32Pointer, Vec
from kernels.cpu.dots import broadcast, exp2_fp32, multiply, power_of_two, vector_at, words_at
from kernels.cpu.elementwise.activations import tanh
from kernels.cpu.features import HAS_BF16_TILES, MULTIPLIES_PAIRS
from kernels.cpu.parallel import empty_rows, jit, next_item, parallel_kernel
from kernels.cpu.simd import I32Pointer, advance, load, load_pair, read, splat, store, write
from kernels.kv_format import kv_format_of

COLUMNS = 64  # AMX computes as many numbers of an output at a time
KEYS = 64  # keys of a tile: four accumulators a row, and both repacked tiles (16 KiB at head_dim 64) stay in L1
ROWS = 4  # rows of a microkernel: with KEYS sixteen accumulators, half the registers
# (token, head) pairs of a work item: repacking keys and values then costs a few per cent of the arithmetic.
QUERIES = 256 if HAS_BF16_TILES else 96
NEG_INF = np.float32(-np.inf)
MOST_EXPONENT = np.float32(8)  # probabilities that are not yet divided by their sum are at most 2 ** 8
UNSEEN = np.float32(1e30)  # the shift of a row without keys: every score is above MOST_EXPONENT, -inf remains -inf
ARGUMENTS = "11q1d9q1d3q"  # of the kernels
ZERO, ONE, LOG2_E = np.float32(0), np.float32(1), np.float32(np.log2(np.e))

_I16V, _I32V = (ir.VectorType(scalar, WIDTH) for scalar in (ir.IntType(16), ir.IntType(32)))
_F32V, _I64 = ir.VectorType(ir.FloatType(), WIDTH), ir.IntType(64)

_score1, _score2, _score3, _score4 = (
    multiply(ROWS, vectors, f"Scores of four rows and {vectors * WIDTH} keys.", adds=False)
    for vectors in range(1, KEYS // WIDTH + 1)
)
_multiply_values = multiply(ROWS, 2, "Thirty-two columns of four rows of the output.")


@intrinsic
def _factors(typingctx, pointer):
    """A pointer to bf16 or fp32 as `multiply` takes it."""
    result = F32Pointer if pointer == F32Pointer else I32Pointer

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(pointer), codegen


@jit
def _uses_amx(pointer):
    """True if numbers of this dtype are multiplied in tiles of AMX (kernels/cpu/amx.py)."""
    return HAS_BF16_TILES and simd.is_bf16(pointer)


@jit
def _num_words(pointer, count):
    """Words of `count` numbers."""
    return count // 2 if simd.is_bf16(pointer) else count


@intrinsic
def _transpose(typingctx, source, source_stride, target, target_stride):
    """target[i, j] = source[j, i] for sixteen rows of sixteen 32-bit words."""

    def codegen(context, builder, sig, args):
        source, source_stride, target, target_stride = args
        at = [builder.mul(source_stride, ir.Constant(_I64, i)) for i in range(WIDTH)]
        rows = [builder.load(vector_at(builder, source, index, _I32V), align=2) for index in at]
        for i, row in enumerate(transposed(builder, rows)):
            index = builder.mul(target_stride, ir.Constant(_I64, i))
            builder.store(row, vector_at(builder, target, index, _I32V), align=4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(I32Pointer, i64, I32Pointer, i64), codegen


@intrinsic
def _interleave(typingctx, a, b, target):
    """Sixteen words: element i of bf16 row `a`, given as words, in the low half, element i of `b` in the high half."""

    def codegen(context, builder, sig, args):
        zero = ir.Constant(_I64, 0)
        low, high = (
            builder.zext(builder.load(vector_at(builder, row, zero, _I16V), align=2), _I32V) for row in args[:2]
        )
        words = builder.or_(low, builder.shl(high, ir.Constant(_I32V, [16] * WIDTH)))
        builder.store(words, vector_at(builder, args[2], zero, _I32V), align=4)
        return context.get_dummy_value()

    return types.void(I32Pointer, I32Pointer, I32Pointer), codegen


def _lanes(comparison, doc):
    """An intrinsic: the lanes whose number compares so with `count` (an int64 of any size); -inf in the others."""

    def codegen(context, builder, sig, args):
        vector, count = args
        lanes = ir.Constant(ir.VectorType(_I64, WIDTH), list(range(WIDTH)))
        kept = builder.icmp_signed(comparison, lanes, broadcast(builder, count))
        return builder.select(kept, vector, ir.Constant(_F32V, [float("-inf")] * WIDTH))

    def typing(typingctx, vector, count):
        return Vec(Vec, types.int64), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


_first_lanes = _lanes("<", "The first `count` lanes.")
_lanes_from = _lanes(">=", "The lanes from number `count` on.")


@intrinsic
def _lane_numbers(typingctx):
    """0, 1, ... 15"""
    numbers = ir.Constant(_F32V, [float(lane) for lane in range(WIDTH)])
    return Vec(), lambda context, builder, sig, args: numbers


@jit
def _decode_row(row, parameters, head_dim, target):
    """target[:head_dim] = the numbers of a row of codes, in order. parameters: the row's word."""
    scale, least = splat(read(parameters, 0)), splat(ZERO)
    if codes.is_int4(row):
        halves = simd.pointer_bf16(simd.address(parameters))
        scale, least = splat(read(halves, 0)), splat(read(halves, 1))
    for d in range(0, head_dim, 2 * WIDTH):
        first, second = load_pair(row, d)
        place, step = (d // 2, head_dim // 2) if codes.is_int4(row) else (d, WIDTH)
        store(target, place, simd.fma(first, scale, least))
        store(target, place + step, simd.fma(second, scale, least))


@jit
def _rows_of(cache, table, token, num_tokens, kv_head, num_kv_heads, block_size, head_dim, decoded):
    """Pointer to the keys or values of num_tokens tokens of a block: in the cache, or in `decoded`, whose dtype they
    get."""
    page = block(cache, table, token // block_size, num_kv_heads, kv_head, block_size, head_dim)
    first = token % block_size
    if codes.bits(cache) == 0:
        return simd.pointer_as(decoded, simd.address(advance(page, first * head_dim)))
    for t in range(first, first + num_tokens):
        row = advance(page, t * head_dim * codes.bits(cache) // 8)
        _decode_row(row, advance(words(page, block_size, head_dim), t), head_dim,
                    advance(decoded, (t - first) * head_dim))  # fmt: skip
    return decoded


@jit
def _pack_keys(rows, words, packed):
    """packed[i, t] = word i of key t, for sixteen keys of `words` words."""
    for i in range(0, words, WIDTH):
        _transpose(advance(words_at(rows), i), words, advance(words_at(packed), i * KEYS), KEYS)


@jit
def _pack_values(rows, num_tokens, head_dim, zeros, packed):
    """packed[i, d] = element d of the values of tokens 2i and 2i + 1, in fp32 of token i. Rows behind num_tokens are
    undefined."""
    if simd.is_bf16(rows):
        for t in range(0, num_tokens, 2):
            second = advance(rows, (t + 1) * head_dim) if t + 1 < num_tokens else zeros
            for d in range(0, head_dim, WIDTH):
                pair = advance(words_at(packed), t // 2 * head_dim + d)
                _interleave(words_at(advance(rows, t * head_dim + d)), words_at(advance(second, d)), pair)
    else:
        simd.copy_bytes(simd.address(packed), simd.address(rows), 4 * num_tokens * head_dim)


@jit
def _amx_score(queries, keys, words, width, scores):
    """As _score, sixteen rows and a multiple of 32 keys."""
    q, k = simd.pointer_i32(simd.address(queries)), simd.pointer_i32(simd.address(keys))
    if width == KEYS:
        amx.set4(q, words, k, KEYS, words // amx.DEPTH, scores, KEYS, k, 0)
    else:
        amx.set2(q, words, k, KEYS, words // amx.DEPTH, scores, KEYS, k, 0)


@jit
def _amx_add_values(probs, values, head_dim, width, acc):
    """acc[r, :] += probs[r, :width] @ values for sixteen rows and a multiple of 32 keys."""
    p, v = simd.pointer_i32(simd.address(probs)), simd.pointer_i32(simd.address(values))
    steps, whole = width // 2 // amx.DEPTH, head_dim // COLUMNS * COLUMNS
    for d in range(0, whole, COLUMNS):
        amx.add4(p, KEYS // 2, advance(v, d), head_dim, steps, advance(acc, d), head_dim, v, 0)
    if whole < head_dim:
        amx.add2(p, KEYS // 2, advance(v, whole), head_dim, steps, advance(acc, whole), head_dim, v, 0)


@jit
def _score(queries, keys, words, width, scores):
    """The scores of four rows of `words` words and the first `width` keys of a tile, a multiple of sixteen."""
    if width == 4 * WIDTH:
        _score4(queries, words, keys, KEYS, words, scores, KEYS)
    elif width == 3 * WIDTH:
        _score3(queries, words, keys, KEYS, words, scores, KEYS)
    elif width == 2 * WIDTH:
        _score2(queries, words, keys, KEYS, words, scores, KEYS)
    else:
        _score1(queries, words, keys, KEYS, words, scores, KEYS)


@jit
def _cap(scores, rows, scale, softcap):
    """Apply the soft cap to rows of a tile: score * scale becomes softcap * tanh(score * scale / softcap). The scores
    are multiplied by the scale later."""
    shrink, stretch = splat(scale / softcap), splat(softcap / scale)
    for i in range(0, rows * KEYS, WIDTH):
        store(scores, i, simd.mul(tanh(simd.mul(load(scores, i), shrink)), stretch))


@jit
def _mask(scores, skipped, num_keys, slope):
    """Replace the scores of a row outside of the keys skipped:num_keys of a tile by -inf. slope: that of ALiBi divided
    by the scale, or 0; with ALiBi the row itself is key num_keys - 1."""
    for i in range(0, KEYS, WIDTH):
        row = load(scores, i)
        if slope != 0:
            behind = simd.add(_lane_numbers(), splat(np.float32(i + 1 - num_keys)))
            row = simd.fma(splat(slope), behind, row)
        store(scores, i, _lanes_from(_first_lanes(row, num_keys - i), skipped - i))


@intrinsic
def _probabilities(typingctx, scores, scale, shifts, probs, totals):
    """probs[r, t] = 2 ** (scores[r, t] * scale + shifts[r]) for ROWS rows and KEYS keys; totals[r], a Vec, is raised by
    their sums. Returns True, and leaves totals as they are, if an exponent is above MOST_EXPONENT.

    All rows in one block of instructions: the processor computes them side by side.
    """
    bf16 = probs != F32Pointer

    def codegen(context, builder, sig, args):
        scores, scale, shifts, probs, totals = args
        scales, exponents = broadcast(builder, scale), {}
        for r in range(ROWS):
            shift = broadcast(builder, builder.load(builder.gep(shifts, [ir.Constant(_I64, r)])))
            for t in range(0, KEYS, WIDTH):
                place = vector_at(builder, scores, ir.Constant(_I64, r * KEYS + t), _F32V)
                score = builder.load(place, align=4)
                exponents[r, t] = simd.call(builder, "llvm.fma.v16f32", _F32V, score, scales, shift)
        largest = reduce(partial(simd.larger_of, builder), exponents.values())
        is_above = builder.fcmp_ordered(">", largest, ir.Constant(_F32V, [MOST_EXPONENT] * WIDTH))
        above = builder.icmp_unsigned("!=", builder.bitcast(is_above, ir.IntType(WIDTH)), ir.IntType(WIDTH)(0))
        powers = {cell: power_of_two(builder, exponent, bf16) for cell, exponent in exponents.items()}
        for (r, t), power in powers.items():
            rounded = simd.round_to_bf16(builder, power) if bf16 else power
            place = vector_at(builder, probs, ir.Constant(_I64, r * KEYS + t), rounded.type)
            builder.store(rounded, place, align=2 if bf16 else 4)
        with builder.if_then(builder.not_(above), likely=True):
            for r in range(ROWS):
                total = vector_at(builder, totals, ir.Constant(_I64, r * WIDTH), _F32V)
                parts = [powers[r, t] for t in range(0, KEYS, WIDTH)]
                builder.store(reduce(builder.fadd, parts, builder.load(total, align=4)), total, align=4)
        return above

    return types.boolean(F32Pointer, types.float32, F32Pointer, probs, F32Pointer), codegen


@jit
def _raise_top(scores, scale, shift, acc, total, head_dim):
    """Make the exponent of a row's largest score 0 if it is above MOST_EXPONENT: lower the shift, and acc [head_dim]
    and the total, which are sums over the keys so far, with it."""
    top = splat(NEG_INF)
    for t in range(0, KEYS, WIDTH):
        top = simd.larger(load(scores, t), top)
    top, before = simd.spread_max1(top), read(shift, 0)
    # Rounded once, as in _probabilities: a row that is above there, but not here, would lose the tile's sums.
    if simd.first(simd.fma(top, splat(scale), splat(before))) <= MOST_EXPONENT:
        return
    now = simd.first(top) * -scale
    shrink = exp2_fp32(splat(now - before))
    for d in range(0, head_dim, WIDTH):
        store(acc, d, simd.mul(load(acc, d), shrink))
    store(total, 0, simd.mul(load(total, 0), shrink))
    write(shift, 0, now)


@jit
def _softmax(scores, scale, shifts, probs, acc, totals, head_dim):
    """The online softmax of ROWS rows over a tile of keys, in powers of two.

    The exponents of a row are relative to a score that was the largest at some time, and that changes only where one
    exceeds it by MOST_EXPONENT: fp32 and bf16 have the range, and most tiles need neither a maximum per row nor new
    sums. (FlashAttention-4 rescales as rarely, and computes powers of two by a cubic polynomial, too.)
    """
    if _probabilities(scores, scale, shifts, probs, totals):
        for r in range(ROWS):
            _raise_top(advance(scores, r * KEYS), scale, advance(shifts, r), advance(acc, r * head_dim),
                       advance(totals, r * WIDTH), head_dim)  # fmt: skip
        _probabilities(scores, scale, shifts, probs, totals)


@jit
def _skipped(first_key, seen, window, chunk):
    """The keys of a tile from first_key on that a row does not see, because its window or chunk begins later; the row
    itself is key seen - 1 of the tile."""
    skipped = seen - window if window > 0 else 0
    if chunk > 0:
        position = first_key + seen - 1
        skipped = max(skipped, position // chunk * chunk - first_key)
    return skipped


@jit
def _attend_keys(queries, keys, values, scores, probs, acc, shifts, totals, num_rows, group, first_key, num_seen,
                 num_keys, ahead, window, chunk, slopes, scale, softcap, head_dim):  # fmt: skip
    """Add a tile of keys, num_keys of the sequence, to the rows of a tile of queries. Row r of num_rows is key
    num_seen + r - num_rows of the tile and sees the keys up to `ahead` keys behind it, without those before its window
    or chunk."""
    words, last = _num_words(probs, head_dim), num_rows * group - 1
    in_tiles = _uses_amx(probs)
    band = amx.ROWS if in_tiles else ROWS
    unseen = max(0, num_rows - num_seen - ahead) * group
    masks = min(num_keys, num_seen + 1 - num_rows + ahead) < KEYS or _skipped(first_key, num_seen, window, chunk) > 0
    masks = masks or simd.address(slopes) != 0
    most_seen = KEYS
    for m in range(unseen // band * band, last + 1, band):
        if masks:
            if _skipped(first_key, num_seen + m // group + 1 - num_rows, window, chunk) >= KEYS:
                continue
            of_last = num_seen + min(m + band - 1, last) // group + 1 - num_rows + ahead
            most_seen = min(KEYS, num_keys, of_last)
        width = (most_seen + WIDTH - 1) // WIDTH * WIDTH  # at the diagonal, half of the tile is unseen
        if in_tiles:
            width = (most_seen + 2 * WIDTH - 1) // (2 * WIDTH) * 2 * WIDTH
            _amx_score(advance(queries, m * words), keys, words, width, scores)
        else:
            _score(advance(queries, m * words), keys, words, width, scores)
        if softcap != 0:
            _cap(scores, band, scale, softcap)
        if masks:
            for r in range(band):
                row = min(m + r, last)
                own = num_seen + row // group + 1 - num_rows
                slope = read(slopes, row % group) / scale if simd.address(slopes) != 0 else ZERO
                seen = min(num_keys, own + ahead)
                _mask(advance(scores, r * KEYS), _skipped(first_key, own, window, chunk), seen, slope)
        for r in range(0, band, ROWS):
            _softmax(advance(scores, r * KEYS), scale * LOG2_E, advance(shifts, m + r), advance(probs, r * KEYS),
                     advance(acc, (m + r) * head_dim), advance(totals, (m + r) * WIDTH), head_dim)  # fmt: skip
        if in_tiles:
            _amx_add_values(probs, values, head_dim, width, advance(acc, m * head_dim))
            continue
        depth = _num_words(probs, most_seen + 1) if simd.is_bf16(probs) else most_seen
        for d in range(0, head_dim, 2 * WIDTH):
            _multiply_values(_factors(probs), _num_words(probs, KEYS), advance(values, d), head_dim, depth,
                             advance(acc, m * head_dim + d), head_dim)  # fmt: skip


@jit
def _inverse_with_sink(top, total, sink):
    """1 / (total + exp(sink - top)), where no exponential overflows."""
    above = max(top, sink)
    shrink, share = simd.exp(splat(top - above)), simd.exp(splat(sink - above))
    return simd.div(shrink, simd.fma(splat(total), shrink, share))


@jit
def _attend_tile(args, q, k_cache, v_cache, out, table, kv_head, first_row, num_rows, seq_len, end, ahead):
    """Attention of num_rows rows of one sequence for all heads of kv_head. The last row is token seq_len - 1; a row
    sees up to `ahead` tokens behind itself, of the first `end` tokens of the sequence."""
    num_kv_heads, group, block_size, head_dim, q_stride = args[7], args[8], args[9], args[10], args[12]
    scale, words, rows = np.float32(simd.as_float(args[13])), _num_words(q, head_dim), num_rows * group
    in_tiles = _uses_amx(q)
    band = amx.ROWS if in_tiles else ROWS
    padded = (rows + band - 1) // band * band
    sizes = padded * (head_dim + words + WIDTH + 1) + KEYS * (2 * words + 2 * band) + words + WIDTH * words
    scratch = np.zeros(sizes + WIDTH, np.float32)
    keys = _factors(simd.pointer_as(q, (scratch.ctypes.data + 63) // 64 * 64))
    values = advance(keys, KEYS * words)
    scores = simd.pointer_f32(simd.address(advance(values, KEYS * words)))
    acc = advance(scores, KEYS * band)
    totals = advance(acc, padded * head_dim)
    shifts = advance(totals, padded * WIDTH)
    probs = simd.pointer_as(q, simd.address(advance(shifts, padded)))
    queries = _factors(advance(probs, KEYS * band))
    zeros = simd.pointer_as(q, simd.address(advance(queries, padded * words)))
    decoded = advance(zeros, head_dim)
    for m in range(rows):
        row = (first_row + m // group) * q_stride + (kv_head * group + m % group) * head_dim
        simd.copy_bytes(simd.address(advance(queries, m * words)), simd.address(advance(q, row)), 4 * words)
    for m in range(padded):
        write(shifts, m, UNSEEN)
    window, chunk, softcap = args[21], args[22], np.float32(simd.as_float(args[23]))
    slopes = heads_of(simd.pointer_f32(args[20]), kv_head * group)
    begin = max(0, _skipped(0, seq_len + 1 - num_rows, window, chunk)) // KEYS * KEYS
    for first_key in range(begin, end, KEYS):
        num_keys = end - first_key
        for t in range(0, min(KEYS, num_keys), WIDTH):
            n = min(WIDTH, num_keys - t)
            where = (table, first_key + t, n, kv_head, num_kv_heads, block_size, head_dim, decoded)
            _pack_keys(_rows_of(k_cache, *where), words, advance(keys, t))
            _pack_values(_rows_of(v_cache, *where), n, head_dim, zeros, advance(values, t * words))
        _attend_keys(queries, keys, values, scores, probs, acc, shifts, totals, num_rows, group, first_key,
                     seq_len - first_key, num_keys, ahead, window, chunk, slopes, scale, softcap,
                     head_dim)  # fmt: skip
    for m in range(rows):
        total = simd.first(simd.spread_add1(load(totals, m * WIDTH)))
        inverse = splat(ONE / total)
        if args[19] != 0:
            sink = read(simd.pointer_f32(args[19]), kv_head * group + m % group)
            inverse = _inverse_with_sink(-read(shifts, m) / LOG2_E, total, sink)
        row = (first_row + m // group) * args[25] + (kv_head * group + m % group) * head_dim
        for d in range(0, head_dim, WIDTH):
            store(out, row + d, simd.mul(load(acc, m * head_dim + d), inverse))
    simd.keep(scratch)


@jit
def _attend_items(args, q, k_cache, v_cache, out):
    """Work items are (KV head, a few rows), so that consecutive items read the same keys. args[26]: null, or where the
    kernel finds the numbers of decodes, whose rows it leaves out, and of all sequences when it runs."""
    seq_lens, cu_seqlens_q = simd.pointer_i32(args[14]), simd.pointer_i32(args[15])
    first, num_seqs, num_rows, rows_per_item, ahead = np.int64(0), args[16], args[17], args[18], args[24]
    counts = simd.pointer_i64(args[26])
    if simd.address(counts) != 0:
        first, num_seqs = read(counts, 0), read(counts, 1)
        num_rows = np.int64(read(cu_seqlens_q, num_seqs))
    items_per_head = (num_rows - first + rows_per_item - 1) // rows_per_item
    tiles = np.zeros(amx.STATE, np.int64)
    if _uses_amx(q):
        amx.configure(simd.pointer_i64(tiles.ctypes.data), amx.ROWS)
    item = next_item(args)
    while item < items_per_head * args[7]:
        kv_head, begin = item // items_per_head, first + item % items_per_head * rows_per_item
        last = min(num_rows, begin + rows_per_item)
        seq = find_sequence(cu_seqlens_q, num_seqs, begin)
        while begin < last:
            stop = np.int64(read(cu_seqlens_q, seq + 1))
            rows = min(last, stop) - begin
            if rows > 0:
                behind = stop - begin - rows  # tokens of the sequence behind these rows
                table = advance(simd.pointer_i32(args[6]), seq * args[11])
                seq_len = np.int64(read(seq_lens, seq))
                end = seq_len - behind + min(behind, ahead)
                _attend_tile(args, q, k_cache, v_cache, out, table, kv_head, begin, rows, seq_len - behind, end, ahead)
                begin += rows
            seq += 1
        item = next_item(args)
    if _uses_amx(q):
        amx.release()
    simd.keep(tiles)


@parallel_kernel(ARGUMENTS)
def _prefill_bf16(args):
    pointer = simd.pointer_bf16
    _attend_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _prefill_bf16_int8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _prefill_bf16_fp8(args):
    pointer, page = simd.pointer_bf16, codes.pointer_fp8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _prefill_bf16_int4(args):
    pointer, page = simd.pointer_bf16, codes.pointer_int4
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _prefill_f32(args):
    pointer = simd.pointer_f32
    _attend_items(args, pointer(args[2]), pointer(args[3]), pointer(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _prefill_f32_int8(args):
    pointer, page = simd.pointer_f32, codes.pointer_int8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _prefill_f32_fp8(args):
    pointer, page = simd.pointer_f32, codes.pointer_fp8
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


@parallel_kernel(ARGUMENTS)
def _prefill_f32_int4(args):
    pointer, page = simd.pointer_f32, codes.pointer_int4
    _attend_items(args, pointer(args[2]), page(args[3]), page(args[4]), pointer(args[5]))


_KERNELS = {
    (torch.bfloat16, "auto"): _prefill_bf16,
    (torch.bfloat16, "int8"): _prefill_bf16_int8,
    (torch.bfloat16, "fp8"): _prefill_bf16_fp8,
    (torch.bfloat16, "int4"): _prefill_bf16_int4,
    (torch.float32, "auto"): _prefill_f32,
    (torch.float32, "int8"): _prefill_f32_int8,
    (torch.float32, "fp8"): _prefill_f32_fp8,
    (torch.float32, "int4"): _prefill_f32_int4,
}


def supports(q: Tensor, k_cache: Tensor) -> bool:
    """True for bf16 or fp32 rows, a cache of their dtype or quantised, head_dim a multiple of 32, and block_size of
    16."""
    return (
        MULTIPLIES_PAIRS
        and q.dtype in (torch.bfloat16, torch.float32)
        and (k_cache.dtype == q.dtype or kv_format_of(k_cache) is not None)
        and q.shape[2] % (2 * WIDTH) == 0
        and k_cache.shape[2] % WIDTH == 0
    )


def prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, cu_seqlens_q: Tensor,
                      seq_lens: Tensor, scale: float, alibi_slopes: Tensor | None, sliding_window: int,
                      softcap: float, sinks: Tensor | None, attention_chunk: int,
                      out: Tensor | None = None, *, both_ways: bool = False,
                      counts: Tensor | None = None) -> Tensor:  # fmt: skip
    """See kernels.attention.prefill. both_ways: a row sees later tokens, too, all or those that are nearer than the
    window; without ALiBi and chunks. counts: see launch.mixed_attention."""
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    rows_per_item = max(ROWS, QUERIES // group)
    ahead = (sliding_window - 1 if sliding_window else num_rows) if both_ways else 0
    out = empty_rows(q.shape, q.dtype) if out is None else out
    kv_format = kv_format_of(k_cache)
    kernel = _KERNELS[q.dtype, "auto" if kv_format is None else kv_format.name]
    kernel(
        -(-num_rows // rows_per_item) * num_kv_heads,
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), block_tables.data_ptr(),
        num_kv_heads, group, block_size, head_dim, block_tables.stride(0), q.stride(0), scale,
        seq_lens.data_ptr(), cu_seqlens_q.data_ptr(), seq_lens.shape[0], num_rows, rows_per_item,
        0 if sinks is None else sinks.data_ptr(), 0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        sliding_window, attention_chunk, softcap, ahead, out.stride(0),
        0 if counts is None else counts.data_ptr(),
    )  # fmt: skip
    return out
