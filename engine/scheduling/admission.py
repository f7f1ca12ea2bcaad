"""Admission: which waiting sequence starts next, which running ones give way, and which a step leaves out.

Four resources decide: rows (`max_num_seqs`), slots of adapters (`max_loras`), KV blocks (what the known tokens need,
plus what BlockReserve keeps free for the growth of running sequences) and the tenants' shares (FairShare). The
Scheduler asks `next_start` until the answer is None, and reports everything that starts, stops, and is planned.
Questions change no decision: calling them twice gives the same answer.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from engine.executor.step import StepPlan, StepResult
from engine.memory.block_manager import BlockManager, Prefix
from engine.memory.sequence import Sequence, SequenceGroup, num_forks_of, together
from engine.outputs import FinishReason
from engine.scheduling.block_reserve import BlockReserve
from engine.scheduling.fair_share import Displacement, FairShare, StepScope
from engine.scheduling.sequence_queue import SequenceQueue

NO_DISPLACEMENT = Displacement()


class Start(NamedTuple):
    """How a waiting sequence would start: on the blocks of `prefix`, with `num_forks` siblings to run beside it.

    `spare`: blocks that must stay free. `splits_group`: the group outgrows the pool, so its members run one by one.
    `too_large`: the group can never run, because it needs more blocks than the pool has.
    """

    seq: Sequence
    prefix: Prefix
    num_forks: int
    spare: int
    has_room: bool
    splits_group: bool = False
    too_large: bool = False


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The next sequence in turn, and the running sequences of other tenants that must give way to it first."""

    seq: Sequence
    displacement: Displacement


class Admission:
    """Decides over the queues `waiting` and `running`, which the Scheduler fills and drains."""

    def __init__(
        self,
        block_manager: BlockManager,
        waiting: SequenceQueue,
        running: SequenceQueue,
        *,
        max_num_seqs: int,
        reserve: BlockReserve,
        fair_share: FairShare,
        whole_sequences: bool,
        max_loras: int,
    ) -> None:
        """`whole_sequences`: an encoder computes all tokens of a sequence in one step. `max_loras`: most adapters that
        running sequences may have."""
        self.max_num_seqs = max_num_seqs
        self.max_loras = max_loras
        self.reserve = reserve
        self.fair_share = fair_share
        self.num_delayed = 0  # sequences that the watermark alone would have started sooner
        self._blocks = block_manager
        self._waiting = waiting
        self._running = running
        self._whole_sequences = whole_sequences
        self.inseparable_groups: set[SequenceGroup] = set()  # live groups whose members run together or not at all
        self._last_delayed: Sequence | None = None

    # Questions of the Scheduler.

    def next_newcomer(self) -> Newcomer | None:
        """Returns the next sequence in turn with those that give way to it; None without competition or without room.

        Only where several tenants compete: otherwise no running sequence ever gives way to a waiting one.
        """
        if not self.fair_share.contended or not self._waiting:
            return None
        seq = self.next_in_turn(self.fair_share.displaced)
        if seq.num_pending_tokens:
            return None
        if self.finds_room(seq):
            return Newcomer(seq, NO_DISPLACEMENT)
        spare = self.reserve.spare(seq, [], num_forks_of(seq), self._running)
        displacement = self.fair_share.displacement_for(seq, self._running, self.num_rows, spare)
        if not displacement.victims or not self._has_slot(seq, displacement.victims):
            return None
        return Newcomer(seq, displacement)

    def next_start(self, scope: StepScope, budget: int, plan: StepPlan) -> Start | None:
        """Returns the next waiting sequence, of at least one, if it may start within `budget` tokens; else None.

        Sequences start in turn: if the next one has no room, none starts. A group that is `too_large` is returned, too,
        to be failed. `plan` is the plan under construction.
        """
        if not self._has_row(seq := self.next_in_turn(scope.displaced)):
            return None
        # A sequence preempted with a pending token can start again after the next result.
        if seq.num_pending_tokens or seq.tenant in scope.excluded:
            return None
        if self._whole_sequences and seq.num_tokens > budget:
            return None
        start = self._start_of(seq)
        if start.has_room:
            return start
        self._count_delay(start)
        # If group members are already in this plan, decide in the next one.
        if seq.group is not None and seq.group.inseparable and self.is_alone(seq) and not plan.num_tokens:
            return start._replace(too_large=True)
        return None

    def next_in_turn(self, displaced: frozenset[str]) -> Sequence:
        """Returns the next sequence to admit. Hypotheses of a running beam search go first: their siblings cannot
        continue without them. Sequences of the `displaced` tenants go last.
        """
        rest = (seq for group in self.inseparable_groups if group.running for seq in group.waiting)
        found = min(rest, key=lambda seq: seq.order, default=None)
        return self.fair_share.next_in_turn(self._waiting, self._running, displaced) if found is None else found

    def finds_room(self, seq: Sequence) -> bool:
        """True if a row and a slot are free for `seq`, and blocks for all its known tokens."""
        return self._has_row(seq) and self._start_of(seq).has_room

    def victim_for(self, seq: Sequence) -> Sequence:
        """Returns the running sequence to preempt when `seq` gets no block.

        Victim: the newest sequence of the heaviest tenant behind `seq` that progressed since its last preemption; else
        the newest of that tenant. Sequences that are preempted together progressed only if all of them did.
        """
        own = together(seq)
        candidates = self.fair_share.heaviest(self._running, together(self._running[0]))
        behind = takewhile(lambda other: other not in own, reversed(candidates))
        found = (other for other in behind if all(member.has_progressed for member in together(other)))
        return next(found, candidates[-1])

    def is_alone(self, seq: Sequence) -> bool:
        """True if nothing runs, or only the group of `seq`."""
        whole = seq.group is not None and not seq.group.split
        return not self._running or (whole and len(together(seq)) == len(self._running))

    @property
    def num_rows(self) -> int:
        """Rows in use, and rows kept free for hypotheses of running beam searches."""
        return len(self._running) + sum(group.num_spare_rows for group in self.inseparable_groups)

    @property
    def has_free_row(self) -> bool:
        return self.num_rows < self.max_num_seqs

    # Reports of the Scheduler.

    def begin_step(self, newcomer: Newcomer | None, budget: int) -> StepScope:
        """Opens the scope of the next plan, after the victims of `newcomer` were preempted."""
        seq, displacement = (None, NO_DISPLACEMENT) if newcomer is None else (newcomer.seq, newcomer.displacement)
        if seq is not None and displacement.victims and not self.finds_room(seq):
            seq = None  # a block of a victim is shared with a sequence that goes on
        return self.fair_share.begin_step(seq, displacement, self._running, bool(self._waiting), budget)

    def entered(self, seq: Sequence) -> None:
        """A sequence is new to the Scheduler."""
        self.fair_share.came(seq, self._running)
        if seq.group is not None and seq.group.inseparable:
            self.inseparable_groups.add(seq.group)

    def left(self, seq: Sequence) -> None:
        """A sequence finished, in whatever state it was."""
        self.fair_share.went(seq)
        if seq.group is not None and not seq.group.live:
            self.inseparable_groups.discard(seq.group)

    def started(self, start: Start) -> None:
        """A sequence runs, with its blocks."""
        if start.seq.group is not None:
            start.seq.group.split = start.splits_group
        self.reserve.started(start.seq, start.num_forks)

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """A sample that was counted with `parent` runs on the same blocks."""
        self.reserve.forked(parent, child)

    def preempted(self, seq: Sequence) -> None:
        """A running sequence is about to give up its blocks."""
        self.fair_share.charge(seq)
        self.reserve.stopped(seq)

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        """A running sequence ends and is about to give up its blocks."""
        self.reserve.stopped(seq, reason)

    def computing(self) -> None:
        """Tokens were added to the plan: the next turn depends on what each tenant gets."""
        if self.fair_share.contended:
            self.fair_share.settle(self._running)

    def planned(self, plan: StepPlan) -> None:
        """A plan is complete and goes to the Worker."""
        self.reserve.planned()
        self.fair_share.planned(plan, self._running)

    def computed(self, result: StepResult) -> None:
        """A result is back from the Worker."""
        self.fair_share.computed(result)

    def reset(self, max_num_seqs: int, watermark_blocks: int) -> None:
        """The Worker is gone; the next one has another pool and another number of rows."""
        self.max_num_seqs = max_num_seqs
        self.reserve.reset(watermark_blocks)
        self.fair_share.worker_lost(max_num_seqs)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that rows and accounts agree with the live sequences. For tests and simulation."""
        self.fair_share.check_invariants(list(sequences))
        adapters = {seq.adapter.adapter_id for seq in self._running if seq.adapter is not None}
        assert len(adapters) <= self.max_loras, "the Worker has no slot for an adapter"
        assert self.num_rows <= self.max_num_seqs and all(group.live for group in self.inseparable_groups)

    def _start_of(self, seq: Sequence) -> Start:
        """Returns how `seq` would start, and whether there is room for it.

        All known tokens must find room: those of a whole group before its first member starts. The reserve stays free
        unless nothing else runs. Samples that no pool of this size holds together are split, so that they do not wait
        for others to end.
        """
        blocks, group = self._blocks, seq.group
        prefix, num_forks = self._match_prefix(seq), num_forks_of(seq)
        spare = 0 if self.is_alone(seq) else self.reserve.spare(seq, prefix.blocks, num_forks, self._running)
        has_room = blocks.can_admit(seq, prefix, spare)
        splits = group is not None and group.split
        if has_room and group is not None and not group.running:
            needed = blocks.num_blocks_together(group.waiting)
            splits = needed > blocks.num_blocks and not group.inseparable
            rest = needed - blocks.num_blocks_for(seq.num_tokens)
            has_room = splits or blocks.can_admit(seq, prefix, spare + rest)
        return Start(seq, prefix, num_forks, spare, has_room, splits_group=splits)

    def _match_prefix(self, seq: Sequence) -> Prefix:
        prefix = self._blocks.match_prefix(seq)
        shared = [] if seq.group is None else self._blocks.shared_prefix(seq, seq.group.running)
        shared = shared[: seq.num_skippable_tokens // self._blocks.block_size]
        return Prefix([*shared]) if len(shared) > len(prefix.parts) else prefix

    def _has_row(self, seq: Sequence) -> bool:
        needed = 1 if seq.group is None else seq.group.num_rows_to_start
        return self.num_rows + min(needed, self.max_num_seqs) <= self.max_num_seqs and self._has_slot(seq)

    def _has_slot(self, seq: Sequence, leaving: Collection[Sequence] = ()) -> bool:
        """True if the Worker has a slot for the sequence's adapter beside those of the running sequences that are not
        `leaving`."""
        if seq.adapter is None:
            return True
        staying = (other for other in self._running if other not in leaving)
        adapters = {other.adapter.adapter_id for other in staying if other.adapter is not None}
        return seq.adapter.adapter_id in adapters or len(adapters) < self.max_loras

    def _count_delay(self, start: Start) -> None:
        """Counts a sequence once that the prediction delays and the watermark alone would not. A mere statistic."""
        watermark = self.reserve.watermark(start.num_forks)
        if start.seq is self._last_delayed or start.spare <= watermark:
            return
        fits = self._blocks.can_admit
        if fits(start.seq, start.prefix, watermark) and not fits(start.seq, start.prefix, start.spare):
            self._last_delayed = start.seq
            self.num_delayed += 1
