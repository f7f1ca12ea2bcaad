"""Loads a model into a runner: weights, memory profile, KV cache, warm-up; the Worker then reports WorkerReady."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.executor.step import WorkerReady
from engine.models.families import read_model_config
from engine.models.loading.load import weight_bytes
from engine.worker.cache.host_cache import open_host_cache
from engine.worker.cache.kv_cache import (
    allocate_kv_caches,
    num_host_blocks,
    resolve_kv_format,
    staging_bytes,
)
from engine.worker.cache_costs import measure_cache_costs
from engine.worker.device.host import available_host_bytes
from engine.worker.device.queue import CudaQueue
from engine.worker.encoder_runner import EncoderRunner, load_encoder
from engine.worker.loaded import load_decoder
from engine.worker.memory_profile import size_cache
from engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def load_runner(
    config: EngineConfig,
    model_dir: Path,
    eos_token_ids: list[int],
    progress: Callable[[str], None],
    model_identity: bytes = b"",
) -> tuple[ModelRunner | EncoderRunner, WorkerReady]:
    """Load the weights, size and allocate the KV cache, warm up. Raises ConfigError and ModelError."""
    model = read_model_config(model_dir, config.quantization)
    if not model.causal:
        return load_encoder(config, model_dir, model, progress)
    clock = StartClock()
    clock.start("load")
    loaded = load_decoder(config, model_dir, model, progress)
    clock.start("compile")
    if loaded.device.type == "cuda":
        progress("choosing matrix kernels")
        loaded.decoder.operators.choose_kernels(loaded.device, loaded.limits.max_num_batched_tokens)
    loaded.compile_kernels()
    progress("profiling")
    clock.start("profile")
    queue = CudaQueue(loaded.device) if loaded.device.type == "cuda" else None
    size, used = size_cache(loaded)
    if size.max_model_len < loaded.max_model_len:
        logger.warning(
            "max_model_len is cut from the model's %d to the %d tokens that the KV cache holds",
            loaded.max_model_len,
            size.max_model_len,
        )
    reserved = 0 if queue is not None else size.num_bytes
    num_slots = num_host_blocks(config, size.block_bytes, available_host_bytes() - reserved)
    progress("allocating the KV cache")
    clock.start("load")
    kv_format = resolve_kv_format(config, model)
    kv_caches = allocate_kv_caches(model, size.num_blocks, config.block_size, loaded.dtype, loaded.device, kv_format)
    host_cache = open_host_cache(
        config, model, kv_caches, num_slots=num_slots, queue=queue, model_identity=model_identity
    )
    runner = loaded.make_runner(
        kv_caches,
        size.max_model_len,
        queue,
        eos_token_ids=eos_token_ids,
        host_cache=host_cache,
        graph_bytes=used.get("cuda_graphs"),
    )
    progress("warming up")
    clock.start("compile")
    runner.warm_up()
    progress("recording CUDA graphs")
    clock.start("capture")
    runner.record_graphs()
    clock.stop()
    costs = measure_cache_costs(runner) if num_slots and config.swap_policy == "auto" else None
    memory = {"weights": weight_bytes(model, loaded.dtype.itemsize), **used}
    memory |= {"kv_cache": size.num_bytes, "host_cache": num_slots * size.block_bytes}
    if queue is not None and num_slots:
        memory["swap_staging"] = staging_bytes(num_slots, size.block_bytes)
    seconds = {phase: round(spent, 3) for phase, spent in clock.seconds.items()}
    logger.info("start-up: %s", ", ".join(f"{phase} {spent:.1f} s" for phase, spent in seconds.items()))
    dtype_name = str(loaded.dtype).removeprefix("torch.")
    return runner, WorkerReady(
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        max_num_seqs=loaded.limits.max_num_seqs,
        max_num_batched_tokens=loaded.limits.max_num_batched_tokens,
        vocab_size=runner.vocab_size,
        device=runner.device.type,
        dtype=dtype_name,
        memory=memory,
        num_host_blocks=num_slots,
        cache_costs=costs,
        disk_digests=host_cache.disk_digests,
        kv_cache_dtype=dtype_name if kv_format is None else kv_format.name,
        hidden_size=model.hidden_size,
        start_seconds=seconds,
    )


class StartClock:
    """The seconds of each phase of start-up: "load" (weights and the KV cache), "compile" (kernels, by running them),
    "profile" (of memory) and "capture" (of CUDA graphs)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase = ""
        self._started = 0.0

    def start(self, phase: str) -> None:
        """End the phase before and begin, or go on with, this one."""
        self.stop()
        self._phase, self._started = phase, time.perf_counter()

    def stop(self) -> None:
        """End the phase."""
        if self._phase:
            spent = time.perf_counter() - self._started
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent
        self._phase = ""
