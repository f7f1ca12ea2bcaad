"""The part that both attention kernels share: fold one tile of keys and values into a running softmax (Milakov and
Gimelshein, 2018; Dao, 2023). Scores are in base 2, because the GPU has an exponential of base 2: the launchers multiply
the scale by log2(e) (base_2_scale)."""

from kernels.cache.quantize import load_codes, load_parameters, load_where
from kernels.dispatch import tl, triton

LOG2_E = 1.4426950408889634


def base_2_scale(scale: float, softcap: float) -> tuple[float, float]:
    """(scale', softcap') for the kernels.

    Without a cap c, exp(scale * s) = exp2(scale' * s). With a cap, scale' = 2 / ln 2 * scale / c, because
    c * tanh(scale * s / c) = c * (1 - 2 / (1 + exp2(scale' * s))); softcap' = c * log2(e).
    """
    if not softcap:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / softcap, softcap * LOG2_E


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(acc, row_max, row_sum) of rows that have seen no key."""
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), row_sum - float("inf"), row_sum


@triton.jit
def load_slopes(alibi_slopes_ptr, head, mask, BLOCK_M: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """ALiBi's slopes of the rows' heads, in base 2; zeros without ALiBi."""
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes_ptr + head, mask=mask, other=0.0) * 1.4426950408889634
    return slopes


@triton.jit
def sum_queries(q, BLOCK_M: tl.constexpr, KV_FORMAT: tl.constexpr):
    """fp32 [BLOCK_M]: for int4, the format with a minimum, the sum of each row of q; zeros for other formats."""
    q_sum = tl.zeros([BLOCK_M], tl.float32)
    if KV_FORMAT == 3:
        q_sum += tl.sum(q.to(tl.float32), 1)
    return q_sum


@triton.jit
def cast_queries(q, KV_FORMAT: tl.constexpr):
    """q in the dtype of its products: e4m3 and int4 become fp16 by fewer instructions than bf16. A number of q, or of a
    value, beyond 65504 is infinite there, and its request fails."""
    if KV_FORMAT >= 3 and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@triton.jit
def value_factor(KV_FORMAT: tl.constexpr, dtype: tl.constexpr):
    """The factor of acc while codes are multiplied in `dtype`.

    A small probability times a small scale underflows in fp16: there they are multiplied by the largest number of
    load_codes, too, which makes of the scale the largest magnitude of its row.
    """
    number: tl.constexpr = 127.0 if KV_FORMAT == 1 else 1.75 if KV_FORMAT == 2 else 15.0 if KV_FORMAT == 3 else 448.0
    return number if dtype == tl.float16 else 1.0


@triton.jit
def attend_tile(
    q,
    q_sum,
    acc,
    row_max,
    row_sum,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    kv_head,
    tile_start,
    key_end,
    query_pos,
    slopes,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fold keys tile_start : tile_start + BLOCK_N into the softmax; tile_start is a multiple of BLOCK_N.

    q [BLOCK_M, BLOCK_D], acc [BLOCK_M, BLOCK_D] fp32, the other arguments of rows [BLOCK_M]. MASKED False promises that
    every key of the tile exists and is visible to every row. The codes of a quantised cache (KV_FORMAT not 0) are
    multiplied without their scales; a key's scale then multiplies its scores, and a value's scale its probabilities. A
    minimum m (int4) adds m * q_sum to a score, where q_sum is the sum of the query, and p * m to acc. acc is multiplied
    by value_factor. slopes are in base 2; scale and softcap come from base_2_scale.
    """
    key_pos = tile_start + tl.arange(0, BLOCK_N)
    exists = key_pos < key_end
    block_id, offset = find_keys(block_table_ptr, tile_start, key_pos, exists, BLOCK_SIZE, BLOCK_N, MASKED)
    k, v, k_scale, k_min, v_scale, v_min = load_tile(
        k_cache_ptr, v_cache_ptr, block_id, kv_head, offset, exists,
        NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, KV_FORMAT, MASKED, q.dtype,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    # If the scale is the only change of the scores, it is applied after the maximum, inside the exponential: one fused
    # multiply-add per score in place of a multiplication and a subtraction.
    late: tl.constexpr = KV_FORMAT == 0 and not HAS_SOFTCAP and not HAS_ALIBI
    if not late:
        scores *= scale if KV_FORMAT == 0 else (k_scale * scale)[None, :]
    if KV_FORMAT == 3:
        scores += q_sum[:, None] * (k_min * scale)[None, :]
    if HAS_SOFTCAP:  # tl has no tanh
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    if HAS_ALIBI:
        scores += slopes[:, None] * (key_pos[None, :] - query_pos[:, None]).to(tl.float32)
    if MASKED:
        visible = exists[None, :] & (key_pos[None, :] <= query_pos[:, None])
        if WINDOW > 0:
            visible &= key_pos[None, :] > query_pos[:, None] - WINDOW
        if CHUNK > 0:
            visible &= key_pos[None, :] >= (query_pos // CHUNK * CHUNK)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    factor = scale if late else 1.0
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    # a row that has seen no key has -inf, and -inf - -inf would be NaN
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    probs = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(row_max - shift)
    acc *= decay[:, None]
    row_sum = row_sum * decay + tl.sum(probs, 1)
    number: tl.constexpr = value_factor(KV_FORMAT, q.dtype)
    if KV_FORMAT == 3:
        acc += (tl.sum(probs * v_min[None, :], 1) * number)[:, None]
    if KV_FORMAT != 0:
        probs *= (v_scale * number)[None, :]
    acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def store_result(
    acc,
    row_max,
    row_sum,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    items_ptr,
    item,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the result of an item, whose keys have all been folded in.

    If its unit has one chunk, to `out` [rows, NUM_KV_HEADS * GROUP, HEAD_DIM]; else, as fp32, to the item's row of the
    partial results [chunks, NUM_KV_HEADS, TOKENS, GROUP, HEAD_DIM], with the base-2 logarithm of the softmax's
    denominator in lse [chunks, NUM_KV_HEADS, TOKENS, GROUP]. partial None: every unit has one chunk. sinks fp32 [heads]
    or None: logits that join the denominator; of a unit of several chunks, in the reduction.
    """
    # The item is read again, so that no register holds these numbers during the loop over the keys.
    at = items_ptr + item * 8
    q_row, tokens = tl.load(at + 1, volatile=True), tl.load(at + 2, volatile=True)
    partial_row = tl.load(at + 6, volatile=True)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tile_token, tile_head = offs_m // GROUP, offs_m % GROUP
    mask = (tile_token < tokens) & (offs_m < TOKENS * GROUP)
    store = mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + kv_head * GROUP + tile_head, mask=mask, other=0.0) * 1.4426950408889634
        share = tl.exp2(sinks - row_max)
        row_sum += share if partial_ptr is None else tl.where(partial_row < 0, share, 0.0)
    row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)  # a row that has seen no key: zeros, and row_max is -inf
    acc /= row_sum[:, None]
    # int64 once for the tile: threads hold offsets of 32 bits
    out_at = out_ptr + (q_row.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    offsets = (tile_token * (NUM_KV_HEADS * GROUP) + tile_head)[:, None] * HEAD_DIM + offs_d[None, :]
    if partial_ptr is None:
        tl.store(out_at + offsets, acc.to(out_ptr.dtype.element_ty), mask=store)
    elif partial_row < 0:
        tl.store(out_at + offsets, acc.to(out_ptr.dtype.element_ty), mask=store)
    else:
        first = (partial_row.to(tl.int64) * NUM_KV_HEADS + kv_head) * (TOKENS * GROUP)
        place = tile_token * GROUP + tile_head
        tl.store(partial_ptr + first * HEAD_DIM + place[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=store)
        tl.store(lse_ptr + first + place, row_max + tl.log2(row_sum), mask=mask)


@triton.jit
def load_item(items_ptr, item):
    """(sequence, first row of q, query tokens, position of the first one, first key, end of the keys) of an item of a
    WorkMap."""
    at = items_ptr + item * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def find_keys(
    block_table_ptr, tile_start, key_pos, exists, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr
):
    """(block of each key [BLOCK_N], or one block for the whole tile; the keys' rows in their blocks).

    If the block size divides the tile, these rows are the same for every tile, and the compiler computes them before
    the loop.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(block_table_ptr + tile_start // BLOCK_SIZE), key_pos % BLOCK_SIZE
    elif BLOCK_N % BLOCK_SIZE == 0:
        at = tl.arange(0, BLOCK_N)
        ids_ptr = block_table_ptr + tile_start // BLOCK_SIZE + at // BLOCK_SIZE
        return load_where(ids_ptr, exists if MASKED else None), at % BLOCK_SIZE
    else:
        ids_ptr = block_table_ptr + key_pos // BLOCK_SIZE
        return load_where(ids_ptr, exists if MASKED else None), key_pos % BLOCK_SIZE


@triton.jit
def load_tile(
    k_cache_ptr,
    v_cache_ptr,
    block_id,
    kv_head,
    offset,
    exists,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    dtype: tl.constexpr,
):
    """(keys, values) [BLOCK_N, BLOCK_D], then scales and minima of the keys and of the values [BLOCK_N], unused for
    floats.

    block_id: one block for the tile, or [BLOCK_N]; offset [BLOCK_N]: the row in the page of that block and kv_head. If
    MASKED, rows that do not exist are zeros. An address is the place in a block, which the compiler moves out of the
    loop over tiles, plus the start of the block: one multiply-add per row.
    """
    offs_d = tl.arange(0, BLOCK_D)
    if MASKED:
        present = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
    elif BLOCK_D > HEAD_DIM:
        present = (offs_d < HEAD_DIM)[None, :]
    else:
        present = None
    ROW: tl.constexpr = HEAD_DIM // 2 if KV_FORMAT == 3 else HEAD_DIM
    PAGE: tl.constexpr = BLOCK_SIZE * (ROW if KV_FORMAT == 0 else ROW + 4)
    # int64: a cache of 80 GB has more elements than an int32 can count
    block = block_id.to(tl.int64) * (NUM_KV_HEADS * PAGE) + tl.zeros(offset.shape, tl.int64)
    page = kv_head * PAGE
    if KV_FORMAT == 0:
        inside = (page + offset * ROW)[:, None] + offs_d[None, :]
        none = tl.zeros(offset.shape, tl.float32)
        k = load_where(k_cache_ptr + inside + block[:, None], present)
        v = load_where(v_cache_ptr + inside + block[:, None], present)
        return k, v, none, none, none, none
    else:
        known = exists if MASKED else None
        k = load_codes(k_cache_ptr + page, block, offset, offs_d, present, HEAD_DIM, KV_FORMAT, dtype)
        v = load_codes(v_cache_ptr + page, block, offset, offs_d, present, HEAD_DIM, KV_FORMAT, dtype)
        k_scale, k_min = load_parameters(k_cache_ptr + page, block, offset, known, BLOCK_SIZE * ROW, KV_FORMAT)
        v_scale, v_min = load_parameters(v_cache_ptr + page, block, offset, known, BLOCK_SIZE * ROW, KV_FORMAT)
        return k, v, k_scale, k_min, v_scale, v_min
