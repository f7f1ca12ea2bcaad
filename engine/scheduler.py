"""Scheduler: which tokens of which sequences the next step computes.

Iteration-level scheduling (Orca: Yu et al. 2022, section 3) with one rule: computed tokens chase known tokens. There is
no prefill phase and no decode phase; a prompt, a chunk of one, a decode step and the recomputation after a preemption
are the same line: `min(seq.num_uncomputed_tokens, budget)`. Chunked prefill shares a step with decodes (Sarathi-Serve:
Agrawal et al. 2024, section 4).

Running sequences come first, those with a single token to compute before longer chunks, so that a long prompt never
makes a stream stutter beyond one step of `max_num_batched_tokens`. Then waiting sequences are admitted in order while
all their known tokens find room and the watermark stays free. When a running sequence gets no block, the last in order
is preempted: it gives up its blocks and waits again, to be recomputed. The first in order is never preempted by others
and a single sequence always fits the pool, so something always progresses.
"""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.outputs import FinishReason
from engine.sequence import Sequence, SequenceStatus
from engine.step import NewSequence, SampledToken, SequenceStep, StepPlan, StepResult


@dataclass(slots=True)
class _RunningSteps:
    """What running sequences get in the plan under construction: (num_tokens, new block ids), not counted as done yet.

    So a victim of preemption just drops out of it.
    """

    budget: int
    planned: dict[Sequence, tuple[int, list[int]]] = field(default_factory=dict)

    def add(self, seq: Sequence, num_tokens: int, block_ids: list[int]) -> None:
        self.planned[seq] = num_tokens, block_ids
        self.budget -= num_tokens

    def drop(self, seq: Sequence) -> None:
        num_tokens, _ = self.planned.pop(seq, (0, []))
        self.budget += num_tokens


class Scheduler:
    """Owns `waiting` and `running`. All methods are synchronous and are called between steps, from one thread."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.01,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_manager = block_manager
        # Every running sequence must find room for its one token of decode in each step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self._watermark = watermark
        self.watermark_blocks = math.ceil(watermark * block_manager.num_blocks)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Sequence] = []  # sorted by Sequence.order
        self.running: list[Sequence] = []  # sorted by Sequence.order
        self.held: list[Sequence] = []  # what isolate() keeps from running; they hold no blocks
        self.num_preemptions = 0
        self._sequences: dict[int, Sequence] = {}
        self._removed: list[int] = []  # what the Worker must drop at the next plan
        self._isolated: Collection[Sequence] | None = None
        self._next_step_id = 0
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.held)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.held)

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait. It must fit the pool on its own: the Driver refuses those that never can."""
        self._sequences[seq.seq_id] = seq
        insort(self._queue_for(seq), seq, key=lambda s: s.order)

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can be computed now (no work, or every sequence awaits a result)."""
        num_preemptions = self.num_preemptions
        running = self._plan_running()
        steps = [self._count_as_computed(seq, n, block_ids) for seq, (n, block_ids) in running.planned.items()]
        new: list[NewSequence] = []
        if self.num_preemptions == num_preemptions:  # else what was just pushed out would come straight back in
            self._admit_waiting(running.budget, new, steps)
        if not steps:
            return None
        removed, self._removed = self._removed, []
        self._next_step_id += 1
        return StepPlan(self._next_step_id, removed, new, steps)

    def update(self, result: StepResult) -> list[tuple[Sequence, SampledToken]]:
        """Take in the tokens of a result; sequences that reach their end are finished and their blocks freed.

        Returns the (sequence, token) pairs that are new, in the order of the plan. A token of a sequence that finished
        while the step was under way is thrown away.
        """
        fresh = []
        for token in result.samples:
            seq = self._sequences.get(token.seq_id)
            if seq is None:
                continue
            seq.num_pending_tokens -= 1
            seq.token_ids.append(token.token_id)
            fresh.append((seq, token))
            self._finish_if_ended(seq, token.token_id)
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.register_full_blocks(seq)
        return fresh

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence in any state; a no-op when it ended before. Its blocks are free at once."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self._remove_sorted(self.running, seq)
            self._removed.append(seq.seq_id)
        else:
            self._remove_sorted(self._queue_for(seq), seq)
        # What an error left in the blocks cannot be trusted, so it must not be served to others.
        self.block_manager.free(seq, discard=reason is FinishReason.ERROR)
        seq.status, seq.finish_reason, seq.stop_reason = SequenceStatus.FINISHED, reason, stop_reason
        del self._sequences[seq.seq_id]

    def isolate(self, sequences: Collection[Sequence] | None) -> None:
        """Let these alone run, until the next call; all others give up their blocks and are held. None: all may run."""
        for seq in [seq for seq in self.running if sequences is not None and seq not in sequences]:
            self._preempt(seq)
        self._isolated = sequences
        everyone = sorted(self.waiting + self.held, key=lambda s: s.order)
        self.waiting, self.held = [], []
        for seq in everyone:
            self._queue_for(seq).append(seq)

    def reset(self, num_blocks: int, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Begin again with the empty pool of a new Worker: every live sequence waits, in order, to be recomputed.

        A token that was on its way is lost; it is drawn again, and comes out the same.
        """
        self.block_manager.reset(num_blocks)
        self.watermark_blocks = math.ceil(self._watermark * num_blocks)
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        for seq in self._sequences.values():
            seq.status = SequenceStatus.WAITING
            seq.block_table = []
            seq.num_computed_tokens = seq.num_pending_tokens = seq.num_registered_blocks = 0
        self.waiting = sorted(self._sequences.values(), key=lambda s: s.order)
        self.running, self.held, self._removed, self._isolated = [], [], [], None

    def sequence(self, seq_id: int) -> Sequence | None:
        """A live sequence by its id."""
        return self._sequences.get(seq_id)

    def check_invariants(self) -> None:
        """Assert that queues, statuses and blocks agree. For tests and simulation: O(n)."""
        assert self.running == sorted(self.running, key=lambda s: s.order)
        assert self.waiting == sorted(self.waiting, key=lambda s: s.order)
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running)
        assert all(seq.status is SequenceStatus.WAITING and not seq.block_table for seq in self.waiting + self.held)
        assert len(self.running) <= self.max_num_seqs
        assert {id(s) for s in self._sequences.values()} == {id(s) for s in self.running + self.waiting + self.held}
        for seq in self.running:
            assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_num_tokens
            assert len(seq.block_table) == self.block_manager.num_blocks_for(seq.num_computed_tokens)
        self.block_manager.check_invariants(self.running)

    def _plan_running(self) -> _RunningSteps:
        """Decodes before chunks, each in order; preempts where blocks run out."""
        plan = _RunningSteps(self.max_num_batched_tokens)
        due = [(seq, n) for seq in self.running if (n := seq.num_uncomputed_tokens) > 0]
        for seq, num_tokens in [x for x in due if x[1] == 1] + [x for x in due if x[1] > 1]:
            if plan.budget == 0:
                break
            if seq.status is SequenceStatus.RUNNING:  # not preempted meanwhile
                num_tokens = min(num_tokens, plan.budget)
                block_ids = self._allocate_or_preempt(seq, num_tokens, plan)
                if block_ids is not None:
                    plan.add(seq, num_tokens, block_ids)
        return plan

    def _allocate_or_preempt(self, seq: Sequence, num_tokens: int, plan: _RunningSteps) -> list[int] | None:
        """Blocks for `seq`, preempting from the end of the order; None when `seq` itself was the last."""
        while (block_ids := self.block_manager.allocate(seq, num_tokens)) is None:
            victim = self.running[-1]
            plan.drop(victim)
            self._preempt(victim)
            if victim is seq:
                return None
        return block_ids

    def _preempt(self, seq: Sequence) -> None:
        """Give up the blocks and wait again. A token that is still on its way stays valid: it was computed."""
        self._remove_sorted(self.running, seq)
        self._removed.append(seq.seq_id)
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, seq, key=lambda s: s.order)

    def _admit_waiting(self, budget: int, new: list[NewSequence], steps: list[SequenceStep]) -> None:
        """Move sequences from waiting to running, in order, until one finds no room."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if seq.num_pending_tokens:  # preempted with a token on its way: it is back after the next result
                break
            prefix = self.block_manager.match_prefix(seq)
            watermark = self.watermark_blocks if self.running else 0
            if not self.block_manager.can_admit(seq, prefix, watermark):
                break
            self.block_manager.adopt_prefix(seq, prefix)
            num_tokens = min(seq.num_uncomputed_tokens, budget)
            block_ids = self.block_manager.allocate(seq, num_tokens)
            assert block_ids is not None, "can_admit() found room for all known tokens"
            self._start_running(seq)
            new.append(self._new_sequence(seq))
            steps.append(self._count_as_computed(seq, num_tokens, []))  # its block ids came with NewSequence
            budget -= num_tokens

    def _start_running(self, seq: Sequence) -> None:
        del self.waiting[0]
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda s: s.order)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.first_scheduled_time = self._clock()

    def _count_as_computed(self, seq: Sequence, num_tokens: int, new_block_ids: list[int]) -> SequenceStep:
        """Advance `seq`; its full blocks are shared from now on, with other samples of this very step too."""
        seq.num_computed_tokens += num_tokens
        sample = seq.num_computed_tokens == seq.num_tokens
        self.block_manager.register_full_blocks(seq)
        seq.num_pending_tokens += sample
        return SequenceStep(seq.seq_id, num_tokens, sample, new_block_ids)

    def _new_sequence(self, seq: Sequence) -> NewSequence:
        return NewSequence(
            seq_id=seq.seq_id,
            token_ids=list(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=seq.num_computed_tokens,
            block_ids=list(seq.block_table),
            params=seq.params,
            seed=seq.seed,
        )

    def _finish_if_ended(self, seq: Sequence, token_id: int) -> None:
        params = seq.params
        if seq.num_generated_tokens >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return self.finish(seq, FinishReason.STOP, token_id)
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return self.finish(seq, FinishReason.STOP)
        if len(seq.token_ids) >= seq.max_num_tokens:
            self.finish(seq, FinishReason.LENGTH)

    def _queue_for(self, seq: Sequence) -> list[Sequence]:
        """Where a sequence that does not run waits."""
        return self.waiting if self._isolated is None or seq in self._isolated else self.held

    @staticmethod
    def _remove_sorted(queue: list[Sequence], seq: Sequence) -> None:
        index = bisect_left(queue, seq.order, key=lambda s: s.order)
        assert queue[index] is seq, "arrival is unique, so the order finds exactly this sequence"
        del queue[index]
