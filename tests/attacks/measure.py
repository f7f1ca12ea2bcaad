"""Measures a server under attack: memory and descriptors of its processes by /proc, and the latencies of probes."""

import json
import os
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import session_and_descendants

SAMPLE_SECONDS = 0.05
LOOK_SECONDS = 1.0  # between two looks at which processes there are


@dataclass(frozen=True)
class Limits:
    """Milliseconds, MB of 2**20 bytes, seconds."""

    other_key_worst_ms: float = 1000.0
    other_key_p50_ratio: float = 3.0
    health_worst_ms: float = 250.0
    memory_left_mb: float = 50.0
    descriptors_left: int = 20
    exit_seconds: float = 2.0


@dataclass(frozen=True)
class Sample:
    """`driver` is the server's first process; `total` is of all: with helpers and Worker."""

    driver_mb: float
    total_mb: float
    descriptors: int


def sample(pid: int, others: list[int]) -> Sample:
    """Anonymous memory: pages of files that are mapped cost nothing that cannot be had back."""
    driver = _anonymous_mb(pid)
    descriptors = 0
    with suppress(OSError):
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(driver, driver + sum(map(_anonymous_mb, others)), descriptors)


def _anonymous_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


class Sampler:
    """Reads on in a thread; `peak` is of all samples since `reset`. More than `most_mb` in all ends the server."""

    def __init__(self, pid: int, most_mb: float) -> None:
        self._pid, self._most_mb = pid, most_mb
        self._others: list[int] = []
        self._ended = threading.Event()
        self.reset()
        self.stopped_it = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.peak = Sample(0.0, 0.0, 0)

    def now(self) -> Sample:
        return sample(self._pid, self._others)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        looked = 0.0
        while not self._ended.wait(SAMPLE_SECONDS):
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                self._others = [pid for pid in session_and_descendants(self._pid) if pid != self._pid]
            found, peak = self.now(), self.peak
            self.peak = Sample(*(max(pair) for pair in zip(vars(found).values(), vars(peak).values(), strict=True)))
            if found.total_mb > self._most_mb and not self.stopped_it:
                self.stopped_it = True
                with suppress(ProcessLookupError):
                    os.kill(self._pid, 9)


@dataclass
class Waits:
    """Latencies that one probe measured, of requests under way between two points of time."""

    seconds: list[float] = field(default_factory=list)
    failures: dict[int, int] = field(default_factory=dict)  # by status
    late: float = 0.0

    @classmethod
    def between(cls, path: Path, start: float, end: float) -> "Waits":
        found = cls()
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # the last line of a probe that was ended
                begun, seconds, status, late = json.loads(line)
                if begun < end and begun + seconds > start:
                    found.seconds.append(seconds)
                    found.late = max(found.late, late)
                    if status != 200:
                        found.failures[status] = found.failures.get(status, 0) + 1
        return found

    @property
    def p50_ms(self) -> float:
        return 1000 * statistics.median(self.seconds or [float("inf")])

    @property
    def worst_ms(self) -> float:
        return 1000 * max(self.seconds, default=float("inf"))


@dataclass
class Result:
    """The figures of one attack. `faults` says which limits were missed and what else went wrong."""

    name: str
    item: int
    quiet: Waits
    other_key: Waits
    health: Waits
    before: Sample
    peak: Sample
    after: Sample
    exit_seconds: float
    faults: list[str] = field(default_factory=list)

    def judge(self, limits: Limits) -> None:
        """Add what was missed to the faults."""
        ratio = self.other_key.p50_ms / self.quiet.p50_ms
        left_mb = self.after.driver_mb - self.before.driver_mb
        left_files = self.after.descriptors - self.before.descriptors
        missed = (
            ("other key", self.other_key.worst_ms, limits.other_key_worst_ms, "ms at worst"),
            ("other key", ratio, limits.other_key_p50_ratio, "times its quiet p50"),
            ("/health", self.health.worst_ms, limits.health_worst_ms, "ms at worst"),
            ("memory", left_mb, limits.memory_left_mb, "MB more than before"),
            ("descriptors", left_files, limits.descriptors_left, "more than before"),
            ("exit", self.exit_seconds, limits.exit_seconds, "s after a second signal"),
        )
        self.faults += [f"{what}: {value:.3g} {unit}" for what, value, limit, unit in missed if value > limit]
        for what, waits in (("other key", self.other_key), ("/health", self.health)):
            self.faults += [f"{what}: {count} with status {status}" for status, count in waits.failures.items()]

    def as_json(self) -> dict[str, Any]:
        return {
            "item": self.item,
            "other_key": {
                "quiet_p50_ms": round(self.quiet.p50_ms, 1),
                "p50_ms": round(self.other_key.p50_ms, 1),
                "worst_ms": round(self.other_key.worst_ms, 1),
                "requests": len(self.other_key.seconds),
            },
            "health": {"worst_ms": round(self.health.worst_ms, 1), "requests": len(self.health.seconds)},
            "probes_late_ms": round(1000 * max(self.health.late, self.other_key.late), 1),
            **{
                when: {name: round(value, 1) for name, value in vars(getattr(self, when)).items()}
                for when in ("before", "peak", "after")
            },
            "exit_seconds": round(self.exit_seconds, 2),
            "faults": self.faults,
        }
