"""Measures the host time of one decode step, Driver and Worker, with a device that costs nothing.

    python -m benchmarks.host_cost [--batch 1 16 64 256] [--steps 300] [--rounds 3] [--cpu-time] [--json FILE]

The real Driver serves real requests (tokenizer, streams and their readers) and the real ModelRunner executes its plans;
between them lie the real messages, as bytes. Only the device is missing: its graphs do nothing, and nothing is sampled.
Everything runs in one thread of one process, so that every microsecond is seen; in a server Driver and Worker are two
processes, work at the same time, and both at the same time as the device. So the sum is an upper bound of what a step
can cost, with nothing overlapped. Plans are made one ahead, as on a GPU, and the event loop is the server's.

`driver` counts all work of the Driver's loop between two steps, from decoding a result to sending the next plan;
`worker` counts all work from decoding a plan to encoding its result. `readers` is the time in which readers take their
outputs (the server's side) and belongs to neither. Milliseconds per step, medians over the steps of all rounds.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import engine.executor.supervisor
from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.driver import Driver
from engine.executor.frames import FRAME_HEADER
from engine.executor.step import (
    StartWorker,
    StepPlan,
    StepResult,
    WorkerReady,
    decode_driver_message,
    decode_worker_message,
    encode_frame,
)
from engine.garbage_collector import settle_garbage_collector
from engine.models.config import ModelConfig
from engine.models.layers.operators import FastOperators
from engine.request import Request
from engine.requests.stream import RequestStream
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.worker.bucket_runner import BucketSettings
from engine.worker.device.host import StepLimits
from engine.worker.model_runner import ModelRunner, RunnerParts
from server.process import event_loop

T = TypeVar("T")
BLOCK_SIZE = 16
HIDDEN_SIZE = 8
PROMPT_TOKENS = 100
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 256
WARM_UP_STEPS = 40

DRIVER_STAGES = ("schedule", "encode plan", "other planning", "decode result", "update", "deliver")
WORKER_STAGES = ("decode plan", "input batch", "packing", "other launch", "result", "encode result")
WHOLES = {
    "pump": ("schedule", "encode plan"),
    "process": ("update", "pump"),
    "stage": ("input batch",),
    "launch": ("stage",),
}


class Clock:
    """Seconds per stage and step. A stage that holds others counts what they leave."""

    def __init__(self, cpu_time: bool) -> None:
        self.now = time.thread_time if cpu_time else time.perf_counter
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] = {}

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(stage, self.now() - started)

        return call

    def add(self, stage: str, seconds: float) -> None:
        self._step[stage] = self._step.get(stage, 0.0) + seconds

    def end_step(self) -> None:
        self.steps.append(self._step)
        self._step = {}


class NullDecoder:
    """Takes the place of engine.models.decoder.Decoder: hidden states of nothing, logits made once."""

    recorded = None

    def __init__(self, config: ModelConfig, num_seqs: int) -> None:
        self.config, self.operators, self.dense = config, FastOperators(), ()
        tokenizer = Tokenizer(resolve_model(EngineConfig()))
        # Whole characters, as nearly all tokens of a text are.
        texts = [i for i in range(VOCAB_SIZE) if tokenizer.token_bytes(i).isascii() and tokenizer.token_bytes(i)]
        self.logits = torch.zeros(num_seqs, VOCAB_SIZE)
        for row in range(num_seqs):
            self.logits[row, texts[row % len(texts)]] = 1.0

    def forward(self, input_ids: Any, metadata: Any, kv_caches: Any) -> torch.Tensor:
        rows = input_ids if metadata.outputs is None else metadata.outputs.indices
        return torch.zeros(len(rows), HIDDEN_SIZE)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(hidden)]


class Done:
    def wait(self) -> None:
        pass


class NullQueue:
    """A DeviceQueue whose graphs do nothing: what they sampled when they were recorded stays. Copies are done."""

    device = torch.device("cpu")

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def mark(self) -> Done:
        return Done()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def free_bytes(self) -> int:
        return 0


def null_runner(num_seqs: int, num_blocks: int) -> ModelRunner:
    """A ModelRunner, set up as for a GPU, whose model and device cost nothing."""
    model = ModelConfig(
        family="llama", vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=HIDDEN_SIZE, intermediate_size=8, max_position_embeddings=MAX_MODEL_LEN, norm="rms", norm_eps=1e-6,
        position="rope", activation="silu", gated_mlp=True,
    )  # fmt: skip
    cache = torch.zeros(num_blocks, 1, BLOCK_SIZE, HIDDEN_SIZE)
    return ModelRunner(
        RunnerParts(
            decoder=NullDecoder(model, num_seqs),  # type: ignore[arg-type]
            kv_caches=[(cache, cache)],
            limits=StepLimits(num_seqs, max(2048, 2 * num_seqs * PROMPT_TOKENS)),
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            eos_token_ids=[],
            device=NullQueue.device,
            queue=NullQueue(),
            buckets=BucketSettings(
                num_seqs, num_seqs, 2048, MAX_MODEL_LEN // BLOCK_SIZE, HIDDEN_SIZE, torch.float32, graphs=True
            ),
        )
    )


class LoopbackExecutor:
    """Stands where the Driver expects the Worker process: frames go to a ModelRunner in this very thread."""

    def __init__(self, clock: Clock, num_seqs: int, worker_command: tuple[str, ...] = (), *_: Any) -> None:
        num_blocks = num_seqs * MAX_MODEL_LEN // BLOCK_SIZE
        self.ready = False
        self._clock = clock
        self._num_blocks = num_blocks
        self._runner = runner = null_runner(num_seqs, num_blocks)
        self._ready_message = WorkerReady(
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=2 * num_seqs * PROMPT_TOKENS + 2048,
            vocab_size=VOCAB_SIZE,
            device="cuda",
            dtype="none",
            memory={},
        )
        self._frames: deque[bytes] = deque()
        self._launched: deque[Any] = deque()
        self._idle = asyncio.Event()
        self._encode = clock.timed("encode plan", encode_frame)
        self._decode = clock.timed("decode result", decode_worker_message)
        self._launch = clock.timed("launch", runner.launch)
        runner.record_graphs()
        buckets = runner.buckets
        assert buckets is not None, "it was made with a queue"
        buckets.stage_decodes = clock.timed("stage", buckets.stage_decodes)  # type: ignore[method-assign]
        runner.batch.fill_decodes = clock.timed("input batch", runner.batch.fill_decodes)  # type: ignore[method-assign]

    async def start(self, message: StartWorker) -> None:
        """The Worker is there already."""

    async def wait_ready(self, on_progress: Callable[[str], None]) -> WorkerReady:
        self.ready = True
        return self._ready_message

    def send(self, plan: StepPlan) -> None:
        self._frames.append(self._encode(plan))
        self._idle.set()

    async def receive(self) -> StepResult:
        """Let the readers run, then be the Worker for one step."""
        started = self._clock.now()
        await asyncio.sleep(0)
        self._clock.add("readers", self._clock.now() - started)
        if not self._frames and not self._launched:
            self._idle.clear()
            await self._idle.wait()
        self._clock.end_step()
        while self._frames:
            started = self._clock.now()
            plan = decode_driver_message(self._frames.popleft()[FRAME_HEADER.size :])
            self._clock.add("decode plan", self._clock.now() - started)
            self._launched.append(self._launch(plan))
        started = self._clock.now()
        found = self._runner.result(self._launched.popleft())
        done = self._clock.now()
        frame = encode_frame(found)
        self._clock.add("result", done - started)
        self._clock.add("encode result", self._clock.now() - done)
        result: StepResult = self._decode(frame[FRAME_HEADER.size :])
        return result

    async def stop(self, grace: float = 0.0) -> None:
        self.ready = False


@contextmanager
def loopback(clock: Clock, num_seqs: int) -> Iterator[None]:
    """Drivers made in here have a LoopbackExecutor."""
    original = engine.executor.supervisor.Executor
    engine.executor.supervisor.Executor = partial(LoopbackExecutor, clock, num_seqs)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        engine.executor.supervisor.Executor = original  # type: ignore[misc]


async def read(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def decode_steps(num_seqs: int, num_steps: int, cpu_time: bool) -> list[dict[str, float]]:
    """Seconds per stage of each step in which all of num_seqs sequences decode."""
    clock = Clock(cpu_time)
    with loopback(clock, num_seqs):
        driver = Driver(EngineConfig(cpu_threads=1, block_size=BLOCK_SIZE), max_queued_requests=num_seqs + 1)
        await driver.start()
        await driver.wait_ready()
    driver._pump = clock.timed("pump", driver._pump)  # type: ignore[method-assign]
    driver._process = clock.timed("process", driver._process)  # type: ignore[method-assign]
    scheduler = driver.scheduler
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = clock.timed("update", scheduler.update)  # type: ignore[method-assign]
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_steps + WARM_UP_STEPS + 2)
    readers = []
    for i in range(num_seqs):  # lengths differ, so that blocks are full at different steps
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS + i % BLOCK_SIZE)]
        readers.append(asyncio.create_task(read(driver.generate(Request(f"r{i}", prompt, params)))))
    await asyncio.gather(*readers)
    await driver.stop()
    return clock.steps[WARM_UP_STEPS : WARM_UP_STEPS + num_steps]


def figures(step: dict[str, float]) -> dict[str, float]:
    """Milliseconds per stage, with what is left of a whole in place of the whole."""
    ms = {stage: 1e3 * seconds for stage, seconds in step.items()}
    rest = {whole: ms.get(whole, 0.0) - sum(ms.get(part, 0.0) for part in parts) for whole, parts in WHOLES.items()}
    ms |= {"other planning": rest["pump"], "deliver": rest["process"]}
    ms |= {"packing": rest["stage"], "other launch": rest["launch"]}
    ms["driver"] = sum(ms.get(stage, 0.0) for stage in DRIVER_STAGES)
    ms["worker"] = sum(ms.get(stage, 0.0) for stage in WORKER_STAGES)
    ms["sum"] = ms["driver"] + ms["worker"]
    return ms


def measure(num_seqs: int, num_steps: int, rounds: int, cpu_time: bool) -> dict[str, float]:
    """Medians in milliseconds, and two deciles of the sum."""
    steps = []
    for _ in range(rounds):
        settle_garbage_collector()
        steps += [figures(step) for step in event_loop.run(decode_steps(num_seqs, num_steps, cpu_time))]
    names = (*DRIVER_STAGES, "driver", *WORKER_STAGES, "worker", "sum", "readers")
    table = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    deciles = statistics.quantiles([step["sum"] for step in steps], n=10)
    table |= {"sum p10": deciles[0], "sum p90": deciles[-1]}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256], help="sequences that decode together")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of this thread, for a busy machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments_of_all = arguments.steps, arguments.rounds, arguments.cpu_time
    table = {batch: measure(batch, *arguments_of_all) for batch in arguments.batch}
    print("host cost per decode step with a null device, median ms")
    print(f"{'batch':16}" + "".join(f"{batch:>9}" for batch in table))
    for name in next(iter(table.values())):
        print(f"{name:16}" + "".join(f"{row[name]:9.3f}" for row in table.values()))
    if arguments.json:
        settings = {"steps": arguments.steps, "rounds": arguments.rounds, "cpu_time": arguments.cpu_time}
        arguments.json.write_text(json.dumps({"settings": settings, "ms_per_step": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
