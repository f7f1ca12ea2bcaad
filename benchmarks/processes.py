"""Servers that the benchmark starts, pauses and stops itself (Linux).

Two model servers on a small machine disturb each other even when one is idle: OpenMP threads spin, event loops tick,
watchdogs wake. So all processes of the idle one are stopped (SIGSTOP) while the other is measured: it keeps its memory
and its compiled code, and uses no processor time at all.
"""

import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO


class ServerProcess:
    """One server and everything it started. `command` holds {port}; its output goes to `log`."""

    def __init__(self, command: str, log: Path, environment: dict[str, str] | None = None) -> None:
        if "{port}" not in command:
            raise ValueError(f"the command must hold {{port}}, so that a free one can be chosen: {command!r}")
        self.port = _free_port()
        self._log_path = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            shlex.split(command.replace("{port}", str(self.port))),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def check_alive(self) -> None:
        """Raises RuntimeError with the end of the log when the server has exited."""
        status = self._process.poll()
        if status is not None:
            tail = self._log_path.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the server exited with status {status}; the end of its log:\n{tail}")

    def pause(self) -> None:
        """Returns when all processes have stopped; a busy machine may take a moment to deliver the signal."""
        self._signal_all(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while any((stat := _read_stat(pid)) and stat[0] != "T" for pid in self._pids()) and time.monotonic() < deadline:
            time.sleep(0.005)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """User and system time of all its live processes so far."""
        ticks = sum(int(stat[11]) + int(stat[12]) for pid in self._pids() if (stat := _read_stat(pid)) is not None)
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """Proportional set size of all its processes: pages that two of them share count once."""
        return sum(_pss_kib(pid) for pid in self._pids()) / 1024

    def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM to the first process, then SIGKILL to whatever is left after `timeout` seconds.

        Returns the exit status of the first process, -N for signal N.
        """
        self.resume()
        everything = self._pids()
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        for pid in {*everything, *self._pids()}:
            _kill(pid, signal.SIGKILL)
        status = self._process.wait()
        self._log.close()
        return status

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._pids():
            _kill(pid, number)

    def _pids(self) -> list[int]:
        return session_and_descendants(self._process.pid)


def session_and_descendants(leader: int) -> list[int]:
    """All processes of the leader's session, and those below it that made a session of their own; parents first."""
    stats = {int(entry.name): _read_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        if stat is not None:
            children.setdefault(int(stat[1]), []).append(pid)
    found = [leader] if stats.get(leader) is not None else []
    for pid in found:
        found.extend(child for child in children.get(pid, []) if child not in found)
    orphans = (pid for pid, stat in stats.items() if stat is not None and int(stat[3]) == leader and pid not in found)
    return [*found, *orphans]


def _read_stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on (state, ppid, pgrp, session, ...); None: it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
