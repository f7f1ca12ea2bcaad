"""Loads a model into a runner: weights, memory profile, KV cache, warm-up; the Worker then reports WorkerReady."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.executor.step import ONE_PLACE, CacheCosts, Place, WorkerReady
from engine.garbage_collector import thaw_garbage
from engine.models.families import read_model_config
from engine.models.loading.load import slot_bytes, weight_bytes
from engine.worker.cache.host_cache import HostCache, block_copier, open_host_cache
from engine.worker.cache.kv_cache import (
    DoesNotFitError,
    KVCacheSize,
    allocate_kv_caches,
    num_host_blocks,
    resolve_kv_format,
    staging_bytes,
)
from engine.worker.cache_costs import measure_cache_costs
from engine.worker.device.host import available_host_bytes, return_freed_memory
from engine.worker.device.offload import Offloaded, device_bytes, free_cached_bytes, tensors_on
from engine.worker.device.queue import CudaQueue
from engine.worker.encoder_runner import EncoderRunner, load_encoder
from engine.worker.loaded import LoadedDecoder, load_decoder
from engine.worker.memory_profile import size_cache
from engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """Raise a ConfigError with the settings that take memory if the GPU has too little for the work inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        logger.exception("loading failed")
        found = str(error).partition(" Including ")[0]  # the rest counts torch's own caches
        raise DoesNotFitError(
            f"the GPU has too little memory: {found}",
            "Use a lower --max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization, a smaller or a "
            "quantised model, or end other programs on this GPU.",
        ) from None


def load_runner(
    config: EngineConfig,
    model_dir: Path,
    eos_token_ids: list[int],
    progress: Callable[[str], None],
    model_identity: bytes = b"",
    place: Place = ONE_PLACE,
    draft_dir: Path | None = None,
) -> tuple[ModelRunner | EncoderRunner, WorkerReady]:
    """The runner of a model that never sleeps, ready to serve. Raises ConfigError and ModelError."""
    resident = load_resident(config, model_dir, eos_token_ids, progress, model_identity, place, draft_dir)
    return resident.take_runner(), resident.ready


@naming_lack_of_memory()
def load_resident(
    config: EngineConfig,
    model_dir: Path,
    eos_token_ids: list[int],
    progress: Callable[[str], None],
    model_identity: bytes = b"",
    place: Place = ONE_PLACE,
    draft_dir: Path | None = None,
) -> "Resident":
    """Load the weights, size and allocate the KV cache, warm up. Raises ConfigError and ModelError."""
    model = read_model_config(model_dir, config.quantization, place.rank, place.size)
    if not model.causal:
        return ResidentEncoder(*load_encoder(config, model_dir, model, progress, place))
    clock = StartClock()
    clock.start("load")
    loaded = load_decoder(config, model_dir, model, progress, place, draft_dir)
    clock.start("compile")
    if loaded.device.type == "cuda":
        progress("choosing matrix kernels")
        for decoder in (loaded.decoder, *([] if loaded.draft is None else [loaded.draft.decoder])):
            decoder.operators.choose_kernels(loaded.device, loaded.limits.max_num_batched_tokens)
    else:
        progress("compiling kernels")
    loaded.compile_kernels()
    resident = ResidentDecoder(loaded, eos_token_ids, model_identity)
    resident.start(progress, clock)
    return resident


class Resident(ABC):
    """The model of a Worker: awake, with a runner, or asleep, with its weights in host memory (sleep level 1)."""

    ready: WorkerReady
    runner: ModelRunner | EncoderRunner | None = None
    _offloaded: Offloaded | None = None

    def take_runner(self) -> ModelRunner | EncoderRunner:
        """The runner. The caller drops it before `sleep`."""
        runner, self.runner = self.runner, None
        assert runner is not None, "it was taken before"
        return runner

    def sleep(self) -> None:
        """Free the device: the KV cache, buffers and graphs go, the weights move to host memory. On a CPU the weights
        are there already, so the KV cache alone is freed."""
        device = torch.device(self.ready.device)
        before = device_bytes(device)
        self._let_go()
        if device.type == "cuda":
            self._offloaded = Offloaded(tensors_on(device))
            free_cached_bytes()
            logger.info("sleep frees %d of %d bytes of GPU memory", before - device_bytes(device), before)
        else:
            return_freed_memory()

    @naming_lack_of_memory()
    def wake(self, progress: Callable[[str], None]) -> None:
        """Undo `sleep`. Raises ConfigError where weights, steps and KV cache no longer fit."""
        if self._offloaded is not None:
            progress("loading weights")
            self._offloaded.restore()
            self._offloaded = None
        self._start_again(progress)

    @abstractmethod
    def _let_go(self) -> None:
        """Drop everything but the weights and the host tier."""

    @abstractmethod
    def _start_again(self, progress: Callable[[str], None]) -> None:
        """Make the next runner."""


class ResidentEncoder(Resident):
    """An encoder has no KV cache: its runner stays."""

    def __init__(self, runner: EncoderRunner, ready: WorkerReady) -> None:
        self.runner = self._kept = runner
        self.ready = ready

    def _let_go(self) -> None:
        pass

    def _start_again(self, progress: Callable[[str], None]) -> None:
        self.runner = self._kept


class ResidentDecoder(Resident):
    """A decoder: each wake sizes and allocates the KV cache anew. The host tier keeps its blocks."""

    def __init__(self, loaded: LoadedDecoder, eos_token_ids: list[int], model_identity: bytes) -> None:
        self._loaded = loaded
        self._eos_token_ids = eos_token_ids
        self._model_identity = model_identity
        self._host_cache: HostCache | None = None
        self._costs: CacheCosts | None = None

    def _let_go(self) -> None:
        if self._host_cache is not None:
            self._host_cache.leave()
        self._loaded.forget_caches()
        thaw_garbage()  # the runner is part of a reference cycle

    def _start_again(self, progress: Callable[[str], None]) -> None:
        self.start(progress, StartClock())

    def start(self, progress: Callable[[str], None], clock: "StartClock") -> None:
        """Make a runner that is ready to serve, and `ready`."""
        loaded, config = self._loaded, self._loaded.config
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
        progress("allocating the KV cache")
        clock.start("load")
        kv_format = resolve_kv_format(config, loaded.model)
        kv_caches = allocate_kv_caches(
            loaded.model, size.num_blocks, config.block_size, loaded.dtype, loaded.device, kv_format
        )
        draft_caches = None
        if loaded.draft is not None:
            draft_caches = loaded.draft.allocate(config, size.num_blocks, loaded.dtype, loaded.device)
        woken = self._host_cache is not None
        all_caches = kv_caches + (draft_caches or [])
        host_cache = self._host_cache = self._serve_host_cache(all_caches, size, queue)
        runner = loaded.make_runner(
            kv_caches,
            size.max_model_len,
            queue,
            eos_token_ids=self._eos_token_ids,
            host_cache=host_cache,
            graph_bytes=used.get("cuda_graphs"),
            draft_caches=draft_caches,
        )
        progress("warming up")
        clock.start("compile")
        runner.warm_up()
        progress("recording CUDA graphs")
        clock.start("capture")
        runner.record_graphs()
        clock.stop()
        if host_cache.num_slots and config.swap_policy == "auto" and not woken:  # measuring writes to slots
            self._costs = measure_cache_costs(runner)
        logger.info("start-up: %s", ", ".join(f"{phase} {spent:.1f} s" for phase, spent in clock.seconds.items()))
        self.runner, self.ready = runner, self._report(runner, host_cache, size, used)

    def _serve_host_cache(
        self, kv_caches: list[tuple[torch.Tensor, torch.Tensor]], size: KVCacheSize, queue: CudaQueue | None
    ) -> HostCache:
        """The host tier of a pool: that of the pool before, with its blocks, if there was one."""
        if self._host_cache is not None:
            self._host_cache.serve(block_copier(kv_caches), queue)
            return self._host_cache
        config, loaded = self._loaded.config, self._loaded
        reserved = 0 if queue is not None else size.num_bytes  # a CPU touches the pages of its pool later
        available = available_host_bytes() // config.num_processes
        num_slots = num_host_blocks(config, size.block_bytes, available - reserved)
        if (ranks := loaded.decoder.operators.ranks) is not None:
            (num_slots,) = ranks.least([num_slots])
        return open_host_cache(
            config, loaded.model, kv_caches, num_slots=num_slots, queue=queue, model_identity=self._model_identity
        )

    def _report(
        self, runner: ModelRunner, host_cache: HostCache, size: KVCacheSize, used: dict[str, int]
    ) -> WorkerReady:
        loaded, num_slots = self._loaded, host_cache.num_slots
        kv_format = resolve_kv_format(loaded.config, loaded.model)
        packed = loaded.packed
        memory = {"weights": weight_bytes(loaded.model, loaded.dtype.itemsize, packed), **used}
        if loaded.compressed_bytes:
            memory["compressed_weights"] = loaded.compressed_bytes
        if loaded.draft is not None:
            memory["draft_weights"] = weight_bytes(loaded.draft.model, loaded.dtype.itemsize, packed)
        if loaded.config.serves_adapters and loaded.device.type == "cuda":
            memory["adapters"] = slot_bytes(loaded.model, loaded.config.lora_slots, loaded.dtype.itemsize)
        memory |= {"kv_cache": size.num_bytes, "host_cache": num_slots * size.block_bytes}
        if loaded.device.type == "cuda" and num_slots:
            memory["swap_staging"] = staging_bytes(num_slots, size.block_bytes)
        dtype_name = str(loaded.dtype).removeprefix("torch.")
        return WorkerReady(
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            max_num_seqs=loaded.limits.max_num_seqs,
            max_num_batched_tokens=loaded.limits.max_num_batched_tokens,
            vocab_size=runner.vocab_size,
            device=runner.device.type,
            dtype=dtype_name,
            memory=memory,
            num_host_blocks=num_slots,
            cache_costs=self._costs,
            disk_digests=host_cache.disk_digests,
            num_disk_blocks=host_cache.num_disk_blocks,
            kv_cache_dtype=dtype_name if kv_format is None else kv_format.name,
            hidden_size=loaded.decoder.vector_size,
            embeds_only=loaded.model.embeds_only,
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
