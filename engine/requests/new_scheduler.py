"""new_scheduler: the scheduler over the memory that a Worker reports."""

from engine.checkpoint.checkpoint import Checkpoint
from engine.config import EngineConfig
from engine.executor.step import WorkerReady
from engine.memory.block_manager import BlockManager
from engine.memory.host_tier import HostTier
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.drafts import (
    CPU_BOUNDS,
    GPU_BOUNDS,
    PREDICTED_TOKENS,
    Drafts,
    DraftSource,
    make_drafts,
)


def new_scheduler(ready: WorkerReady, config: EngineConfig, checkpoint: Checkpoint) -> Scheduler:
    """The scheduler of a model that a first Worker has loaded."""
    return Scheduler(
        BlockManager(
            ready.num_blocks,
            config.block_size,
            config.enable_prefix_caching and not ready.encoder,
            host_tier(ready, config),
            checkpoint.identity,
        ),
        max_num_seqs=ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        watermark=config.watermark,
        admission=config.admission,
        eos_token_ids=checkpoint.eos_token_ids,
        whole_sequences=ready.encoder,
        step_seconds=None if ready.encoder else config.fair_step_seconds,
        itl_target=None if ready.encoder else config.itl_target,
        drafts=_drafts(ready, config),
        max_loras=config.max_loras,
    )


def _drafts(ready: WorkerReady, config: EngineConfig) -> Drafts:
    """A prediction of the client needs no setting. No draft is verified for adapters."""
    if ready.encoder or config.serves_adapters:
        return Drafts()
    source = DraftSource.NONE
    if config.max_draft_tokens:
        source = DraftSource.MODEL if config.draft_model else DraftSource.TEXT
    bounds = CPU_BOUNDS if ready.device == "cpu" else GPU_BOUNDS
    return make_drafts(config.max_draft_tokens or PREDICTED_TOKENS, source, bounds)


def host_tier(ready: WorkerReady, config: EngineConfig) -> HostTier | None:
    """The host tier of a Worker that was just loaded."""
    return HostTier.of(ready, config.disk_cache is not None)
