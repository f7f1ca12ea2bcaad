"""What the two attention kernels share: one tile of keys and values folded into a running softmax (Milakov and
Gimelshein, 2018; Dao, 2023). Scores are kept in base 2, where the GPU's exponential lives."""

from kernels.dispatch import tl, triton


@triton.jit
def attend_tile(
    q,
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
    MASKED: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Keys tile_start : tile_start + BLOCK_N. q [BLOCK_M, BLOCK_D], acc [BLOCK_M, BLOCK_D] fp32; the rest [BLOCK_M].

    MASKED False promises that every key of the tile exists and is visible to every row.
    """
    key_pos = tile_start + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    exists = key_pos < key_end
    if MASKED:
        block_id = tl.load(block_table_ptr + key_pos // BLOCK_SIZE, mask=exists, other=0)
    else:
        block_id = tl.load(block_table_ptr + key_pos // BLOCK_SIZE)
    # int64: a cache of 80 GB has more elements than an int32 can count
    row = (block_id.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_SIZE + key_pos % BLOCK_SIZE
    offsets = row[:, None] * HEAD_DIM + offs_d[None, :]
    if MASKED:
        present = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + offsets, mask=present, other=0.0)
        v = tl.load(v_cache_ptr + offsets, mask=present, other=0.0)
    elif BLOCK_D > HEAD_DIM:
        k = tl.load(k_cache_ptr + offsets, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_cache_ptr + offsets, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_cache_ptr + offsets)
        v = tl.load(v_cache_ptr + offsets)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
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
    acc = tl.dot(probs.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum * decay + tl.sum(probs, 1)
