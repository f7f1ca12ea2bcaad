"""Scheduler: which tokens of which sequences the next step computes.

Iteration-level scheduling (Orca: Yu et al. 2022, section 3) with one rule: computed tokens chase known tokens. There is
no prefill phase and no decode phase. A prompt, a chunk of a prompt, a decode and the recomputation after a preemption
are the same: `min(seq.num_uncomputed_tokens, budget)`. Chunked prefill shares a step with decodes (Sarathi-Serve:
Agrawal et al. 2024, section 4).

`schedule` fills a plan in two loops. Running sequences come first, those with one token to compute before longer
chunks, so a long prompt delays a stream by at most one step of `max_num_batched_tokens`. Then waiting sequences start,
in turn, while Admission finds room for the next one. If a running sequence gets no block, a victim is preempted: it
gives up its blocks and waits to be recomputed. The first sequence in order is never preempted for want of blocks, and a
single sequence always fits the pool, so something always progresses.

Samples of one prompt are forks of the first sample: it computes the prompt for all, then they share its blocks.
Samples, and hypotheses of a beam search, are preempted as a whole group and return when all of them find room
(engine/memory/sequence.py); samples that together outgrow the pool run one by one.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable

from engine.executor.step import BlockCopy, SampledToken, SequenceStep, StepPlan, StepResult
from engine.memory.block_manager import Allocation, BlockManager
from engine.memory.host_tier import HostTier
from engine.memory.sequence import (
    GroupChoice,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    end_after,
    end_tokens,
    together,
)
from engine.outputs import FinishReason
from engine.scheduling.admission import Admission, Start
from engine.scheduling.block_reserve import make_reserve
from engine.scheduling.fair_share import FairShare, StepScope
from engine.scheduling.plan_parts import RunningParts, decode_end, new_sequence
from engine.scheduling.sequence_queue import SequenceQueue, check_queues
from engine.scheduling.short_steps import make_target
from engine.scheduling.speculation.drafts import Drafts


class Scheduler:
    """Owns `waiting` and `running`. All methods are synchronous; one thread calls them, between steps."""

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
        max_loras: int = 0,
        drafts: Drafts | None = None,
        itl_target: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`watermark`: share of the blocks that a starting sequence leaves free. `admission`: see make_reserve.
        `whole_sequences`: an encoder computes all tokens of a sequence in one step. `step_seconds`: see FairShare.
        `max_loras`: see Admission.
        `drafts`: speculation, which is this scheduler's own; None: there is none.
        `itl_target`: seconds that a step with decodes may take (TimedTarget).
        """
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self.held = SequenceQueue()  # sequences that isolate() keeps from running; they hold no blocks
        # Every running sequence must find room for its one token of decode in each step.
        max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.admission = Admission(
            block_manager,
            self.waiting,
            self.running,
            max_num_seqs=max_num_seqs,
            reserve=make_reserve(admission, block_manager, math.ceil(watermark * block_manager.num_blocks)),
            fair_share=FairShare(block_manager, max_num_seqs, step_seconds=step_seconds),
            whole_sequences=whole_sequences,
            max_loras=max_loras,
        )
        self.drafts = Drafts() if drafts is None else drafts
        self._target = make_target(itl_target)
        self.scope = StepScope([], max_num_batched_tokens)  # limits of the last plan
        self.ended_groups: list[SequenceGroup] = []  # beam searches that ended; the Driver empties the list
        self.num_preemptions = 0
        self._watermark = watermark
        self._sequences: dict[int, Sequence] = {}
        self._forks: dict[Sequence, list[Sequence]] = {}  # samples that wait for another to compute their prompt
        self._removed: list[int] = []  # sequences that the Worker must drop at the next plan
        self._isolated: Collection[Sequence] | None = None
        self._next_step_id = 1
        self._clock = clock

    @property
    def max_num_seqs(self) -> int:
        return self.admission.max_num_seqs

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
        """Adds a new sequence, which waits. It must fit the pool on its own: the Driver refuses others.

        `forks` are further samples of its prompt, which come after it in order.
        """
        self._enter(seq)
        self._queue_for(seq).add(seq)
        forks = list(forks)
        if forks and seq.group is None:
            SequenceGroup([seq, *forks])  # sets `group` of each
        for fork in forks:
            self._enter(fork)
            fork.fork_of = seq
            self._forks.setdefault(seq, []).append(fork)

    def schedule(self) -> StepPlan | None:
        """Returns the next plan; None if nothing can be computed now (no work, or every sequence awaits a result)."""
        plan = StepPlan(step_id=self._next_step_id, removed=self._removed, new=[], block_copies=[], chunks=[],
                        offloads=[], loads=[], decodes=[], decode_blocks=[], drafts=[])  # fmt: skip
        self.block_manager.begin_plan()
        newcomer = self.admission.next_newcomer()
        for victim in newcomer.displacement.victims if newcomer is not None else ():
            self._displace(victim)
        scope = self.admission.begin_step(newcomer, self.max_num_batched_tokens)
        if (budget := self._target.limit(scope.sequences, scope.budget)) < scope.budget:
            scope = scope._replace(budget=budget)
        while True:
            self.scope, num_preemptions = scope, self.num_preemptions

            # Running sequences: decodes, then single tokens, then longer chunks.
            parts = RunningParts(self.drafts.without_held(scope), self._forks, scope.budget)
            for seq, num_tokens in parts.without_blocks():
                if (blocks := self._allocate_or_preempt(seq, num_tokens, parts)) is not None:
                    parts.add(seq, num_tokens, blocks)
            self.drafts.add_to(parts, self.block_manager, self._num_spare_rows(parts))
            parts.commit_decodes(plan, self.block_manager)
            for seq, (num_tokens, blocks) in parts.chunks.items():
                self._plan_chunk(plan, seq, num_tokens, blocks)

            # Waiting sequences, in turn. None starts after a preemption: the victim itself would come straight back.
            budget = parts.budget
            while self.waiting and budget > 0 and self.num_preemptions == num_preemptions:
                self.admission.computing()
                if (start := self.admission.next_start(scope, budget, plan)) is None:
                    break
                budget -= self._start(plan, start, budget)

            if plan.decodes or plan.chunks:
                break
            if (wider := self._wider_scope(scope, num_preemptions)) is None:
                return None
            scope = wider
        self._add_moves(plan)
        self.admission.planned(plan)
        self.drafts.planned(plan)
        self._target.planned(plan)
        self._removed = []
        self._next_step_id += 1
        return plan

    def _num_spare_rows(self, parts: RunningParts) -> int:
        """Returns the rows, of one token each, that drafts may have: those that running and waiting sequences leave."""
        num_rows = self.max_num_seqs - len(self.running) - len(self.waiting)
        return min(num_rows, parts.budget // 2 if self.waiting else parts.budget)

    def _wider_scope(self, scope: StepScope, num_preemptions: int) -> StepScope | None:
        """Returns the scope for another attempt after nothing was planned; None if another attempt changes nothing.

        Everything planned may have been preempted in favour of sequences that the scope excludes, and a group of
        sequences may need more tokens at once than a target leaves.
        """
        is_cut = self._target.bounds_steps and scope.budget < self.max_num_batched_tokens
        if scope.excluded == scope.displaced and self.num_preemptions == num_preemptions and not is_cut:
            return None
        return scope.widened(self.running, self.max_num_batched_tokens)

    def _allocate_or_preempt(self, seq: Sequence, num_tokens: int, parts: RunningParts) -> Allocation | None:
        """Returns blocks for `seq`, and preempts others until there are enough; None if `seq` itself was preempted."""
        while (blocks := self.block_manager.allocate(seq, num_tokens)) is None:
            victims = together(self.admission.victim_for(seq))
            if seq.group is not None and not seq.group.split and len(victims) == len(self.running):
                self._outgrow(seq.group, parts)
            else:
                for victim in victims:
                    parts.drop(victim)
                    self._preempt(victim)
            if seq.status is not SequenceStatus.RUNNING:
                return None
        return blocks

    def _outgrow(self, group: SequenceGroup, parts: RunningParts) -> None:
        """A group alone needs more blocks than the pool has. Samples go on one by one; a beam search fails."""
        if group.inseparable:
            for seq in group.running:
                parts.drop(seq)
            self._fail_group(group)
        else:
            group.split = True

    def _start(self, plan: StepPlan, start: Start, budget: int) -> int:
        """Moves a sequence from waiting to running and plans its first tokens. Returns their number."""
        seq = start.seq
        if start.too_large and seq.group is not None:
            self._fail_group(seq.group)
            return 0
        self.block_manager.adopt_prefix(seq, start.prefix)
        num_tokens = min(seq.num_uncomputed_tokens, budget)
        blocks = self.block_manager.allocate(seq, num_tokens)
        assert blocks is not None, "Admission found room for all known tokens"
        self.waiting.withdraw(seq)
        self._start_running(seq)
        self.admission.started(start)
        self._plan_chunk(plan, seq, num_tokens, blocks)
        return num_tokens

    def _plan_chunk(self, plan: StepPlan, seq: Sequence, num_tokens: int, blocks: Allocation) -> None:
        """Counts tokens as computed. Full blocks are shared from now on, with other sequences of this very step too."""
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
        """Lets `fork` go on from the blocks and the logits of `parent`; without a free row it waits like any other."""
        fork.fork_of = None
        if not self.admission.has_free_row:
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

    def _start_running(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.end_token_ids = end_tokens(seq.params, self.eos_token_ids)
        self.running.add(seq)
        seq.num_charged_tokens = max(seq.num_charged_tokens, seq.num_computed_tokens)  # tokens of a prefix hit are free
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.first_scheduled_time = self._clock()

    def _displace(self, victim: Sequence) -> None:
        """Preempts a sequence for one of another tenant."""
        if victim.group is not None and not victim.group.inseparable:
            victim.group.split = True  # its other samples go on without this one
        self._preempt(victim)

    def _preempt(self, seq: Sequence) -> None:
        """Makes a running sequence give up its blocks and wait again. A pending token stays valid: it was computed."""
        self.running.withdraw(seq)
        self._drop_row(seq)
        self.admission.preempted(seq)
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_draft_tokens = 0
        seq.num_preemptions += 1
        seq.num_tokens_when_preempted = seq.num_tokens
        self.num_preemptions += 1
        self.waiting.add(seq)

    def plan_flush(self) -> StepPlan:
        """Returns the last plan of a server: it computes nothing, and moves the prefix cache to the host."""
        plan = StepPlan(step_id=self._next_step_id, removed=[], new=[], block_copies=[], chunks=[],
                        offloads=[], loads=[])  # fmt: skip
        self.block_manager.offload_all()
        self._add_moves(plan)
        return plan

    def update(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Adds the tokens of a result to their sequences; finishes those that reach their end, and frees their blocks.

        Returns the new (sequence, token id) pairs. A token of a sequence that finished while the step was under way is
        dropped. Beam searches return nothing here: see `ended_groups`.
        """
        self.admission.computed(result)
        self.drafts.computed(result)
        self._target.computed(result)
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
                self._add_detailed(seq, token, fresh)
        for tokens in result.verified:
            if (seq := find(tokens[0].seq_id)) is not None:
                self._add_verified(seq, tokens, fresh)
        return fresh

    def update_vectors(self, result: StepResult) -> list[tuple[Sequence, bytes]]:
        """Finishes the embedded sequences of a result. Returns (sequence, vector) pairs."""
        found = [(seq, vector) for seq_id, vector in result.vectors.items() if (seq := self._sequences.get(seq_id))]
        for seq, _ in found:
            seq.num_pending_tokens -= 1
            self.finish(seq, FinishReason.STOP)
        return found

    def _add_detailed(self, seq: Sequence, token: SampledToken, fresh: list[tuple[Sequence, int]]) -> None:
        """Adds a token that came with logprobs: to its sequence, or as candidates to its beam search."""
        seq.num_pending_tokens -= 1
        group = seq.group
        if group is not None and (choice := group.add_candidates(seq, token)) is not None:
            self._apply(group, choice)
            return
        seq.token_ids.append(token.token_id)
        fresh.append((seq, token.token_id))
        self._look_at(seq, token.token_id)

    def _add_verified(self, seq: Sequence, tokens: list[SampledToken], fresh: list[tuple[Sequence, int]]) -> None:
        """Adds the tokens of a sequence with a draft; removes those behind its end from `tokens`.

        The step has computed all but the last of them. The blocks of a sequence preempted meanwhile are gone.
        """
        seq.num_pending_tokens -= 1
        holds_blocks = seq.num_draft_tokens > 0
        if holds_blocks:
            self.drafts.verified(seq, len(tokens) - 1)
            seq.num_draft_tokens = 0
        for i, token in enumerate(tokens):
            seq.token_ids.append(token.token_id)
            fresh.append((seq, token.token_id))
            if holds_blocks and i > 0:
                seq.num_computed_tokens += 1
                self.block_manager.register_full_blocks(seq)
            self._look_at(seq, token.token_id)
            if seq.status is SequenceStatus.FINISHED:
                del tokens[i + 1 :]
                return
        if holds_blocks:
            self.block_manager.trim(seq)

    def _apply(self, group: SequenceGroup, choice: GroupChoice) -> None:
        for seq in choice.finished:
            self.finish(seq, FinishReason.ABORT)
            seq.finish_reason = None  # an empty slot has none
        for parent, child in choice.forked:
            child.token_ids = list(parent.token_ids)
            self.fork(parent, child)
        for seq in choice.resent:
            self.resend(seq)
        for seq, token_id in choice.appended:
            seq.token_ids.append(token_id)
            seq.max_num_tokens = len(seq.token_ids) + 1
        if choice.ended:
            group.write_results()
            self.ended_groups.append(group)

    def _look_at(self, seq: Sequence, token_id: int) -> None:
        """Checks whether a new token ended `seq` or filled a block."""
        if (end := end_after(seq, token_id, self.eos_token_ids)) is not None:
            if not seq.params.generates:
                seq.token_ids.pop()
            self.finish(seq, *end)
        if seq.status is SequenceStatus.RUNNING:
            self.block_manager.register_full_blocks(seq)
        size = self.block_manager.block_size
        seq.look_at = min((len(seq.token_ids) // size + 1) * size, seq.max_num_tokens)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends a sequence in any state; a no-op if it ended before. Its blocks are free at once."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.withdraw(seq)
            self._drop_row(seq)
            self.admission.finished(seq, reason)
        elif seq.fork_of is not None:
            self._forks[seq.fork_of].remove(seq)
        else:
            self._queue_for(seq).withdraw(seq)
        # Blocks of a failed sequence cannot be trusted, so no other sequence may get them from the prefix cache.
        self.block_manager.free(seq, discard=reason is FinishReason.ERROR, keep_tail=seq.group is None)
        seq.status, seq.finish_reason, seq.stop_reason = SequenceStatus.FINISHED, reason, stop_reason
        del self._sequences[seq.seq_id]
        self.admission.left(seq)
        self.drafts.forget(seq)
        if forks := self._forks.pop(seq, None):  # the next one computes the prompt
            forks[0].fork_of = None
            self.add(forks[0], forks[1:])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child`, which is not live and has the tokens of `parent`, go on from where `parent` is.

        It runs if `parent` runs, in a row that its group has kept free; else it waits.
        """
        self._enter(child)
        if parent.status is SequenceStatus.RUNNING:
            self.block_manager.fork(parent, child)
            parent.decode_end = 0  # its last block is shared
            self.admission.forked(parent, child)
            self._start_running(child)
        else:
            child.status = SequenceStatus.WAITING
            child.block_keys = list(parent.block_keys)
            self._queue_for(child).add(child)

    def resend(self, seq: Sequence) -> None:
        """Makes the next plan with `seq` send it anew: its last token is not the one that the Worker sampled."""
        self._drop_row(seq)

    def isolate(self, sequences: Collection[Sequence] | None) -> None:
        """Lets only these run until the next call; others give up their blocks and are held. None: all may run."""
        for seq in [seq for seq in self.running if sequences is not None and seq not in sequences]:
            self._preempt(seq)
        self._isolated = sequences
        everyone = self.waiting + self.held
        self.waiting.refill(seq for seq in everyone if self._may_run(seq))
        self.held.refill(seq for seq in everyone if not self._may_run(seq))

    def reset(
        self, num_blocks: int, host_tier: HostTier | None = None, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        """Starts again with the empty pool of a new Worker: every live sequence waits, in order, to be recomputed.

        Pending tokens are lost; they are drawn again and come out the same.
        """
        self.block_manager.reset(num_blocks, host_tier)
        self.drafts.reset()
        self.max_num_batched_tokens = max_num_batched_tokens
        self._target.lose_plans()
        self.admission.reset(min(max_num_seqs, max_num_batched_tokens), math.ceil(self._watermark * num_blocks))
        for seq in self._sequences.values():
            seq.lose_blocks()
        self.waiting.refill(seq for seq in self._sequences.values() if seq.fork_of is None)
        self.running.refill(())
        self.held.refill(())
        self._removed, self._isolated = [], None

    def sequence(self, seq_id: int) -> Sequence | None:
        """Returns a live sequence."""
        return self._sequences.get(seq_id)

    def check_invariants(self) -> None:
        """Asserts that queues, statuses and blocks agree. For tests and simulation: O(n)."""
        forks = [fork for group in self._forks.values() for fork in group]
        check_queues(self.waiting, self.running, self.held, forks, self._sequences)
        self.admission.check_invariants(self._sequences.values())
        for seq in self.running:
            assert len(seq.block_table) == self.block_manager.num_blocks_for(
                seq.num_computed_tokens + seq.num_draft_tokens
            )
        self.block_manager.check_invariants(self.running)

    def _add_moves(self, plan: StepPlan) -> None:
        """Adds the moves between the pool and host memory."""
        if (tier := self.block_manager.host_tier) is not None:
            plan.offloads[:], plan.loads[:] = tier.pop_moves()

    def _fail_group(self, group: SequenceGroup) -> None:
        group.fail(self.block_manager.num_blocks, self.block_manager.block_size)
        for seq in group.members:
            self.finish(seq, FinishReason.ABORT)  # ABORT keeps its blocks in the prefix cache: their content is right
            seq.finish_reason = FinishReason.ERROR
        self.ended_groups.append(group)

    def _enter(self, seq: Sequence) -> None:
        if seq.seq_id not in self._sequences:
            self._sequences[seq.seq_id] = seq
            self.admission.entered(seq)
            self.drafts.entered(seq)

    def _drop_row(self, seq: Sequence) -> None:
        if seq.in_worker:
            self._removed.append(seq.seq_id)
            seq.in_worker = False
            seq.decode_end = 0

    def _may_run(self, seq: Sequence) -> bool:
        return self._isolated is None or seq in self._isolated

    def _queue_for(self, seq: Sequence) -> SequenceQueue:
        """Returns the queue in which a sequence waits."""
        return self.waiting if self._may_run(seq) else self.held
