"""The classes under test, with hooks: they call the Monitor and change nothing."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from engine.executor.step import StepPlan, StepResult
from engine.memory.block_manager import Allocation, BlockManager, Prefix
from engine.memory.free_list import Block
from engine.memory.sequence import BlockKey, Sequence, SequenceGroup, SequenceStatus, num_forks_of, smallest_part
from engine.outputs import FinishReason
from engine.scheduling.admission import Newcomer
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.block_reserve import PredictedReserve
from engine.scheduling.fair_share import StepScope
from engine.scheduling.scheduler import Scheduler
from tests.sim.admission import check_spare
from tests.sim.beams import check_too_large
from tests.sim.drafts import SimDrafts
from tests.sim.model import mix
from tests.sim.violation import fail, require

if TYPE_CHECKING:
    from tests.sim.monitor import Monitor


def states_of(seq: Sequence) -> tuple[str, ...]:
    """The names under which an abort may pick a sequence, and is counted."""
    if seq.status is SequenceStatus.FINISHED:
        return ("finished",)
    if seq.fork_of is not None:
        return ("fork",)
    if seq.status is SequenceStatus.WAITING and not seq.num_preemptions:
        return ("new",)
    pending = seq.num_pending_tokens > 0
    if seq.status is SequenceStatus.WAITING:
        return ("preempted", "preempted+pending") if pending else ("preempted",)
    stage = "prefill" if seq.num_computed_tokens < seq.num_prompt_tokens else "decode"
    return (stage, "pending") if pending else (stage,)


ABORT_COUNTERS = {
    "fork": "abort while waiting to fork",
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
        self.copied_now: set[int] = set()
        self.registered_now: set[int] = set()  # block ids
        self.forked: set[int] = set()  # blocks that were shared while not full, and not written since

    def walk_free(self) -> Iterator[Block]:
        """The free list, given up after more steps than there are blocks: a broken one may be a ring."""
        block = self.free_blocks._end.next_free
        for _ in range(self.num_blocks + 1):
            if block is None or block is self.free_blocks._end:
                return
            yield block
            block = block.next_free

    def start_plan(self) -> None:
        self.planning = True
        self.allocated_now.clear()
        self.copied_now.clear()
        self.registered_now.clear()

    def match_prefix(self, seq: Sequence) -> Prefix:
        prefix = super().match_prefix(seq)
        keys, num_found = seq.block_keys, len(prefix.parts)
        if num_found < min(len(keys), (len(seq.token_ids) - 1) // self.block_size):
            if self.host_tier is not None and keys[num_found] in self.host_tier:
                self.monitor.saw("not worth loading")
            elif keys[num_found] in self.monitor.contents.content_of:
                self.monitor.saw("prefix hit cut short by an eviction")
        return prefix

    def can_admit(self, seq: Sequence, prefix: Prefix, spare: int) -> bool:
        check_spare(self.monitor.scheduler, seq, spare)
        admitted = super().can_admit(seq, prefix, spare)
        if not admitted:
            by_watermark = super().can_admit(seq, prefix, 0)
            self.monitor.saw("admission waits for " + ("the watermark" if by_watermark else "blocks"))
        return admitted

    def adopt_prefix(self, seq: Sequence, prefix: Prefix) -> None:
        for block in prefix.blocks:
            self.monitor.saw("prefix hit on a block in use" if block.ref_count else "prefix hit on a freed block")
        if prefix.parts and seq.num_preemptions:
            self.monitor.saw("prefix hit on the return from preemption")
        if self.registered_now.intersection(block.block_id for block in prefix.blocks):
            self.monitor.saw("prefix hit on a block that this plan fills")
        if prefix.partial is not None:
            self.monitor.saw(f"prefix hit on a {'part of a block' if prefix.partial.tail is None else 'tail'}")
        if prefix.host_keys:
            self.monitor.saw("block loaded from the host tier")
            if seq.num_preemptions:
                self.monitor.saw("block loaded for the return from preemption")
            if prefix.blocks:
                self.monitor.saw("prefix partly in the pool, partly in the host tier")
        super().adopt_prefix(seq, prefix)

    def _take_free(self) -> int:
        tier = self.host_tier
        num_offloads, num_kept = (0, 0) if tier is None else (tier.num_offloads, len(tier))
        evicted = next(self.walk_free()).key
        block_id = super()._take_free()
        if tier is not None and evicted is not None:
            if tier.num_offloads > num_offloads:
                self.monitor.saw("block offloaded to the host tier")
                if len(tier) == num_kept:
                    self.monitor.saw("host tier gives up a block")
            elif evicted not in tier:
                self.monitor.saw("host tier pinned as a whole")
        return block_id

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        partly = parent.num_computed_tokens % self.block_size > 0
        self.monitor.saw("fork shares a partly filled block" if partly else "fork shares full blocks only")
        if partly:
            self.forked.add(parent.block_table[-1])

    def allocate(self, seq: Sequence, num_tokens: int) -> Allocation | None:
        if self._refuses(seq, num_tokens):
            return None
        num_cached = len(self.cached_blocks)
        last = seq.block_table[-1] if seq.block_table else -1
        partly = seq.num_computed_tokens % self.block_size > 0
        full = partly and num_tokens > 0 and self.blocks[last].key is not None
        blocks = super().allocate(seq, num_tokens)
        if len(self.cached_blocks) < num_cached:
            self.monitor.saw("cached block evicted")
        if blocks is None:
            return None
        self.allocated_now.add(seq.seq_id)
        if blocks.copy is not None:
            self.copied_now.add(seq.seq_id)
            self.monitor.saw("copy-on-write")
        elif full:
            self.monitor.saw("block taken over for want of a copy")
        elif last in self.forked:
            self.forked.discard(last)
            self.monitor.saw("last holder of a forked block writes in place")
        return blocks

    def _refuses(self, seq: Sequence, num_tokens: int) -> bool:
        """Now and then no block is found, so that anything may be preempted at any moment; never what runs alone.

        In half of all plans a chunk is refused until none, or only one, is left of those that this plan copies for, or
        because somebody just gave way to another tenant's.
        """
        every, running, step = self.monitor.config.refuse_every, self.monitor.scheduler.running, self.monitor.num_steps
        if not every or len(running) < 2 or seq.status is not SequenceStatus.RUNNING:
            return False
        group = seq.group
        if group is not None and not group.split and all(other.group is group for other in running):
            return False
        storm = num_tokens > 1 and running[-1] is not seq and len(self.copied_now) > mix(step, 1) % 2
        storm = storm or (num_tokens > 1 and bool(self.monitor.scheduler.scope.displaced))
        if not (storm and mix(step, 0) % 2) and mix(step, seq.seq_id + 1000 * len(running)) % every:
            return False
        self.monitor.saw("allocation refused though blocks are free")
        return True

    def register_full_blocks(self, seq: Sequence) -> None:
        start = seq.num_registered_blocks
        super().register_full_blocks(seq)
        for block_id in seq.block_table[start : seq.num_registered_blocks]:
            self.registered_now.add(block_id)
            if self.blocks[block_id].key is None:
                self.monitor.saw("equal content in two blocks, one cached")

    def free(self, seq: Sequence, *, discard: bool = False, keep_tail: bool = False) -> None:
        if self.planning:
            self._count_preemption(seq)
        blocks = [self.blocks[block_id] for block_id in seq.block_table]
        keys = [block.key for block in blocks if block.key is not None]
        alone = {block.block_id for block in blocks if block.ref_count == 1}
        if discard:
            self._count_discard(len(alone) < len(blocks), keys)
        super().free(seq, discard=discard, keep_tail=keep_tail)
        self.forked -= alone
        if discard and any(key in self.cached_blocks or key in (self.host_tier or ()) for key in keys):
            fail("failed-in-cache", f"{seq} failed, and blocks that it held may still be served")

    def _count_discard(self, shared: bool, keys: list[BlockKey]) -> None:
        if shared:
            self.monitor.saw("failed sequence whose blocks were shared")
        if keys:
            self.monitor.saw("failed sequence whose blocks were cached")
        if any(key in (self.host_tier or ()) for key in keys):
            self.monitor.saw("failed sequence whose blocks lie in the host tier")

    def _count_preemption(self, seq: Sequence) -> None:
        if seq.num_computed_tokens < seq.num_prompt_tokens:
            self.monitor.saw("preempted during chunked prefill")
        if seq.num_pending_tokens:
            self.monitor.saw("preempted with a token on its way")
        if seq.num_preemptions > 1:
            self.monitor.saw("preempted more than twice")
        if seq.seq_id in self.allocated_now:
            self.monitor.saw("preempted what this plan had scheduled")
        if seq.seq_id in self.copied_now:
            self.copied_now.discard(seq.seq_id)
            self.monitor.saw("planned copy undone by a preemption")
        if seq.block_table and seq.block_table[-1] in self.forked and self.blocks[seq.block_table[-1]].ref_count > 1:
            self.monitor.saw("preempted with a shared block that is not full")


class WatchedScheduler(Scheduler):
    def __init__(self, monitor: "Monitor", block_manager: WatchedBlockManager, **kwargs: Any) -> None:
        super().__init__(block_manager, **kwargs)
        self.monitor = monitor
        if monitor.config.max_draft_tokens:
            self.drafts = SimDrafts(monitor, monitor.config.max_draft_tokens)
        self.watched_blocks = block_manager
        self.preempted_groups: set[SequenceGroup] | None = None  # by the plan under construction, where there is one
        self.delayed: set[Sequence] = set()  # by the prediction
        self.num_passed_over = 0  # plans in a row without the tenant whose turn it is
        self.emptied = False  # preemptions emptied the plan under construction
        self._real_begin_step = self.admission.begin_step
        self.admission.begin_step = self._begin_step  # type: ignore[method-assign]
        monitor.attach(self)

    def add(self, seq: Sequence, forks: Iterable[Sequence] = ()) -> None:
        forks = list(forks)
        super().add(seq, forks)
        for added in (seq, *forks):
            self.monitor.added(added)

    def schedule(self) -> StepPlan | None:
        with self.monitor.checking():
            ran = list(self.running)
            self.watched_blocks.start_plan()
            self.preempted_groups, self.emptied = (groups := set[SequenceGroup]()), False
            num_delayed, waited = self.admission.num_delayed, self.waiting[:1]
            num_displaced = self.admission.fair_share.num_displaced
            plan = super().schedule()
            if plan is not None and self.emptied:
                self.monitor.saw("all that was to be computed made way, others are")
            self.watched_blocks.planning, self.preempted_groups = False, None
            back = {new.seq_id for new in plan.new} if plan is not None else set()
            if any(seq.seq_id not in back for group in groups if not group.split for seq in group.running):
                fail("group", "a group was preempted in part")
            if self.admission.fair_share.num_displaced > num_displaced:
                self.monitor.saw("newcomer takes the place of another tenant's")
            if self.admission.num_delayed > num_delayed:
                self.monitor.saw("admission delayed by the prediction")
                self.delayed.update(seq for seq in waited if seq.status is SequenceStatus.WAITING)
            self._count_resumed(plan)
            if plan is None:
                self._check_idle()
            else:
                self._check_lockout()
            self.monitor.planned(plan, ran)
            return plan

    def _wider_scope(self, scope: StepScope, num_preemptions: int) -> StepScope | None:
        self.emptied = self.num_preemptions != num_preemptions
        if self.emptied and scope.excluded == scope.displaced and self.monitor.is_idle:
            self.monitor.saw("all that was to be computed made way, nothing is on its way")
        return super()._wider_scope(scope, num_preemptions)

    def _begin_step(self, newcomer: Newcomer | None, budget: int) -> StepScope:
        scope = self._real_begin_step(newcomer, budget)
        if newcomer is not None:
            self._check_displaced(newcomer)
        return scope

    def _check_displaced(self, newcomer: Newcomer) -> None:
        """A sequence gives way only if the adapter of the newcomer finds a slot then. The last sequence of a tenant
        gives way again only if it has progressed since the last time."""
        in_use = {seq.adapter for seq in self.running} - {None}
        if newcomer.displacement.victims and newcomer.seq.adapter not in {None, *in_use}:
            found = len(in_use) < self.monitor.config.max_loras
            require(found, "adapter-slots", f"sequences gave way to {newcomer.seq}, whose adapter finds no slot")
        for victim in newcomer.displacement.victims:
            if victim not in self.admission.fair_share.comebacks:
                continue
            if any(other.tenant == victim.tenant for other in self.running):
                continue  # it was not the last
            if victim.num_charged_tokens <= self.monitor.gave_way_at.get(victim.seq_id, -1):
                fail("comeback", f"{victim} is displaced by {newcomer.seq} again without progress since the last time")
            self.monitor.gave_way_at[victim.seq_id] = victim.num_charged_tokens
            searches = isinstance(victim.group, BeamGroup)
            self.monitor.saw("beam search gives way as a whole" if searches else "sequence gives way as a whole")
        if any(victim.group and victim.group.running for victim in newcomer.displacement.victims):
            self.monitor.saw("samples give way one by one")

    def _check_lockout(self) -> None:
        """A single tenant that holds everything does not keep out another, whose turn it is and who asks for little."""
        tenants = {seq.tenant for seq in self.running}
        seq = self._next() if self.waiting else None
        if seq is None or len(tenants) > 1 or seq.tenant in tenants or not self._asks_for_little(seq):
            self.num_passed_over = 0
            return
        self.num_passed_over += 1
        # All may have to be computed again first, in long steps, and to go on for as long, in short ones.
        known = sum(other.num_tokens for other in self.running)
        limit = 20 + known // 8 + 4 * known // self.max_num_batched_tokens
        if self.num_passed_over > limit:
            fail("lockout", f"{seq} is next and was not let in by {limit} plans; {len(self.running)} sequences run")

    def _asks_for_little(self, seq: Sequence) -> bool:
        """No more than half of what the first in order holds, or, where blocks are free, half of the rows in use.

        A sequence without a slot for its adapter waits for those that hold the slots: nobody gives way for a slot, and
        nobody else starts meanwhile.
        """
        first = self.running[0] if self.running else None
        in_use = {other.adapter for other in self.running} - {None}
        if seq.adapter not in {None, *in_use} and len(in_use) >= self.monitor.config.max_loras:
            return False
        if first is None or any(other.priority < seq.priority for other in self.running) or seq.num_pending_tokens:
            return False
        weight, weight_of_holder = seq.weight, first.weight
        num_rows = 1 if seq.group is None else max(1, seq.group.num_rows_to_start)
        num_blocks = self.block_manager.num_blocks_for(seq.num_tokens)
        if seq.group is not None and not seq.group.running:
            num_blocks = self.block_manager.num_blocks_together(seq.group.waiting)
        spare = self.admission.reserve.spare(seq, [], num_forks_of(seq), self.running)
        part = smallest_part(first)
        part_rows = len(part) + (0 if first.group is None else first.group.num_spare_rows)
        part_blocks = sum(len(member.block_table) for member in part)
        shares = num_rows / self.max_num_seqs, num_blocks / self.block_manager.num_blocks
        asked = max(shares) / weight
        of_part = max(part_rows / self.max_num_seqs, part_blocks / self.block_manager.num_blocks) / weight_of_holder
        if num_blocks + spare <= len(self.block_manager.free_blocks):
            return 2 * asked <= max(
                of_part, (self.admission.num_rows - num_rows) / self.max_num_seqs / weight_of_holder
            )
        return 2 * asked <= of_part and num_blocks + spare <= self.block_manager.num_blocks

    def _next(self) -> Sequence:
        return self.admission.next_in_turn(self.admission.fair_share.displaced)

    def _check_idle(self) -> None:
        """A plan may be empty only if no running sequence has tokens to compute and no waiting one can start."""
        for seq in self.running:
            waits = seq.num_uncomputed_tokens == 0 or self.drafts.holds(seq)
            require(waits, "idle", f"{seq} has tokens to compute, and nothing is planned")
        if not self.waiting:
            return
        seq = self._next()
        excluded = self.scope.displaced | self.scope.excluded
        if not seq.num_pending_tokens and seq.tenant not in excluded and self.admission.finds_room(seq):
            fail("idle", f"nothing is planned, and {seq}, which is next, finds room")

    def _count_resumed(self, plan: StepPlan | None) -> None:
        for new in plan.new if plan is not None else ():
            seq = self._sequences[new.seq_id]
            if seq in self.delayed:
                self.delayed.discard(seq)
                self.monitor.saw("delayed sequence admitted in the end")
            if (
                isinstance(seq.group, BeamGroup)
                and seq.num_preemptions
                and any(slot.status is SequenceStatus.WAITING for slot in seq.group.slots)
            ):
                self.monitor.saw("beam group resumed in several plans")

    def plan_flush(self) -> StepPlan:
        with self.monitor.checking():
            plan = super().plan_flush()
            self.monitor.flushed(plan)
            return plan

    def fork(self, parent: Sequence, child: Sequence) -> None:
        waits = parent.status is SequenceStatus.WAITING
        super().fork(parent, child)
        self.monitor.added(child)
        self.monitor.saw("hypothesis forked while its parent waits" if waits else "hypothesis forked")

    def resend(self, seq: Sequence) -> None:
        if seq.in_worker:
            self.monitor.saw("hypothesis goes on with another token than the Worker's")
        super().resend(seq)

    def _preempt(self, seq: Sequence) -> None:
        if seq.group is not None:
            if self.preempted_groups is not None:  # else it makes room for a suspect that runs alone
                self.preempted_groups.add(seq.group)
            if not isinstance(seq.group, BeamGroup) and not seq.group.split and len(seq.group.running) > 1:
                self.monitor.saw("samples preempted together")
        if isinstance(seq.group, BeamGroup):
            if len(seq.group.running) > 1:
                self.monitor.saw("beam group preempted with several hypotheses")
            if seq.group._samples:
                self.monitor.saw("beam group preempted amid a round")
        if isinstance(self.admission.reserve, PredictedReserve):
            self.monitor.saw("preempted in spite of the prediction")
        super()._preempt(seq)

    def _outgrow(self, group: SequenceGroup, *args: Any) -> None:
        if not isinstance(group, BeamGroup):
            self.monitor.saw("samples that outgrow the pool come and go one by one")
        super()._outgrow(group, *args)

    def _fail_group(self, group: BeamGroup) -> None:
        check_too_large(self, group)
        self.monitor.too_large.add(self.monitor.arrival_of(group.slots[0]).index)
        self.monitor.saw("beam group larger than the pool")
        super()._fail_group(group)

    def _start_fork(self, plan: StepPlan, parent: Sequence, fork: Sequence) -> None:
        super()._start_fork(plan, parent, fork)
        if fork.status is SequenceStatus.WAITING:
            self.monitor.saw("fork finds no row free")

    def reset(self, *args: Any, **kwargs: Any) -> None:
        with self.monitor.checking():
            self._count_reset()
            before = self.block_manager.num_blocks
            super().reset(*args, **kwargs)
            if self.block_manager.num_blocks != before:
                larger = self.block_manager.num_blocks > before
                self.monitor.saw(f"new Worker has a {'larger' if larger else 'smaller'} pool")
            self.watched_blocks.forked.clear()
            self.monitor.restarted(list(self._sequences.values()))

    def _count_reset(self) -> None:
        if any(len(group.search.running) > 1 for group in self.admission.inseparable_groups):
            self.monitor.saw("Worker lost amid a beam search")
        if any(group._samples for group in self.admission.inseparable_groups):
            self.monitor.saw("Worker lost amid a round of a beam search")

    def update(self, result: StepResult) -> list[tuple[Sequence, int]]:
        with self.monitor.checking():
            num_known = sum(token.seq_id in self._sequences for token in result.samples)
            fresh = super().update(result)
            self.monitor.updated(result, fresh, num_known)
            return fresh

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        with self.monitor.checking():
            self._count_finish(seq, reason, stop_reason)
            super().finish(seq, reason, stop_reason)

    def _count_finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        saw = self.monitor.saw
        self.delayed.discard(seq)
        self.monitor.gave_way_at.pop(seq.seq_id, None)  # a slot of a beam search may live again as another hypothesis
        if seq.status is SequenceStatus.FINISHED:
            return
        if isinstance(seq.group, BeamGroup):
            if reason is FinishReason.ERROR:
                saw("beam search failed")
            return
        if self._forks.get(seq):
            saw("first sample ended while others wait to fork")
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
    yield from scheduler.held
