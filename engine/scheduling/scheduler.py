"""Scheduler: which tokens of which sequences the next step computes.

Iteration-level scheduling (Orca: Yu et al. 2022, section 3) with one rule: computed tokens chase known tokens. There is
no prefill phase and no decode phase; a prompt, a chunk of one, a decode step and the recomputation after a preemption
are the same line: `min(seq.num_uncomputed_tokens, budget)`. Chunked prefill shares a step with decodes (Sarathi-Serve:
Agrawal et al. 2024, section 4).

Running sequences come first, those with a single token to compute before longer chunks, so that a long prompt never
makes a stream stutter beyond one step of `max_num_batched_tokens`. Then waiting sequences are admitted in order while
all their known tokens find room and as many blocks stay free as engine/scheduling/admission.py asks. When a running
sequence gets no block, the last in order is preempted: it gives up its blocks and waits again, to be recomputed. The
first in order is never preempted for want of blocks and a single sequence always fits the pool, so something always
progresses. Where tenants compete, engine/scheduling/fair_share.py says whose turn it is, and who gives way.

Samples of one prompt are forks of the first of them: it computes the prompt for all, then they share its blocks. The
hypotheses of a beam search are forked and ended by their BeamGroup. Both are preempted as a whole and come back when
there is room for all of them (engine/memory/sequence.py); samples that together outgrow the pool run one by one.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable
from itertools import takewhile

from engine.executor.step import BlockCopy, SampledToken, SequenceStep, StepPlan, StepResult
from engine.memory.block_manager import Allocation, BlockManager, Prefix
from engine.memory.host_tier import HostTier
from engine.memory.sequence import (
    Sequence,
    SequenceGroup,
    SequenceStatus,
    end_after,
    end_tokens,
    num_forks_of,
    together,
)
from engine.outputs import FinishReason
from engine.scheduling.admission import make_admission
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.fair_share import FairShare
from engine.scheduling.plan_parts import RunningSteps, decode_end, new_sequence
from engine.scheduling.sequence_queue import SequenceQueue, check_queues


class Scheduler:
    """Owns `waiting` and `running`. All methods are synchronous and are called between steps, from one thread."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.01,
        admission: str = "plain",
        eos_token_ids: Iterable[int] = (),
        whole_sequences: bool = False,
        step_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_manager = block_manager
        self._whole_sequences = whole_sequences  # an encoder computes all tokens of a sequence in one step
        # Every running sequence must find room for its one token of decode in each step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self._watermark = watermark
        self.admission = make_admission(admission, block_manager, math.ceil(watermark * block_manager.num_blocks))
        self.step_budget = max_num_batched_tokens  # of the last plan: see engine/scheduling/fair_share.py
        self.fair_share = FairShare(block_manager, self.max_num_seqs, step_seconds=step_seconds)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self.held = SequenceQueue()  # what isolate() keeps from running; they hold no blocks
        self.ended_groups: list[BeamGroup] = []  # for the Driver to take out
        self.num_preemptions = 0
        self._groups: set[BeamGroup] = set()
        self._sequences: dict[int, Sequence] = {}
        self._forks: dict[Sequence, list[Sequence]] = {}  # what waits for another to compute their common prompt
        self._removed: list[int] = []  # what the Worker must drop at the next plan
        self._isolated: Collection[Sequence] | None = None
        self._next_step_id = 1
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.held)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.held) + sum(map(len, self._forks.values()))

    @property
    def num_waiting_tokens(self) -> int:
        return self.waiting.num_tokens + self.held.num_tokens

    def add(self, seq: Sequence, forks: Iterable[Sequence] = ()) -> None:
        """Let a new sequence wait. It must fit the pool on its own: the Driver refuses those that never can.

        `forks` are further samples of its prompt, which come after it in order.
        """
        self._enter(seq)
        self._queue_for(seq).add(seq)
        if isinstance(seq.group, BeamGroup):
            self._groups.add(seq.group)
        forks = list(forks)
        if forks and seq.group is None:
            SequenceGroup([seq, *forks])  # they know it
        for fork in forks:
            self._enter(fork)
            fork.fork_of = seq
            self._forks.setdefault(seq, []).append(fork)

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can be computed now (no work, or every sequence awaits a result)."""
        plan = StepPlan(self._next_step_id, self._removed, [], [], [], [], [], [], [])
        newcomer = self._make_way() if self.fair_share.contended and self.waiting else None
        most, more_wait = self.max_num_batched_tokens, bool(self.waiting)
        starters, self.step_budget = self.fair_share.next_step(newcomer, self.running, more_wait, most)
        before = self.num_preemptions  # what is pushed out from now on would come straight back in
        filled = self._fill(plan, starters, before)
        # They may all have made way for nobody: for who was left out, or a group that runs in part and awaits the rest.
        while not filled and (self.fair_share.all_in() or self.num_preemptions != before):
            before, self.step_budget = self.num_preemptions, self.max_num_batched_tokens
            filled = self._fill(plan, self.running, before)
        if not filled:
            return None
        self._add_moves(plan)
        self.fair_share.planned(plan, self.running)
        self._removed = []
        self._next_step_id += 1
        return plan

    def _fill(self, plan: StepPlan, sequences: list[Sequence], num_preemptions: int) -> bool:
        """Let these go on, then, if all of them can, some that wait; whether anything is planned."""
        running = self._plan_running(sequences)
        running.decodes.commit(plan, self.block_manager)
        for seq, (num_tokens, blocks) in running.planned.items():
            self._plan_step(plan, seq, num_tokens, blocks)
        if self.num_preemptions == num_preemptions:
            self._admit_waiting(running.budget, plan)
        return bool(plan.decodes or plan.chunks)

    def plan_flush(self) -> StepPlan:
        """A plan that computes nothing and moves to the host what the prefix cache holds: the last of a server."""
        plan = StepPlan(self._next_step_id, [], [], [], [], [], [])
        self.block_manager.offload_all()
        self._add_moves(plan)
        return plan

    def update(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Take in the tokens of a result; sequences that reach their end are finished and their blocks freed.

        Returns the (sequence, token id) pairs that are new. A token of a sequence that finished while the step was
        under way is thrown away. Beam searches return nothing here: see `ended_groups`.
        """
        self.fair_share.computed(result)
        fresh = []
        find = self._sequences.get
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            if (seq := find(seq_id)) is None:
                continue
            seq.num_pending_tokens -= 1
            token_ids = seq.token_ids
            token_ids.append(token_id)
            fresh.append((seq, token_id))
            if len(token_ids) >= seq.look_at or token_id in seq.end_token_ids:
                self._look_at(seq, token_id)
        for scores in result.prompt_scores:
            if (seq := find(scores.seq_id)) is not None:
                seq.num_scored_tokens = max(seq.num_scored_tokens, scores.start + scores.num_tokens)
        for token in result.detailed:
            if (seq := find(token.seq_id)) is not None:
                self._take_detailed(seq, token, fresh)
        return fresh

    def take_vectors(self, result: StepResult) -> list[tuple[Sequence, bytes]]:
        """The embedded sequences that a result ends, with their vectors."""
        found = [(seq, vector) for seq_id, vector in result.vectors.items() if (seq := self._sequences.get(seq_id))]
        for seq, _ in found:
            seq.num_pending_tokens -= 1
            self.finish(seq, FinishReason.STOP)
        return found

    def _take_detailed(self, seq: Sequence, token: SampledToken, fresh: list[tuple[Sequence, int]]) -> None:
        """A token that its logprobs came with: for a beam search, or for a client."""
        seq.num_pending_tokens -= 1
        if isinstance(seq.group, BeamGroup):
            seq.group.take(seq, token, self)
            return
        seq.token_ids.append(token.token_id)
        fresh.append((seq, token.token_id))
        self._look_at(seq, token.token_id)

    def _look_at(self, seq: Sequence, token_id: int) -> None:
        """A new token may have ended `seq` or filled a block."""
        if (end := end_after(seq, token_id, self.eos_token_ids)) is not None:
            if not seq.params.generates:
                seq.token_ids.pop()
            self.finish(seq, *end)
        if seq.status is SequenceStatus.RUNNING:
            self.block_manager.register_full_blocks(seq)
        size = self.block_manager.block_size
        seq.look_at = min((len(seq.token_ids) // size + 1) * size, seq.max_num_tokens)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence in any state; a no-op when it ended before. Its blocks are free at once."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.take_out(seq)
            self._drop_row(seq)
            self.admission.stopped(seq, reason)
        elif seq.fork_of is not None:
            self._forks[seq.fork_of].remove(seq)
        else:
            self._queue_for(seq).take_out(seq)
        # What an error left in the blocks cannot be trusted, so it must not be served to others.
        self.block_manager.free(seq, discard=reason is FinishReason.ERROR)
        seq.status, seq.finish_reason, seq.stop_reason = SequenceStatus.FINISHED, reason, stop_reason
        del self._sequences[seq.seq_id]
        self.fair_share.went(seq)
        if isinstance(seq.group, BeamGroup) and not seq.group.live:
            self._groups.discard(seq.group)
        if forks := self._forks.pop(seq, None):  # the next one computes the prompt
            forks[0].fork_of = None
            self.add(forks[0], forks[1:])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which is not live and has the tokens of `parent`, go on from where `parent` is.

        It runs where `parent` runs, in a row that its group has kept free, else it waits.
        """
        self._enter(child)
        child.block_keys = list(parent.block_keys)
        if parent.status is SequenceStatus.RUNNING:
            self.block_manager.fork(parent, child)
            parent.decode_end = 0  # its last block is shared
            self.admission.forked(parent, child)
            self._start_running(child)
        else:
            child.status = SequenceStatus.WAITING
            self._queue_for(child).add(child)

    def resend(self, seq: Sequence) -> None:
        """The last known token is not the one that the Worker sampled: the next plan with `seq` brings it anew."""
        self._drop_row(seq)

    def isolate(self, sequences: Collection[Sequence] | None) -> None:
        """Let these alone run, until the next call; all others give up their blocks and are held. None: all may run."""
        for seq in [seq for seq in self.running if sequences is not None and seq not in sequences]:
            self._preempt(seq)
        self._isolated = sequences
        everyone = self.waiting + self.held
        self.waiting, self.held = SequenceQueue(), SequenceQueue()
        for seq in everyone:
            self._queue_for(seq).add(seq)

    def reset(
        self, num_blocks: int, host_tier: HostTier | None = None, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        """Begin again with the empty pool of a new Worker: every live sequence waits, in order, to be recomputed.

        A token that was on its way is lost; it is drawn again, and comes out the same.
        """
        self.block_manager.reset(num_blocks, host_tier)
        self.admission.reset(math.ceil(self._watermark * num_blocks))
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.fair_share.worker_lost(self.max_num_seqs)
        for seq in self._sequences.values():
            seq.lose_blocks()
        self.waiting = SequenceQueue(seq for seq in self._sequences.values() if seq.fork_of is None)
        self.running, self.held, self._removed, self._isolated = SequenceQueue(), SequenceQueue(), [], None

    def sequence(self, seq_id: int) -> Sequence | None:
        """A live sequence by its id."""
        return self._sequences.get(seq_id)

    def check_invariants(self) -> None:
        """Assert that queues, statuses and blocks agree. For tests and simulation: O(n)."""
        forks = [fork for group in self._forks.values() for fork in group]
        check_queues(self.waiting, self.running, self.held, forks, self._sequences)
        self.fair_share.check_invariants(self._sequences.values())
        assert self._num_rows <= self.max_num_seqs and all(group.live for group in self._groups)
        for seq in self.running:
            assert len(seq.block_table) == self.block_manager.num_blocks_for(seq.num_computed_tokens)
        self.block_manager.check_invariants(self.running)

    def _add_moves(self, plan: StepPlan) -> None:
        if (tier := self.block_manager.host_tier) is not None:
            plan.offloads[:], plan.loads[:] = tier.take_moves()

    def _plan_running(self, sequences: list[Sequence]) -> RunningSteps:
        """Decodes before chunks, each in order; preempts where blocks run out."""
        plan = RunningSteps(self.step_budget)
        growing, due = plan.decodes.take(sequences, self._forks)
        plan.budget -= len(plan.decodes.sequences)  # max_num_seqs of them fit
        for seq in growing:
            if seq.status is SequenceStatus.RUNNING:
                blocks = self._allocate_or_preempt(seq, 1, plan)
                if blocks is not None:
                    plan.decodes.allocations[seq] = blocks
        for seq, num_tokens in [x for x in due if x[1] == 1] + [x for x in due if x[1] > 1]:
            if plan.budget == 0:
                break
            if seq.status is SequenceStatus.RUNNING:  # not preempted meanwhile
                num_tokens = min(num_tokens, plan.budget)
                blocks = self._allocate_or_preempt(seq, num_tokens, plan)
                if blocks is not None:
                    plan.add(seq, num_tokens, blocks)
        return plan

    def _allocate_or_preempt(self, seq: Sequence, num_tokens: int, plan: RunningSteps) -> Allocation | None:
        """Blocks for `seq`, preempting from the end of the order; None when `seq` or its group was the last."""
        while (blocks := self.block_manager.allocate(seq, num_tokens)) is None:
            victims = together(self._victim(seq))
            if seq.group is not None and not seq.group.split and len(victims) == len(self.running):
                self._outgrown(seq.group, plan)
            else:
                for victim in victims:
                    plan.drop(victim)
                    self._preempt(victim)
            if seq.status is not SequenceStatus.RUNNING:
                return None
        return blocks

    def _victim(self, seq: Sequence) -> Sequence:
        """The last of those who hold most, unless it is no further than when it was preempted and one behind `seq` is.

        Who is preempted together is behind it together, and got further only if all of them did.
        """
        own = together(seq)
        candidates = self.fair_share.heaviest(self.running, together(self.running[0]))
        behind = takewhile(lambda other: other not in own, reversed(candidates))
        found = (other for other in behind if all(member.has_progressed for member in together(other)))
        return next(found, candidates[-1])

    def _outgrown(self, group: SequenceGroup, plan: RunningSteps) -> None:
        """All blocks there are do not suffice for a group: hypotheses cannot go on without each other, samples can."""
        if isinstance(group, BeamGroup):
            for seq in group.running:
                plan.drop(seq)
            self._fail_group(group)
        else:
            group.split = True

    def _preempt(self, seq: Sequence) -> None:
        """Give up the blocks and wait again. A token that is still on its way stays valid: it was computed."""
        self.running.take_out(seq)
        self._drop_row(seq)
        self.fair_share.charge(seq)
        self.admission.stopped(seq)
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        seq.num_tokens_when_preempted = seq.num_tokens
        self.num_preemptions += 1
        self.waiting.add(seq)

    def _admit_waiting(self, budget: int, plan: StepPlan) -> None:
        """Move sequences from waiting to running, in order, until one finds no room, or is of a tenant left out."""
        while self.waiting and budget > 0 and self._has_row(seq := self._next_to_admit()):
            # One that was preempted with a token on its way is back after the next result.
            if seq.num_pending_tokens or seq.tenant in self.fair_share.left_out:
                break
            if self._whole_sequences and seq.num_tokens > budget:
                break
            prefix, num_forks = self._match_prefix(seq), num_forks_of(seq)
            if not self._has_blocks(seq, prefix, num_forks):
                # With others of the group in this very plan, the next one will tell.
                if isinstance(seq.group, BeamGroup) and self._is_alone(seq) and not plan.num_tokens:
                    self._fail_group(seq.group)
                    continue
                break
            self.block_manager.adopt_prefix(seq, prefix)
            num_tokens = min(seq.num_uncomputed_tokens, budget)
            blocks = self.block_manager.allocate(seq, num_tokens)
            assert blocks is not None, "can_admit() found room for all known tokens"
            self.waiting.take_out(seq)
            self._start_running(seq)
            self.admission.admitted(seq, num_forks)
            self._plan_step(plan, seq, num_tokens, blocks)
            budget -= num_tokens

    def _make_way(self) -> Sequence | None:
        """Find a place for the next in turn, where tenants compete; None where there is none."""
        seq = self._next_to_admit()
        return seq if not seq.num_pending_tokens and (self._finds_room(seq) or self._displace_for(seq)) else None

    def _finds_room(self, seq: Sequence) -> bool:
        return self._has_row(seq) and self._has_blocks(seq, self._match_prefix(seq), num_forks_of(seq))

    def _displace_for(self, seq: Sequence) -> bool:
        """Let others give way to `seq` as far as that is fair; whether it then finds room."""
        spare = self.admission.spare(seq, [], num_forks_of(seq), self.running, self._next_step_id)
        for victim in self.fair_share.displaced_by(seq, self.running, self._num_rows, spare):
            if victim.group is not None and not victim.group.inseparable:
                victim.group.split = True  # its other samples go on without this one
            self._preempt(victim)
        return self._finds_room(seq)

    def _next_to_admit(self) -> Sequence:
        """Whose turn it is, but before all others the rest of a beam search: what runs of it waits for them."""
        rest = (seq for group in self._groups if group.running for seq in group.waiting)
        found = min(rest, key=lambda s: s.order, default=None)
        return self.fair_share.next_in_turn(self.waiting, self.running) if found is None else found

    def _match_prefix(self, seq: Sequence) -> Prefix:
        prefix = self.block_manager.match_prefix(seq)
        shared = [] if seq.group is None else self.block_manager.shared_prefix(seq, seq.group.running)
        shared = shared[: seq.num_skippable_tokens // self.block_manager.block_size]
        return Prefix([*shared]) if len(shared) > len(prefix.parts) else prefix

    def _has_row(self, seq: Sequence) -> bool:
        needed = 1 if seq.group is None else seq.group.num_rows_to_start
        return self._num_rows + min(needed, self.max_num_seqs) <= self.max_num_seqs

    def _has_blocks(self, seq: Sequence, prefix: Prefix, num_forks: int) -> bool:
        """Whether all known tokens find room: those of a whole group before the first of it is admitted.

        Blocks that forks will soon write to are left free, and the watermark, unless nothing else runs. Samples that
        no pool of this size holds are split here, so that they need not wait for others to end.
        """
        blocks, group, now = self.block_manager, seq.group, self._next_step_id
        spare = 0 if self._is_alone(seq) else self.admission.spare(seq, prefix.blocks, num_forks, self.running, now)
        if not blocks.can_admit(seq, prefix, spare):
            return False
        if group is None or group.running:
            return True
        needed = blocks.num_blocks_together(group.waiting)
        group.split = needed > blocks.num_blocks and not isinstance(group, BeamGroup)
        return group.split or blocks.can_admit(seq, prefix, spare + needed - blocks.num_blocks_for(seq.num_tokens))

    def _is_alone(self, seq: Sequence) -> bool:
        """Whether nothing runs, or the group of `seq` only."""
        whole = seq.group is not None and not seq.group.split
        return not self.running or (whole and len(together(seq)) == len(self.running))

    @property
    def _num_rows(self) -> int:
        return len(self.running) + sum(group.num_spare_rows for group in self._groups)

    def _fail_group(self, group: BeamGroup) -> None:
        group.too_large(self.block_manager)
        for slot in group.slots:
            self.finish(slot, FinishReason.ABORT)  # what is in the blocks is right
            slot.finish_reason = FinishReason.ERROR
        self.ended_groups.append(group)

    def _enter(self, seq: Sequence) -> None:
        if seq.seq_id not in self._sequences:
            self._sequences[seq.seq_id] = seq
            self.fair_share.came(seq, self.running)

    def _drop_row(self, seq: Sequence) -> None:
        if seq.in_worker:
            self._removed.append(seq.seq_id)
            seq.in_worker = False
            seq.decode_end = 0

    def _start_running(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.end_token_ids = end_tokens(seq.params, self.eos_token_ids)
        self.running.add(seq)
        seq.num_charged_tokens = max(seq.num_charged_tokens, seq.num_computed_tokens)  # found, not computed
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.first_scheduled_time = self._clock()

    def _plan_step(self, plan: StepPlan, seq: Sequence, num_tokens: int, blocks: Allocation) -> None:
        """Count tokens as computed; full blocks are shared from now on, with other samples of this very step too."""
        if not seq.in_worker:
            plan.new.append(new_sequence(seq, blocks))
            seq.in_worker = True
        if blocks.copy is not None:
            plan.block_copies.append(BlockCopy(seq.seq_id, *blocks.copy))
        seq.num_computed_tokens += num_tokens
        sample = seq.num_computed_tokens == seq.num_tokens
        self.block_manager.register_full_blocks(seq)
        plan.chunks.append(SequenceStep(seq.seq_id, num_tokens, sample, blocks.new_block_ids))
        if sample:
            seq.decode_end = decode_end(seq, self.block_manager.block_size)
            for fork in self._forks.pop(seq, ()):
                self._start_fork(plan, seq, fork)
        seq.num_pending_tokens += sample

    def _start_fork(self, plan: StepPlan, parent: Sequence, fork: Sequence) -> None:
        """Let `fork` go on from the blocks and the logits of `parent`; wait like any other where no row is free."""
        fork.fork_of = None
        if self._num_rows == self.max_num_seqs:
            self._queue_for(fork).add(fork)
            return
        self.block_manager.fork(parent, fork)
        self.admission.forked(parent, fork)
        self._start_running(fork)
        plan.new.append(new_sequence(fork, Allocation([]), fork_of=parent.seq_id))
        fork.in_worker = True
        plan.chunks.append(SequenceStep(fork.seq_id, 0, True, []))
        parent.decode_end = 0  # its last block is shared
        fork.num_pending_tokens += 1

    def _queue_for(self, seq: Sequence) -> SequenceQueue:
        """Where a sequence that does not run waits."""
        return self.waiting if self._isolated is None or seq in self._isolated else self.held
