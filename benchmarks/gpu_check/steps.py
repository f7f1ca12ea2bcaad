"""Decode, prefill and mixed steps of both models, straight through the ModelRunner: the Worker without the Driver.

Every figure is a case of its own on keys and values that were never computed: the cache is filled with random numbers,
and sequences arrive with all tokens but the last computed. So decode figures need the decode kernels alone, and a fault
in one kernel costs the figures of that kernel. Plans are launched as the Worker launches them, the next one before the
result of the last one is awaited, and a step's time is the time between two results.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise

import torch

from benchmarks.gpu_check.bounds import Bounds
from benchmarks.gpu_check.datasheets import find_limits
from benchmarks.gpu_check.fabricated import Fabricated, load_bare
from benchmarks.gpu_check.names import LLAMA, QWEN
from benchmarks.gpu_check.operators import Rows, step_operators
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.profile import profile_steps
from benchmarks.gpu_check.record import Goal, Recorder, at_least
from benchmarks.gpu_check.shapes import write_model
from benchmarks.gpu_check.timing import pick_device, synchronize
from engine.executor.step import NewSequence, SequenceStep, StepPlan
from engine.worker.model_runner import LaunchedStep
from kernels.quantized.linear import FEW_ROWS
from kernels.quantized.scaled_matmul import multiplies_in_8_bits

CONTEXT, BATCHES, MORE_BATCHES = 1024, (1, 64, 256, 16), (24, 32, 48)
SHARED_CONTEXT, SHARED = 4096, 3584  # of sequences with a common prefix
LONG = 32768  # beside 63 sequences of CONTEXT, and the context of a short chunk
PREFILLS, SHORT_CHUNK = (1024, 8192, 32768), 32
MIXED = {LLAMA: (64, 512), QWEN: (100, 200)}  # decodes, and tokens of a prompt in the same step
PROFILED = (1, 64, 256)
WARM_UP, STEPS, HOST_STEPS, PREFILL_RUNS = 8, 40, 10, 3
TINY_CONTEXT, TINY_LONG, TINY_BATCHES, TINY_PREFILLS, TINY_SHORT = 32, 96, (1, 3), (24, 70), 4
TINY_MIXED, TINY_PROFILED, TINY_SHARED = (3, 8), (1,), 64
TINY_WARM_UP, TINY_STEPS, TINY_HOST_STEPS = 2, 4, 2
# The bound of totals counts at batch 1. In larger batches products wait for arithmetic while attention waits for memory
# and they do not overlap, so the goal counts against the sum of the operators' own floors.
GOALS = {(LLAMA, 1): ("bound", 0.85), (LLAMA, 64): ("floor", 0.80), (LLAMA, 256): ("floor", 0.80)}
BYTES = {"int4": 4.5 / 8, "int8": 1.0, "fp8": 1.0, "w8a8": 1.0}  # of a number with its part of the scales
IN_8_BITS = {"fp8": torch.float8_e4m3fn, "w8a8": torch.int8}  # codes that a card may multiply with inputs of their kind
LOAD_SECONDS, CASE_SECONDS = 60.0, 15.0


def run_decode(recorder: Recorder, setting: Setting) -> None:
    """The model with goals first, and its batches with goals before others and before profiles."""
    for name in (LLAMA, QWEN):
        with_model(name, recorder, setting, decode_cases)


def run_prefill(recorder: Recorder, setting: Setting) -> None:
    for name in (LLAMA, QWEN):
        with_model(name, recorder, setting, prefill_cases)


Cases = Callable[["Steps"], Iterator[tuple[str, Callable[[], None]]]]


def with_model(name: str, recorder: Recorder, setting: Setting, cases: Cases, quantization: str | None = None) -> None:
    """Run the cases of one model. A process that goes on behind a fault loads it again in its first case."""
    device = pick_device(setting.tiny)
    steps = Steps(name, recorder, setting, device, quantization)
    name, planned = steps.name, list(cases(steps))
    if all(recorder.is_done(f"{name}: {case}") for case, _ in planned):
        return
    recorder.case(f"{name}: load", steps.load, seconds=LOAD_SECONDS)
    for case, measure in planned:
        seconds = CASE_SECONDS if steps.loaded else LOAD_SECONDS
        recorder.case(f"{name}: {case}", partial(steps.fresh, measure), seconds=seconds)
    del steps, planned, case, measure  # the cases hold the model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def decode_cases(steps: "Steps") -> Iterator[tuple[str, Callable[[], None]]]:
    """Batches of one length, one long sequence among short ones, sequences with a common prefix, then where the time of
    a step goes."""
    tiny = steps.setting.tiny
    context, long = (TINY_CONTEXT, TINY_LONG) if tiny else (CONTEXT, LONG)
    batches = TINY_BATCHES if tiny else (*BATCHES, *(MORE_BATCHES if steps.name == LLAMA else ()))
    for batch in batches:
        yield f"decode {batch} x {context}", partial(steps.decode, {context: batch})
    many = batches[-1] if tiny else 64
    yield f"decode {many - 1} x {context} + 1 x {long}", partial(steps.decode, {context: many - 1, long: 1})
    context, shared = (TINY_LONG, TINY_SHARED) if tiny else (SHARED_CONTEXT, SHARED)
    yield f"decode {many} x {context}, {shared} shared", partial(steps.decode, {context: many}, shared)
    context = TINY_CONTEXT if tiny else CONTEXT
    for batch in TINY_PROFILED if tiny else PROFILED:
        yield f"profile, decode {batch}", partial(steps.profile, context, batch)


def prefill_cases(steps: "Steps") -> Iterator[tuple[str, Callable[[], None]]]:
    """Whole prompts, a short chunk behind a long context, and decodes with a prompt in the same step."""
    tiny = steps.setting.tiny
    for length in TINY_PREFILLS if tiny else PREFILLS:
        yield f"prefill {length}", partial(steps.prefill, length, 0)
    new, context = (TINY_SHORT, TINY_LONG) if tiny else (SHORT_CHUNK, LONG)
    yield f"prefill {new} of {context}", partial(steps.prefill, new, context - new)
    decodes, prompt = TINY_MIXED if tiny else MIXED[steps.model_name]
    context = TINY_CONTEXT if tiny else CONTEXT
    yield f"mixed {decodes} x {context} + {prompt}", partial(steps.mixed, decodes, context, prompt)


class Steps:
    """The steps of one model, which the first of them loads. A load that failed fails every later step at once."""

    def __init__(
        self, name: str, recorder: Recorder, setting: Setting, device: torch.device, quantization: str | None = None
    ) -> None:
        self.model_name, self.quantization = name, quantization
        self.name = f"{name} {quantization}" if quantization else name
        self.recorder, self.setting, self.device = recorder, setting, device
        self.loaded = False
        self._sequences: Fabricated | None = None
        self._error = ""

    def fresh(self, measure: Callable[[], None]) -> None:
        """Run one measurement on a loaded model without sequences."""
        if self._error:
            raise RuntimeError(f"the model was not loaded: {self._error}")
        if self._sequences is None:
            try:
                self.load()
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
                raise
        try:
            measure()
        finally:
            self.sequences.forget()

    @property
    def sequences(self) -> Fabricated:
        assert self._sequences is not None, "fresh loads the model"
        return self._sequences

    def load(self) -> None:
        """Load with the kernels of linear layers chosen by timing; if a process failed at that, with cuBLAS alone."""
        choose = not self.recorder.has_failed(f"{self.name}: load")
        folder = write_model(self.model_name, self.setting.folder, self.setting.tiny)
        started = time.perf_counter()
        tokens = (max(BATCHES) * (CONTEXT + 256)) if not self.setting.tiny else 1024
        bare = load_bare(folder, self.device, tokens, choose=choose, quantization=self.quantization)
        self._sequences = Fabricated(bare, self.device)
        self.loaded = True
        limits, quantized = find_limits(self.setting, self.recorder), BYTES.get(self.quantization or "")
        codes = IN_8_BITS.get(self.quantization or "")
        eight_bits = FEW_ROWS + 1 if codes is not None and multiplies_in_8_bits(codes, self.device) else None
        self.bounds = Bounds(self.sequences.model, limits, quantized_bytes=quantized, eight_bits_from=eight_bits)
        chosen = self.sequences.bare.chosen_kernels()
        self.recorder.figure(f"{self.name}: load", time.perf_counter() - started, "s", chosen=chosen)

    def decode(self, lengths: dict[int, int], shared: int = 0) -> None:
        """`lengths`: how many sequences of each context, which all begin with the same `shared` tokens. The time of a
        step, then the host's part of it."""
        tiny = self.setting.tiny
        warm_up, steps, host_steps = (
            (TINY_WARM_UP, TINY_STEPS, TINY_HOST_STEPS) if tiny else (WARM_UP, STEPS, HOST_STEPS)
        )
        batch, label = sum(lengths.values()), " + ".join(f"{count} x {context}" for context, count in lengths.items())
        label += f", {shared} shared" if shared else ""
        seq_ids = self._arrive(lengths, warm_up + steps + host_steps + 4, shared)
        self._run_decodes(seq_ids, warm_up)
        before = self._rows(seq_ids)
        intervals = self._run_decodes(seq_ids, steps)
        seconds = statistics.median(intervals)
        read_once = shared - shared / batch
        rows = [Rows(1, 1, (first.context + last.context) / 2 - read_once)
                for first, last in zip(before, self._rows(seq_ids), strict=True)]  # fmt: skip
        bound, floor = self.bounds.step_seconds(rows), self.bounds.floor_seconds(rows)
        of, goal = ("bound", None) if self.quantization or shared else self._goal(batch, lengths)
        self.recorder.figure(
            f"{self.name}: decode {label}", seconds * 1e3, "ms/step",
            share=(floor if of == "floor" else bound) / seconds, of=of, goal=goal,
            tokens_per_second=batch / seconds, share_of_bound=bound / seconds,
            share_of_floor=floor / seconds, floors_us=self._floors(rows), slowest_ms=max(intervals) * 1e3,
            graph=self.sequences.bare.uses_graph(batch),
        )  # fmt: skip
        host = statistics.median(self._host_seconds(self._decode_plan(seq_ids))[0] for _ in range(host_steps))
        if len(lengths) == 1 and not shared:
            self.recorder.figure(f"{self.name}: host time of a step, {batch} sequences", host * 1e3, "ms")

    def _goal(self, batch: int, lengths: dict[int, int]) -> tuple[str, Goal | None]:
        of, share = GOALS.get((self.name, batch), ("bound", 0.0))
        return (of, at_least(share, on="share")) if share and len(lengths) == 1 else ("bound", None)

    def _floors(self, rows: list[Rows]) -> dict[str, float]:
        """Microseconds that the products and the attention of a step take at least, by the profile's names."""
        floors = {"GEMM": 0.0, "attention": 0.0}
        for operator in self.bounds.operators(rows):
            if operator.kind != "row":
                kind = "GEMM" if operator.kind == "gemm" else "attention"
                floors[kind] += operator.floor(self.bounds.limits.bandwidth, self.bounds.limits.rate) * 1e6
        return floors

    def profile(self, context: int, batch: int) -> None:
        """Kernels of a decode step by kind."""
        seq_ids = self._arrive({context: batch}, WARM_UP + 16)
        rows = profile_steps(partial(self._run_decodes, seq_ids), self.device)
        for row in rows:
            self.recorder.figure(f"{self.name}: {row.name}, decode {batch}", row.microseconds, "us/step",
                                 share=row.share, of="step", launches=row.launches)  # fmt: skip
        if not rows:
            self.recorder.skip(f"{self.name}: profile, decode {batch}", "the profiler saw nothing of the device")

    def prefill(self, new: int, cached: int) -> None:
        """The time of one prompt alone, in as many steps as max_num_batched_tokens makes of it: the best TTFT."""
        sequences, length = self.sequences, cached + new
        name = f"{self.name}: prefill {new}{f' of {length}' if cached else ''}"
        times = []
        for _ in range(PREFILL_RUNS + 1):  # the first compiles
            seq_id, arriving = sequences.arrive(length, cached, room=1)
            started = time.perf_counter()
            self._run_plans(self._prefill_plans(seq_id, arriving, new))
            times.append(time.perf_counter() - started)
            sequences.forget()
            sequences.bare.record_mixed(new, 1)  # as a server does, where the step is small enough for a graph
        seconds = statistics.median(times[1:])
        rows = [Rows(1, new, length)]
        flops = sum(operator.flops for operator in step_operators(self.bounds.model, rows))
        self.recorder.figure(
            name, seconds * 1e3, "ms", share=self.bounds.step_seconds(rows) / seconds, of="bound",
            teraflops=flops / seconds / 1e12, tokens_per_second=new / seconds, all_ms=[t * 1e3 for t in times],
            graph=sequences.bare.uses_mixed_graph(new, 1), share_of_floor=self.bounds.floor_seconds(rows) / seconds,
        )  # fmt: skip

    def mixed(self, decodes: int, context: int, prompt: int) -> None:
        """Decodes with a whole prompt in each step; a new prompt each time, the last one leaves."""
        tiny = self.setting.tiny
        warm_up, steps, host_steps = (
            (TINY_WARM_UP, TINY_STEPS, TINY_HOST_STEPS) if tiny else (WARM_UP, STEPS // 2, HOST_STEPS)
        )
        seq_ids = self._arrive({context: decodes}, warm_up + steps + host_steps + 4)
        plans = self._mixed_plans(seq_ids, prompt)
        self._run_plans([next(plans)])
        self.sequences.bare.record_mixed(decodes + prompt, decodes + 1)
        self._run_plans(next(plans) for _ in range(warm_up))
        seconds = statistics.median(self._run_plans(next(plans) for _ in range(steps)))
        rows = [Rows(decodes, 1, context + warm_up + steps / 2), Rows(1, prompt, prompt)]
        name = f"{self.name}: mixed {decodes} x {context} + {prompt}"
        self.recorder.figure(
            name, seconds * 1e3, "ms/step", share=self.bounds.step_seconds(rows) / seconds, of="bound",
            share_of_floor=self.bounds.floor_seconds(rows) / seconds,
            tokens_per_second=(decodes + prompt) / seconds,
            graph=self.sequences.bare.uses_mixed_graph(decodes + prompt, decodes + 1),
        )  # fmt: skip
        hosts = [self._host_seconds(next(plans)) for _ in range(host_steps)]
        self.recorder.figure(f"{name}: host time", statistics.median(total for total, _ in hosts) * 1e3, "ms")
        self.recorder.figure(
            f"{name}: host time to launch", statistics.median(launch for _, launch in hosts) * 1e3, "ms"
        )

    def _arrive(self, lengths: dict[int, int], room: int, shared: int = 0) -> list[int]:
        """Sequences with all tokens but the last computed, brought by one step that decodes them all; see decode."""
        sequences, arriving = self.sequences, list[NewSequence]()
        for context, count in lengths.items():
            for _ in range(count):
                prefix = arriving[0].block_ids[: shared // sequences.bare.block_size] if arriving else []
                arriving.append(sequences.arrive(context, context - 1, room, prefix)[1])
        seq_ids = [new.seq_id for new in arriving]
        plan = StepPlan(sequences.next_step(), sequences.take_removed(), arriving, [], [], decodes=seq_ids)
        self._run_plans([plan])
        sequences.bare.record(len(seq_ids))
        return seq_ids

    def _rows(self, seq_ids: list[int]) -> list[Rows]:
        return [Rows(1, 1, self.sequences.num_tokens[seq_id]) for seq_id in seq_ids]

    def _run_decodes(self, seq_ids: list[int], count: int) -> list[float]:
        """`count` decode steps; seconds between their results."""
        return self._run_plans(self._decode_plan(seq_ids) for _ in range(count))

    def _run_plans(self, plans: Iterable[StepPlan]) -> list[float]:
        runner = self.sequences.bare.runner
        ends, launched = [time.perf_counter()], deque[LaunchedStep]()
        for plan in plans:
            launched.append(runner.launch(plan))
            if len(launched) == runner.max_in_flight:
                self._result(launched.popleft())
                ends.append(time.perf_counter())
        for step in launched:
            self._result(step)
            ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends[1:])] or [ends[-1] - ends[0]]

    def _host_seconds(self, plan: StepPlan) -> tuple[float, float]:
        """(the Worker's own seconds in one step, from the plan to the result without the wait; those of the launch).

        On a CPU both include the computation.
        """
        runner = self.sequences.bare.runner
        synchronize(self.device)
        started = time.perf_counter()
        step = runner.launch(plan)
        launched = time.perf_counter()
        synchronize(self.device)
        waited = time.perf_counter()
        self._result(step)
        return time.perf_counter() - waited + launched - started, launched - started

    def _prefill_plans(self, seq_id: int, arriving: object, new: int) -> Iterator[StepPlan]:
        """Steps of at most max_num_batched_tokens."""
        sequences, most, left = self.sequences, self.sequences.bare.max_num_batched_tokens, new
        while left:
            count = min(left, most)
            left -= count
            first = [arriving] if left + count == new else []
            yield StepPlan(sequences.next_step(), sequences.take_removed(), first, [],
                           [SequenceStep(seq_id, count, left == 0, [])])  # fmt: skip

    def _mixed_plans(self, seq_ids: list[int], prompt: int) -> Iterator[StepPlan]:
        sequences, last = self.sequences, -1
        while True:
            if last >= 0:
                sequences.remove(last)
            last, arriving = sequences.arrive(prompt, 0, room=1)
            sequences.count(seq_ids)
            yield StepPlan(sequences.next_step(), sequences.take_removed(), [arriving], [],
                           [SequenceStep(last, prompt, True, [])], decodes=seq_ids)  # fmt: skip

    def _decode_plan(self, seq_ids: list[int]) -> StepPlan:
        self.sequences.count(seq_ids)
        return StepPlan(self.sequences.next_step(), self.sequences.take_removed(), [], [], [], decodes=seq_ids)

    def _result(self, step: LaunchedStep) -> None:
        """Also raises where a sequence could not be sampled: NaN would be fast and mean nothing."""
        result = self.sequences.bare.runner.result(step)
        if result.failed:
            raise RuntimeError(f"{len(result.failed)} sequences failed: {next(iter(result.failed.values()))}")
