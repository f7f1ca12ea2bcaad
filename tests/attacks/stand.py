"""One attack from start to end: a server with two keys, the probes beside the attack, and what is left afterwards."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.processes import ServerProcess
from tests.attacks.frame import Attack, Target
from tests.attacks.measure import Result, Sampler, Waits

ROOT = Path(__file__).resolve().parents[2]
VICTIM_KEY, ATTACKER_KEY = "sk-of-the-other-key", "sk-of-the-attacker"
MODEL = "under-attack"
START_SECONDS = 180.0
WARM_UP_REQUESTS = 30
VICTIM_INTERVAL, HEALTH_INTERVAL = 0.05, 0.02
EXIT_WAIT_SECONDS = 30.0  # for the process to end before it is killed
SETTLED_SECONDS = 1.0  # of the attack, begun again, before the signals come
BETWEEN_SIGNALS = 0.5
VICTIM_BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


@contextmanager
def serving(attack: Attack, folder: Path) -> Iterator[tuple[ServerProcess, int]]:
    """(The server, its pid), ready."""
    keys = folder / "keys"
    keys.write_text(f"other {VICTIM_KEY}\nattacker {ATTACKER_KEY}\n", encoding="utf-8")
    keys.chmod(0o600)
    options = ["--api-key-file", str(keys), "--served-model-name", MODEL, *attack.options]
    options += attack.prepare(folder) if attack.prepare is not None else []
    command = "exec " + shlex.join([sys.executable, "-m", "server.cli", "serve", *options]) + " --port {port}"
    if attack.open_files is not None:
        command = f"ulimit -S -n {attack.open_files}; {command}"
    with unread_pipe(folder / "pipe") as pipe:
        if attack.log_pipe:
            command += f" 2>{pipe}"
        environment = {"OMP_NUM_THREADS": "1", **attack.environment}
        server = ServerProcess(f"sh -c {shlex.quote(command)}", folder / "server.log", environment)
        try:
            wait_until_ready(server)
            yield server, server.pid
        finally:
            server.stop(timeout=0.1)


@contextmanager
def unread_pipe(path: Path) -> Iterator[Path]:
    """A named pipe that can be written to until it is full."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield path
    finally:
        os.close(descriptor)


def wait_until_ready(server: ServerProcess) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        server.check_alive()
        try:
            if httpx.get(server.base_url.removesuffix("/v1") + "/ready").status_code == 200:
                return
        except httpx.TransportError:  # it does not listen yet
            pass
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready")


def find_target(port: int, pid: int, victim_key: str, attacker_key: str, body: dict) -> Target:
    """Asks what is served, and a few requests of the other key, for what begins with the first ones."""
    headers = {"authorization": f"Bearer {victim_key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        card = client.get("/v1/models").raise_for_status().json()["data"][0]
        for _ in range(WARM_UP_REQUESTS):
            client.post("/v1/completions", json=body).raise_for_status()
    return Target("127.0.0.1", port, attacker_key, card["id"], card["max_model_len"], pid)


class Probes:
    """Two processes: the other key's requests, and /health."""

    def __init__(self, target: Target, folder: Path, victim_key: str, body: dict) -> None:
        self.victim, self.health = folder / "victim.jsonl", folder / "health.jsonl"
        self._processes = [
            self._start(target, self.victim, VICTIM_INTERVAL, json.dumps(body), victim_key),
            self._start(target, self.health, HEALTH_INTERVAL, "", ""),
        ]
        end = time.monotonic() + 30
        while not all(path.exists() and path.stat().st_size for path in (self.victim, self.health)):
            assert time.monotonic() < end, "a probe did not start"
            time.sleep(0.01)

    @staticmethod
    def _start(target: Target, found: Path, interval: float, body: str, key: str) -> "subprocess.Popen[bytes]":
        arguments = [str(found), target.host, str(target.port), str(interval), body, key]
        return subprocess.Popen([sys.executable, "-m", "tests.attacks.probe", *arguments], cwd=ROOT)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Attacker:
    """The process of the attack."""

    def __init__(self, attack: Attack, target: Target) -> None:
        command = [sys.executable, "-m", "tests.attacks.attacker", attack.name, str(attack.seconds)]
        command.append(json.dumps(vars(target)))
        self._seconds = attack.seconds
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def wait(self) -> str:
        """The attack's fault, "" for none."""
        try:
            return self._process.communicate(timeout=self._seconds + 30)[0].strip()
        except subprocess.TimeoutExpired:
            self.stop()
            return "the attack did not end in time"

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(
    attack: Attack, target: Target, folder: Path, sampler: Sampler, victim: tuple[str, dict], quiet: float, after: float
) -> Result:
    """Quiet seconds, the attack, and `after` seconds for what it took to come back. Nothing is judged yet."""
    probes = Probes(target, folder, *victim)
    try:
        quiet_start = time.monotonic()
        time.sleep(quiet)
        before = sampler.now()
        sampler.reset()
        start = time.monotonic()
        fault = Attacker(attack, target).wait()
        end = time.monotonic()
        time.sleep(after)
        left, peak = sampler.now(), sampler.peak
        # A request that goes unanswered for long is in no file before it ends.
        unanswered = time.monotonic() - min(_last_end(probes.victim), _last_end(probes.health))
    finally:
        probes.stop()
    result = Result(
        attack.name,
        attack.item,
        Waits.between(probes.victim, quiet_start, start),
        Waits.between(probes.victim, start, end),
        Waits.between(probes.health, start, end),
        before,
        peak,
        left,
        exit_seconds=0.0,
    )
    if fault:
        result.faults.append(fault.splitlines()[-1])
    if unanswered > 5.0:
        result.faults.append(f"a probe has had no answer for {unanswered:.0f} s")
    if sampler.stopped_it:
        result.faults.append("it took so much memory that it was ended")
    return result


def _last_end(path: Path) -> float:
    begun, seconds, *_ = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return begun + seconds


def time_exit(attack: Attack, target: Target, server: ServerProcess) -> float:
    """Seconds from a second signal to the end of the process, the attack being under way once more."""
    again = Attacker(attack, target)
    try:
        time.sleep(SETTLED_SECONDS)
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(BETWEEN_SIGNALS)
        start = time.monotonic()
        if server.alive():
            os.kill(server.pid, signal.SIGTERM)
        while server.alive() and time.monotonic() - start < EXIT_WAIT_SECONDS:
            time.sleep(0.01)
        return time.monotonic() - start
    finally:
        again.stop()


def run(attack: Attack, folder: Path, quiet: float, after: float, most_mb: float) -> Result:
    folder.mkdir(parents=True)
    with serving(attack, folder) as (server, pid):
        target = find_target(server.port, pid, VICTIM_KEY, ATTACKER_KEY, VICTIM_BODY)
        sampler = Sampler(pid, most_mb)
        try:
            result = measure(attack, target, folder, sampler, (VICTIM_KEY, VICTIM_BODY), quiet, after)
        finally:
            sampler.stop()
        if not server.alive():
            result.faults.append("the server ended under the attack")
            return result
        result.exit_seconds = time_exit(attack, target, server)
    return result
