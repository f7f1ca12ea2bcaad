"""Describes the machine of a benchmark and writes the benchmark's JSON."""

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Facts that every figure depends on: processor, cores that this process may use, memory, system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def describe(facts: dict[str, Any]) -> str:
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['system']}"


def write_json(path: Path, settings: dict[str, Any], servers: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    """Write every run with the facts that are needed to repeat it. Creates the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "settings": settings,
        "servers": servers,
        "runs": runs,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _cpu_model() -> str:
    """The processor's name: "model name" in /proc/cpuinfo on x86, elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
