"""Monitor: the invariants, checked after every plan and every result, whoever drives the scheduler."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from engine.executor.frames import FRAME_HEADER
from engine.executor.recovery import GUILTY_AT
from engine.executor.step import SampledToken, StepPlan, StepResult, decode_driver_message, encode_frame
from engine.executor.step_durations import Features, StepKind
from engine.memory.sequence import BlockKey, Sequence, SequenceStatus
from engine.scheduling.beam_group import BeamGroup
from tests.sim.admission import check_admission
from tests.sim.beams import check_groups
from tests.sim.coverage import Coverage
from tests.sim.device import KvDevice, KvMemory, has_slow_masks
from tests.sim.disk import FaultyOs
from tests.sim.model import Reference
from tests.sim.swarm import FOR_GOOD, Arrival, SimConfig
from tests.sim.violation import Violation, fail, require
from tests.sim.watched import WatchedScheduler, sequences_of

if TYPE_CHECKING:
    from tests.sim.executor import SimExecutor
    from tests.sim.worker import SimWorker

OWN_CHECKS_EVERY = 16  # steps between two calls of the scheduler's own check_invariants


class CacheContents:
    """Cached blocks: full, immutable, and each key stands for one content as each content for one key.

    `content_of` outlives the pool: what the disk tier brings back was computed by an earlier Worker.
    """

    def __init__(
        self,
        device: KvDevice,
        content_of: dict[BlockKey, bytes],
        key_of: dict[bytes, BlockKey],
        content_of_digest: dict[bytes, bytes],
    ) -> None:
        self.content_of, self._key_of, self._content_of_digest = content_of, key_of, content_of_digest
        self._device = device
        self._keys: list[BlockKey | None] = [None] * len(device.slots)
        self._snapshot = device.slots.copy()
        self._cached = np.empty(0, np.intp)

    def check(self, keys: list[BlockKey | None]) -> None:
        if keys != self._keys:
            for block_id, (old, new) in enumerate(zip(self._keys, keys, strict=True)):
                if new is not None and new != old:
                    self._record(block_id, new)
            self._keys = keys
            self._cached = np.array([i for i, key in enumerate(keys) if key is not None], np.intp)
        changed = self._device.slots[self._cached] != self._snapshot[self._cached]
        if changed.any():
            fail("cached-changed", f"blocks {self._cached[changed.any(axis=1)].tolist()} changed while cached")

    def _record(self, block_id: int, key: BlockKey) -> None:
        content = self._device.slots[block_id]
        if (content < 0).any():
            fail("cached-not-full", f"block {block_id} is cached, but not all of it was computed")
        packed = content.tobytes()
        if self.content_of.setdefault(key, packed) != packed or self._key_of.setdefault(packed, key) != key:
            fail("cache-key", f"block {block_id}: a key stands for two contents, or a content has two keys")
        self._content_of_digest[key.digest] = packed
        self._snapshot[block_id] = content


class Monitor:
    """One per run. `results` holds what the device answered to each plan, until the simulated Worker hands it over."""

    def __init__(self, config: SimConfig, coverage: Coverage, arrivals: list[Arrival]) -> None:
        self.config = config
        self.num_steps = 0
        self.violation: Violation | None = None
        self.results: dict[int, StepResult] = {}
        self.saw = coverage.saw
        self.executor: SimExecutor
        self.faults = FaultyOs(config, self.saw)
        self.num_workers = 0  # started so far
        self.workers: dict[int, SimWorker] = {}  # by number, which is also the pid
        self._num_before: dict[int, int] = {}  # of tokens emitted, before the last result
        self.compiled: set[StepKind] = set()  # kinds of steps that a Worker has begun to do
        self.slowest: dict[StepKind | Features, float] = {}  # seconds of a step, by what it is and does
        self.blows: list[str] = []  # "kill" or "stop": what happens to the next Workers, at the first plan of each
        self._hits: dict[int, int] = {}  # by index of arrival: deaths from outside since its last token
        self.memory: KvMemory | None = None  # of the Worker that was started last, where there is one
        self.adapters: dict[int, str] = {}  # weights of those that the Worker holds, by id
        self.too_large: set[int] = set()  # indices of arrivals whose beams found too few blocks
        self.doomed: set[int] = set()  # and of those that a smaller pool cannot hold
        self.max_num_tokens: dict[int, int] = {}  # of arrivals that were accepted, where the pool has set it
        self._digest = hashlib.sha256()
        self.content_of_digest: dict[bytes, bytes] = {}
        self._contents: tuple[dict[BlockKey, bytes], dict[bytes, BlockKey]] = {}, {}
        self.expect(arrivals)

    def expect(self, arrivals: list[Arrival]) -> None:
        """These are what the life of an engine that begins now will be asked for."""
        self._samples = {arrival.seed_of(i): (arrival, i) for arrival in arrivals for i in range(arrival.params.n)}
        self._salts: dict[int, str] = {}
        self._deadly: dict[int, str] = {}
        self._num_emitted: dict[int, int] = {}
        self.waits_for_disk: dict[Sequence, float] = {}  # since when
        self._in_flight = 0
        self._before: dict[int, set[int]] = {}  # who decoded while a sequence rested, by its id
        self.gave_way_at: dict[int, int] = {}  # by seq_id: tokens computed when it gave way as the last of its tenant
        self.results.clear()
        self.num_workers = 0
        self.blows.clear()
        self._hits.clear()
        self.too_large.clear()
        self.doomed.clear()
        self.max_num_tokens.clear()

    def expect_instead(self, arrival: Arrival) -> None:
        """Its adapter has other weights by now."""
        self._samples.update({arrival.seed_of(i): (arrival, i) for i in range(arrival.params.n)})

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Remembers the first thing that goes wrong, also where the caller survives it."""
        try:
            yield
        except Violation as violation:
            self.violation = self.violation or violation
            raise
        except Exception as error:
            self.violation = self.violation or Violation(type(error).__name__, _where(error))
            raise self.violation from error

    def raise_violation(self) -> None:
        if self.violation is not None:
            raise self.violation

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def record(self, *facts: object) -> None:
        """Make something part of the history."""
        self._digest.update(repr(facts).encode())

    def attach(self, scheduler: WatchedScheduler) -> None:
        self.scheduler = scheduler
        self.blocks = scheduler.watched_blocks
        tier = self.blocks.host_tier
        memory = self.memory or KvMemory(
            self.blocks.num_blocks, 0 if tier is None else tier.num_slots, self.config.block_size
        )
        self.device = KvDevice(
            self.config.model,
            memory,
            max_model_len=self.config.max_model_len,
            salt_of=self._salts.__getitem__,
            adapters=self.adapters,
            max_loras=self.config.max_loras,
            is_kept=self._is_kept,
        )
        self.contents = CacheContents(self.device, *self._contents, self.content_of_digest)

    def _is_kept(self, block_id: int) -> bool:
        block = self.blocks.blocks[block_id]
        return block.key is not None or block.tail is not None or block.ref_count > 0

    @property
    def limit(self) -> int:
        """Tokens that a sequence may have, as the pool is now."""
        return min(self.config.max_model_len, self.blocks.num_blocks * self.config.block_size)

    def live_sequences(self) -> Iterator[Sequence]:
        """All that have not ended, those that wait for the disk included."""
        yield from sequences_of(self.scheduler)
        yield from self.waits_for_disk

    def reference_of(self, seq: Sequence) -> Reference:
        arrival, index = self._samples[seq.seed]
        return arrival.references[index]

    def arrival_of(self, seq: Sequence) -> Arrival:
        return self._samples[seq.seed][0]

    # Hooks.

    def added(self, seq: Sequence) -> None:
        self._salts[seq.seq_id] = seq.cache_salt
        self._deadly[seq.seq_id] = self._samples[seq.seed][0].deadly
        self._num_emitted[seq.seq_id] = 0

    def how_deadly(self, plan: StepPlan) -> str:
        """ "crash" or "hang" where some sequence of the plan has that effect."""
        return max((self._deadly[step.seq_id] for step in plan.steps), default="")

    def blow(self, plan: StepPlan) -> None:
        """A plan was sent: the Worker may be hit before it begins."""
        worker = self.executor.worker
        if not self.blows or not worker.alive or worker.stopped:
            return
        if self.blows.pop() == "kill":
            worker.kill()
        else:
            worker.stop(FOR_GOOD)
        self.hit([plan])

    def hit(self, plans: Iterable[StepPlan]) -> None:
        """Somebody kills the Worker, or stops it for good, while it has these to compute."""
        seqs = [self.scheduler.sequence(seq_id) for plan in plans for seq_id in plan.seq_ids]
        for index in {self.arrival_of(seq).index for seq in seqs if seq is not None}:
            self._hits[index] = self._hits.get(index, 0) + 1
            if self._hits[index] == GUILTY_AT:
                self.saw("request hit from outside as often as makes guilty")

    def restarted(self, live: list[Sequence]) -> None:
        """The Driver has begun again with an empty pool: so does the device. What cannot fit any more must fail."""
        self._in_flight = 0
        self._before.clear()
        self.gave_way_at.clear()  # what they computed since may be lost
        self.results.clear()
        self.attach(self.scheduler)
        for seq in live:
            self._judge(seq)
        if len(self.doomed) and len(self.doomed) < len({self.arrival_of(seq).index for seq in live}):
            self.saw("some requests fit a smaller pool, some do not")
        self.check()

    def _judge(self, seq: Sequence) -> None:
        """Shorten, or expect to fail, a live sequence that a pool of another size cannot hold."""
        if seq.max_num_tokens <= self.limit:
            return
        arrival = self.arrival_of(seq)
        if arrival.params.max_tokens is None and len(seq.token_ids) < self.limit:
            self.max_num_tokens[arrival.index] = self.limit
            self.saw("request shortened to what a smaller pool holds")
        else:
            self.doomed.add(arrival.index)
            self.saw("request too large for a smaller pool")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way that would make anybody plan again."""
        return not self._in_flight and not self.scheduler.ended_groups

    def planned(self, plan: StepPlan | None, ran: list[Sequence]) -> None:
        """`ran` is what was running before, in order."""
        if plan is None:
            if self.scheduler.has_work and self.is_idle:
                fail("stuck", "sequences wait, nothing is in flight and nothing can be planned")
            return
        self.num_steps += 1
        self._in_flight += 1
        self._execute(plan)
        self._check_plan(plan, ran)
        self._check_moves(plan)
        self._check_worker_agrees()
        self.check()

    def flushed(self, plan: StepPlan) -> None:
        """The last plan of a server moves blocks and computes nothing."""
        require(not (plan.steps or plan.new or plan.loads), "flush", f"a flush that does more: {plan}")
        self._execute(plan)
        self._check_moves(plan)

    def _execute(self, plan: StepPlan) -> None:
        frame = encode_frame(plan)  # as it crosses to the Worker: no list is shared with the Driver
        self._digest.update(frame)
        self.results[plan.step_id] = self.device.execute(decode_driver_message(frame[FRAME_HEADER.size :]))

    def updated(self, result: StepResult, fresh: list[tuple[Sequence, int]], num_known: int) -> None:
        """`num_known` of the samples are of live sequences."""
        self._in_flight -= 1
        self._digest.update(encode_frame(result))
        for tokens in result.verified:
            self.device.answered(tokens[0].seq_id)
            self.saw("token of a draft was wrong" if len(tokens) == 1 else "token of a draft was right")
        if num_known < len(result.samples):
            self.saw("token of a finished sequence thrown away")
        owners = [id(self._samples[seq.seed][0]) for seq, _ in fresh]
        if len(set(owners)) < len(owners):
            self.saw("several tokens of one request in a result")
        left = Counter(seq.seq_id for seq, _ in fresh)
        self._num_before = {seq_id: self._num_emitted[seq_id] for seq_id in left}
        for seq, token_id in fresh:
            left[seq.seq_id] -= 1
            self._check_token(seq, SampledToken(seq.seq_id, token_id), left[seq.seq_id])
        self.check()

    def _check_token(self, seq: Sequence, token: SampledToken, num_more: int) -> None:
        """`num_more` tokens of the same sequence come with it, behind it."""
        emitted = self._num_emitted[seq.seq_id]
        expected = self.reference_of(seq).token_ids
        if emitted == len(expected) and seq.params.stop and emitted > self._num_before.get(seq.seq_id, emitted):
            return  # it came with the token that ended the text at a stop string, and Delivery drops it
        if seq.num_generated_tokens != emitted + 1 + num_more or expected[emitted : emitted + 1] != [token.token_id]:
            fail("tokens", f"{seq}: token {emitted} is {token.token_id}, the oracle has {expected[emitted:][:1]}")
        self._num_emitted[seq.seq_id] = emitted + 1
        if self._hits:
            self._hits.pop(self.arrival_of(seq).index, None)
        params = seq.params
        if token.token_id in params.stop_token_ids and emitted + 1 < params.min_tokens:
            self.saw("stop token before min_tokens")

    # Invariants.

    def check(self) -> None:
        """After every plan and every result: who holds what, and that the cache says the truth."""
        self._check_queues()
        self._check_blocks()
        if self.num_steps % OWN_CHECKS_EVERY == 0:
            check_groups(self.scheduler)
            self.scheduler.check_invariants()
            check_admission(self.scheduler)

    def _check_queues(self) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.running, scheduler.waiting
        for seq in running:
            if seq.status is not SequenceStatus.RUNNING or scheduler.sequence(seq.seq_id) is not seq:
                fail("queues", f"{seq} is among the running")
            if not seq.num_computed_tokens <= seq.num_tokens <= seq.max_num_tokens:
                fail("computed-known", f"{seq} may have {seq.max_num_tokens} tokens")
            if self.doomed and self.arrival_of(seq).index in self.doomed:
                fail("doomed", f"{seq} runs, and the pool is too small for it")
        for seq in waiting:
            if seq.status is not SequenceStatus.WAITING or scheduler.sequence(seq.seq_id) is not seq:
                fail("queues", f"{seq} is among the waiting")
            if seq.block_table or seq.num_computed_tokens:
                fail("queues", f"{seq} waits and holds blocks")
        for queue in (running, waiting, scheduler.held):
            orders = [seq.order for seq in queue]
            if orders != sorted(set(orders)):
                fail("queues", f"not in order, or twice in a queue: {orders}")
        for seq in scheduler.held:
            if seq.status is not SequenceStatus.WAITING or seq.block_table or seq.num_computed_tokens:
                fail("queues", f"{seq} is held")
            self.saw("request held while another runs alone")
        if len(running) > scheduler.max_num_seqs:
            fail("budget", f"{len(running)} sequences run")

    def _check_blocks(self) -> None:
        manager = self.blocks
        counts = [0] * manager.num_blocks
        for seq in self.scheduler.running:
            for block_id in seq.block_table:
                counts[block_id] += 1
        if counts != [block.ref_count for block in manager.blocks]:
            wrong = [i for i, block in enumerate(manager.blocks) if block.ref_count != counts[i]]
            fail("ref-counts", f"blocks {wrong}: the count is not the number of tables")
        free = [block.block_id for block in manager.walk_free()]
        if len(free) != len(manager.free_blocks) or len(free) != counts.count(0) or len(set(free)) != len(free):
            fail(
                "free-list", f"{len(free)} blocks, length {len(manager.free_blocks)}, {counts.count(0)} without holder"
            )
        if any(counts[block_id] for block_id in free):
            fail("free-list", "a block is free and in a table")
        if not free:
            self.saw("no block free")
        keys = [block.key for block in manager.blocks]
        if len(manager.cached_blocks) != len(keys) - keys.count(None):
            fail("cache-index", f"{len(manager.cached_blocks)} keys, {len(keys) - keys.count(None)} cached blocks")
        self.contents.check(keys)

    def _check_plan(self, plan: StepPlan, ran: list[Sequence]) -> None:
        scheduler, saw = self.scheduler, self.saw
        num_tokens = plan.num_tokens
        is_short = scheduler.scope.budget < scheduler.max_num_batched_tokens
        planned = {step.seq_id for step in plan.steps}
        if not 0 < num_tokens <= scheduler.scope.budget or len(planned) != len(plan.steps):
            fail("budget", f"{num_tokens} tokens for {len(planned)} of {len(plan.steps)} sequences")
        for seq in scheduler.running:
            idle = seq.num_uncomputed_tokens if seq.seq_id not in planned else 0
            # A preemption gives budget back, for which another prompt may have been admitted beside an unfinished one.
            if idle and (seq in scheduler.scope.resting or scheduler.drafts.holds(seq)):
                continue
            if idle and seq.tenant in scheduler.scope.excluded:
                saw("plan left to a tenant that waits for a first token")
            elif idle and (num_tokens < scheduler.scope.budget or (idle == 1 and not is_short)):
                fail("progress", f"{seq} has tokens to compute and is not in the plan")
        if ran and ran[0].status is SequenceStatus.WAITING and ran[0] not in scheduler.admission.fair_share.comebacks:
            fail("progress", f"the first in order was preempted: {ran[0]}")
        self._check_order(plan, ran)
        self._check_turns(plan, planned)
        self._count_adapters()
        if num_tokens == scheduler.max_num_batched_tokens:
            saw("token budget used up")
        if is_short and num_tokens == scheduler.scope.budget:
            saw("short step, while another tenant is expected")
        if scheduler.waiting and len(scheduler.running) == scheduler.max_num_seqs:
            saw("max_num_seqs reached")
        if scheduler.waiting and scheduler.waiting[0].num_pending_tokens:
            saw("admission waits for a pending token")
        if self._in_flight > 1:
            saw("two plans in flight" if self._in_flight == 2 else "three plans in flight")
        if any(len(seq.block_table) == self.blocks.num_blocks for seq in scheduler.running):
            saw("one sequence holds the whole pool")

    def _check_moves(self, plan: StepPlan) -> None:
        """Check that each slot of the host tier holds the block of its key."""
        tier = self.blocks.host_tier
        if tier is None or not (plan.offloads or plan.loads):
            return
        key_of = {slot: key for key, slot in tier._slots.items()}
        for move in plan.offloads:
            if self.device.host[move.slot].tobytes() != self.contents.content_of[key_of[move.slot]]:
                fail("offload", f"{move}: the slot holds what belongs to another key")
        if {move.slot for move in plan.offloads} & {move.slot for move in plan.loads}:
            self.saw("block offloaded and loaded by the same plan")
        if {move.block_id for move in plan.offloads} & {move.block_id for move in plan.loads}:
            self.saw("block loaded in place of one that is offloaded")

    def _check_turns(self, plan: StepPlan, planned: set[int]) -> None:
        """While one rests in short steps, none of its tenant's others decodes twice, unless it has slow masks."""
        resting = self.scheduler.scope.resting
        if found := {seq.seq_id for seq in resting} & planned:
            fail("turn", f"sequences {found} rest, and are in the plan")
        tenants = {seq.seq_id: seq.tenant for seq in self.scheduler.running}
        self._before = {seq_id: others for seq_id, others in self._before.items() if seq_id not in planned}
        if any(has_slow_masks(seq.seq_id) for seq in resting):
            self.saw("sequences with slow masks rest")
        for seq in resting:
            if has_slow_masks(seq.seq_id):
                continue
            others = {seq_id for seq_id in plan.decodes if tenants[seq_id] == seq.tenant}
            before = self._before.setdefault(seq.seq_id, set())
            if found := others & before:
                fail("turn", f"{seq} rests, and {found} decode for the second time")
            before |= others
            self.saw("decodes rest in a short step")

    def _count_adapters(self) -> None:
        """At most as many as there are slots, which the device checks; the next in turn may wait for one."""
        in_use = {seq.adapter for seq in self.scheduler.running if seq.adapter is not None}
        if len(in_use) > 1:
            self.saw("several adapters run together")
        waiting = self.scheduler.waiting
        if waiting and waiting[0].adapter not in {None, *in_use} and len(in_use) == self.config.max_loras:
            self.saw("request waits for a slot of an adapter")

    def _check_order(self, plan: StepPlan, ran: list[Sequence]) -> None:
        """First come, first served within a priority: whoever was admitted goes before all who still wait."""
        known = {seq.seq_id for seq in ran}  # a hypothesis that changes its row is no newcomer
        for group in {seq.group for seq in ran if isinstance(seq.group, BeamGroup)}:
            known.update(slot.seq_id for slot in group.slots)  # and those that others wait for go before all
        admitted = [
            self.scheduler.sequence(new.seq_id) for new in plan.new if new.fork_of is None and new.seq_id not in known
        ]
        if not admitted or not self.scheduler.waiting:
            return
        waiting = self.scheduler.waiting
        for last in admitted:
            first = next((seq for seq in waiting if seq.tenant == last.tenant), last)
            if last.order > first.order or last.priority > waiting[0].priority:
                fail("first-come", f"{last} was admitted, {first} waits")
            if last.order > waiting[0].order:
                self.saw("tenant goes before earlier arrivals of another")
        if any(seq.arrival < last.arrival and seq.priority > last.priority for seq in waiting for last in admitted):
            self.saw("arrival goes before earlier ones by priority")

    def _check_worker_agrees(self) -> None:
        """The mirror that the Worker keeps from plans alone equals what the Driver believes.

        A hypothesis whose row was dropped is sent anew with its next tokens, which may have to wait for an unfinished
        prompt; until then only the Driver knows that it holds its blocks.
        """
        rows, holders = self.device.rows, list(self.device.holders)
        running = [seq for seq in self.scheduler.running if seq.in_worker]
        for seq in self.scheduler.running:
            if not seq.in_worker:
                require(isinstance(seq.group, BeamGroup), "worker-rows", f"{seq} runs and was not sent")
                for block_id in seq.block_table:
                    holders[block_id] += 1
        if len(rows) != len(running):
            fail("worker-rows", f"the Worker holds {len(rows)} sequences, {len(running)} run")
        for seq in running:
            row = rows.get(seq.seq_id)
            if row is None or row.table[: row.num_blocks].tolist() != seq.block_table:
                fail("worker-rows", f"{seq}: the Worker has another block table")
            # The choices that a hypothesis has sampled wait for the rest of its group.
            is_through = seq.num_computed_tokens == seq.num_tokens and not seq.num_pending_tokens
            num_chosen = is_through and isinstance(seq.group, BeamGroup) and seq in seq.group._samples
            if seq.num_draft_tokens:  # the Driver does not know yet how many of them are right
                continue
            if row.num_computed != seq.num_computed_tokens or row.num_known != seq.num_tokens + num_chosen:
                fail("worker-rows", f"{seq}: the Worker computed {row.num_computed} and knows {row.num_known}")
        if holders != [block.ref_count for block in self.blocks.blocks]:
            fail("ref-counts", "the Worker's tables and the ref counts disagree")

    def check_idle(self) -> None:
        """Check that no trace of any request is left."""
        scheduler, manager = self.scheduler, self.blocks
        scheduler.check_invariants()
        require(not list(sequences_of(scheduler)), "leftovers", "sequences are left")
        require(len(manager.free_blocks) == manager.num_blocks, "leftovers", "an idle engine holds blocks")
        left = left_over(scheduler, but=("eos_token_ids", "_removed"))
        require(not left, "leftovers", f"the scheduler still has {left}")
        require(not left_over(scheduler.drafts, but=()), "leftovers", "the drafts of an idle engine")
        check_admission(scheduler)
        scheduler.admission.fair_share.check_invariants([])
        tier = manager.host_tier
        require(tier is None or not tier._reserved, "leftovers", "slots are kept for a fetch that is over")


def left_over(owner: object, but: tuple[str, ...]) -> dict[str, object]:
    """The containers of an object that are not empty: state that outlived its requests."""
    containers = (list, dict, set, frozenset) if not isinstance(owner, type) else ()
    return {k: v for k, v in vars(owner).items() if k not in but and isinstance(v, containers) and v}


def _where(error: BaseException) -> str:
    """The message of an error and the innermost frame, without line numbers of the harness."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace is not None else "?"
    return f"{error} (in {place})"
