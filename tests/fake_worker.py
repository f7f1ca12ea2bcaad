"""A Worker process whose device is FakeDevice: the real protocol, a real process, no torch.

python -m tests.fake_worker [options] FD
"""

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import socket
import time
from pathlib import Path

import msgspec

from engine.executor.frames import FrameSocket, pack_frame
from engine.executor.step import (
    AdapterLoaded,
    GrammarPrepared,
    Heartbeat,
    LoadAdapter,
    LoadProgress,
    PrepareGrammar,
    SleepWorker,
    StartWorker,
    StepPlan,
    StepResult,
    UnloadAdapter,
    WakeWorker,
    WorkerAsleep,
    WorkerFailed,
    WorkerReady,
    decode_driver_message,
    encode_frame,
)
from engine.structured_output import Vocabulary
from engine.thinking import ThinkingTags
from tests.fake_device import HIDDEN_SIZE, VOCAB_SIZE, FakeDevice

FAULTS = (
    "die_at_step",
    "hang_at_step",
    "hang_at_heartbeat",
    "die_on_token",
    "garbage_at_step",
    "wrong_step_at_step",
    "uneven_at_step",
)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # as the real one, which lives on
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--sleep-seconds", type=float, default=0.0)  # the way to sleep
    parser.add_argument("--wake-seconds", type=float, default=0.0)
    parser.add_argument("--eos-every", type=int, default=0)
    parser.add_argument("--fail-on-token", type=int)
    parser.add_argument("--die-at-step", type=int)
    parser.add_argument("--hang-at-step", type=int)
    parser.add_argument("--hang-at-heartbeat", type=int)
    parser.add_argument("--die-on-token", type=int)  # a sequence that holds it is deadly in every step
    parser.add_argument("--garbage-at-step", type=int)
    parser.add_argument("--wrong-step-at-step", type=int)
    parser.add_argument("--uneven-at-step", type=int)
    parser.add_argument("--hang-loading", action="store_true")
    parser.add_argument("--fail-loading")
    parser.add_argument("--lives", type=Path)  # counts the starts
    parser.add_argument("--faults-in")  # the lives, as "1,3", that have the faults named above; else all
    parser.add_argument("--num-blocks-later", type=int)  # the pool of all lives but the first
    parser.add_argument("--heartbeats", type=Path)  # gets a byte for each
    parser.add_argument("--plans", type=Path)  # gets a line [life, [seq_id, ...]] for each step
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--encoder", action="store_true")  # a model that only embeds
    parser.add_argument("fd", type=int)
    options = parser.parse_args()
    with socket.socket(fileno=options.fd) as channel:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the Driver has gone
            serve(options, channel, FrameSocket(channel))


def serve(options, channel, frames) -> None:
    start = receive(frames)
    if start is None:
        return
    assert isinstance(start, StartWorker)
    life = begin_life(options)
    channel.sendall(encode_frame(LoadProgress("loading weights")))
    time.sleep(3600 if options.hang_loading else options.load_seconds)
    if options.fail_loading:
        channel.sendall(encode_frame(WorkerFailed("ModelError", options.fail_loading)))
        return
    config = start.config
    num_blocks = config.num_blocks or 256
    if life > 1 and options.num_blocks_later:
        num_blocks = options.num_blocks_later
    device = FakeDevice(num_blocks, config.block_size, options.eos_every, options.fail_on_token)
    ready = encode_frame(
        WorkerReady(
            num_blocks=num_blocks,
            max_model_len=config.max_model_len or options.max_model_len,
            max_num_seqs=config.max_num_seqs or 64,
            max_num_batched_tokens=config.max_num_batched_tokens or 256,
            vocab_size=VOCAB_SIZE,
            device="fake",
            dtype="none",
            memory={"weights": 0, "kv_cache": 0},
            hidden_size=HIDDEN_SIZE,
            encoder=options.encoder,
            embeds_only=options.encoder,
        )
    )
    channel.sendall(ready)
    num_steps = num_heartbeats = 0
    while (plan := receive(frames)) is not None:
        if isinstance(plan, Vocabulary | PrepareGrammar | ThinkingTags):  # a fake device holds to no form
            if isinstance(plan, PrepareGrammar):
                error = "this model is an encoder" if options.encoder else ""
                channel.sendall(encode_frame(GrammarPrepared(plan.output.digest(), error)))
            continue
        if isinstance(plan, LoadAdapter):  # it computes as the base does
            if Path(plan.path).name == "deadly":
                os.abort()
            channel.sendall(encode_frame(AdapterLoaded(plan.adapter_id, Path(plan.path).name.encode())))
            continue
        if isinstance(plan, UnloadAdapter):
            continue
        if isinstance(plan, Heartbeat):
            num_heartbeats += 1
            if options.heartbeats:
                with options.heartbeats.open("a") as file:
                    file.write("x")
            if num_heartbeats == options.hang_at_heartbeat:
                time.sleep(3600)
            channel.sendall(encode_frame(plan))
            continue
        if isinstance(plan, SleepWorker):
            time.sleep(options.sleep_seconds)
            channel.sendall(encode_frame(WorkerAsleep()))
            if plan.level == 2 or not isinstance(receive(frames), WakeWorker):
                return
            device = FakeDevice(num_blocks, config.block_size, options.eos_every, options.fail_on_token)
            time.sleep(options.wake_seconds)
            channel.sendall(ready)
            continue
        assert isinstance(plan, StepPlan)
        num_steps += 1
        if options.encoder:
            assert not plan.decodes and [new.seq_id for new in plan.new] == [step.seq_id for step in plan.chunks]
            assert all(len(new.token_ids) == step.num_tokens for new, step in zip(plan.new, plan.chunks, strict=True))
        if options.plans:
            with options.plans.open("a") as file:
                file.write(json.dumps([life, [step.seq_id for step in plan.steps]]) + "\n")
        if num_steps == options.die_at_step:
            raise SystemExit(3)
        if num_steps == options.hang_at_step:
            time.sleep(3600)
        time.sleep(options.step_seconds)
        result = device.execute(plan)
        if options.die_on_token in {t for step in plan.steps for t in device.rows[step.seq_id].token_ids}:
            os.abort()
        if num_steps == options.garbage_at_step:
            channel.sendall(pack_frame(b"abc"))
        if num_steps == options.wrong_step_at_step:
            result = StepResult(result.step_id + 1, [], {}, 0.0)
        channel.sendall(encode_frame(result) if num_steps != options.uneven_at_step else uneven(result))


def uneven(result: StepResult) -> bytes:
    """Its frame, with a sequence that has no token."""
    fields = msgspec.to_builtins(result)
    fields[1 + StepResult.__struct_fields__.index("token_ids")].pop()  # the first is the tag
    return encode_frame(fields)


def begin_life(options) -> int:
    """Which start this is, from 1; a life that is to be healthy loses its faults."""
    life = 1
    if options.lives:
        with options.lives.open("a") as file:
            file.write("x")
        life = options.lives.stat().st_size
    if options.faults_in is not None and str(life) not in options.faults_in.split(","):
        for fault in FAULTS:
            setattr(options, fault, None)
        options.fail_loading, options.hang_loading = None, False
    return life


def receive(frames):
    body = frames.read_frame()
    return None if body is None else decode_driver_message(body)


if __name__ == "__main__":
    main()
