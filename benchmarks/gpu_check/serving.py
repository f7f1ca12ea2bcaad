"""The whole engine, Driver and Worker, without HTTP: the nano-vllm workload, 100 users, the card's memory, KV waste.

The Worker is a server's own, with its step loop; it logs when the device idles (benchmarks/watched_worker.py).
"""

import asyncio
import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.gpu_check.bounds import Bounds
from benchmarks.gpu_check.card import memory_in_use
from benchmarks.gpu_check.datasheets import find_limits
from benchmarks.gpu_check.names import NANO, QWEN
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Goal, Recorder, at_least, at_most
from benchmarks.gpu_check.shapes import NanoRequest, nano_workload, write_model
from benchmarks.gpu_check.timing import pick_device
from benchmarks.watched_worker import WatchedStep
from engine.config import EngineConfig
from engine.driver import Driver
from engine.models.families import read_model_config
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.settings import load_settings
from server.process import event_loop

NANO_TEMPERATURE = 0.6
NUM_USERS, PROMPT, OUTPUT, ROUNDS = 100, 512, 128, 4
TINY_USERS, TINY_PROMPT, TINY_OUTPUT, TINY_ROUNDS = 4, 8, 5, 2
WARM_UP_SEED = 1
IDLE_SECONDS = 4.0  # after the start: a Worker may record CUDA graphs while it is idle
IN_USE, MEMORY_GOAL = "after the workload", at_least(90, text="> 90 %")
GPU_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpu.yaml"
SAMPLE_SECONDS = 0.25  # between two looks at the blocks
CASES = ("memory of the card", NANO, "memory of the card at work", "100 users", "device idle")
IDLE_MS = 0.05  # a step that begins later after the one before it counts as late


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds on the clock: when a request was sent, and when each of its outputs came."""

    sent: float
    came: list[float]
    tokens: list[int]  # in each output

    @property
    def first(self) -> float:
        return self.came[0] - self.sent

    @property
    def total(self) -> float:
        return self.came[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between outputs; one with several tokens counts as one gap, which is what a reader sees."""
        return [after - before for before, after in pairwise(self.came)]


@dataclass
class Waste:
    """Slots of KV blocks that sequences hold: how many, and how many of them hold no token."""

    held: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    in_use: list[float] = field(default_factory=list)  # share of the pool that sequences or cached prefixes fill

    def look(self, driver: Driver) -> None:
        view = driver.kv_view()
        used = view.states.count("u") + view.states.count("p")
        if used:
            self.held.append(used * view.block_size)
            self.empty.append(sum(view.block_size - fill for fill in view.partial.values()))
            self.in_use.append(1 - view.states.count(".") / view.num_blocks)

    @property
    def share(self) -> float:
        return sum(self.empty) / max(1, sum(self.held))


def run(recorder: Recorder, setting: Setting) -> None:
    """One engine for everything, as a user with a card for it alone would start it: with configs/gpu.yaml."""
    device = pick_device(setting.tiny).type
    if all(recorder.is_done(name) for name in CASES):
        return
    folder = write_model(QWEN, setting.folder, setting.tiny)
    event_loop.run(_measure(recorder, setting, serving_config(folder, device, setting.tiny)))


def serving_config(folder: Path, device: str, tiny: bool) -> EngineConfig:
    """gpu_memory_utilization is what leaves less than a tenth of the card unused; the default is for shared cards."""
    settings = {"config": str(GPU_CONFIG), "model": str(folder), "load_format": "dummy", "device": device}
    sizes = {"num_blocks": 64, "max_num_seqs": 8} if tiny else {}
    config: EngineConfig = load_settings((EngineConfig,), settings | sizes, {})[0]
    return config


async def _measure(recorder: Recorder, setting: Setting, config: EngineConfig) -> None:
    model = read_model_config(setting.folder / QWEN.lower())
    bounds = Bounds(model, find_limits(setting, recorder))
    log = setting.folder / "watched-steps.json"
    started = time.perf_counter()
    async with running_engine(config, log) as driver:
        recorder.figure(f"{QWEN}: engine start to ready", time.perf_counter() - started, "s")
        bench = EngineBench(recorder, setting, driver, bounds)
        await asyncio.sleep(0 if setting.tiny else IDLE_SECONDS)
        await recorder.case_async("memory of the card", partial(bench.memory, "when ready"))
        await recorder.case_async(NANO, bench.nano, seconds=60)
        await recorder.case_async("memory of the card at work", partial(bench.memory, IN_USE, MEMORY_GOAL))
        await recorder.case_async("100 users", bench.users, seconds=60)
    recorder.case("device idle", partial(bench.device_idle, log))


@contextlib.asynccontextmanager
async def running_engine(config: EngineConfig, log: Path) -> AsyncIterator[Driver]:
    """A running engine, whose Worker writes `log` at the end."""
    driver = Driver(config, worker_command=(sys.executable, "-m", "benchmarks.watched_worker", str(log)))
    try:
        await driver.start()
        await driver.wait_ready()
        yield driver
    finally:
        await driver.stop()


class EngineBench:
    """The measurements on one running Driver."""

    def __init__(self, recorder: Recorder, setting: Setting, driver: Driver, bounds: Bounds, prefix: str = "") -> None:
        """prefix: of the names of the figures of users."""
        self.prefix = prefix
        self.recorder, self.setting, self.driver, self.bounds = recorder, setting, driver, bounds
        self._number = 0
        self._runs: dict[str, tuple[float, float]] = {}  # name of a workload -> when it began and ended

    async def memory(self, when: str, goal: Goal | None = None) -> None:
        """By NVIDIA's own count, which has all processes in it. Weights, graphs and the KV cache are there before the
        first request; what steps take beside them is, once one has taken it.
        """
        name, found = f"memory of the card in use, {when}", memory_in_use()
        if found is None:
            self.recorder.skip(name, "there is no card, or neither NVML nor nvidia-smi answers")
            return
        used, total = found
        self.recorder.figure(name, used / total * 100, "%", goal=goal, used_bytes=used, total_bytes=total,
                             engine=self.driver.config.gpu_memory_utilization, parts=self.driver.model.memory,
                             num_blocks=self.driver.model.num_blocks)  # fmt: skip

    async def nano(self) -> None:
        """256 requests at once, in output tokens per second from the first to the last."""
        warm_up = nano_workload(self.setting.tiny, WARM_UP_SEED)[: 6 if self.setting.tiny else 128]
        await self._all(NanoRequest(request.prompt[:100], 20) for request in warm_up)
        workload, waste = nano_workload(self.setting.tiny), Waste()
        steps = self.driver.stats.iteration_tokens
        num_steps, computed, cpu = steps.total, steps.sum, time.process_time()
        started = time.perf_counter()
        watching = asyncio.ensure_future(self._watch(waste))
        timelines = await self._all(workload)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        self._runs[NANO] = started, started + seconds
        watching.cancel()
        num_steps = steps.total - num_steps
        output = sum(request.output for request in workload)
        assert output == sum(sum(timeline.tokens) for timeline in timelines), "a request ended early"
        lengths = [(len(request.prompt), request.output) for request in workload]
        share = self.bounds.workload_seconds(lengths) / seconds
        self.recorder.figure(NANO, output / seconds, "tok/s", share=share, of="bound", goal=at_least(0.65, "share"),
                             seconds=seconds, output_tokens=output, steps=num_steps, computed=steps.sum - computed,
                             preemptions=self.driver.scheduler.num_preemptions)  # fmt: skip
        self.recorder.figure(f"{NANO}: mean step", seconds / max(1, num_steps) * 1e3, "ms")
        self.recorder.figure(f"{NANO}: Driver's CPU time of a step", cpu / max(1, num_steps) * 1e3, "ms",
                             share=cpu / seconds, of="run")  # fmt: skip
        if not waste.held:
            waste.look(self.driver)
        self.recorder.figure("KV slots held by sequences and empty", waste.share * 100, "%",
                             goal=at_most(4, text="< 4 %"), looks=len(waste.held), pool_filled=max(waste.in_use,
                             default=0.0))  # fmt: skip

    async def users(self) -> None:
        """Users without think time: each sends the next request when the last is answered; lengths are all alike."""
        tiny = self.setting.tiny
        count, rounds = (TINY_USERS, TINY_ROUNDS) if tiny else (NUM_USERS, ROUNDS)
        started = time.perf_counter()
        timelines = [line for lines in await asyncio.gather(*(self._user(i, rounds) for i in range(count)))
                     for line in lines]  # fmt: skip
        seconds = time.perf_counter() - started
        tokens = sum(sum(timeline.tokens) for timeline in timelines)
        name = f"{self.prefix}{count} users"
        self._runs[name] = started, started + seconds
        self.recorder.figure(f"{name}: throughput", tokens / seconds, "tok/s", requests=len(timelines), seconds=seconds)
        for label, values in (
            ("whole request", [timeline.total for timeline in timelines]),
            ("first token", [timeline.first for timeline in timelines]),
            ("between outputs", [gap for timeline in timelines for gap in timeline.gaps]),
        ):
            self._percentiles(f"{name}: {label}", values)

    def device_idle(self, log: Path) -> None:
        """The time in which the device had nothing to do before a step without prompts, from the Worker's log."""
        if not self._runs:
            raise RuntimeError("no workload ran in the process that would say how long the device idled")
        steps = msgspec.json.decode(log.read_bytes(), type=list[WatchedStep])
        for name, (begin, end) in self._runs.items():
            found = [step for step in steps if begin <= step.launched < end][1:]  # before the first there was no work
            idle = [step.idle_seconds * 1e3 for step in found if not step.num_chunks]
            # A step without a graph begins while it is launched: these are more than the device idles.
            mixed = [step.idle_seconds * 1e3 for step in found if step.num_chunks]
            self.recorder.figure(
                f"{name}: device idle", statistics.fmean(idle), "ms/step",
                share=sum(idle) / 1e3 / (end - begin), of="run", goal=at_most(IDLE_MS), steps=len(idle),
                late=sum(ms >= IDLE_MS for ms in idle) / len(idle), p99_ms=percentile(idle, 99), largest_ms=max(idle),
                steps_with_prompts=len(mixed), at_most_ms_with_prompts=statistics.fmean(mixed) if mixed else None,
                launch_ms=statistics.median(step.launch_seconds * 1e3 for step in found),
            )  # fmt: skip

    def _percentiles(self, name: str, seconds: list[float]) -> None:
        p50, p99 = (percentile(seconds, percent) for percent in (50, 99))
        self.recorder.figure(f"{name} P50", p50 * 1e3, "ms", mean=statistics.fmean(seconds) * 1e3)
        self.recorder.figure(f"{name} P99", p99 * 1e3, "ms", largest=max(seconds) * 1e3)
        self.recorder.figure(f"{name} P99 / P50", p99 / p50, "x", goal=at_most(2.5))

    async def _user(self, number: int, rounds: int) -> list[Timeline]:
        tiny = self.setting.tiny
        prompt, output = (TINY_PROMPT, TINY_OUTPUT) if tiny else (PROMPT, OUTPUT)
        rng = random.Random(f"user {number}")
        ids = [[rng.randrange(256) for _ in range(prompt)] for _ in range(rounds)]
        return [await self._one(NanoRequest(prompt_ids, output)) for prompt_ids in ids]

    async def _all(self, requests: Iterable[NanoRequest]) -> list[Timeline]:
        return await asyncio.gather(*(self._one(request) for request in requests))

    async def _one(self, request: NanoRequest) -> Timeline:
        self._number += 1
        params = SamplingParams(temperature=NANO_TEMPERATURE, max_tokens=request.output, ignore_eos=True)
        sent, came, tokens = time.perf_counter(), [], []
        stream = self.driver.generate(Request(f"gpu-check-{self._number}", request.prompt, params))
        try:
            async for output in stream:
                came.append(time.perf_counter())
                tokens.append(sum(len(part.token_ids) for part in output.outputs))
        finally:
            stream.close()
        return Timeline(sent, came, tokens)

    async def _watch(self, waste: Waste) -> None:
        while True:
            await asyncio.sleep(0.01 if self.setting.tiny else SAMPLE_SECONDS)
            waste.look(self.driver)


def percentile(values: list[float], percent: float) -> float:
    """The least value that `percent` % of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
