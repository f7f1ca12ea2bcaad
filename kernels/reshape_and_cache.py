"""Write the keys and values of this step's tokens into their slots of the paged KV cache."""

from torch import Tensor

from kernels.dispatch import cpu_kernels, tl, triton, use_triton


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store row t of key and value [num_tokens, num_kv_heads, head_dim] at slot_mapping[t] of the caches.

    Caches are [num_blocks, num_kv_heads, block_size, head_dim]; slot = block_id * block_size + offset, int64, and -1
    skips the row (padding). key and value may be views of a wider row whose last axis is contiguous.
    """
    if use_triton(key):
        _launch(key, value, k_cache, v_cache, slot_mapping)
        return
    cpu = cpu_kernels() if key.device.type == "cpu" else None
    if cpu and cpu.elementwise.supports_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping):
        cpu.elementwise.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)
    else:
        reshape_and_cache_reference(key, value, k_cache, v_cache, slot_mapping)


def _launch(key, value, k_cache, v_cache, slot_mapping):
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    reshape_and_cache_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slot_mapping, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[2],
        BLOCK_H=1 << (num_kv_heads - 1).bit_length(), BLOCK_D=1 << (head_dim - 1).bit_length(), num_warps=4,
    )  # fmt: skip


@triton.jit
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_stride_row,
    key_stride_head,
    value_stride_row,
    value_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (num_tokens,): all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head, offs_d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (head < NUM_KV_HEADS) & (offs_d < HEAD_DIM)
    row = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = row * HEAD_DIM + offs_d
    key = tl.load(key_ptr + token * key_stride_row + head * key_stride_head + offs_d, mask=mask)
    value = tl.load(value_ptr + token * value_stride_row + head * value_stride_head + offs_d, mask=mask)
    tl.store(k_cache_ptr + target, key, mask=mask)
    tl.store(v_cache_ptr + target, value, mask=mask)


def reshape_and_cache_reference(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The same in torch."""
    keep = slot_mapping >= 0
    slots, block_size = slot_mapping[keep], k_cache.shape[2]
    block_ids, offsets = slots // block_size, slots % block_size
    k_cache[block_ids, :, offsets] = key[keep]
    v_cache[block_ids, :, offsets] = value[keep]
