"""The classes under test, with hooks: they call the Monitor and change nothing."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engine.block_manager import Block, BlockManager
from engine.outputs import FinishReason
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.step import SampledToken, StepPlan, StepResult
from tests.sim.violation import fail

if TYPE_CHECKING:
    from tests.sim.monitor import Monitor


def states_of(seq: Sequence) -> tuple[str, ...]:
    """The names under which an abort may pick a sequence, and is counted."""
    if seq.status is SequenceStatus.FINISHED:
        return ("finished",)
    if seq.status is SequenceStatus.WAITING and not seq.num_preemptions:
        return ("new",)
    pending = seq.num_pending_tokens > 0
    if seq.status is SequenceStatus.WAITING:
        return ("preempted", "preempted+pending") if pending else ("preempted",)
    stage = "prefill" if seq.num_computed_tokens < seq.num_prompt_tokens else "decode"
    return (stage, "pending") if pending else (stage,)


ABORT_COUNTERS = {
    "new": "abort while new",
    "prefill": "abort during prefill",
    "decode": "abort during decode",
    "pending": "abort with a token on its way",
    "preempted": "abort while preempted",
    "preempted+pending": "abort while preempted with a token on its way",
}


class WatchedBlockManager(BlockManager):
    def __init__(self, monitor: "Monitor", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.monitor = monitor
        self.planning = False
        self.allocated_now: set[int] = set()  # seq_ids in the plan under construction
        self.registered_now: set[int] = set()  # block ids

    def start_plan(self) -> None:
        self.planning = True
        self.allocated_now.clear()
        self.registered_now.clear()

    def match_prefix(self, seq: Sequence) -> list[Block]:
        prefix = super().match_prefix(seq)
        hashes = seq.block_hashes
        if len(prefix) < min(len(hashes), (len(seq.token_ids) - 1) // self.block_size):
            if hashes[len(prefix)] in self.monitor.contents.content_of:
                self.monitor.saw("prefix hit cut short by an eviction")
        return prefix

    def can_admit(self, seq: Sequence, prefix: list[Block], watermark: int) -> bool:
        admitted = super().can_admit(seq, prefix, watermark)
        if not admitted:
            by_watermark = super().can_admit(seq, prefix, 0)
            self.monitor.saw("admission waits for " + ("the watermark" if by_watermark else "blocks"))
        return admitted

    def adopt_prefix(self, seq: Sequence, prefix: list[Block]) -> None:
        for block in prefix:
            self.monitor.saw("prefix hit on a block in use" if block.ref_count else "prefix hit on a freed block")
        if prefix and seq.num_preemptions:
            self.monitor.saw("prefix hit on the return from preemption")
        if self.registered_now.intersection(block.block_id for block in prefix):
            self.monitor.saw("prefix hit on a block that this plan fills")
        super().adopt_prefix(seq, prefix)

    def allocate(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        num_cached = len(self.cached_blocks)
        block_ids = super().allocate(seq, num_tokens)
        if block_ids is not None:
            self.allocated_now.add(seq.seq_id)
        if len(self.cached_blocks) < num_cached:
            self.monitor.saw("cached block evicted")
        return block_ids

    def register_full_blocks(self, seq: Sequence) -> None:
        start = seq.num_registered_blocks
        super().register_full_blocks(seq)
        for block_id in seq.block_table[start : seq.num_registered_blocks]:
            self.registered_now.add(block_id)
            if self.blocks[block_id].block_hash is None:
                self.monitor.saw("equal content in two blocks, one cached")

    def free(self, seq: Sequence, *, discard: bool = False) -> None:
        if self.planning:
            self._count_preemption(seq)
        alone = [block for block_id in seq.block_table if (block := self.blocks[block_id]).ref_count == 1]
        if discard and len(alone) < len(seq.block_table):
            self.monitor.saw("failed sequence whose blocks were shared")
        if discard and any(block.block_hash is not None for block in alone):
            self.monitor.saw("failed sequence whose blocks were cached")
        super().free(seq, discard=discard)
        if discard and any(block.block_hash is not None for block in alone):
            fail("failed-in-cache", f"{seq} failed, and blocks that it alone held may still be served")

    def _count_preemption(self, seq: Sequence) -> None:
        if seq.num_computed_tokens < seq.num_prompt_tokens:
            self.monitor.saw("preempted during chunked prefill")
        if seq.num_pending_tokens:
            self.monitor.saw("preempted with a token on its way")
        if seq.num_preemptions > 1:
            self.monitor.saw("preempted more than twice")
        if seq.seq_id in self.allocated_now:
            self.monitor.saw("preempted what this plan had scheduled")


class WatchedScheduler(Scheduler):
    def __init__(self, monitor: "Monitor", block_manager: WatchedBlockManager, **kwargs: Any) -> None:
        super().__init__(block_manager, **kwargs)
        self.monitor = monitor
        self.watched_blocks = block_manager
        monitor.attach(self)

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        self.monitor.added(seq)

    def schedule(self) -> StepPlan | None:
        with self.monitor.checking():
            head = self.running[0] if self.running else None
            self.watched_blocks.start_plan()
            plan = super().schedule()
            self.watched_blocks.planning = False
            self.monitor.planned(plan, head)
            return plan

    def update(self, result: StepResult) -> list[tuple[Sequence, SampledToken]]:
        with self.monitor.checking():
            fresh = super().update(result)
            self.monitor.updated(result, fresh)
            return fresh

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        with self.monitor.checking():
            self._count_finish(seq, reason, stop_reason)
            super().finish(seq, reason, stop_reason)

    def _count_finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        saw = self.monitor.saw
        if seq.status is SequenceStatus.FINISHED:
            return
        if reason is FinishReason.ABORT:
            for state in states_of(seq):
                saw(ABORT_COUNTERS[state])
        elif reason is FinishReason.ERROR:
            if seq.num_pending_tokens > 1:
                saw("failed sequence with another token on its way")
        elif reason is FinishReason.LENGTH:
            saw("finished by length")
        elif isinstance(stop_reason, str):
            saw("finished by stop string")
            if seq.num_pending_tokens:
                saw("stop string with a token on its way")
        else:
            saw("finished by stop token" if stop_reason is not None else "finished by end of sequence")


def sequences_of(scheduler: Scheduler) -> Iterable[Sequence]:
    yield from scheduler.running
    yield from scheduler.waiting
