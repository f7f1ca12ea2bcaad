"""What the two attention kernels share: one tile of keys and values folded into a running softmax (Milakov and
Gimelshein, 2018; Dao, 2023). Scores are kept in base 2, where the GPU's exponential lives."""

from kernels.dispatch import tl, triton
from kernels.kv_quantize import load_codes, load_parameters, load_where


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
    num_kv_heads,
    tile_start,
    key_end,
    query_pos,
    slopes,
    scale,
    softcap,
    sliding_window,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Keys tile_start : tile_start + BLOCK_N. q [BLOCK_M, BLOCK_D], acc [BLOCK_M, BLOCK_D] fp32; the rest [BLOCK_M].

    MASKED False promises that every key of the tile exists and is visible to every row. Of a quantised cache (KV_FORMAT
    not 0) the codes are multiplied as they are; a key's scale then meets its scores, and a value's scale its
    probabilities. A minimum m (int4) adds m * q_sum to a score, q_sum being the sum of the query, and p * m to acc.
    """
    key_pos = tile_start + tl.arange(0, BLOCK_N)
    exists = key_pos < key_end
    if MASKED:
        block_id = tl.load(block_table_ptr + key_pos // BLOCK_SIZE, mask=exists, other=0)
    else:
        block_id = tl.load(block_table_ptr + key_pos // BLOCK_SIZE)
    # int64: a cache of 80 GB has more elements than an int32 can count
    k, v, k_scale, k_min, v_scale, v_min = load_tile(
        k_cache_ptr, v_cache_ptr, block_id.to(tl.int64) * num_kv_heads + kv_head, key_pos % BLOCK_SIZE, exists,
        BLOCK_SIZE, HEAD_DIM, BLOCK_D, KV_FORMAT, MASKED, q.dtype,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores *= scale if KV_FORMAT == 0 else (k_scale * scale)[None, :]
    if KV_FORMAT == 3:
        scores += q_sum[:, None] * (k_min * scale)[None, :]
    if HAS_SOFTCAP:
        # c * tanh(s / c), written with exp2 because tl has no tanh
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / softcap * 2.8853900817779268)))
    if HAS_ALIBI:
        scores += slopes[:, None] * (key_pos[None, :] - query_pos[:, None]).to(tl.float32)
    scores *= 1.4426950408889634
    if MASKED:
        visible = exists[None, :] & (key_pos[None, :] <= query_pos[:, None])
        if HAS_WINDOW:
            visible &= key_pos[None, :] > query_pos[:, None] - sliding_window
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # a row that has seen no key yet keeps -inf; subtracting it from itself would give NaN
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    probs = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    acc *= decay[:, None]
    row_sum = row_sum * decay + tl.sum(probs, 1)
    if KV_FORMAT == 3:
        acc += tl.sum(probs * v_min[None, :], 1)[:, None]
    if KV_FORMAT != 0:
        if v.dtype == tl.float16:  # a small probability times a small scale is less than fp16 can hold
            v = (v * v_scale[:, None]).to(tl.float16)
        else:
            probs *= v_scale[None, :]
    acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def load_tile(
    k_cache_ptr,
    v_cache_ptr,
    page,
    offset,
    exists,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Keys and values [BLOCK_N, BLOCK_D]; then the scales and minima of the keys, and of the values [BLOCK_N] (of
    floats: unused).

    page int64 [BLOCK_N] counts pages, offset the rows in a page. Where MASKED, rows that do not exist are zeros.
    """
    offs_d = tl.arange(0, BLOCK_D)
    if MASKED:
        present = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
    elif BLOCK_D > HEAD_DIM:
        present = (offs_d < HEAD_DIM)[None, :]
    else:
        present = None
    if KV_FORMAT == 0:
        offsets = (page * BLOCK_SIZE + offset)[:, None] * HEAD_DIM + offs_d[None, :]
        none = tl.zeros(offset.shape, tl.float32)
        k, v = load_where(k_cache_ptr + offsets, present), load_where(v_cache_ptr + offsets, present)
        return k, v, none, none, none, none
    else:
        rows_bytes: tl.constexpr = BLOCK_SIZE * (HEAD_DIM // 2 if KV_FORMAT == 3 else HEAD_DIM)
        start = page * (rows_bytes + 4 * BLOCK_SIZE)
        known = exists if MASKED else None
        k = load_codes(k_cache_ptr, start, offset, offs_d, present, HEAD_DIM, KV_FORMAT, dtype)
        v = load_codes(v_cache_ptr, start, offset, offs_d, present, HEAD_DIM, KV_FORMAT, dtype)
        k_scale, k_min = load_parameters(k_cache_ptr, start, offset, known, rows_bytes, KV_FORMAT)
        v_scale, v_min = load_parameters(v_cache_ptr, start, offset, known, rows_bytes, KV_FORMAT)
        return k, v, k_scale, k_min, v_scale, v_min
