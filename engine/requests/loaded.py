"""Loaded: everything that exists only once the Worker has loaded the model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.pooling import pooling_of_model
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.recovery import Recovery
from engine.executor.step import FetchBlocks, WorkerReady
from engine.requests.adapters import Adapters
from engine.requests.live_requests import LiveRequests
from engine.requests.model_info import ModelInfo, fits_still
from engine.requests.new_scheduler import host_tier, new_scheduler
from engine.scheduling.prefetch import Prefetcher
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.request_log import RequestLog
from engine.telemetry.stats import EngineStats
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """`prefetcher` is None without a disk tier. At most `max_in_flight` plans are sent ahead of their results."""

    model: ModelInfo
    scheduler: Scheduler
    prefetcher: Prefetcher | None
    live: LiveRequests
    adapters: Adapters
    max_in_flight: int

    @classmethod
    def of(
        cls,
        ready: WorkerReady,
        config: EngineConfig,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        *,
        send: Callable[[FetchBlocks], None],
        wake: Callable[[], None],
        queue_limits: tuple[int, int | None],
        recovery: Recovery,
        stats: EngineStats,
        log: RequestLog,
    ) -> "Loaded":
        """The model of the first Worker, without requests. Raises ConfigError.

        `send` sends to the present Worker; `wake` is called when there may be something new to schedule. `queue_limits`
        are the requests and the prompt tokens that may wait.
        """
        model = ModelInfo.of(
            ready,
            config.block_size,
            eos_token_ids=checkpoint.eos_token_ids,
            pooling=pooling_of_model(checkpoint.pooling, ready.encoder),
            thinking_tags=tokenizer.thinking_tags,
        )
        scheduler = new_scheduler(ready, config, checkpoint)
        prefetcher = None if config.disk_cache is None else Prefetcher(scheduler, send, wake)
        adapters = Adapters(config)
        live = LiveRequests(
            scheduler,
            prefetcher,
            tokenizer,
            checkpoint.eos_token_ids,
            queue_limits=queue_limits,
            recovery=recovery,
            stats=stats,
            log=log,
            wake=wake,
            hold_adapter=adapters.hold,
            release_adapter=adapters.release,
        )
        overlap = config.async_scheduling
        if overlap is None:  # on a CPU, planning ahead would take cores from the Worker's threads in mid-step
            overlap = ready.device != "cpu"
        return cls(model, scheduler, prefetcher, live, adapters, max_in_flight=2 if overlap else 1)

    def on(self, ready: WorkerReady, config: EngineConfig, *, keep_host_tier: bool = False) -> "Loaded":
        """Move to a new Worker, whose pool is empty and may be smaller: every live sequence waits to be recomputed.

        `keep_host_tier`: the same Worker woke, and its host memory holds what it held. A request that no longer fits
        ends with EngineError.
        """
        loaded = replace(self, model=self.model.on(ready))
        self.scheduler.reset(
            ready.num_blocks,
            self.scheduler.block_manager.host_tier if keep_host_tier else host_tier(ready, config),
            max_num_seqs=ready.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
        )
        if self.prefetcher is not None:
            self.prefetcher.reopen()
        for live in self.live:
            unfinished = [seq for seq in live.sequences if seq.finish_reason is None]
            if not all(fits_still(seq, loaded.model) for seq in unfinished):
                self.live.fail(live, EngineError("The Worker came back with a KV cache too small for this request."))
        return loaded
