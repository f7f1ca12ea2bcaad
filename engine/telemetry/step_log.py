"""StepLog: what the last steps were made of, for those who watch.

Nobody watching, a step costs one comparison: the log is written only for WATCHED_STEPS steps after the last look at it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.executor.step import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler

NUM_RECORDS = 256
WATCHED_STEPS = 4096


class StepRecord(msgspec.Struct, array_like=True):
    """One step. Counts of preemptions, evictions and prefix hits are of what was done to plan it.

    `copies` are copy-on-write pairs (source, target). `evicted` are blocks whose cached content was given up: the last
    64 at most, `num_evicted` is how many there were. `finished_at` (monotonic seconds) and `compute_seconds`, those of
    the Worker, are None until its result is back; `num_sampled` is 0 till then.
    """

    step_id: int
    num_decodes: int
    num_chunks: int  # of prompts, whole ones too, and of what is computed again after a preemption
    num_chunk_tokens: int
    num_preempted: int
    num_evicted: int
    num_hit_tokens: int
    copies: list[tuple[int, int]]
    evicted: list[int]
    num_sampled: int = 0
    finished_at: float | None = None
    compute_seconds: float | None = None


@dataclass(frozen=True)
class StepsView:
    """`steps` are records, the oldest first, as arrays whose fields `columns` names."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_running: int
    num_waiting: int
    steps: list[StepRecord]
    columns: tuple[str, ...] = field(default=StepRecord.__struct_fields__)


class StepLog:
    """The last NUM_RECORDS steps. `sent` and `done` are called for every plan and result, in order."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_RECORDS)
        self._in_flight: deque[StepRecord] = deque(maxlen=NUM_RECORDS)
        self._num_left = 0  # steps that are still recorded
        self._counts = (0, 0, 0)

    def sent(self, plan: StepPlan, scheduler: Scheduler) -> None:
        if not self._num_left:
            return
        self._num_left -= 1
        before, self._counts = self._counts, _counts(scheduler)
        num_preempted, num_evicted, num_hit_tokens = map(int.__sub__, self._counts, before)
        chunk_tokens = [chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens]  # a fork computes none
        last_evicted = scheduler.block_manager.last_evicted
        record = StepRecord(
            plan.step_id,
            len(plan.decodes),
            len(chunk_tokens),
            sum(chunk_tokens),
            num_preempted,
            num_evicted,
            num_hit_tokens,
            [(copy.source, copy.target) for copy in plan.block_copies],
            list(last_evicted),
        )
        last_evicted.clear()
        self._records.append(record)
        self._in_flight.append(record)

    def done(self, result: StepResult, now: float) -> None:
        """A step is finished; what a dead Worker left behind before it never was."""
        while self._in_flight and self._in_flight[0].step_id <= result.step_id:
            record = self._in_flight.popleft()
            if record.step_id == result.step_id:
                record.num_sampled = len(result.seq_ids) + len(result.detailed)
                record.finished_at, record.compute_seconds = now, result.compute_seconds

    def view(self, scheduler: Scheduler) -> StepsView:
        """The recorded steps. Recording begins, or goes on."""
        if not self._num_left:  # what happened unseen belongs to no step
            self._counts = _counts(scheduler)
            scheduler.block_manager.last_evicted.clear()
        self._num_left = WATCHED_STEPS
        return StepsView(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            len(scheduler.running),
            scheduler.num_waiting,
            list(self._records),
        )


def _counts(scheduler: Scheduler) -> tuple[Any, ...]:
    blocks = scheduler.block_manager
    return scheduler.num_preemptions, blocks.num_evictions, blocks.num_prefix_hits
