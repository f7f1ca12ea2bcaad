"""Faults planted into the code under test: the simulation must find every one, or its checks are not worth much.

A mutant replaces a piece of the source of one function, in this process only. One whose piece is no longer there does
not apply, which is an error: change it with the code.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.sim.coverage import Coverage
from tests.sim.runner import Outcome, sweep

# The rarest fault took 146,000 steps from one seed on, and 477,000 from another.
STEPS_PER_MUTANT = 1_000_000


@dataclass(frozen=True)
class Mutant:
    """`old` must occur exactly once in the source of `owner.method`; `owner` is a class, or a module.

    `for_driver`: the scheduler alone cannot show it, so only the runs of the Driver are played.
    """

    name: str
    owner: type | ModuleType
    method: str
    old: str
    new: str
    for_driver: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        original = self.owner.__dict__[self.method]
        setattr(self.owner, self.method, self._mutated(original))
        try:
            yield
        finally:
            setattr(self.owner, self.method, original)

    def _mutated(self, original: Any) -> Any:
        function = original.fget if isinstance(original, property) else original
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise LookupError(f"mutant {self.name!r} does not apply: {self.old!r} is not once in {self.method}()")
        namespace: dict[str, Any] = {}
        exec(source.replace(self.old, self.new), vars(sys.modules[function.__module__]), namespace)
        return namespace[self.method]


def hunt(mutant: Mutant, first_seed: int, num_steps: int = STEPS_PER_MUTANT) -> tuple[int, int, Outcome]:
    """Steps until it was found (or until we gave up), the last seed, and its outcome."""
    total, seed, outcome = 0, first_seed, Outcome(0, "", None)
    with mutant.planted():
        first, stride = (first_seed | 1, 2) if mutant.for_driver else (first_seed, 1)
        for last, outcome in sweep(first, num_steps, Coverage(), stride):
            seed, total = last, total + outcome.num_steps
    return total, seed, outcome


def hunt_all(mutants: Iterable[Mutant], first_seed: int) -> int:
    """Print who found what; 1 if a mutant survives."""
    found = survived = 0
    print(f"{'fault':45} {'found by':18} {'steps':>8}  seed")
    for mutant in mutants:
        steps, seed, outcome = hunt(mutant, first_seed)
        found += outcome.violation is not None
        survived += outcome.violation is None
        by = outcome.violation.name if outcome.violation else "SURVIVED"
        print(f"{mutant.name:45} {by:18} {steps:8,}  {seed}", flush=True)
    print(f"{found} faults found, {survived} survived.")
    return 0 if found and not survived else 1
