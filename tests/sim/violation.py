"""Violation: what a check raises. `name` is the invariant; the table of mutants and the shrinker go by it."""

from typing import NoReturn


class Violation(Exception):
    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


def require(condition: bool, name: str, detail: str) -> None:
    """For checks whose detail costs nothing to make; hot ones branch themselves and call `fail`."""
    if not condition:
        fail(name, detail)


def fail(name: str, detail: str) -> NoReturn:
    raise Violation(name, detail)
