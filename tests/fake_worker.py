"""A Worker process whose device is FakeDevice: the real protocol, a real process, no torch.

python -m tests.fake_worker [options] FD
"""

import argparse
import contextlib
import socket
import time

from engine.step import (
    FRAME_HEADER,
    LoadProgress,
    StartWorker,
    StepPlan,
    WorkerFailed,
    WorkerReady,
    decode_driver_message,
    encode_frame,
)
from tests.fake_device import VOCAB_SIZE, FakeDevice


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--eos-every", type=int, default=0)
    parser.add_argument("--fail-on-token", type=int)
    parser.add_argument("--die-at-step", type=int)
    parser.add_argument("--hang-at-step", type=int)
    parser.add_argument("--fail-loading")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("fd", type=int)
    options = parser.parse_args()
    with socket.socket(fileno=options.fd) as channel, channel.makefile("rb") as reader:
        with contextlib.suppress(BrokenPipeError):  # the Driver has gone
            serve(options, channel, reader)


def serve(options, channel, reader) -> None:
    start = receive(reader)
    assert isinstance(start, StartWorker)
    channel.sendall(encode_frame(LoadProgress("loading weights")))
    time.sleep(options.load_seconds)
    if options.fail_loading:
        channel.sendall(encode_frame(WorkerFailed("ModelError", options.fail_loading)))
        return
    config = start.config
    num_blocks = config.num_blocks or 256
    device = FakeDevice(num_blocks, config.block_size, options.eos_every, options.fail_on_token)
    channel.sendall(
        encode_frame(
            WorkerReady(
                num_blocks=num_blocks,
                max_model_len=config.max_model_len or options.max_model_len,
                max_num_seqs=config.max_num_seqs or 64,
                max_num_batched_tokens=config.max_num_batched_tokens or 256,
                vocab_size=VOCAB_SIZE,
                device="fake",
                dtype="none",
                memory={"weights": 0, "kv_cache": 0},
            )
        )
    )
    num_steps = 0
    while (plan := receive(reader)) is not None:
        assert isinstance(plan, StepPlan)
        num_steps += 1
        if num_steps == options.die_at_step:
            raise SystemExit(3)
        if num_steps == options.hang_at_step:
            time.sleep(3600)
        time.sleep(options.step_seconds)
        channel.sendall(encode_frame(device.execute(plan)))


def receive(reader):
    header = reader.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    (length,) = FRAME_HEADER.unpack(header)
    return decode_driver_message(reader.read(length))


if __name__ == "__main__":
    main()
