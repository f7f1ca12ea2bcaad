"""The real Worker process at the other end of a socket pair."""

import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.executor.frames import FrameSocket
from engine.executor.step import (
    AdapterLoaded,
    Heartbeat,
    LoadAdapter,
    LoadProgress,
    NewSequence,
    SequenceStep,
    SleepWorker,
    StartWorker,
    StepPlan,
    UnloadAdapter,
    WakeWorker,
    WorkerAsleep,
    WorkerFailed,
    WorkerReady,
    decode_worker_message,
    encode_frame,
)
from engine.sampling_params import SamplingParams
from tests.engine.models.adapters.peft_files import write_adapter

ROOT = Path(__file__).parents[3]
CONFIG = EngineConfig(device="cpu", block_size=8, num_blocks=32, max_num_seqs=4, cpu_threads=1)
PATIENCE = 15  # seconds for what takes a fraction of one where tests have the machine to themselves
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


class Process:
    """The Driver's end."""

    def __init__(self, stderr=None):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(120)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.worker.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=ENVIRONMENT,
            )
        self.frames = FrameSocket(self.socket)

    def send(self, message):
        self.socket.sendall(encode_frame(message))

    def receive(self):
        return decode_worker_message(self.frames.read_frame())

    def start(self, model_dir, config=CONFIG):
        """The phases that were reported, and the message after them."""
        self.send(StartWorker(config, str(model_dir), [2]))
        phases = []
        while isinstance(message := self.receive(), LoadProgress):
            phases.append(message.phase)
        return phases, message

    def close(self):
        self.socket.close()

    def wait(self, seconds):
        return self.process.wait(seconds)


@pytest.fixture
def worker():
    process = Process()
    yield process
    process.close()
    process.process.kill()
    process.wait(PATIENCE)


def generation(prompt, n, seq_id=7):
    """Plans of a prefill and n - 1 decodes."""
    new = NewSequence(
        seq_id=seq_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=[0, 1, 2],
        params=SamplingParams(temperature=0.0),
        seed=0,
    )
    yield StepPlan(1, [], [new], [], [SequenceStep(seq_id, len(prompt), True, [])])
    for step_id in range(2, n + 1):
        yield StepPlan(step_id, [], [], [], [SequenceStep(seq_id, 1, True, [])])


def test_ready_steps_and_end(worker, model_dir, hf_greedy):
    phases, ready = worker.start(model_dir)
    assert isinstance(ready, WorkerReady)
    assert (ready.num_blocks, ready.vocab_size, ready.max_num_seqs, ready.device) == (32, 96, 4, "cpu")
    assert phases[0] == "importing"
    assert {"profiling", "warming up"} <= set(phases)
    assert any(phase.startswith("loading weights") for phase in phases)

    for plan in generation([5, 6, 7], 8):
        worker.send(plan)  # the next plan is there before the last result is read
    results = [worker.receive() for _ in range(8)]
    assert [result.step_id for result in results] == list(range(1, 9))
    assert [sample.token_id for result in results for sample in result.samples] == hf_greedy([5, 6, 7], 8)
    assert all(result.compute_seconds > 0 and not result.failed for result in results)

    for number in (signal.SIGINT, signal.SIGTERM):
        worker.process.send_signal(number)
    worker.send(StepPlan(9, [7], [], [], []))
    assert worker.receive().step_id == 9

    worker.close()
    assert worker.wait(PATIENCE) == 0


def test_messages_around_a_sleep(worker, model_dir, hf_greedy, hf_model, tmp_path):
    """An adapter that is being read is answered before the sleep; messages that come late do not end the sleep."""
    write_adapter(tmp_path / "a", hf_model)
    worker.start(model_dir, replace(CONFIG, allow_runtime_lora=True, lora_root=str(tmp_path)))
    load = LoadAdapter(1, str(tmp_path / "a"))
    for message in (load, SleepWorker(1, None), Heartbeat(), load, UnloadAdapter(1), WakeWorker()):
        worker.send(message)
    answer = worker.receive()
    assert isinstance(answer, AdapterLoaded) and not answer.error
    assert isinstance(worker.receive(), WorkerAsleep)
    while isinstance(message := worker.receive(), LoadProgress):
        pass
    assert isinstance(message, WorkerReady)
    for plan in generation([9, 8], 3):
        worker.send(plan)
    assert [worker.receive().samples[0].token_id for _ in range(3)] == hf_greedy([9, 8], 3)


def test_frames_may_arrive_in_pieces(worker, model_dir, hf_greedy):
    worker.start(model_dir)
    frames = b"".join(encode_frame(plan) for plan in generation([9, 8], 3))
    for byte in frames:
        worker.socket.sendall(bytes([byte]))
    tokens = [worker.receive().samples[0].token_id for _ in range(3)]
    assert tokens == hf_greedy([9, 8], 3)


def test_a_folder_without_a_model_fails_with_its_reason(worker, tmp_path):
    _, message = worker.start(tmp_path)
    assert isinstance(message, WorkerFailed)
    assert message.kind == "ModelError"
    assert "config.json" in message.message
    assert worker.wait(PATIENCE) == 1


def test_a_wrong_setting_fails_with_its_name(worker, model_dir):
    _, message = worker.start(model_dir, EngineConfig(device="cpu", max_model_len=100_000))
    assert (message.kind, "--max-model-len 128" in message.message) == ("ConfigError", True)


def test_a_setting_that_does_not_fit_is_a_wrong_setting(worker, model_dir):
    _, message = worker.start(model_dir, replace(CONFIG, num_blocks=4, max_model_len=64))
    assert (message.kind, "--max-model-len 32" in message.message) == ("ConfigError", True)


def test_a_driver_that_leaves_while_loading_ends_it(worker, model_dir):
    worker.send(StartWorker(CONFIG, str(model_dir), [2]))
    assert worker.receive() == LoadProgress("importing")
    worker.close()
    worker.wait(PATIENCE)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 5) + b"\x93\x01\x02",  # cut short, then the end
        struct.pack("<I", 3) + b"\xff\xff\xff",
        struct.pack("<I", 2**32 - 1),
        encode_frame(StepPlan(1, [], [], [], [])),
        bytes(range(256)),
    ],
)
def test_bytes_that_are_no_message_end_it_without_harm(tmp_path, data):
    with (tmp_path / "log").open("wb") as log:
        worker = Process(stderr=log)
        worker.socket.sendall(data)
        worker.socket.shutdown(socket.SHUT_WR)
        status = worker.wait(PATIENCE)
        worker.close()
    assert status in (0, 2)
    assert status == 0 or "Traceback" in (tmp_path / "log").read_text()


def test_a_step_that_fails_as_a_whole_ends_it_with_a_traceback(tmp_path, model_dir):
    with (tmp_path / "log").open("wb") as log:
        worker = Process(stderr=log)
        worker.start(model_dir)
        worker.send(StepPlan(1, [], [], [], [SequenceStep(99, 1, True, [])]))
        assert worker.frames.read_frame() is None
        assert worker.wait(PATIENCE) == 2
        worker.close()
    assert "KeyError: 99" in (tmp_path / "log").read_text()


def test_asked_where_it_is_it_writes_its_stacks_and_works_on(tmp_path, model_dir):
    """The Driver asks for a stack dump before it kills a Worker that hangs."""
    with open(tmp_path / "log", "w+b") as log:
        worker = Process(stderr=log)
        _, ready = worker.start(model_dir)
        assert isinstance(ready, WorkerReady)
        end = time.monotonic() + PATIENCE
        while b"in serve" not in (text := Path(log.name).read_bytes()):
            assert time.monotonic() < end, text
            worker.process.send_signal(signal.SIGUSR1)  # again where it was on its way there
            time.sleep(0.1)
        assert b"Thread" in text and b"worker.py" in text
        worker.send(StepPlan(1, [], [], [], []))
        assert worker.receive().step_id == 1
        worker.close()
        assert worker.wait(PATIENCE) == 0


def test_the_death_of_the_driver_ends_it_within_two_seconds(tmp_path, model_dir):
    """A Driver that is killed, while a copy of its socket lives on in another process: no hang-up to see."""
    script = textwrap.dedent(f"""
        import os, socket, subprocess, sys, time
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "engine.worker.worker", str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        holder = subprocess.Popen(["sleep", "30"], pass_fds=[ours.fileno()])
        from engine.config import EngineConfig
        from engine.executor.step import StartWorker, encode_frame
        config = EngineConfig(device="cpu", num_blocks=32, cpu_threads=1)
        ours.sendall(encode_frame(StartWorker(config, {str(model_dir)!r}, [2])))
        ours.recv(1)
        print(worker.pid, holder.pid, flush=True)
        time.sleep(60)
    """)
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=ENVIRONMENT, text=True)
    worker_pid, holder_pid = map(int, driver.stdout.readline().split())
    try:
        driver.kill()
        driver.wait(5)
        driver.stdout.close()
        deadline = time.monotonic() + 2
        while alive(worker_pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(worker_pid)
        assert alive(holder_pid)
    finally:
        os.kill(holder_pid, signal.SIGKILL)


def alive(pid):
    """True if the process runs: it is neither gone nor a zombie that nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
