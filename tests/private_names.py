"""Counts uses of the private names of pageserve in its tests.

    python -m tests.private_names [FILE_OR_FOLDER ...]

A private name begins with one underscore and is defined in engine/, server/, kernels/ or benchmarks/. The check counts
an attribute of any object but `self` and `cls`, an imported name, and a name given as text to monkeypatch, getattr
or hasattr ("module._name"). Not counted: a test class or a simulation that watches its own base class by `self`, and
tests/sim/faults.py, which quotes source text.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "server", "kernels", "benchmarks")
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, by their documentation
BY_TEXT = {"setattr", "delattr", "getattr", "hasattr", "setitem"}


class Use(NamedTuple):
    path: Path
    line: int
    name: str


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in {"_", *OF_NAMED_TUPLES}


@cache
def private_definitions() -> frozenset[str]:
    """Private functions, classes, variables and attributes of the packages."""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(filter(is_private, found))


def private_uses(path: Path) -> Iterator[Use]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for name in _names_used(node):
            if name in private_definitions():
                yield Use(path, node.lineno, name)  # type: ignore[attr-defined]


def _names_used(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute) and not _is_own(node.value):
        return [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call) and _called(node) in BY_TEXT:
        texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        return [name for text in texts if isinstance(text, str) for name in text.split(".")]
    return []


def _is_own(value: ast.expr) -> bool:
    """True for `self`, `cls` and `super()`, and for modules of others."""
    if isinstance(value, ast.Call):
        return _called(value) == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "os", "sys", "torch")


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def files_of(names: list[str]) -> Iterator[Path]:
    for name in names:
        path = ROOT / name
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> None:
    found = [use for path in files_of(sys.argv[1:] or ["tests"]) for use in private_uses(path)]
    for use in found:
        print(f"{use.path.relative_to(ROOT)}:{use.line}: {use.name}")
    print(f"{len(found)} uses of private names", file=sys.stderr)


if __name__ == "__main__":
    main()
