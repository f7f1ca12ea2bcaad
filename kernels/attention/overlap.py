"""The loop of prefill on cards with wgmma: the tensor cores multiply the probabilities of one tile of keys with its
values while the softmax of the next tile is computed (Shah et al., "FlashAttention-3", 2024, section 3.2).

A step computes the scores of its tile and waits for them, starts the product of the tile before it, and then takes the
softmax. Triton leaves that product under way until the wait of the next step, because its result is only the loop's
accumulator; so the accumulator is rescaled after that wait, one step late.

`TMA`: the card's copy engine fetches tiles, where a block of the cache holds whole tiles. No thread computes
addresses, and the loop of Llama-3-8B on sm_90 takes 917 instructions for 128 keys in place of 755 for 64 (PTX).
"""

from typing import Any

from torch import Tensor

from kernels.aot_configuration import power_of_2
from kernels.attention.choices import Tile
from kernels.attention.tile import find_keys
from kernels.cache.quantize import load_where
from kernels.dispatch import tl, triton


def as_copied(cache: Tensor, tile: Tile) -> Any:
    """A cache [num_blocks, num_kv_heads, block_size, head_dim] as the kernel takes it for this tile: itself, or for TMA
    the description of its rows, of which the card copies block_n at a time."""
    if not tile.tma:
        return cache
    from triton.tools.tensor_descriptor import TensorDescriptor

    head_dim = cache.shape[-1]
    block = [tile.block_n, max(16, power_of_2(head_dim))]
    return TensorDescriptor(cache, [cache.numel() // head_dim, head_dim], [head_dim, 1], block)


@triton.jit
def attend_overlapped(
    q, acc, row_max, row_sum, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head, begin, all_see_end, end, query_pos,
    scale,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Fold keys begin:end into the softmax (acc, row_max, row_sum); every row sees the keys before all_see_end.

    For caches of 16-bit floats, without ALiBi, soft cap and window. begin and all_see_end are multiples of BLOCK_N.
    """
    # Probabilities pass from step to step as integers: Triton puts a float of the step before into shared memory.
    probs = tl.zeros([BLOCK_M, BLOCK_N], tl.int16)
    decay = tl.zeros([BLOCK_M], tl.float32) + 1.0
    for tile_start in range(begin, all_see_end, BLOCK_N):
        acc, row_max, row_sum, probs, decay = _step(
            q, acc, row_max, row_sum, probs, decay, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head, tile_start,
            begin, end, query_pos, scale, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False, TMA,
        )  # fmt: skip
    for tile_start in range(all_see_end, end, BLOCK_N):
        acc, row_max, row_sum, probs, decay = _step(
            q, acc, row_max, row_sum, probs, decay, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head, tile_start,
            begin, end, query_pos, scale, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, TMA,
        )  # fmt: skip
    last = (end - 1) // BLOCK_N * BLOCK_N
    v = _load_tile(
        v_cache_ptr, block_table_ptr, kv_head, last, begin, end, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
        True, TMA,
    )  # fmt: skip
    if TMA:  # the slots after the last key may hold NaN
        v = tl.where((last + tl.arange(0, BLOCK_N) < end)[:, None], v, 0.0)
    return tl.dot(probs.to(v.dtype, bitcast=True), v, acc * decay[:, None]), row_max, row_sum


@triton.jit
def _step(
    q, acc, row_max, row_sum, probs, decay, k_cache_ptr, v_cache_ptr, block_table_ptr, kv_head, tile_start, begin, end,
    query_pos, scale,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores of the tile at tile_start, and its softmax; probs (as bits) and decay are those of the tile before it."""
    k = _load_tile(
        k_cache_ptr, block_table_ptr, kv_head, tile_start, begin, end, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D,
        BLOCK_N, MASKED, TMA,
    )  # fmt: skip
    v = _load_tile(  # zeros before the first tile, whose step has no probabilities
        v_cache_ptr, block_table_ptr, kv_head, tile_start - BLOCK_N, begin, end, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
        BLOCK_D, BLOCK_N, True, TMA,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(k))
    acc = tl.dot(probs.to(v.dtype, bitcast=True), v, acc * decay[:, None])
    if MASKED:
        key_pos = tile_start + tl.arange(0, BLOCK_N)
        visible = (key_pos < end)[None, :] & (key_pos[None, :] <= query_pos[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # a row that has seen no key has -inf, and -inf - -inf would be NaN
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    return acc, new_max, row_sum, weights.to(q.dtype).to(tl.int16, bitcast=True), decay


@triton.jit
def _load_tile(
    cache_ptr, block_table_ptr, kv_head, tile_start, begin, end,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_N, BLOCK_D] of a tile; if MASKED, rows outside begin:end are zeros.

    TMA: a tile before begin is zeros, and the slots at and after end are whatever the block holds.
    """
    if TMA:
        exists = tile_start >= begin
        block_id = tl.load(block_table_ptr + tile_start // BLOCK_SIZE, mask=exists, other=0)
        row = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tile_start % BLOCK_SIZE
        rows = cache_ptr.load([tl.where(exists, row, -BLOCK_N), 0])  # zeros for rows outside of the cache
    else:
        rows = _load_rows(
            cache_ptr, block_table_ptr, kv_head, tile_start, begin, end, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D,
            BLOCK_N, MASKED,
        )  # fmt: skip
    return rows


@triton.jit
def _load_rows(
    cache_ptr, block_table_ptr, kv_head, tile_start, begin, end,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_N, BLOCK_D] of a tile; if MASKED, rows outside begin:end are zeros."""
    key_pos, offs_d = tile_start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    exists = (key_pos >= begin) & (key_pos < end)
    block_id, offset = find_keys(
        block_table_ptr, tl.maximum(tile_start, 0), key_pos, exists, BLOCK_SIZE, BLOCK_N, MASKED
    )
    if MASKED:
        present = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
    elif BLOCK_D > HEAD_DIM:
        present = (offs_d < HEAD_DIM)[None, :]
    else:
        present = None
    block = block_id.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + tl.zeros(offset.shape, tl.int64)
    inside = (kv_head * (BLOCK_SIZE * HEAD_DIM) + offset * HEAD_DIM)[:, None] + offs_d[None, :]
    return load_where(cache_ptr + inside + block[:, None], present)
