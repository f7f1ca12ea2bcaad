"""The Worker's step loop alone: a heartbeat is answered whatever else goes on, unless the loop or the device hangs."""

import fcntl
import resource
import socket
import threading
from contextlib import contextmanager

import pytest
import torch

from engine.executor.frames import FrameSocket
from engine.executor.step import (
    FetchBlocks,
    FetchedBlocks,
    Heartbeat,
    StepPlan,
    StepResult,
    decode_worker_message,
    encode_frame,
)
from engine.worker.cache.disk_cache import BlockFile, DiskCache
from engine.worker.cache.host_cache import HostCache
from engine.worker.worker import Channel, serve
from kernels.cache.copy_blocks import BlockCopier

PATIENCE = 15


class Runner:
    """A ModelRunner without a model. `pieces` is what there is to do in idle time."""

    def __init__(self, max_in_flight=1, pieces=(), host_cache=None):
        self.max_in_flight = max_in_flight
        self.pieces = list(pieces)
        self.host_cache = host_cache
        self.device_error = None

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
        return plan.step_id

    def result(self, step_id):
        return StepResult(step_id, [], {}, 0.0)


class Loop:
    """`serve` in a thread, and the Driver's end of its socket."""

    def __init__(self, runner):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        self.frames = FrameSocket(self.socket)
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(theirs, runner))
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


def test_a_channel_may_have_any_descriptor():
    """A Driver with a thousand clients has none below 1024 left for its next Worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this machine allows no such descriptor")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    ours, theirs = socket.socketpair()
    with ours, socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD, 1100)) as high:
        channel = Channel(high)
        assert high.fileno() >= 1100 and not channel.has_data()
        ours.sendall(b"a")
        assert channel.has_data()
