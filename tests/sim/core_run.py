"""The first level: Scheduler, BlockManager and device in a plain loop, plans up to `depth` ahead."""

from collections import deque

from engine.executor.step import StepPlan
from engine.memory.host_tier import HostTier
from engine.memory.sequence import Sequence, SequenceStatus
from engine.outputs import FinishReason
from engine.request import Adapter
from engine.scheduling.beam_group import BeamGroup, begin_search
from tests.sim.coverage import Coverage
from tests.sim.model import EOS_TOKEN_ID, mix
from tests.sim.monitor import Monitor
from tests.sim.swarm import VERSIONS, Abort, Arrival, Event, SimConfig
from tests.sim.violation import fail, require
from tests.sim.watched import WatchedBlockManager, WatchedScheduler, states_of

PATIENCE = 60  # turns that an event waits for the state it is meant for


class CoreRun:
    """Plays events; `run` raises Violation. Time counts turns of the loop, and jumps when there is nothing to do."""

    def __init__(self, config: SimConfig, events: list[Event], coverage: Coverage) -> None:
        self.config = config
        self.events = deque(events)
        self.monitor = Monitor(config, coverage, [event for event in events if isinstance(event, Arrival)])
        self.scheduler = WatchedScheduler(
            self.monitor,
            WatchedBlockManager(
                self.monitor,
                config.num_blocks,
                config.block_size,
                config.prefix_caching,
                HostTier(config.num_host_blocks, config.cache_costs) if config.num_host_blocks else None,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            watermark=config.watermark,
            admission=config.admission,
            eos_token_ids=[EOS_TOKEN_ID],
            step_seconds=config.step_seconds,
            itl_target=config.itl_target,
            clock=lambda: float(self.now),
            max_loras=config.max_loras,
        )
        adapters = [f"a{i}-{VERSIONS[0]}" for i in range(config.num_adapters)]
        self.monitor.adapters.update(enumerate(adapters, start=1))
        self._adapters = {
            weights: Adapter(i, weights, weights.encode()) for i, weights in self.monitor.adapters.items()
        }
        self.now = 0
        self.in_flight: deque[StepPlan] = deque()
        self.groups: dict[int, list[Sequence]] = {}  # by index of the arrival: the samples of a request
        self.owners: dict[int, int] = {}  # seq_id -> index of the arrival
        self._next_id = 0
        self._aborts: list[Abort] = []  # not yet done: nobody is in that state
        self._ambushes: list[Arrival] = []

    def run(self) -> None:
        deadline: int | None = None
        while self.events or self._ambushes or self.scheduler.has_work or self.in_flight:
            self._play_events()
            if not self.events and not self._ambushes and deadline is None:
                deadline = self.now + self._steps_to_finish()
            if deadline is not None and self.now > deadline:
                fail("liveness", f"requests have not ended {deadline} turns after the last event")
            self._turn()
        self._check_ends()

    def _steps_to_finish(self) -> int:
        """Enough for one sequence after the other, a token per step, slow steps included: generous, but finite."""
        live = [seq for group in self.groups.values() for seq in group if seq.finish_reason is None]
        return 100 + 20 * sum(seq.max_num_tokens for seq in live)

    def _play_events(self) -> None:
        if self.events and not self.scheduler.has_work and not self.in_flight:
            self.now = max(self.now, int(self.events[0].at))
        while self.events and self.events[0].at < self.now + 1:
            event = self.events.popleft()
            if isinstance(event, Arrival):
                self._ambushes.append(event) if event.ambush else self._add(event)
            elif isinstance(event, Abort):
                self._aborts.append(event)
        self._spring_ambushes()
        self._abort_some()

    def _spring_ambushes(self) -> None:
        """They arrive when the next plan lets some request fork, or when they have waited long enough."""
        soon = any(
            forks and 0 < parent.num_uncomputed_tokens < self.config.max_num_batched_tokens
            for parent, forks in self.scheduler._forks.items()
            if parent.status is SequenceStatus.RUNNING
        )
        due = [event for event in self._ambushes if soon or self.now >= event.at + PATIENCE]
        self._ambushes = [event for event in self._ambushes if event not in due]
        for event in due:
            self._add(event)

    def _turn(self) -> None:
        while len(self.in_flight) < self.config.depth and (plan := self.scheduler.schedule()) is not None:
            self.in_flight.append(plan)
        self._count_searches()
        self._abort_some()
        if self.in_flight and not self._still_computing(self.in_flight[0]):
            self._take_result()
        self.now += 1

    def _still_computing(self, plan: StepPlan) -> bool:
        slow_every = self.config.slow_every
        return slow_every > 0 and mix(plan.step_id, self.now) % slow_every == 0

    def _take_result(self) -> None:
        result = self.monitor.results.pop(self.in_flight.popleft().step_id)
        self.scheduler.update(result)
        self._count_searches()
        for seq_id in result.failed:
            if (seq := self.scheduler.sequence(seq_id)) is not None:
                self._end(self.owners[seq.seq_id], FinishReason.ERROR)

    def _add(self, arrival: Arrival) -> None:
        group = []
        for index in range(arrival.params.n):
            seq = Sequence(
                self._next_id,
                arrival.prompt,
                arrival.params,
                seed=arrival.seed_of(index),
                max_num_tokens=arrival.max_num_tokens,
                priority=arrival.priority,
                arrival=self._next_id,
                cache_salt=arrival.salt,
                tenant=arrival.tenant,
                weight=arrival.weight,
                adapter=self._adapters.get(arrival.weights),
            )
            self.owners[seq.seq_id] = arrival.index
            self._next_id += 1
            group.append(seq)
        self.groups[arrival.index] = group
        if arrival.beam is None:
            self.scheduler.add(group[0], group[1:])
        else:
            begin_search(arrival.beam, group, self.scheduler.eos_token_ids)
            self.scheduler.add(group[0])

    def _count_searches(self) -> None:
        ended, self.scheduler.ended_groups = self.scheduler.ended_groups, []
        for group in ended:
            require(not group.live, "group", "a group has ended, and hypotheses of it are live")
            if not group.error:
                self.monitor.saw("beam search finished")

    def _abort_some(self) -> None:
        """Those whose state somebody is in; the others wait for that, for a while."""
        self._aborts = [a for a in self._aborts if not self._abort(a) and self.now < a.at + PATIENCE]

    def _abort(self, abort: Abort) -> bool:
        fits = [
            index
            for index, group in self.groups.items()
            if abort.target == "any" or any(abort.target in states_of(seq) for seq in group)
        ]
        if not fits:
            return False
        index = fits[abort.pick % len(fits)]
        if all(seq.status is SequenceStatus.FINISHED for seq in self.groups[index]):
            self.monitor.saw("abort after the end")
        elif isinstance(self.groups[index][0].group, BeamGroup):
            self.monitor.saw("beam search aborted")
            self._end(index, FinishReason.ABORT)
        elif abort.whole or abort.target == "any":
            self._end(index, FinishReason.ABORT)
        else:
            fitting = [seq for seq in self.groups[index] if abort.target in states_of(seq)]
            self.scheduler.finish(fitting[abort.pick % len(fitting)], FinishReason.ABORT)
        return True

    def _end(self, index: int, reason: FinishReason) -> None:
        """A request ends as a whole, as in the Driver."""
        for seq in self.groups[index]:
            self.scheduler.finish(seq, reason)

    def _check_ends(self) -> None:
        """Every sample is what the oracle has, or a prefix of it where its request was ended early."""
        for index, group in self.groups.items():
            for seq in group:
                expected = self.monitor.reference_of(seq)
                generated = seq.token_ids[seq.num_prompt_tokens :]
                self.monitor.record(index, seq.seq_id, seq.finish_reason, seq.stop_reason, generated)
                if seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    found = generated, seq.finish_reason, seq.stop_reason
                    wanted = expected.token_ids, expected.finish_reason, expected.stop_reason
                    require(found == wanted, "outcome", f"{seq} ended as {found}, the oracle as {wanted}")
                elif not isinstance(seq.group, BeamGroup):
                    prefix = expected.token_ids[: len(generated)]
                    require(generated == prefix, "outcome", f"{seq} has tokens that the oracle has not")
                cached = seq.num_cached_tokens
                limit = seq.num_prompt_tokens - (seq is group[0])  # what is reported is that of the first sample
                if not isinstance(seq.group, BeamGroup) or seq is group[0]:
                    require((cached or 0) <= limit, "usage", f"{seq}: {cached} cached tokens")
            errors = [self.monitor.reference_of(seq).finish_reason is FinishReason.ERROR for seq in group]
            failed = any(seq.finish_reason is FinishReason.ERROR for seq in group)
            failed = failed and index not in self.monitor.too_large
            require(any(errors) or not failed, "outcome", f"request {index} failed, none of its samples should")
        self.monitor.check_idle()
