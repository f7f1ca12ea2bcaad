"""FairShare: who is next and who gives way when several tenants compete for the engine.

Three rules. None of them lets the device idle while there is work (they are work-conserving).

Turns (virtual token counter: Sheng et al. 2024, section 4). Each tenant has an account of the seconds of computing that
it got, divided by its weight. The seconds of a step are split by what the step computed for each tenant; a generated
token counts twice. (The paper counts tokens, but a token in a short step takes more time than one in a full step.)
Among the tenants with waiting sequences, the one with the lowest account starts next. A tenant that returns after being
idle is raised to the lowest account of the active tenants: unused time earns nothing. Tokens found in the prefix cache
are free, and so is a second computation.

Places (dominant resource fairness: Ghodsi et al. 2011). A tenant's share is the larger of its share of the rows and its
share of the blocks, divided by its weight. When the next sequence in turn finds no room, running sequences of the
tenant with the largest share are preempted, one by one, as long as that tenant keeps at least the share that the
newcomer's tenant then has: no sequence is ever pushed back and forth. Samples of one request are preempted one by one,
too. A part that cannot be divided (a beam search, or one long sequence) may be all that a tenant has. It is preempted
as a whole for a tenant that would then hold at most half as much, so no request keeps all rows or all blocks for
itself. After its return it keeps its place until it has progressed for as long as the recomputation of its lost tokens
took: at least half of its time is progress. Preempted sequences keep their computed blocks in the prefix cache until
those are needed.

First tokens. While a tenant waits for a first token, the plan excludes tenants that were served more. So the new prompt
neither waits behind their chunks nor shares the step with decodes of a tenant that holds more than twice as much, or,
if the waiting tenant is small, of any tenant that is not (small: in what it holds and in what it asks for). Steps
that a tenant computes alone are charged, so the exclusion ends when the accounts are level. The new prompt still has to
wait for the step under way: so while small tenants are to be expected, steps of other tenants are short
(engine/scheduling/short_steps.py). A small tenant also computes its further tokens alone while its allowance lasts: a
token bucket that fills at ALONE_SHARE of the computing time. A short request finishes soon, and a long one costs other
tenants no more than that share. Sequences whose masks take long decode in turns (engine/scheduling/slow_masks.py).

With a single tenant none of this costs anything: `contended` is False and the order of arrival decides.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.executor.step import StepPlan, StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence, SequenceStatus, smallest_part
from engine.scheduling.short_steps import ShortSteps
from engine.scheduling.slow_masks import SlowMasks

PROMPT_COST, OUTPUT_COST = 1.0, 2.0  # weight of a token, as in the paper
SMALL_SHARE = 1 / 16  # a tenant that holds or asks for more than this, and for more than one row, delays others
CREDIT_SECONDS = 0.25  # computing time by which a small tenant may be ahead of its share
PRICE_WEIGHT = 0.1  # weight of the newest step in the moving average of seconds per token
ALONE_SHARE = 0.1  # share of the computing time that refills a small tenant's allowance for steps of its own
ALONE_SECONDS = 0.1  # computing time: the largest allowance, and the largest debt
VISIT_SECONDS = 20.0  # computing time for which another small tenant is expected after the last one


@dataclass(slots=True)
class Allowance:
    """A token bucket, in seconds of computing, for steps that a tenant computes alone. Times are FairShare's clock."""

    refilled: float  # time of the last refill
    seconds: float = field(default_factory=lambda: ALONE_SECONDS)

    def refill(self, now: float) -> float:
        """Adds what accrued since the last refill; returns the seconds left, below 0 if the tenant owes some."""
        self.seconds = min(ALONE_SECONDS, self.seconds + ALONE_SHARE * (now - self.refilled))
        self.refilled = now
        return self.seconds

    def use(self, seconds: float) -> None:
        self.seconds = max(-ALONE_SECONDS, self.seconds - seconds)


@dataclass(slots=True, eq=False)
class Tenant:
    """`served`: seconds of computing divided by `weight`. `cost`: weighted tokens not charged yet, of which
    `cost_in_flight` are in plans whose results are not back. `num_live`: sequences that have not ended. `alone`: the
    allowance for steps of its own.
    """

    alone: Allowance
    weight: float = 1.0
    served: float = 0.0
    cost: float = 0.0
    cost_in_flight: float = 0.0
    num_live: int = 0


@dataclass(slots=True)
class Comeback:
    """The return of a sequence that was preempted although its tenant had nothing else. Times are FairShare's clock.

    `num_tokens`: tokens that it had computed before.
    """

    num_tokens: int
    returned: float | None = None  # when it ran again
    caught_up: float | None = None  # when it computed more than `num_tokens`

    def observe(self, seq: Sequence, now: float) -> None:
        """Notes how far `seq` got with the plan that is sent now."""
        if seq.status is not SequenceStatus.RUNNING:
            self.returned = self.caught_up = None
            return
        if self.returned is None:
            self.returned = now
        if self.caught_up is None and seq.num_computed_tokens > self.num_tokens:
            self.caught_up = now

    def is_over(self, now: float) -> bool:
        """True if the sequence has progressed for as long as its recomputation took."""
        if self.returned is None or self.caught_up is None:
            return False
        return now - self.caught_up >= self.caught_up - self.returned


@dataclass(slots=True)
class Holding:
    """Rows and blocks of a tenant's running sequences."""

    num_rows: int = 0
    num_blocks: int = 0


class Displacement(NamedTuple):
    """Running sequences to preempt for a newcomer. Each of `undivided` is part of all that its tenant has."""

    victims: Collection[Sequence] = ()
    undivided: Collection[Sequence] = ()


class StepScope(NamedTuple):
    """Limits of the plan under construction.

    sequences: running sequences that may compute, in order.
    budget: tokens.
    excluded: tenants whose waiting sequences do not start in this plan.
    displaced: tenants, a subset of `excluded`, whose sequences were preempted for another tenant just now: they would
        take their places back.
    resting: running sequences that decode in a later step: this one is short, or their masks would make it long.
    """

    sequences: list[Sequence]
    budget: int
    excluded: frozenset[str] = frozenset()
    displaced: frozenset[str] = frozenset()
    resting: frozenset[Sequence] = frozenset()

    def without(self, resting: Collection[Sequence]) -> "StepScope":
        """Returns the scope in which these sequences rest."""
        if not resting:
            return self
        sequences = [seq for seq in self.sequences if seq not in resting]
        return self._replace(sequences=sequences, resting=self.resting.union(resting))

    def widened(self, running: list[Sequence], budget: int) -> "StepScope":
        """Returns the scope that excludes the displaced tenants only."""
        return StepScope(running, budget, excluded=self.displaced, displaced=self.displaced)


class FairShare:
    """The accounts of all tenants. Hears of every sequence that comes and goes."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, *, step_seconds: float | None = None) -> None:
        """`step_seconds`: how long short steps may take (engine/scheduling/short_steps.py); None: no step is short."""
        self.max_num_seqs = max_num_seqs
        self.num_displaced = 0  # sequences that gave way to another tenant's
        self._blocks = block_manager
        self.tenants: dict[str, Tenant] = {}
        self._active: set[str] = set()
        self.displaced: frozenset[str] = frozenset()  # tenants displaced since the last plan was sent
        self.comebacks: dict[Sequence, Comeback] = {}  # sequences that must not be displaced as a whole again yet
        self._clock = 0.0  # seconds of computing so far
        self._costs: dict[int, dict[str, float]] = {}  # by plan and tenant, until the result of the plan is back
        self._price = 0.0  # seconds per weighted token: a moving average over steps
        self._may_be_short = step_seconds is not None
        self._short_steps = ShortSteps(step_seconds or math.inf)
        self.slow_masks = SlowMasks()
        self._visit_until = 0.0  # time until which a small tenant is expected
        self._last_tenant: str | None = None  # tenant of the last sequence that came
        self._floor = 0.0  # lowest account of the active tenants, as last computed

    @property
    def contended(self) -> bool:
        """True if several tenants have live sequences."""
        return len(self._active) > 1

    @property
    def _are_short(self) -> bool:
        """True if steps are short now."""
        return self._may_be_short and self._clock < self._visit_until

    def came(self, seq: Sequence, running: Iterable[Sequence]) -> None:
        """A sequence is new. The account of a tenant that was idle is raised."""
        tenant = self.tenants.setdefault(seq.tenant, Tenant(Allowance(self._clock)))
        tenant.weight = seq.weight
        if not tenant.num_live:
            if self._last_tenant not in (None, seq.tenant):
                self._visit_until = self._clock + VISIT_SECONDS
            if self._active:
                self._meet(running)
                self._floor = min(self.tenants[name].served for name in self._active)
            tenant.served = max(tenant.served, self._floor)
            self._active.add(seq.tenant)
        tenant.num_live += 1
        self._last_tenant = seq.tenant

    def went(self, seq: Sequence) -> None:
        """A sequence ended, in whatever state."""
        self.comebacks.pop(seq, None)
        tenant = self.tenants[seq.tenant]
        tenant.num_live -= 1
        if not tenant.num_live:
            self._active.discard(seq.tenant)
            self.displaced = frozenset()
            self._floor = max(self._floor, min((self.tenants[n].served for n in self._active), default=tenant.served))
            for name in [name for name, one in self.tenants.items() if self._is_as_new(one)]:
                del self.tenants[name]

    def settle(self, running: Iterable[Sequence]) -> None:
        """Adds the cost of everything planned since the last call."""
        for seq in running:
            self.charge(seq)

    def charge(self, seq: Sequence) -> None:
        """Adds the cost of the tokens planned for `seq` since the last call."""
        done, charged = seq.num_computed_tokens, seq.num_charged_tokens
        if done > charged:
            num_prompt = max(0, min(done, seq.num_prompt_tokens) - charged)
            cost = PROMPT_COST * num_prompt + OUTPUT_COST * (done - charged - num_prompt)
            self.tenants[seq.tenant].cost += cost
            seq.num_charged_tokens = done

    def next_in_turn(self, waiting: list[Sequence], running: list[Sequence], displaced: frozenset[str]) -> Sequence:
        """Returns the next sequence to start: in the highest waiting priority, the first of the least served tenant.

        Sequences of `displaced` tenants come last, or they would take their places back.
        """
        first = waiting[0]
        if not self.contended:
            return first
        heads: dict[str, Sequence] = {}
        for seq in waiting:
            if seq.priority != first.priority or len(heads) == len(self._active):
                break
            heads.setdefault(seq.tenant, seq)
        if len(heads) == 1:
            return first
        holdings = self._holdings(running)
        return min(
            heads.values(),
            key=lambda seq: (seq.tenant in displaced, *self._rank(seq.tenant, holdings), seq.arrival),
        )

    def begin_step(
        self,
        newcomer: Sequence | None,
        displacement: Displacement,
        running: list[Sequence],
        more_wait: bool,
        budget: int,
    ) -> StepScope:
        """Opens the scope of the next plan, of at most `budget` tokens.

        `newcomer`: the next sequence to start, if there is room. `displacement`: what was just preempted for it.
        `more_wait`: sequences wait.
        """
        scope = StepScope(running, budget)
        if self.contended:
            self.comebacks |= {victim: Comeback(victim.num_charged_tokens) for victim in displacement.undivided}
            self.num_displaced += len(displacement.victims)
            self.displaced = frozenset(victim.tenant for victim in displacement.victims)
            scope = self._scope(newcomer, running, budget)
        elif self._clock >= self._visit_until:
            return scope
        scope = scope.without(self.slow_masks.resting(scope.sequences, running))
        holdings = self._holdings(running)
        small = {name for name in self._active if self._is_small(name, holdings)}
        if self.contended and small:
            self._visit_until = self._clock + VISIT_SECONDS
        planned = {seq.tenant for seq in scope.sequences} | (self._active - scope.excluded if more_wait else set())
        if not self._are_short or planned <= small:
            return scope
        has_room = more_wait and len(running) < self.max_num_seqs
        sequences, budget, resting = self._short_steps.limit(scope.sequences, has_room, budget)
        return scope._replace(sequences=sequences, budget=budget, resting=scope.resting | resting)

    def planned(self, plan: StepPlan, running: Iterable[Sequence]) -> None:
        """A plan is sent; its tokens are counted as computed."""
        for seq, comeback in [*self.comebacks.items()]:
            comeback.observe(seq, self._clock)
            if comeback.is_over(self._clock):
                del self.comebacks[seq]
        self.displaced = frozenset()
        if self._are_short:
            self._short_steps.planned(plan)
        costs = self._costs[plan.step_id] = dict.fromkeys(self._active, 0.0)
        if self.contended:
            self.settle(running)
            for name in costs:
                tenant = self.tenants[name]
                costs[name], tenant.cost_in_flight = tenant.cost - tenant.cost_in_flight, tenant.cost

    def computed(self, result: StepResult) -> None:
        """A result is back: charges its seconds."""
        seconds, costs = result.compute_seconds, self._costs.pop(result.step_id, {})
        self._clock += seconds
        self._short_steps.computed(result)
        self.slow_masks.computed(result)
        if total := sum(costs.values()):
            self._price += PRICE_WEIGHT * (seconds / total - self._price)
        for name, cost in costs.items():
            if (tenant := self.tenants.get(name)) is not None:
                tenant.cost -= cost
                tenant.cost_in_flight -= cost
                share = cost / total if total else float(len(costs) == 1)
                tenant.served += seconds * share / tenant.weight
                tenant.alone.use(seconds * share / tenant.weight)

    def worker_lost(self, max_num_seqs: int) -> None:
        """No result will come for plans in flight; the next Worker has `max_num_seqs` rows."""
        for tenant in self.tenants.values():
            tenant.served += tenant.cost * self._price / tenant.weight
            tenant.cost = tenant.cost_in_flight = 0.0
        self._costs.clear()
        self._short_steps.lose_plans()
        self.max_num_seqs = max_num_seqs

    def _is_as_new(self, tenant: Tenant) -> bool:
        """True if forgetting the tenant changes nothing: idle, not ahead of the floor, with a full allowance."""
        if tenant.num_live or tenant.cost or tenant.served > self._floor:
            return False
        return tenant.alone.refill(self._clock) == ALONE_SECONDS

    def _meet(self, running: Iterable[Sequence]) -> None:
        """A tenant joins others: their costs count from now on. A tenant alone was charged whole steps."""
        self.settle(running)
        if not self.contended:
            for tenant in self.tenants.values():
                tenant.cost = tenant.cost_in_flight

    def _scope(self, newcomer: Sequence | None, running: list[Sequence], budget: int) -> StepScope:
        """Returns the scope of the next plan before the limits of short steps.

        The plan excludes tenants while a tenant that was served less waits for a first token, or for a further token
        that its allowance covers.
        """
        everything = StepScope(running, budget, excluded=self.displaced, displaced=self.displaced)
        holdings = self._holdings(running)
        alone = {name for name in self._active if self._may_be_alone(name, holdings)}
        due = [seq for seq in running if seq.num_uncomputed_tokens > 0 and (not seq.has_started or seq.tenant in alone)]
        if newcomer is not None and not newcomer.has_started:
            due.append(newcomer)
        if not due:
            return everything
        first = min(due, key=lambda seq: (seq.priority, *self._rank(seq.tenant, holdings)))
        lowest = self._rank(first.tenant, holdings)
        ahead = {name for name in self._active if self._rank(name, holdings) > lowest}
        share = self._share(first.tenant, holdings.get(first.tenant, Holding(num_rows=1)))
        larger = {name for name in ahead if self._share(name, holdings.get(name)) > 2 * share}
        not_small = {name for name in ahead if not self._is_small(name, holdings)}
        if first.has_started:  # all small tenants join this step, prompts included
            ahead = larger = not_small
        elif self._is_small(first.tenant, holdings):
            larger |= not_small
        sequences = [
            seq
            for seq in running
            if seq.tenant not in ahead
            or seq.priority < first.priority
            or (seq.tenant not in larger and seq.has_started)
            # A hypothesis that the Worker lacks must not wait: its beam search goes on only when all are computed.
            or not seq.in_worker
        ]
        return everything._replace(sequences=sequences, excluded=self.displaced | ahead)

    def displacement_for(
        self, seq: Sequence, running: list[Sequence], num_rows_in_use: int, spare: int
    ) -> Displacement:
        """Returns which sequences to preempt for `seq` and its group; none if that would be unfair or not enough.

        `spare` blocks must stay free. The newest sequences of each tenant go first.
        """
        num_rows, num_blocks = 1, self._blocks.num_blocks_for(seq.num_tokens)
        if seq.group is not None:
            num_rows = min(seq.group.num_rows_to_start, self.max_num_seqs)  # the other samples follow one by one
            num_blocks = num_blocks if seq.group.running else self._blocks.num_blocks_together(seq.group.waiting)
        missing_rows = num_rows_in_use + num_rows - self.max_num_seqs
        missing_blocks = num_blocks + spare - len(self._blocks.free_blocks)
        holdings = self._holdings(running)
        own = holdings.setdefault(seq.tenant, Holding())
        own.num_rows += num_rows
        own.num_blocks += num_blocks
        asked, victims = self._share(seq.tenant, own), list[Sequence]()
        given_up: Counter[int] = Counter()  # number of holders that each block loses
        undivided: list[Sequence] = []
        candidates = self._candidates(seq, running)
        while missing_rows > 0 or missing_blocks > 0:
            largest = max(candidates, key=lambda name: self._share(name, holdings[name]), default=None)
            if largest is None:
                return Displacement()
            part = smallest_part(candidates[largest][-1])
            held = self._share(largest, holdings[largest])
            rows = len(part) + (part[0].group.num_spare_rows if part[0].group is not None else 0)
            holdings[largest].num_rows -= rows
            holdings[largest].num_blocks -= sum(len(member.block_table) for member in part)
            if self._share(largest, holdings[largest]) < asked:
                if 2 * asked > held or not self.comebacks.keys().isdisjoint(part):
                    del candidates[largest]
                    continue
                undivided += part
            candidates[largest] = [other for other in candidates[largest] if other not in part]
            if not candidates[largest]:
                del candidates[largest]
            victims += part
            missing_rows -= rows
            missing_blocks -= self._num_freed(part, given_up)
        return Displacement(victims, undivided)

    def heaviest(self, running: list[Sequence], kept: list[Sequence]) -> list[Sequence]:
        """Returns the running sequences, in order, of the tenant with the largest share: they lose blocks first.

        `kept` are the first in order, which are never preempted for others. If nothing else runs, all are returned.
        """
        if not self.contended:
            return running
        others = [seq for seq in running if seq not in kept]
        if not others:
            return running
        holdings = self._holdings(running)
        names = {seq.tenant for seq in others}
        largest = max(names, key=lambda name: (self._share(name, holdings[name]), name))
        return [seq for seq in others if seq.tenant == largest]

    def check_invariants(self, sequences: Collection[Sequence]) -> None:
        """Asserts that the tenants know all live `sequences`. For tests and simulation."""
        live = Counter(seq.tenant for seq in sequences)
        assert live == {name: tenant.num_live for name, tenant in self.tenants.items() if tenant.num_live}
        assert self._active == set(live)
        assert self.comebacks.keys() <= set(sequences)
        assert all(0 <= tenant.cost_in_flight <= tenant.cost for tenant in self.tenants.values())

    @staticmethod
    def _candidates(seq: Sequence, running: list[Sequence]) -> dict[str, list[Sequence]]:
        """Returns the running sequences of other tenants, no more urgent than `seq`, by tenant and in order."""
        found: dict[str, list[Sequence]] = {}
        for other in running:
            if other.tenant != seq.tenant and other.priority >= seq.priority:
                found.setdefault(other.tenant, []).append(other)
        return found

    def _holdings(self, running: Iterable[Sequence]) -> dict[str, Holding]:
        holdings: dict[str, Holding] = {}
        for seq in running:
            holding = holdings.setdefault(seq.tenant, Holding())
            holding.num_rows += 1
            holding.num_blocks += len(seq.block_table)
        for group in {seq.group for seq in running if seq.group is not None}:
            holdings[group.members[0].tenant].num_rows += group.num_spare_rows
        return holdings

    def _share(self, name: str, holding: Holding | None) -> float:
        if holding is None:
            return 0.0
        share = max(holding.num_rows / self.max_num_seqs, holding.num_blocks / self._blocks.num_blocks)
        return share / self.tenants[name].weight

    def _is_small(self, name: str, holdings: dict[str, Holding]) -> bool:
        """True if a tenant holds little and, waiting sequences included, asks for few rows."""
        tenant = self.tenants[name]
        asked = tenant.num_live / self.max_num_seqs / tenant.weight
        return max(asked, self._share(name, holdings.get(name))) <= max(SMALL_SHARE, 1 / self.max_num_seqs)

    def _may_be_alone(self, name: str, holdings: dict[str, Holding]) -> bool:
        return self._is_small(name, holdings) and self.tenants[name].alone.refill(self._clock) > 0.0

    def _rank(self, name: str, holdings: dict[str, Holding]) -> tuple[float, float]:
        """Returns the rank of a tenant: the lowest is served next. Costs not charged yet are estimated."""
        tenant, share = self.tenants[name], self._share(name, holdings.get(name))
        account = tenant.served + tenant.cost * self._price / tenant.weight
        return account - CREDIT_SECONDS * self._is_small(name, holdings), share

    def _num_freed(self, part: list[Sequence], given_up: Counter[int]) -> int:
        """Returns how many blocks become free when `part` gives up its own, after others gave up `given_up`.

        Adds the blocks of `part` to `given_up`.
        """
        num_freed = 0
        for seq in part:
            for block_id in seq.block_table:
                given_up[block_id] += 1
                num_freed += given_up[block_id] == self._blocks.blocks[block_id].ref_count
        return num_freed
