"""Packages that travel as wheels to a machine without a network. No torch here."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_check.parts import Part

# Packages that a machine with torch and transformers may lack: the Makefile's GPU_PACKAGES, and two that they need.
PACKAGES = ("msgspec", "fastapi", "starlette", "uvicorn", "sse_starlette", "httptools", "pydantic", "pydantic_core",
            "httpx", "prometheus_client", "llguidance", "jsonschema")  # fmt: skip


def install_wheels(folder: Path, target: Path, parts: Iterable[Part]) -> Path | None:
    """Unpack the wheels of `folder` into `target`, to be put on the path, where a part lacks a package.

    Installed packages stay unchanged. None where nothing lacks, there are no wheels, or pip cannot install them (it
    says why); the parts are then skipped by name.
    """
    wheels = newest(folder.glob("*.whl"))
    if not wheels or not any(part.missing() for part in parts):
        return None
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
               "--no-cache-dir", "--upgrade", "--disable-pip-version-check", "--root-user-action=ignore",
               "--target", str(target), *map(str, wheels)]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        print(f"gpu-check: the wheels in {folder} could not be installed", file=sys.stderr)
        return None
    return target


def missing_wheels(folder: Path) -> list[str]:
    """The packages of PACKAGES that `folder` has no wheel of."""
    there = {wheel.name.split("-")[0].lower() for wheel in folder.glob("*.whl")}
    return [name for name in PACKAGES if name not in there]


def newest(wheels: Iterable[Path]) -> list[Path]:
    """One wheel per distribution, the last in the order of versions: two of one stop pip."""
    chosen = {wheel.name.split("-")[0].lower(): wheel for wheel in sorted(wheels, key=_version)}
    return sorted(chosen.values())


def _version(wheel: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", wheel.name.split("-")[1])]
