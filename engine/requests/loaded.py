"""Loaded: everything that exists only once the Worker has loaded the model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.pooling import pooling_of_model
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.recovery import Recovery
from engine.executor.step import FetchBlocks, StepPlan, WorkerReady
from engine.requests.adapters import Adapters
from engine.requests.live_requests import LiveRequests
from engine.requests.model_info import ModelInfo, cut_to_context, fits_still
from engine.requests.new_scheduler import host_tier, new_scheduler
from engine.scheduling.prefetch import Prefetcher
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.request_log import RequestLog
from engine.telemetry.stats import EngineStats
from engine.text.tokenizer import Tokenizer

# Sequences on a CPU up to which a plan is sent ahead: the Worker then need not wait for the Driver between two short
# steps. With more, steps are so long that nothing is won, and a request that arrives waits for one more of them.
CPU_AHEAD_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Loaded:
    """`prefetcher` is None without a disk tier. A plan is sent ahead of the result of the one before it while at most
    `max_ahead_sequences` run; None: always."""

    model: ModelInfo
    scheduler: Scheduler
    prefetcher: Prefetcher | None
    live: LiveRequests
    adapters: Adapters
    max_ahead_sequences: int | None

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
        max_ahead = CPU_AHEAD_SEQUENCES if ready.device == "cpu" else None
        if config.async_scheduling is not None:
            max_ahead = None if config.async_scheduling else 0
        return cls(model, scheduler, prefetcher, live, adapters, max_ahead)

    def take_over(self, request_id: str, other: "Loaded") -> bool:
        """Go on with a live request of another replica, whose Worker is gone for good, from its tokens. Returns False
        for a request that may not leave or does not fit here."""
        live = other.live[request_id]
        unfinished = [seq for seq in live.sequences if seq.finish_reason is None]
        if not other.live.may_leave(live) or not all(fits_still(seq, self.model) for seq in unfinished):
            return False
        adapter = live.sequences[0].adapter
        if adapter is not None and (adapter := self.adapters.hold_as(adapter)) is None:
            return False
        for seq in unfinished:
            cut_to_context(seq, self.model)
        self.live.arrive(other.live.leave(live), adapter)
        return True

    def goes_ahead_of(self, plan: StepPlan) -> bool:
        """True if the next plan may be sent before the result of `plan`.

        A CPU's steps with prompts are long: a request that arrives during one joins the very next step only if no plan
        was sent ahead of it.
        """
        if self.max_ahead_sequences is None:
            return True
        return not plan.chunks and len(self.scheduler.running) <= self.max_ahead_sequences

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
                continue
            for seq in unfinished:
                cut_to_context(seq, loaded.model)
        return loaded
