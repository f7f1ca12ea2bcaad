"""StepLog: the composition of the last steps, for /debug/steps.

The log records only WATCHED_STEPS steps after it was last read; after that a step costs one comparison.
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
    """One step. Preemptions, evictions and prefix hits are counted while the step was planned.

    `copies` are copy-on-write pairs (source, target). `evicted` are the last blocks, at most 64, whose cached content
    was dropped; `num_evicted` counts all of them. `finished_at` (monotonic seconds) and `compute_seconds` (measured by
    the Worker) are None, and `num_sampled` is 0, until the result is back.
    """

    step_id: int
    num_decodes: int
    num_chunks: int  # sequences that compute a prompt or a part of it, or recompute tokens after a preemption
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
    """`steps` are records, the oldest first, as arrays; `columns` names their fields."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_running: int
    num_waiting: int
    steps: list[StepRecord]
    columns: tuple[str, ...] = field(default=StepRecord.__struct_fields__)


class StepLog:
    """The last NUM_RECORDS steps. The Driver calls `sent` and `done` for every plan and result, in order."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_RECORDS)
        self._in_flight: deque[StepRecord] = deque(maxlen=NUM_RECORDS)
        self._num_left = 0  # steps to record before the log stops
        self._counts = (0, 0, 0)

    def sent(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Record a plan that was sent to the Worker, if the log was read lately."""
        if not self._num_left:
            return
        self._num_left -= 1
        before, self._counts = self._counts, _counts(scheduler)
        num_preempted, num_evicted, num_hit_tokens = map(int.__sub__, self._counts, before)
        chunk_tokens = [chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens]  # a fork computes no token
        last_evicted = scheduler.block_manager.last_evicted
        record = StepRecord(
            step_id=plan.step_id,
            num_decodes=len(plan.decodes),
            num_chunks=len(chunk_tokens),
            num_chunk_tokens=sum(chunk_tokens),
            num_preempted=num_preempted,
            num_evicted=num_evicted,
            num_hit_tokens=num_hit_tokens,
            copies=[(copy.source, copy.target) for copy in plan.block_copies],
            evicted=list(last_evicted),
        )
        last_evicted.clear()
        self._records.append(record)
        self._in_flight.append(record)

    def done(self, result: StepResult, now: float) -> None:
        """Complete the record of a step. Steps before it whose Worker died stay unfinished."""
        while self._in_flight and self._in_flight[0].step_id <= result.step_id:
            record = self._in_flight.popleft()
            if record.step_id == result.step_id:
                record.num_sampled = len(result.seq_ids) + len(result.detailed) + sum(map(len, result.verified))
                record.finished_at, record.compute_seconds = now, result.compute_seconds

    def view(self, scheduler: Scheduler, asleep: bool = False) -> StepsView:
        """The recorded steps. Recording begins, or goes on. `asleep`: what ran waits for the wake."""
        if not self._num_left:  # events since recording stopped belong to no recorded step
            self._counts = _counts(scheduler)
            scheduler.block_manager.last_evicted.clear()
        self._num_left = WATCHED_STEPS
        return StepsView(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            0 if asleep else len(scheduler.running),
            scheduler.num_waiting + (len(scheduler.running) if asleep else 0),
            list(self._records),
        )


def _counts(scheduler: Scheduler) -> tuple[Any, ...]:
    blocks = scheduler.block_manager
    return scheduler.num_preemptions, blocks.num_evictions, blocks.num_prefix_hits
