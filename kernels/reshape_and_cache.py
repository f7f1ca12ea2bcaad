"""Write the keys and values of this step's tokens into their slots of the paged KV cache."""

from torch import Tensor

from kernels.dispatch import cpu_kernels


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store row t of key and value [num_tokens, num_kv_heads, head_dim] at slot_mapping[t] of the caches.

    Caches are [num_blocks, num_kv_heads, block_size, head_dim]; slot = block_id * block_size + offset, int64, and -1
    skips the row (padding). key and value may be views of a wider row whose last axis is contiguous.
    """
    cpu = cpu_kernels() if key.device.type == "cpu" else None
    if cpu and cpu.elementwise.supports_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping):
        cpu.elementwise.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)
    else:
        reshape_and_cache_reference(key, value, k_cache, v_cache, slot_mapping)


def reshape_and_cache_reference(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The same in torch."""
    keep = slot_mapping >= 0
    slots, block_size = slot_mapping[keep], k_cache.shape[2]
    block_ids, offsets = slots // block_size, slots % block_size
    k_cache[block_ids, :, offsets] = key[keep]
    v_cache[block_ids, :, offsets] = value[keep]
