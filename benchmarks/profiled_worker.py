"""The Worker process, with a log of its steps and kernels: python -m benchmarks.profiled_worker LOG FD.

When the Driver leaves, the Worker writes a Profile as JSON to the file LOG. Kernels that Python starts are timed as
they run. Those of a recorded program (kernels/cpu/program.py) run in one call, which is timed as a whole. After step
REPLAY_STEP of a program of decodes, or the only step of a program with prompts, while its inputs are still in place, it
is run kernel by kernel, in order, so that each reads its weights, keys and values from memory as in a step. Tokens may
differ afterwards: the times count.
"""

import ctypes
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.executor.step import StartWorker, StepPlan, StepResult
from engine.worker import worker
from engine.worker.device.host import set_threads
from engine.worker.worker import Channel

if TYPE_CHECKING:
    from engine.worker.model_runner import LaunchedStep, ModelRunner

REPLAYS, PROMPT_REPLAYS = 15, 3  # with prompts
REPLAY_STEP = 32  # about the middle of an answer of 64 tokens, so that contexts have their usual length
# Bytes of a number of a key and the same number of its value, without the parameters of rows.
KV_BYTES = {"bf16": 4, "f32": 8, "int8": 2, "fp8": 2, "int4": 1}


class Operator(msgspec.Struct):
    """All calls of a kernel with one shape in a step. bytes and flops: of these calls, 0 where they are not counted
    (only linear layers and attention over the cache are)."""

    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0

    def add(self, seconds: float, work: tuple[int, int]) -> None:
        self.calls += 1
        self.seconds += seconds
        self.bytes += work[0]
        self.flops += work[1]


class ProfiledStep(msgspec.Struct):
    """One step. launched, ended: by time.perf_counter(), which Linux processes share; ended once the result is made."""

    launched: float
    num_decodes: int
    num_tokens: int
    ended: float = 0.0
    program: int | None = None  # key of Profile.programs
    program_seconds: float = 0.0
    operators: dict[str, Operator] = {}  # outside the program

    @property
    def kernel_seconds(self) -> float:
        return self.program_seconds + sum(operator.seconds for operator in self.operators.values())


class Profile(msgspec.Struct):
    """The log. programs: the operators of each that was replayed one by one."""

    steps: list[ProfiledStep] = []
    programs: dict[int, dict[str, Operator]] = {}


def describe(kernel: Any, packed: Any) -> tuple[str, tuple[int, int]]:
    """(name and shape of a kernel call, (bytes of weights or of keys and values, flops)). packed: its arguments."""
    from kernels.cpu.linear.floats import DTYPES
    from kernels.cpu.quantized.scales import BYTES, COLUMNS
    from kernels.cpu.quantized.words import PAIR_WORDS

    name, a = kernel.fn.__name__.lstrip("_"), kernel.pack.__self__.unpack(packed[: kernel.pack.__self__.size])
    if name == "linear":
        rows, words, outputs = a[6], a[8], a[9]
        prefix, matrices = _matrices_read(a[12])
        name = prefix + ("linear and gate" if a[13] >= 0 else name)
        return f"{name} {2 * words} -> {outputs}", (matrices * 4 * words * outputs, 4 * rows * words * outputs)
    if name == "float_linear":
        rows, inputs, outputs = a[6], a[8], a[9]
        return f"{name} {inputs} -> {outputs}", (inputs * outputs * DTYPES[a[12]].itemsize, 2 * rows * inputs * outputs)
    if name == "compressed_linear":
        rows, words, outputs = a[10], a[12], a[13]
        prefix, matrices = _matrices_read(a[16])
        name = prefix + ("compressed linear and gate" if a[17] >= 0 else "compressed linear")
        return f"{name} {2 * words} -> {outputs}", (matrices * 3 * words * outputs, 4 * rows * words * outputs)
    if name == "code_linear":
        rows, words, outputs, kind, form, groups = a[9], a[11], a[12], a[13], a[15], a[16]
        prefix, matrices = _matrices_read(a[22])
        parameters = int(outputs * groups * BYTES[form] * (2 if a[8] else 1))
        return f"{prefix}{name} {2 * words} -> {outputs}", (
            matrices * (4 * words * outputs * PAIR_WORDS[kind] // COLUMNS + parameters),
            4 * rows * words * outputs,
        )
    if name == "w8a8_linear":
        rows, quads, outputs = a[7], a[9], a[10]
        prefix, matrices = _matrices_read(a[14])
        name = prefix + ("w8a8_linear and gate" if a[16] >= 0 else name)
        return f"{name} {4 * quads} -> {outputs}", (matrices * 4 * quads * outputs, 8 * rows * quads * outputs)
    if name == "code_linear_f32":
        rows, words, outputs, kind, form, groups = a[9], a[11], a[12], a[13], a[15], a[16]
        parameters = int(outputs * groups * BYTES[form] * (2 if a[8] else 1))
        read = 4 * words * outputs * PAIR_WORDS[kind] // COLUMNS + parameters
        return f"{name} {2 * words} -> {outputs}", (read, 4 * rows * words * outputs)
    if name in ("attention_bf16", "attention_pairs_bf16", "attention_f32"):
        num_seqs, _ = _counts(a[26]) or (a[19], 0)
        keys = sum((ctypes.c_int32 * num_seqs).from_address(a[17])) * a[8] * a[11]  # numbers in the keys of all
        return name, (2 * keys * (2 if name.endswith("bf16") else 4), 4 * keys * a[9])
    if name.startswith("prefill_"):  # a row sees itself and the tokens before it in its sequence, or in its window
        first, num_seqs = _counts(a[26]) or (0, a[16])
        lengths, starts = (list((ctypes.c_int32 * (num_seqs + extra)).from_address(a[14 + extra])) for extra in (0, 1))
        lengths, starts, pairs = lengths[first:], starts[first:], 0
        for length, (start, end) in zip(lengths, itertools.pairwise(starts), strict=True):
            pairs += sum(min(seen, a[21] or seen) for seen in range(length - (end - start) + 1, length + 1))
        return name, (KV_BYTES[name.rsplit("_", 1)[1]] * sum(lengths) * a[7] * a[10], 4 * pairs * a[7] * a[8] * a[10])
    return name, (0, 0)


def _counts(address: int) -> tuple[int, int] | None:
    """(sequences of one row, all sequences) of a program that serves steps of any number of them; None elsewhere."""
    return tuple((ctypes.c_int64 * 2).from_address(address)) if address else None  # type: ignore[return-value]


def _matrices_read(table: int) -> tuple[str, int]:
    """(prefix of the name, number of matrices) of a linear layer. table: address of the table of experts whose rows it
    multiplies (kernels/cpu/linear/places.py), or 0."""
    return ("grouped ", ctypes.c_int64.from_address(table + 8).value) if table else ("", 1)


class StepProfiler:
    """Logs the steps of a runner on a CPU. It takes the place of the runner's `launch` and `result`, and of the calls
    of kernels and programs."""

    def __init__(self, profile: Profile) -> None:
        """Make it before the model is loaded: loading records programs."""
        from kernels.cpu import parallel, program  # imports torch

        self.profile = profile
        self._is_recording = parallel.is_recording
        self._keys = itertools.count()
        self._programs: dict[int, tuple[int, list[tuple[Any, Any]]]] = {}  # by id: key, kernel calls
        self._runs: Counter[int] = Counter()  # by key
        self._latest: Any = None  # the program of the last step, which owns what its kernels read
        self._wrap(parallel.ParallelKernel, "__call__", self._call_kernel)
        self._wrap(program.Program, "__init__", self._new_program)
        self._wrap(program.Program, "__call__", self._call_program)

    def attach(self, runner: "ModelRunner") -> None:
        """Log the steps of `runner`."""
        self._launch, self._result = runner.launch, runner.result
        runner.launch, runner.result = self.launch, self.result  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> "LaunchedStep":
        self.profile.steps.append(ProfiledStep(time.perf_counter(), len(plan.decodes), plan.num_tokens))
        return self._launch(plan)

    def result(self, step: "LaunchedStep") -> StepResult:
        result = self._result(step)
        self.profile.steps[-1].ended = time.perf_counter()
        last = self.profile.steps[-1]
        if last.program is not None and last.num_tokens > last.num_decodes:
            self._replay(last.program, PROMPT_REPLAYS)
        elif last.program is not None and self._runs[last.program] == REPLAY_STEP:
            self._replay(last.program, REPLAYS)
        return result

    def _replay(self, key: int, times: int) -> None:
        """Time the kernels of a program."""
        calls = next(calls for index, calls in self._programs.values() if index == key)
        replays = [[_replay_kernel(*call) for call in calls] for _ in range(times)]
        operators = self.profile.programs[key] = {}
        for runs in zip(*replays, strict=True):
            _, (name, work) = runs[0]
            operators.setdefault(name, Operator()).add(statistics.median(seconds for seconds, _ in runs), work)

    def _wrap(self, kind: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(kind, name)
        setattr(kind, name, lambda wrapped, *args: replacement(original, wrapped, *args))

    def _call_kernel(self, original: Callable[..., None], kernel: Any, *args: Any) -> None:
        started = time.perf_counter()
        original(kernel, *args)
        seconds = time.perf_counter() - started
        if self.profile.steps and not self._is_recording():
            name, work = describe(kernel, kernel.pack(0, *args))
            self.profile.steps[-1].operators.setdefault(name, Operator()).add(seconds, work)

    def _new_program(self, original: Callable[..., None], program: Any, calls: Any, *args: Any) -> None:
        original(program, calls, *args)
        self._programs[id(program)] = next(self._keys), calls

    def _call_program(self, original: Callable[..., Any], program: Any) -> Any:
        started = time.perf_counter()
        result = original(program)
        if self.profile.steps:
            step, self._latest = self.profile.steps[-1], program
            step.program_seconds += time.perf_counter() - started
            step.program = self._programs[id(program)][0]
            self._runs[step.program] += 1
        return result


def _replay_kernel(kernel: Any, packed: Any) -> tuple[float, tuple[str, tuple[int, int]]]:
    """(seconds, description) of a kernel that is run again. Those after it may write where its inputs are."""
    from kernels.cpu import parallel

    ctypes.c_int64.from_buffer(packed).value = 0  # no item is given out
    started = time.perf_counter()
    parallel.run_region(kernel.address, ctypes.addressof(packed))
    seconds = time.perf_counter() - started
    return seconds, describe(kernel, packed)


def main() -> int:
    """Be the Worker at the other end of the socket FD."""
    profile = Profile()

    def load(channel: Channel, message: StartWorker) -> Any:
        set_threads(message.config.cpu_threads)  # before torch is imported
        profiler = StepProfiler(profile)
        resident = worker.load(channel, message)
        if resident is not None:
            profiler.attach(resident.runner)
        return resident

    status = worker.main(load)
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(profile))
    return status


if __name__ == "__main__":
    sys.exit(main())
