"""new_scheduler: the scheduler over the memory that a Worker reports."""

from engine.checkpoint.checkpoint import Checkpoint
from engine.config import EngineConfig
from engine.executor.step import WorkerReady
from engine.memory.block_manager import BlockManager
from engine.memory.host_tier import HostTier
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.drafts import PREDICTED_TOKENS, DraftSource


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
        max_draft_tokens=_max_draft_tokens(ready, config),
        draft_source=_draft_source(config),
        max_loras=config.max_loras,
    )


def _max_draft_tokens(ready: WorkerReady, config: EngineConfig) -> int:
    """The longest draft of a sequence; 0 where none is verified. A prediction of the client needs no setting."""
    if ready.encoder or config.serves_adapters:
        return 0
    return config.max_draft_tokens or PREDICTED_TOKENS


def _draft_source(config: EngineConfig) -> DraftSource:
    if config.draft_model:
        return DraftSource.MODEL
    return DraftSource.TEXT if config.max_draft_tokens else DraftSource.NONE


def host_tier(ready: WorkerReady, config: EngineConfig) -> HostTier | None:
    """The host tier of a Worker that was just loaded."""
    return HostTier.of(ready, config.disk_cache is not None)
