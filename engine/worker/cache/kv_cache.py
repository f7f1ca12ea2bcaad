"""The KV cache: how many blocks fit into memory, the longest sequence that follows, and the tensors.

Sizing needs no torch (`pageserve plan`), only allocating does.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.settings import parse_size
from kernels.kv_format import KVFormat, find_kv_format

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEFAULT_SHARE_OF_HOST = 4  # the default takes a quarter of free memory
MAX_DEFAULT_HOST_BYTES = 4 << 30
MAX_DEFAULT_GPU_BLOCKS = 1 << 18  # bounds the Driver's memory, an object per block, for a small model on a large card
# Staging between a GPU's pool and the host tier (engine/worker/cache/block_mover.py), per direction.
STAGING_BYTES = 32 << 20  # size of a buffer: a millisecond on the link, which hides the latency of a copy
STAGING_BUFFERS = 4  # copies that may be under way before a step waits for the link


class DoesNotFitError(ConfigError):
    """`reason` names what does not fit; the rest of the message advises a setting that starts the server."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason} {advice}")
        self.reason = reason


class NoRoomForWeightsError(DoesNotFitError):
    """The weights take `needed` bytes, and `free` bytes of the device are free."""

    def __init__(self, needed: int, free: int, on_gpu: bool, advice: str) -> None:
        super().__init__(
            f"no room for the weights: they take {format_bytes(needed)}, {format_bytes(free)} of "
            f"{'GPU' if on_gpu else 'host'} memory are free.",
            advice,
        )


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """num_blocks blocks of block_bytes each (over all layers), and the longest sequence that is served."""

    num_blocks: int
    block_bytes: int
    max_model_len: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def resolve_kv_format(config: EngineConfig, model: ModelConfig) -> KVFormat | None:
    """The storage format of keys and values; None: the model's dtype. ConfigError if the model's heads do not fit
    it."""
    kv_format = find_kv_format(config.kv_cache_dtype)
    try:
        if kv_format is not None:
            for heads in model.head_shapes():
                kv_format.row_bytes(heads.head_dim)
    except ValueError as error:
        raise ConfigError(f"kv_cache_dtype: {error}; use --kv-cache-dtype int8, fp8 or auto.") from None
    return kv_format


def model_max_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence in tokens, regardless of memory. ConfigError if max_model_len exceeds the model's."""
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len < 2:
        raise ConfigError("max_model_len: 1 leaves no room for an output token; use --max-model-len 2 or more.")
    if config.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than this model's positions; "
            f"use --max-model-len {model.max_positions} or less."
        )
    return config.max_model_len


def most_positions(config: EngineConfig, model: ModelConfig, dtype_bytes: int, budget: int) -> int:
    """The longest sequence in tokens that a KV cache of at most `budget` bytes could hold.

    It bounds tables with a row per position, because a checkpoint may claim any number of positions.
    """
    block_bytes = config.block_size * model.kv_bytes_per_token(dtype_bytes, resolve_kv_format(config, model))
    num_blocks = config.num_blocks or max(0, budget) // block_bytes
    return max(1, min(model_max_len(config, model), num_blocks * config.block_size))


def host_cache_bytes(config: EngineConfig, available: int) -> int:
    """Bytes for a KV cache in host memory: kv_cache_memory, else a quarter of free memory, at most 4 GiB."""
    if config.kv_cache_memory is not None:
        asked = parse_size(config.kv_cache_memory)
        assert asked is not None, "EngineConfig checked it"
        if asked > available:
            raise DoesNotFitError(
                f"kv_cache_memory: {format_bytes(asked)} is more than the {format_bytes(max(0, available))} that are "
                "free.",
                f"Use --kv-cache-memory {available >> 20}MiB or less." if available >> 20 else "Use a smaller model.",
            )
        return asked
    return min(available // DEFAULT_SHARE_OF_HOST, MAX_DEFAULT_HOST_BYTES)


def gpu_cache_bytes(config: EngineConfig, total: int, used_by_others: int, weights_and_activations: int) -> int:
    """Bytes left for the KV cache of the usable share of the card; zero or less: no block fits."""
    usable = int(total * config.gpu_memory_utilization) - used_by_others
    if config.memory_share is not None:
        usable = min(usable, int(total * config.memory_share))
    return usable - weights_and_activations


def size_kv_cache(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype_bytes: int,
    budget: int,
    available: int,
    max_num_seqs: int,
    on_gpu: bool,
    draft: ModelConfig | None = None,
) -> KVCacheSize:
    """The number of blocks from `budget` bytes (or from num_blocks, at most `available` bytes), and max_model_len.

    On a CPU, which shares memory with other programs, the default is at most what all sequences can use at their
    longest. On a GPU, further blocks serve the prefix cache. A block has room for its tokens in the caches of the model
    and of its draft model. Raises ConfigError with the nearest settings that fit.
    """
    models = [model] if draft is None else [model, draft]
    token_bytes = sum(one.kv_bytes_per_token(dtype_bytes, resolve_kv_format(config, one)) for one in models)
    block_bytes = config.block_size * token_bytes
    longest = model_max_len(config, model)
    blocks_per_sequence = -(-longest // config.block_size)
    if on_gpu:
        staging = staging_bytes(int(config.swap_space * 2**30) // block_bytes, block_bytes)
        budget, available = budget - staging, available - staging
    num_blocks = config.num_blocks or max(0, budget) // block_bytes
    if config.num_blocks is None and (on_gpu or config.kv_cache_memory is None):
        useful = max_num_seqs * blocks_per_sequence
        num_blocks = min(num_blocks, max(useful, MAX_DEFAULT_GPU_BLOCKS) if on_gpu else useful)
    if num_blocks < 1:
        raise DoesNotFitError(
            f"no room for the KV cache: one block takes {format_bytes(block_bytes)}, {format_bytes(max(0, budget))} "
            "are left.",
            _more_memory(on_gpu, config, block_bytes),
        )
    if num_blocks * block_bytes > available:
        fitting = max(0, available) // block_bytes
        raise DoesNotFitError(
            f"num_blocks: {num_blocks} blocks take {format_bytes(num_blocks * block_bytes)}, "
            f"{format_bytes(max(0, available))} are left.",
            f"Use --num-blocks {fitting} or less." if fitting else "Use a smaller model.",
        )
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        missing = (blocks_per_sequence - num_blocks) * block_bytes
        raise DoesNotFitError(
            f"max_model_len: {config.max_model_len} tokens do not fit a KV cache of {num_blocks} blocks of "
            f"{config.block_size}.",
            f"Use --max-model-len {capacity} or less, or make the cache {format_bytes(missing)} larger. "
            f"{_more_memory(on_gpu, config, blocks_per_sequence * block_bytes)}",
        )
    return KVCacheSize(num_blocks, block_bytes, min(longest, capacity))


def staging_sizes(num_slots: int, block_bytes: int) -> tuple[int, int]:
    """(blocks per buffer, buffers) per direction between a GPU and the host tier; a buffer holds at most all slots."""
    return max(1, min(num_slots, STAGING_BYTES // block_bytes)), STAGING_BUFFERS if num_slots else 0


def staging_bytes(num_slots: int, block_bytes: int) -> int:
    """Bytes of GPU memory for the staging buffers of both directions."""
    blocks_per_copy, num_buffers = staging_sizes(num_slots, block_bytes)
    return 2 * num_buffers * blocks_per_copy * block_bytes


def num_host_blocks(config: EngineConfig, block_bytes: int, available: int) -> int:
    """Number of slots of the host tier. ConfigError if they exceed `available` bytes of host memory."""
    wanted = int(config.swap_space * 2**30)
    if wanted > available:
        raise ConfigError(
            f"swap_space: {format_bytes(wanted)} is more than the {format_bytes(max(0, available))} that are free; "
            f"use --swap-space {max(0, available) / 2**30:.1f} or less."
        )
    return wanted // block_bytes


def _more_memory(on_gpu: bool, config: EngineConfig, needed: int) -> str:
    if config.num_blocks is not None:
        return f"Raise --num-blocks, which is {config.num_blocks}."
    if on_gpu:
        return f"Raise --gpu-memory-utilization, which is {config.gpu_memory_utilization}, or use a smaller model."
    return f"Use --kv-cache-memory {-(-needed >> 20)}MiB or more."


def allocate_kv_caches(
    model: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: "torch.dtype",
    device: "torch.device",
    kv_format: KVFormat | None = None,
) -> "list[tuple[Tensor, Tensor]]":
    """(k_cache, v_cache) per layer, each [num_blocks, num_kv_heads, block_size, head_dim] of that layer.

    A layer that reads the keys and values of another layer (ModelConfig.kv_source) has the same two tensors.
    In a quantised cache the last axis is the bytes of a row, and the dtype is the format's (kernels/kv_format.py):
    index b is still all of block b, scales included.

    On a CPU no page is touched, so blocks take memory when they are first used. On a GPU the tensors are zeros, because
    kernels multiply masked elements too, and leftover NaN would spread.
    """
    import torch

    dtype = dtype if kv_format is None else getattr(torch, kv_format.dtype_name)
    make = torch.empty if device.type == "cpu" else torch.zeros
    caches: list[tuple[Tensor, Tensor]] = []
    for layer in range(model.num_layers):
        source, heads = model.kv_source(layer), model.heads(layer)
        if source != layer:
            caches.append(caches[source])
            continue
        width = heads.head_dim if kv_format is None else kv_format.width(heads.head_dim)
        shape = (num_blocks, heads.num_kv_heads, block_size, width)
        caches.append((make(shape, dtype=dtype, device=device), make(shape, dtype=dtype, device=device)))
    return caches


def format_bytes(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
