"""Decode and prefill steps of both models, straight through the ModelRunner: what the Worker does, without the Driver.

The sequences are prefilled for real. Plans are launched as the Worker launches them, the next one before the result of
the last one is awaited, and a step's time is the time between two results.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from benchmarks.gpu_check import swaps
from benchmarks.gpu_check.bounds import Bounds, Limits
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.profile import profile_steps
from benchmarks.gpu_check.record import Goal, Recorder, at_least
from benchmarks.gpu_check.shapes import LLAMA, QWEN, write_model
from benchmarks.gpu_check.timing import pick_device, synchronize
from engine.config import EngineConfig
from engine.executor.step import NewSequence, SequenceStep, StepPlan, WorkerReady
from engine.models.config import ModelConfig
from engine.models.families import read_model_config
from engine.sampling_params import SamplingParams
from engine.worker.load import load_runner
from engine.worker.model_runner import LaunchedStep, ModelRunner

BATCHES, CONTEXT, PREFILLS = (1, 16, 64, 256), 1024, (1024, 8192, 32768)
TINY_BATCHES, TINY_CONTEXT, TINY_PREFILLS = (1, 3), 32, (24, 70)
WARM_UP, STEPS, HOST_STEPS, PREFILL_RUNS = 8, 40, 10, 3
TINY_WARM_UP, TINY_STEPS, TINY_HOST_STEPS = 2, 4, 2
PROFILED_BATCHES = (1, 64)
GOALS = {(LLAMA, 1): 0.85, (LLAMA, 64): 0.80, (LLAMA, 256): 0.80}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def run(recorder: Recorder, setting: Setting) -> None:
    """The model with goals first. Swaps last: host memory that they register with the driver stays registered, and
    what the allocator puts there later would be read from pages that are gone."""
    device = pick_device(setting.tiny)
    for name in (LLAMA, QWEN):
        recorder.case(f"{name}: all steps", partial(measure_model, name, recorder, setting, device), seconds=100)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    swaps.run(recorder, device, setting.tiny)


def measure_model(name: str, recorder: Recorder, setting: Setting, device: torch.device) -> None:
    """Load with random weights and default settings, then every size. Ends early, and says so, where memory does."""
    folder = write_model(name, setting.folder, setting.tiny)
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16", device=device.type,
                          num_blocks=64 if setting.tiny else None)  # fmt: skip
    started = time.perf_counter()
    runner, ready = load_runner(config, folder, [], lambda phase: print(f"  {phase}", flush=True))
    recorder.figure(f"{name}: load, profile and warm up", time.perf_counter() - started, "s", memory=ready.memory)
    model = read_model_config(folder)
    bounds = Bounds(model, Limits.read(setting.folder / "limits.json"))

    steps = Steps(
        name=name,
        runner=runner,
        ready=ready,
        model=model,
        bounds=bounds,
        recorder=recorder,
        setting=setting,
        device=device,
        block_size=config.block_size,
        free=list(range(ready.num_blocks)),
    )
    recorder.case(f"{name}: prefill", steps.prefills, seconds=60)
    recorder.case(f"{name}: decode", steps.decodes, seconds=90)
    recorder.case(f"{name}: profile", steps.profiles, seconds=40)


def _batches(setting: Setting) -> tuple[int, ...]:
    return TINY_BATCHES if setting.tiny else BATCHES


@dataclass
class Steps:
    """One loaded model. Block ids are given out here, as the Driver's block manager would."""

    name: str
    runner: ModelRunner
    ready: WorkerReady
    model: ModelConfig
    bounds: Bounds
    recorder: Recorder
    setting: Setting
    device: torch.device
    block_size: int
    free: list[int]  # block ids
    next_id: int = 0
    step_id: int = 0
    held: dict[int, list[int]] = field(default_factory=dict)  # blocks by seq_id
    num_tokens: dict[int, int] = field(default_factory=dict)  # cached, by seq_id
    decoding: list[int] = field(default_factory=list)  # seq_ids

    def prefills(self) -> None:
        """The time of one prompt alone, in as many steps as max_num_batched_tokens makes of it: the best TTFT."""
        for length in TINY_PREFILLS if self.setting.tiny else PREFILLS:
            if length + 1 > self.ready.max_model_len:
                self.recorder.skip(f"{self.name}: prefill {length}", f"max_model_len is {self.ready.max_model_len}")
                continue
            times = []
            for _ in range(PREFILL_RUNS + 1):  # the first compiles
                started = time.perf_counter()
                seq_id = self._prefill([length])[0]
                times.append(time.perf_counter() - started)
                self._remove([seq_id])
            seconds = statistics.median(times[1:])
            flops = self.bounds.prefill_flops(length)
            self.recorder.figure(
                f"{self.name}: prefill {length}", seconds * 1e3, "ms",
                share=self.bounds.prefill_seconds(length) / seconds, of="bound",
                teraflops=flops / seconds / 1e12, tokens_per_second=length / seconds, all_ms=[t * 1e3 for t in times],
            )  # fmt: skip

    def decodes(self) -> None:
        """Sequences of 1k tokens, all prefilled once; each batch is some of them."""
        context = TINY_CONTEXT if self.setting.tiny else CONTEXT
        batches = _batches(self.setting)
        room = context + len(batches) * (WARM_UP + STEPS + HOST_STEPS + 8)
        fits = min(max(batches), self.ready.max_num_seqs, len(self.free) // -(-room // self.block_size))
        started = time.perf_counter()
        seq_ids = self.decoding = self._prefill([context] * fits, room)
        seconds = time.perf_counter() - started
        self.recorder.figure(f"{self.name}: prefill {fits} x {context}", fits * context / seconds, "tok/s",
                             share=fits * self.bounds.prefill_seconds(context) / seconds, of="bound")  # fmt: skip
        for batch in batches:
            if batch > fits:
                self.recorder.skip(f"{self.name}: decode {batch} x {context}", f"the KV cache holds {fits} of them")
                continue
            self._decode(seq_ids[:batch], context)

    def profiles(self) -> None:
        """Profile steps of the sequences that `decodes` left."""
        for batch in PROFILED_BATCHES:
            if batch <= len(self.decoding):
                self._profile(self.decoding[:batch])

    def _decode(self, seq_ids: list[int], context: int) -> None:
        tiny, batch = self.setting.tiny, len(seq_ids)
        self._run_pipelined(seq_ids, TINY_WARM_UP if tiny else WARM_UP)
        cached = self._cached_tokens(seq_ids)
        intervals = self._run_pipelined(seq_ids, TINY_STEPS if tiny else STEPS)
        seconds, cached = statistics.median(intervals), (cached + self._cached_tokens(seq_ids)) / 2
        name = f"{self.name}: decode {batch} x {context}"
        self.recorder.figure(
            name, seconds * 1e3, "ms/step", share=self.bounds.decode_seconds(batch, cached) / seconds, of="bound",
            goal=self._goal(batch), tokens_per_second=batch / seconds, cached_tokens=cached,
            bytes=self.bounds.decode_bytes(batch, cached), slowest_ms=max(intervals) * 1e3,
        )  # fmt: skip
        host = statistics.median(self._host_seconds(seq_ids) for _ in range(TINY_HOST_STEPS if tiny else HOST_STEPS))
        self.recorder.figure(f"{self.name}: host time of a step, {batch} sequences", host * 1e3, "ms")

    def _goal(self, batch: int) -> Goal | None:
        share = GOALS.get((self.name, batch))
        return at_least(share, on="share") if share else None

    def _profile(self, seq_ids: list[int]) -> None:
        rows = profile_steps(partial(self._run_pipelined, seq_ids), self.device)
        for row in rows:
            self.recorder.figure(f"{self.name}: {row.name}, decode {len(seq_ids)}", row.microseconds, "us/step",
                                 share=row.share, of="step", launches=row.launches)  # fmt: skip
        if not rows:
            self.recorder.skip(f"{self.name}: profile, decode {len(seq_ids)}", "the profiler saw nothing of the device")

    def _run_pipelined(self, seq_ids: list[int], count: int) -> list[float]:
        """`count` decode steps; seconds between their results."""
        return self._run_plans(self._decode_plan(seq_ids) for _ in range(count))

    def _run_plans(self, plans: Iterable[StepPlan]) -> list[float]:
        ends, launched = [time.perf_counter()], deque[LaunchedStep]()
        for plan in plans:
            launched.append(self.runner.launch(plan))
            if len(launched) == self.runner.max_in_flight:
                self._result(launched.popleft())
                ends.append(time.perf_counter())
        for step in launched:
            self._result(step)
            ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends[1:])] or [ends[-1] - ends[0]]

    def _host_seconds(self, seq_ids: list[int]) -> float:
        """Seconds of the Worker's own code in one step, from the plan to the result, without the wait for the device.

        On a CPU the figure includes the computation.
        """
        synchronize(self.device)
        started = time.perf_counter()
        step = self.runner.launch(self._decode_plan(seq_ids))
        launched = time.perf_counter()
        synchronize(self.device)
        waited = time.perf_counter()
        self._result(step)
        return time.perf_counter() - waited + launched - started

    def _prefill(self, lengths: list[int], room: int = 0) -> list[int]:
        """New sequences of random ids, their prompts computed in full steps. `room`: tokens to give blocks to."""
        generator = torch.Generator().manual_seed(self.next_id)
        new = []
        for length in lengths:
            ids = torch.randint(self.model.vocab_size, (length,), generator=generator).tolist()
            blocks = self._take_blocks(-(-max(length + 1, room) // self.block_size))
            new.append(
                NewSequence(
                    seq_id=self.next_id,
                    token_ids=ids,
                    num_prompt_tokens=length,
                    num_computed_tokens=0,
                    block_ids=blocks,
                    params=GREEDY,
                    seed=self.next_id,
                )
            )
            self.held[self.next_id], self.num_tokens[self.next_id] = blocks, length
            self.next_id += 1
        self._run_plans(self._prefill_plans(new))
        return [sequence.seq_id for sequence in new]

    def _prefill_plans(self, new: list[NewSequence]) -> Iterator[StepPlan]:
        waiting = {sequence.seq_id: sequence for sequence in new}
        for steps in self._chunks({sequence.seq_id: len(sequence.token_ids) for sequence in new}):
            arriving = [waiting.pop(step.seq_id) for step in steps if step.seq_id in waiting]
            yield StepPlan(self._next_step(), [], arriving, [], steps)

    def _chunks(self, remaining: dict[int, int]) -> Iterator[list[SequenceStep]]:
        """Steps of at most max_num_batched_tokens, in order; a prompt that does not fit goes on in the next."""
        steps, left = [], self.ready.max_num_batched_tokens
        for seq_id, tokens in remaining.items():
            while tokens:
                count = min(tokens, left)
                tokens, left = tokens - count, left - count
                steps.append(SequenceStep(seq_id, count, tokens == 0, []))
                if not left:
                    yield steps
                    steps, left = [], self.ready.max_num_batched_tokens
        if steps:
            yield steps

    def _take_blocks(self, count: int) -> list[int]:
        if count > len(self.free):
            raise RuntimeError(f"the KV cache has {len(self.free)} free blocks, {count} are needed")
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _remove(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.free += self.held.pop(seq_id)
            del self.num_tokens[seq_id]
        self._result(self.runner.launch(StepPlan(self._next_step(), seq_ids, [], [], [])))

    def _decode_plan(self, seq_ids: list[int]) -> StepPlan:
        for seq_id in seq_ids:
            self.num_tokens[seq_id] += 1
        return decode_plan(self._next_step(), seq_ids)

    def _next_step(self) -> int:
        self.step_id += 1
        return self.step_id

    def _result(self, step: LaunchedStep) -> None:
        """Also raises where a sequence could not be sampled: NaN would be fast and mean nothing."""
        result = self.runner.result(step)
        if result.failed:
            raise RuntimeError(f"{len(result.failed)} sequences failed: {next(iter(result.failed.values()))}")

    def _cached_tokens(self, seq_ids: list[int]) -> int:
        return sum(self.num_tokens[seq_id] for seq_id in seq_ids)


def decode_plan(step_id: int, seq_ids: list[int]) -> StepPlan:
    """One token of each, as the Driver writes it: a column where the step language has one (a graph runs those)."""
    if "decodes" in StepPlan.__struct_fields__:
        return StepPlan(step_id, [], [], [], [], decodes=seq_ids)
    return StepPlan(step_id, [], [], [], [SequenceStep(seq_id, 1, True, []) for seq_id in seq_ids])
