"""Rotary position embedding (Su et al., 2021), in place on the query and key rows of a fused qkv projection."""

from torch import Tensor

from kernels.dispatch import cpu_kernels


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False) -> None:
    """Rotate the first rotary_dim values of every head of q and k by their token's angles, in place.

    positions int64 [num_tokens]; q [num_tokens, num_heads, head_dim] and k [num_tokens, num_kv_heads, head_dim], which
    may be views of a wider row; cos_sin_cache fp32 [max_position, rotary_dim]: the cosines, then the sines of
    rotary_dim / 2 angles. Pair i is (i, i + rotary_dim / 2), or (2i, 2i + 1) if `interleaved` (GPT-J).
    """
    cpu = cpu_kernels() if q.device.type == "cpu" else None
    if cpu and cpu.positions.supports_rotary(positions, q, k, cos_sin_cache, interleaved):
        cpu.positions.rotary_embedding(positions, q, k, cos_sin_cache, interleaved)
    else:
        rotary_embedding_reference(positions, q, k, cos_sin_cache, interleaved)


def rotary_embedding_reference(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> None:
    """rotary_embedding in torch: fp32 arithmetic, rounded once."""
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        rotary = x[..., : cos_sin_cache.shape[-1]]
        first, second = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)
        a, b = first.float(), second.float()
        rotated = a * cos - b * sin, b * cos + a * sin  # compute both before writing: in fp32 a and b are views
        first.copy_(rotated[0])
        second.copy_(rotated[1])
