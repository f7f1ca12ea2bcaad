"""python -m tests.sim: the simulation from the command line; exit status 1 where something is violated."""

import argparse
import pprint
import subprocess

from tests.sim.coverage import Coverage
from tests.sim.faults import MUTANTS
from tests.sim.mutants import hunt_all
from tests.sim.runner import Case, Rate, play, shrink, sweep
from tests.sim.violation import Violation

STATES_FROM_STEPS = 500_000  # shorter sweeps need not have reached every rare state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps to run, over many seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="where the seeds of a sweep begin")
    parser.add_argument("--seed", type=int, help="repeat the run of one seed, and shrink it if it fails")
    parser.add_argument("--mutants", action="store_true", help="plant faults; every one must be found")
    parser.add_argument("--only", help="with --mutants: those whose name contains this")
    options = parser.parse_args()
    if options.mutants:
        return hunt_all([m for m in MUTANTS if (options.only or "") in m.name], options.first_seed)
    if options.seed is not None:
        return run_one(options.seed)
    return run_many(options.first_seed, options.steps)


def run_many(first_seed: int, num_steps: int) -> int:
    coverage, rate = Coverage(), Rate()
    for seed, outcome in sweep(first_seed, num_steps, coverage):
        rate.add(outcome.num_steps)
        if outcome.violation is not None:
            return report(seed, outcome.violation)
        if rate.due():
            print(rate, flush=True)
    print(f"{rate}; no violation. Rare states:")
    for state, count in coverage.counts.items():
        print(f"{count:12,}  {state}")
    if (missing := coverage.missing()) and num_steps >= STATES_FROM_STEPS:
        print(f"FAILED: never reached: {', '.join(missing)}")
        return 1
    return 0


def run_one(seed: int) -> int:
    case = Case.of_seed(seed)
    pprint.pp(case.config)
    outcome = play(case)
    print(f"{len(case.events)} events, {outcome.num_steps} steps, history {outcome.digest}")
    return report(seed, outcome.violation) if outcome.violation is not None else 0


def report(seed: int, violation: Violation) -> int:
    print(f"FAILED: {violation}")
    print(f"SEED={seed} GIT={_git_version()}; repeat with: python -m tests.sim --seed {seed}", flush=True)
    shorter = shrink(Case.of_seed(seed), violation)
    print(f"Shrunk to {len(shorter.events)} events, which end in: {play(shorter).violation}")
    for event in shorter.events:
        print(f"  {event}")
    return 1


def _git_version() -> str:
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
