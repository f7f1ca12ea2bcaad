"""Seeds: run one, run many, repeat and shrink what fails."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.sim.core_run import CoreRun
from tests.sim.coverage import Coverage
from tests.sim.driver_run import DriverRun
from tests.sim.sudden_stop import SuddenStop
from tests.sim.swarm import Event, SimConfig, StopAt, draw_config, draw_events, draw_stop
from tests.sim.violation import Violation

MAX_SHRINK_RUNS = 300


@dataclass(frozen=True)
class Case:
    """All that a run depends on. Odd seeds play the whole Driver, even ones the scheduler alone."""

    config: SimConfig
    events: list[Event]
    for_driver: bool
    stop: StopAt | None = None  # before the events are over

    @classmethod
    def of_seed(cls, seed: int) -> "Case":
        rng, for_driver = random.Random(seed), seed % 2 == 1
        config = draw_config(seed, rng, for_driver)
        stop = draw_stop(seed) if for_driver else None
        return cls(config, draw_events(config, rng, for_driver), for_driver, stop)

    def but(self, events: list[Event]) -> "Case":
        return replace(self, events=events)


@dataclass(frozen=True)
class Outcome:
    num_steps: int
    digest: str  # of every plan, every result and every end
    violation: Violation | None


def play(case: Case, coverage: Coverage | None = None) -> Outcome:
    """One run. Any error is a violation, named after its class where no invariant of ours found it."""
    coverage = coverage or Coverage()
    run = _run_of(case, coverage)
    violation = None
    try:
        run.run()
    except Violation as found:
        violation = found
    except Exception as error:
        violation = Violation(type(error).__name__, str(error))
    return Outcome(run.monitor.num_steps, run.monitor.digest, violation)


def _run_of(case: Case, coverage: Coverage) -> CoreRun | DriverRun:
    if case.stop is not None:
        return SuddenStop(case.config, case.events, coverage, case.stop)
    return (DriverRun if case.for_driver else CoreRun)(case.config, case.events, coverage)


def sweep(first_seed: int, num_steps: int, coverage: Coverage, stride: int = 1) -> Iterator[tuple[int, Outcome]]:
    """Run one seed after the other (every `stride`-th) until their steps add up to `num_steps`, or one fails."""
    seed = first_seed
    while num_steps > 0:
        outcome = play(Case.of_seed(seed), coverage)
        yield seed, outcome
        if outcome.violation is not None:
            return
        num_steps -= max(1, outcome.num_steps)
        seed += stride


def shrink(case: Case, violation: Violation) -> Case:
    """Drop events while the same invariant still breaks: ever smaller slices (Zeller and Hildebrandt 2002)."""
    runs = 0

    def still_fails(events: list[Event]) -> bool:
        nonlocal runs
        runs += 1
        found = play(case.but(events)).violation
        return found is not None and found.name == violation.name

    events, size = case.events, max(1, len(case.events) // 2)
    while runs < MAX_SHRINK_RUNS:
        shorter = _without_one_slice(events, size, still_fails, lambda: runs < MAX_SHRINK_RUNS)
        if shorter is not None:
            events = shorter
        elif size == 1:
            break
        else:
            size //= 2
    return case.but(events)


def _without_one_slice(
    events: list[Event], size: int, still_fails: Callable[[list[Event]], bool], go_on: Callable[[], bool]
) -> list[Event] | None:
    """The list without some slice of `size` events, from the end on, that fails all the same."""
    for start in range(len(events) - size, -size, -size):
        rest = events[: max(0, start)] + events[max(0, start) + size :] if start >= 0 else events[size + start :]
        if go_on() and still_fails(rest):
            return rest
    return None


class Rate:
    """Steps per second of a sweep, for the progress line."""

    def __init__(self) -> None:
        self.num_steps = self.num_runs = 0
        self._started = self._shown = time.perf_counter()

    def add(self, num_steps: int) -> None:
        self.num_steps += num_steps
        self.num_runs += 1

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def due(self, every: float = 10.0) -> bool:
        if time.perf_counter() - self._shown < every:
            return False
        self._shown = time.perf_counter()
        return True

    def __str__(self) -> str:
        rate = self.num_steps / self.seconds
        return f"{self.num_steps:,} steps in {self.num_runs:,} runs, {self.seconds:.0f} s, {rate:,.0f} steps/s"
