"""The Worker's step loop alone: plans are launched while the device computes, and a heartbeat is answered whatever else
goes on, unless the loop or the device hangs."""

import fcntl
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.executor.frames import FrameSocket
from engine.executor.step import (
    FetchBlocks,
    FetchedBlocks,
    Heartbeat,
    StartWorker,
    StepPlan,
    StepResult,
    WorkerReady,
    decode_worker_message,
    encode_frame,
)
from engine.worker.cache.disk_cache import BlockFile, DiskCache
from engine.worker.cache.host_cache import HostCache
from engine.worker.worker import Channel, serve
from kernels.cache.copy_blocks import BlockCopier

PATIENCE = 15
ROOT = Path(__file__).parents[3]


class Step:
    """A launched step, which the device computes until `computed` is set."""

    def __init__(self, runner, step_id):
        self.step_id = step_id
        self.computed = threading.Event()
        self._runner = runner

    def done(self):
        assert self._runner.max_in_flight > 1, "a CPU computes a step while it is launched"
        self._runner.maybe_fail("done")
        return self.computed.is_set()


class Runner:
    """A ModelRunner without a model. `pieces` is what there is to do in idle time. With `slow`, steps take until the
    test sets their `computed`. `fault` names the method that fails."""

    def __init__(self, max_in_flight=1, pieces=(), host_cache=None, slow=False, fault=None):
        self.max_in_flight = max_in_flight
        self.pieces = list(pieces)
        self.host_cache = host_cache
        self.device_error = None
        self.slow, self.fault = slow, fault
        self.steps = queue.Queue()  # launched, for the test
        self.calls = []

    def maybe_fail(self, method):
        if self.fault == method:
            raise RuntimeError(f"{method} fails")

    def use_idle_time(self):
        if self.pieces:
            self.pieces.pop(0)()
            return True
        return False

    def handle_message(self, message, send):
        self.host_cache.fetch(message, send)

    def check_device(self):
        if self.device_error is not None:
            raise self.device_error

    def launch(self, plan):
        self.maybe_fail("launch")
        self.calls.append(("launch", plan.step_id))
        step = Step(self, plan.step_id)
        if not self.slow:
            step.computed.set()
        self.steps.put(step)
        return step

    def result(self, step):
        self.maybe_fail("result")
        self.calls.append(("result", step.step_id))
        assert step.computed.wait(PATIENCE)
        return StepResult(step.step_id, [], {}, 0.0)


class Loop:
    """`serve` in a thread, and the Driver's end of its socket."""

    def __init__(self, runner):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        self.frames = FrameSocket(self.socket)
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(theirs, runner), daemon=True)
        self._thread.start()

    def _run(self, sock, runner):
        with sock:
            try:
                serve(Channel(sock), runner)
            except Exception as error:
                self.error = error

    def send(self, *messages):
        self.socket.sendall(b"".join(map(encode_frame, messages)))

    def receive(self):
        return decode_worker_message(self.frames.read_frame())

    def join(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def serving(runner):
    loop = Loop(runner)
    try:
        yield loop
        loop.socket.shutdown(socket.SHUT_WR)
        loop.join()
        assert loop.error is None
    finally:
        loop.socket.close()
        loop.join()


@pytest.mark.parametrize("max_in_flight", [1, 2], ids=["cpu", "gpu"])
def test_heartbeats_come_back_before_the_plans_that_were_sent_after_them(max_in_flight):
    with serving(Runner(max_in_flight)) as loop:
        for step_id in range(1, 4):
            loop.send(Heartbeat(), StepPlan(step_id, [], [], [], []))
            assert loop.receive() == Heartbeat()
            assert loop.receive().step_id == step_id


def test_a_heartbeat_waits_for_one_piece_of_idle_work_at_most():
    started, go_on = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]

    def piece(i):
        started[i].set()
        assert go_on[i].wait(PATIENCE)

    with serving(Runner(pieces=[lambda i=i: piece(i) for i in range(3)])) as loop:
        for i in range(2):
            assert started[i].wait(PATIENCE)
            loop.send(Heartbeat())
            go_on[i].set()
            assert loop.receive() == Heartbeat(), "while the pieces after this one are not done"
        go_on[2].set()


def test_a_heartbeat_is_answered_while_the_disk_is_slow(tmp_path):
    copier = BlockCopier([torch.arange(16, dtype=torch.uint8).view(4, 4)])
    file = BlockFile(tmp_path, 1 << 16, copier.block_bytes, bytes(32))
    file.store(b"d" * 32, bytes(copier.block_bytes))
    reads, go_on = file.load, threading.Event()
    file.load = lambda digest: go_on.wait(PATIENCE) and reads(digest)
    cache = HostCache(copier, 2, torch.device("cpu"), DiskCache(file))
    with serving(Runner(host_cache=cache)) as loop:
        loop.send(FetchBlocks(5, [b"d" * 32], [0]), Heartbeat())
        assert loop.receive() == Heartbeat()
        go_on.set()
        assert loop.receive() == FetchedBlocks(5, 1)


def test_a_device_that_has_failed_ends_the_worker_and_not_the_next_request():
    runner = Runner()
    loop = Loop(runner)
    loop.send(Heartbeat())
    assert loop.receive() == Heartbeat()
    runner.device_error = RuntimeError("an illegal memory access, some time ago")
    loop.send(Heartbeat())
    assert loop.frames.read_frame() is None
    loop.join()
    assert loop.error is runner.device_error
    loop.socket.close()


def plan(step_id):
    return StepPlan(step_id, [], [], [], [])


def test_a_plan_is_launched_while_the_device_computes_another():
    runner = Runner(max_in_flight=2, slow=True)
    with serving(runner) as loop:
        loop.send(plan(1))
        steps = [runner.steps.get(timeout=PATIENCE)]
        loop.send(plan(2))
        steps.append(runner.steps.get(timeout=PATIENCE))
        assert runner.calls[:2] == [("launch", 1), ("launch", 2)]
        for step_id in range(3, 20):
            steps.pop(0).computed.set()
            assert loop.receive().step_id == step_id - 2
            loop.send(plan(step_id))
            steps.append(runner.steps.get(timeout=PATIENCE))  # although the step before it is not done
        for step in steps:
            step.computed.set()
        assert [loop.receive().step_id for _ in steps] == [18, 19]


def test_a_result_is_sent_as_soon_as_the_device_is_done():
    runner = Runner(max_in_flight=2, slow=True)
    with serving(runner) as loop:
        for step_id in range(1, 4):
            loop.send(plan(step_id))
            runner.steps.get(timeout=PATIENCE).computed.set()
            assert loop.receive().step_id == step_id, "no other message comes"


@pytest.mark.parametrize("max_in_flight", [1, 2], ids=["cpu", "gpu"])
def test_no_more_steps_are_launched_than_fit(max_in_flight):
    runner = Runner(max_in_flight)
    with serving(runner) as loop:
        loop.send(*map(plan, range(1, 6)))
        assert [loop.receive().step_id for _ in range(5)] == [1, 2, 3, 4, 5]
    num_launched = 0
    for method, step_id in runner.calls:
        num_launched += method == "launch"
        assert num_launched <= step_id + (max_in_flight - 1 if method == "result" else 0)
    if max_in_flight == 2:
        assert runner.calls[:3] == [("launch", 1), ("launch", 2), ("result", 1)]


def test_messages_are_answered_while_the_device_computes():
    class Fetches:
        def fetch(self, message, send):
            send(FetchedBlocks(message.fetch_id, 0))

    runner = Runner(max_in_flight=2, slow=True, host_cache=Fetches())
    runner.device_error = RuntimeError("the check would wait for the step")
    with serving(runner) as loop:
        loop.send(plan(1))
        step = runner.steps.get(timeout=PATIENCE)
        loop.send(Heartbeat(), FetchBlocks(5, [], []))
        assert loop.receive() == Heartbeat() and loop.receive() == FetchedBlocks(5, 0)
        step.computed.set()
        assert loop.receive().step_id == 1


def test_the_loop_ends_while_the_device_computes():
    runner = Runner(max_in_flight=2, slow=True)
    with serving(runner) as loop:
        loop.send(plan(1))
        runner.steps.get(timeout=PATIENCE)
    assert runner.calls == [("launch", 1)]


@pytest.mark.parametrize("method", ["launch", "done", "result"])
def test_a_step_that_fails_ends_the_loop(method):
    loop = Loop(Runner(max_in_flight=2, fault=method))
    loop.send(plan(1))
    assert loop.frames.read_frame() is None
    loop.join()
    assert str(loop.error) == f"{method} fails"
    loop.socket.close()


def test_the_socket_may_have_any_descriptor(tmp_path):
    """A Driver with a thousand clients has none below 1024 left for its next Worker, and select() takes no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this machine allows no such descriptor")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    ours, theirs = socket.socketpair()
    high = fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD, 1100)
    command = [sys.executable, "-m", "benchmarks.simulated_device", "1", "0", str(tmp_path / "log"), str(high)]
    process = subprocess.Popen(command, pass_fds=[high], cwd=ROOT)
    os.close(high)
    with ours:
        ours.settimeout(PATIENCE)
        ours.sendall(encode_frame(StartWorker(EngineConfig(), "", [])) + encode_frame(plan(1)))
        frames = FrameSocket(ours)
        assert isinstance(decode_worker_message(frames.read_frame()), WorkerReady)
        assert decode_worker_message(frames.read_frame()).step_id == 1
    assert process.wait(PATIENCE) == 0
