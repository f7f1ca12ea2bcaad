"""From a checkpoint to a runner that is warm, and what the Driver is told of it."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.executor.step import WorkerReady
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.weights import load_model
from engine.worker.cache.disk_cache import DiskCache, open_block_file
from engine.worker.cache.host_cache import HostCache
from engine.worker.cache.kv_cache import (
    KVCacheSize,
    allocate_kv_caches,
    host_cache_bytes,
    kv_format_of,
    model_max_len,
    most_positions,
    num_host_blocks,
    size_kv_cache,
    staging_bytes,
)
from engine.worker.cache_costs import measure_cache_costs
from engine.worker.decode_runner import decode_settings
from engine.worker.device.choice import resolve_device, resolve_dtype
from engine.worker.device.host import StepLimits, available_host_bytes, resolve_step_limits
from engine.worker.device.queue import CudaQueue
from engine.worker.encoder_runner import EncoderRunner, load_encoder
from engine.worker.gpu_profile import profile_gpu
from engine.worker.model_runner import ModelRunner, block_copier

logger = logging.getLogger(__name__)


def load_runner(
    config: EngineConfig,
    model_dir: Path,
    eos_token_ids: list[int],
    progress: Callable[[str], None],
    model_identity: bytes = b"",
) -> tuple[ModelRunner | EncoderRunner, WorkerReady]:
    """Load the weights, size and allocate the KV cache. Raises ConfigError and ModelError."""
    model = read_model_config(model_dir)
    if not model.causal:
        return load_encoder(config, model_dir, model, progress)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config, model, device)
    total_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    limits = resolve_step_limits(config, device.type, total_bytes)
    longest = model_max_len(config, model)
    # What is free now bounds what is left for the cache once the weights are there.
    budget = total_bytes if total_bytes else host_cache_bytes(config, available_host_bytes())
    num_positions = max(limits.max_num_batched_tokens, most_positions(config, model, dtype.itemsize, budget))
    progress("loading weights")
    decoder = load_model(
        model_dir,
        model,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
        max_model_len=min(longest, num_positions),
        batch_invariant=config.batch_invariant,
    )
    assert isinstance(decoder, Decoder), "a causal model is a decoder"
    memory = {"weights": model.weight_bytes(dtype.itemsize)}
    progress("profiling")
    queue = CudaQueue(device) if device.type == "cuda" else None
    size, used = _size_cache(config, model, decoder, limits, dtype, device)
    memory |= used
    if (held := size.max_model_len) < longest:
        logger.warning(
            "max_model_len is cut from the model's %d to the %d tokens that the KV cache holds", longest, held
        )
    reserved = 0 if queue is not None else size.num_bytes
    num_slots = num_host_blocks(config, size.block_bytes, available_host_bytes() - reserved)
    progress("allocating the KV cache")
    kv_format = kv_format_of(config, model)
    dtype_name = str(dtype).removeprefix("torch.")
    kv_caches = allocate_kv_caches(model, size.num_blocks, config.block_size, dtype, device, kv_format)
    copier = block_copier(kv_caches)
    block_file = open_block_file(config, copier.block_bytes, block_identity(model_identity, model, longest))
    runner = ModelRunner(
        model,
        decoder,
        kv_caches,
        limits=limits,
        max_model_len=size.max_model_len,
        block_size=config.block_size,
        eos_token_ids=eos_token_ids,
        device=device,
        host_cache=HostCache(copier, num_slots, device, DiskCache(block_file) if block_file else None, queue),
        queue=queue,
        decode=decode_settings(config, model, limits, size.max_model_len, dtype),
        batch_invariant=config.batch_invariant,
    )
    progress("warming up")
    runner.warm_up()
    costs = measure_cache_costs(runner) if num_slots and config.swap_policy == "auto" else None
    memory |= {"kv_cache": size.num_bytes, "host_cache": num_slots * size.block_bytes}
    if queue is not None and num_slots:
        memory["swap_staging"] = staging_bytes(num_slots, size.block_bytes)
    ready = _ready(runner, size, limits, memory, dtype_name, model.hidden_size)
    disk_digests = block_file.digests() if block_file else []
    kv_cache_dtype = dtype_name if kv_format is None else kv_format.name
    return runner, msgspec.structs.replace(
        ready, cache_costs=costs, disk_digests=disk_digests, kv_cache_dtype=kv_cache_dtype
    )


def block_identity(model_identity: bytes, model: ModelConfig, max_model_len: int) -> bytes:
    """What tells the blocks on a disk from another model's: keys with long rotary factors are another model's, too."""
    return hashlib.sha256(model_identity + b"long").digest() if model.has_long_rope(max_model_len) else model_identity


def _size_cache(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[KVCacheSize, dict[str, int]]:
    """The size of the KV cache, and what profiling found that steps use beside it, in bytes."""
    used: dict[str, int] = {}
    if device.type == "cuda":  # a queue of its own, since the pool of graphs that are gone cannot be used again
        profile = profile_gpu(config, model, decoder, limits, dtype, CudaQueue(device))
        budget = available = profile.cache_budget
        used = {"activations": profile.activations, "cuda_graphs": profile.graphs}
    else:
        available = available_host_bytes()
        budget = host_cache_bytes(config, available)
    size = size_kv_cache(
        config,
        model,
        dtype_bytes=dtype.itemsize,
        budget=budget,
        available=available,
        max_num_seqs=limits.max_num_seqs,
        on_gpu=device.type == "cuda",
    )
    return size, used


def _ready(
    runner: ModelRunner,
    size: KVCacheSize,
    limits: StepLimits,
    memory: dict[str, int],
    dtype_name: str,
    hidden_size: int,
) -> WorkerReady:
    return WorkerReady(
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=runner.vocab_size,
        device=runner.device.type,
        dtype=dtype_name,
        memory=memory,
        num_host_blocks=runner.host_cache.num_slots,
        hidden_size=hidden_size,
    )
