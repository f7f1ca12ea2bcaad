"""The short run of the simulation, and that it notices: same seed same run, planted faults found, failures shrunk."""

import asyncio
import itertools
import os
import subprocess
import sys

import pytest

from tests.sim.__main__ import run_many
from tests.sim.coverage import Coverage
from tests.sim.faults import MUTANTS
from tests.sim.mutants import Mutant, hunt
from tests.sim.runner import Case, play, shrink, sweep
from tests.sim.sudden_stop import SuddenStop
from tests.sim.swarm import StopAt
from tests.sim.violation import Violation
from tests.sim.virtual_time import VirtualLoop

QUICK = (
    "lost decref of a shared block",
    "hit stays in the free list",
    "stale hash of a block given out again",
    "last token's block adopted",
    "salt ignored",
    "adapter ignored",
    "adapters not loaded again",
    "block cached before it is full",
    "failed blocks stay in the cache",
    "computed off by one after preemption",
    "abort leaks the blocks",
    "missed copy",
    "owner of an aborted sample kept",
    "nobody plans after an arrival",
    "request too large for the new pool goes on",
    "hypothesis not sent anew",
    "who stopped is still counted",
    "file outgrows its quota",
    "no heartbeats",
)


def named(name: str) -> Mutant:
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    return mutant


def test_a_short_sweep_violates_nothing():
    coverage = Coverage()
    outcomes = list(sweep(first_seed=1, num_steps=15_000, coverage=coverage))
    assert [(seed, outcome.violation) for seed, outcome in outcomes if outcome.violation] == []
    assert sum(outcome.num_steps for _, outcome in outcomes) >= 15_000
    assert len(coverage.missing()) <= 20, coverage.missing()  # of some 140; a million steps see all


@pytest.mark.parametrize("seed", [2, 3], ids=["scheduler", "driver"])
def test_same_seed_same_run(seed):
    first, again, other = play(Case.of_seed(seed)), play(Case.of_seed(seed)), play(Case.of_seed(seed + 2))
    assert first == again
    assert first.digest != other.digest
    command = [sys.executable, "-m", "tests.sim", "--seed", str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert first.digest in printed, "another process, other hashes of strings"


def stop_in_every_turn(seed: int, num_events: int, coverage: Coverage) -> int:
    """Run the start of a case again and again, stopped one turn of the event loop later each time; how many."""
    case = Case.of_seed(seed)
    for turn in itertools.count(1):
        run = SuddenStop(case.config, case.events[:num_events], coverage, StopAt(0, turn))
        run.run()
        if not run.in_time:
            return turn


def test_a_server_may_be_stopped_in_any_turn_of_the_event_loop():
    coverage = Coverage()
    assert sum(stop_in_every_turn(seed, 4, coverage) for seed in (9, 15, 33)) > 600  # short ones, with restarts
    for phase in ("starting", "loading weights", "ready", "restarting"):
        assert coverage.counts[f"server stopped while {phase}"] > 3


def test_a_stop_that_is_lost_in_one_turn_is_found():
    with named("cancellation lost in a restart").planted(), pytest.raises(Violation, match="liveness"):
        stop_in_every_turn(29, 8, Coverage())


def test_every_mutant_applies():
    for mutant in MUTANTS:
        original = mutant.owner.__dict__[mutant.method]
        with mutant.planted():
            assert mutant.owner.__dict__[mutant.method] is not original
        assert mutant.owner.__dict__[mutant.method] is original
    with pytest.raises(LookupError, match="does not apply"), Mutant("x", Coverage, "saw", "no such text", "").planted():
        pass


@pytest.mark.parametrize("name", QUICK)
def test_planted_faults_are_found(name):
    _, _, outcome = hunt(named(name), first_seed=1, num_steps=10_000)
    assert outcome.violation is not None


def test_a_failure_says_how_to_repeat_it_and_is_shrunk(capsys):
    with named("salt ignored").planted():
        assert run_many(first_seed=1, num_steps=3000) == 1
        printed = capsys.readouterr().out
        seed = int(printed.split("python -m tests.sim --seed ")[1].split()[0])
        case = Case.of_seed(seed)
        violation = play(case).violation
        assert violation is not None
        shorter = shrink(case, violation)
        assert len(shorter.events) == 2 < len(case.events), "two requests of two tenants are all it takes"
        assert play(shorter).violation.name == violation.name
    assert "SEED=" in printed and "GIT=" in printed and "Shrunk to 2 events" in printed


def test_virtual_time_passes_at_once_and_in_order():
    loop = VirtualLoop()

    async def sleepers():
        order = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(*map(sleeper, [7200, 3600, 1]))
        assert await asyncio.to_thread(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return order

    assert loop.run_until_complete(sleepers()) == [1, 3600, 7200]
    assert 7200 <= loop.time() < 7201
    loop.close()


def test_everybody_waiting_is_a_deadlock_and_waiting_too_long_a_livelock():
    loop = VirtualLoop()
    with pytest.raises(Violation, match="deadlock"):
        loop.run_until_complete(loop.create_future())
    loop.clock.deadline = 10
    task = loop.create_task(asyncio.sleep(11))
    with pytest.raises(Violation, match="liveness"):
        loop.run_until_complete(task)
    loop.clock.deadline = 12
    loop.run_until_complete(task)
    loop.close()


def test_an_undeclared_state_is_a_mistake():
    with pytest.raises(KeyError, match="not declared"):
        Coverage().saw("something else")
