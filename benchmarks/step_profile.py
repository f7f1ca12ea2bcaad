"""Measures the time of a CPU's step by operator and by process, against the ceilings of the machine.

    python -m benchmarks.step_profile [--model .cache/models/llama-90m] [--quantization int4] [--streams 1 4 16 64]
                                      [--context 16] [--prompt 512] [--tokens 64] [--json PATH]

First the ceilings: bytes read per second by one thread and by all (a sum over 1 GiB), and the rate of bf16 dot products
(the faster of our linear layer and torch's), for a model in W8A8 that of int8 products. Then a line of milliseconds
per step for each number of streams, each with a prompt of --context tokens, and for a prefill:

  kernels    the compiled kernels; the layers of a step run as one recorded program
  worker     the rest of the Worker's time from plan to result: Python, and operators of torch
  driver     the Driver's time from result to plan
  wake-ups   the rest of the time between a result and the next plan: messages and sleeping processes
  overhead   the share of a step that is not kernels
  floor      the least time by the ceilings: for each linear layer and each attention, the longer of reading its bytes
             and computing its products
  reached    floor / step

and a table of its operators: calls, microseconds, bytes and FLOPs per second and the larger of their shares of the
ceilings. Operators of a program are timed one by one after its 32nd step, or after a prefill, so their sum includes the
start of each; the difference to the program itself is on the last line. A program of fewer decodes, because long
prompts come in parts, has no table and no floor. Bytes are those of weights, or of keys and values. HTTP is not part of
it: see benchmarks.stream_chunks. Other programs on the machine add time; `chrt -f 50` before the command keeps them
away.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

import engine.executor.supervisor
from benchmarks.profiled_worker import REPLAY_STEP, Operator, Profile, ProfiledStep
from benchmarks.quantized import SHORT_PROMPT, read_bandwidth
from engine.driver import Driver
from engine.llm import LLM
from engine.models.families import read_model_config
from engine.models.weight_format import InputFormat
from engine.sampling_params import SamplingParams
from kernels.linear.packed import PackedLinear
from kernels.quantized.linear import QuantizedLinear
from kernels.quantized.weight import QuantizedWeight
from server.commands.bench.report import machine

ROWS, SIZE = 512, 1024  # of the product that measures the dot rate: its weight stays in L2
INT8_ROWS = 2048  # of the product in int8
WARM_UP_STEPS = 8
DriverTimes = list[tuple[float, float]]  # when the Driver's work began, and its seconds


def measure_ceilings(dtype: torch.dtype, int8_inputs: bool) -> dict[str, float]:
    """Bytes and FLOPs per second. int8_inputs: those of int8 products, too."""
    threads = torch.get_num_threads()
    ceilings = {"read_bytes_per_s": read_bandwidth()}
    torch.set_num_threads(1)
    ceilings["read_bytes_per_s_1_thread"] = read_bandwidth()
    torch.set_num_threads(threads)
    x, weight = torch.randn(ROWS, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
    layers: list[Callable[[torch.Tensor], object]] = [PackedLinear(weight, None), lambda x: x @ weight.T]
    seconds = min(_best_seconds(lambda layer=layer: layer(x)) for layer in layers)  # type: ignore[misc]
    ceilings["dot_flops_per_s"] = 2 * ROWS * SIZE * SIZE / seconds
    if int8_inputs:
        codes = torch.randint(-127, 128, (SIZE, SIZE)).to(torch.int8)
        layer = QuantizedLinear(QuantizedWeight(codes, torch.ones(SIZE, 1), SIZE, int8_inputs=True), None, dtype)
        many, rows = x.repeat(INT8_ROWS // ROWS, 1), codes.repeat(INT8_ROWS // SIZE, 1)
        seconds = min(_best_seconds(lambda: layer(many)), _best_seconds(lambda: torch._int_mm(rows, codes.T)))
        ceilings["int8_flops_per_s"] = 2 * INT8_ROWS * SIZE * SIZE / seconds
    return ceilings


def _best_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(50):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


@contextmanager
def timed_driver(times: DriverTimes) -> Any:
    """Note the time of the Driver's work between a result and the next plan."""
    originals = {name: getattr(Driver, name) for name in ("_process", "_pump")}
    depth = 0

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal depth
            depth, started = depth + 1, time.perf_counter()
            try:
                return original(*args)
            finally:
                depth -= 1
                if depth == 0:  # else part of a call that is timed
                    times.append((started, time.perf_counter() - started))

        return call

    for name, original in originals.items():
        setattr(Driver, name, timed(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Driver, name, original)


def run_workload(options: argparse.Namespace) -> tuple[Profile, DriverTimes]:
    """Every number of streams, and prefills, in one engine."""
    times: DriverTimes = []
    rng, vocab_size = random.Random(0), read_model_config(options.model).vocab_size
    with tempfile.TemporaryDirectory() as folder, timed_driver(times):
        log = Path(folder) / "profile.json"
        engine.executor.supervisor.WORKER_COMMAND = (sys.executable, "-m", "benchmarks.profiled_worker", str(log))
        llm = LLM(
            str(options.model), dtype=options.dtype, quantization=options.quantization, kv_cache_memory="512MiB",
            enable_prefix_caching=False, max_num_batched_tokens=max(options.prompt, 2048),
            compressed_weights=options.compressed_weights,
        )  # fmt: skip
        with llm:
            lengths = [(streams, options.context, options.tokens) for streams in options.streams]
            for streams, prompt, tokens in [*lengths, *[(1, options.prompt, 1)] * 8]:
                prompts = [[rng.randrange(3, vocab_size) for _ in range(prompt)] for _ in range(streams)]
                params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
                llm.generate(prompts, params, use_tqdm=False)
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:  # the Worker writes it once the engine has left
            time.sleep(0.05)
        return msgspec.json.decode(log.read_bytes(), type=Profile), times


def summarise(
    steps: list[tuple[ProfiledStep, ProfiledStep | None]], profile: Profile, driver: DriverTimes
) -> dict[str, Any]:
    """Medians of steps of one kind, each with the next step if that follows at once."""
    kernels = statistics.median(step.kernel_seconds for step, _ in steps)
    row: dict[str, Any] = {
        "steps": len(steps),
        "kernels": kernels,
        "worker": statistics.median(step.ended - step.launched for step, _ in steps) - kernels,
        "driver": 0.0,
        "wake_ups": 0.0,
    }
    turns = []
    for step, following in steps:
        if following is not None:
            busy = sum(seconds for at, seconds in driver if step.ended <= at < following.launched)
            turns.append((busy, following.launched - step.ended - busy))
    if turns:
        row["driver"], row["wake_ups"] = (statistics.median(values) for values in zip(*turns, strict=True))
    row["step"] = sum(row[name] for name in ("kernels", "worker", "driver", "wake_ups"))
    row["overhead"] = 1 - kernels / row["step"]
    last = steps[-1][0]
    programs = {} if last.program is None else profile.programs.get(last.program, {})
    row["operators"] = {"program: " + name: operator for name, operator in programs.items()} | last.operators
    row["program"] = statistics.median(step.program_seconds for step, _ in steps)
    row["program_sum"] = sum(operator.seconds for operator in programs.values())
    return row


def group_steps(profile: Profile, options: argparse.Namespace) -> dict[str, list[Any]]:
    """The steps of each number of streams, and the prefills, without the first of each."""
    groups: dict[str, list[Any]] = {}
    for step, following in zip(profile.steps, [*profile.steps[1:], None], strict=True):
        if step.num_decodes == step.num_tokens and step.num_decodes in options.streams:
            same = following is not None and following.num_decodes == following.num_tokens == step.num_tokens
            groups.setdefault(f"{step.num_decodes} streams", []).append((step, following if same else None))
        elif step.num_tokens == options.prompt:
            groups.setdefault(f"prefill of {options.prompt}", []).append((step, None))
    return {name: steps[min(WARM_UP_STEPS, len(steps) // 2) :] for name, steps in groups.items()}


def operator_line(name: str, operator: Operator, ceilings: dict[str, float]) -> str:
    """One operator: calls, time, rates, and the larger share of a ceiling."""
    read, dots = operator.bytes / operator.seconds, operator.flops / operator.seconds
    share = max(read / ceilings["read_bytes_per_s"], dots / dot_ceiling(name, ceilings))
    rates = f"{read / 1e9:7.1f} GB/s {dots / 1e9:8.0f} GFLOP/s {share:5.0%}" if operator.bytes else ""
    return f"  {name:36} {operator.calls:4} calls {operator.seconds * 1e6:9.0f} us {rates}".rstrip()


def dot_ceiling(name: str, ceilings: dict[str, float]) -> float:
    """FLOPs per second that an operator could reach."""
    return ceilings["int8_flops_per_s" if "w8a8" in name else "dot_flops_per_s"]


def floor_seconds(row: dict[str, Any], ceilings: dict[str, float]) -> float:
    """The least seconds of a step; the module's docstring says how they count."""
    read = ceilings["read_bytes_per_s"]
    return sum(
        max(operator.bytes / read, operator.flops / dot_ceiling(name, ceilings))
        for name, operator in row["operators"].items()
    )


def print_report(rows: dict[str, dict[str, Any]], ceilings: dict[str, float]) -> None:
    read, one = ceilings["read_bytes_per_s"], ceilings["read_bytes_per_s_1_thread"]
    dots = ceilings["dot_flops_per_s"]
    int8 = f", in int8 {ceilings['int8_flops_per_s'] / 1e9:.0f}" if "int8_flops_per_s" in ceilings else ""
    print(f"reads {read / 1e9:.1f} GB/s, {one / 1e9:.1f} with one thread; dots {dots / 1e9:.0f} GFLOP/s{int8}")
    names = ("step", "kernels", "worker", "driver", "wake_ups")
    heading = "".join(f"{name.replace('_', '-'):>10}" for name in names)
    print(f"{'ms per step':16}{heading}  overhead     floor  reached")
    for kind, row in rows.items():
        times = "".join(f"{row[name] * 1e3:10.3f}" for name in names)
        limit = f"{row['floor'] * 1e3:10.3f}{row['floor'] / row['step']:9.0%}" if row["floor"] else ""
        print(f"{kind:16}{times}{row['overhead']:10.1%}{limit}")
    for kind, row in rows.items():
        print(f"\n{kind}")
        for name, operator in sorted(row["operators"].items(), key=lambda item: -item[1].seconds):
            print(operator_line(name, operator, ceilings))
        if row["program_sum"]:
            print(f"  the program: {row['program'] * 1e6:.0f} us; one by one: {row['program_sum'] * 1e6:.0f} us")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_profile", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llama-90m"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--compressed-weights", action=argparse.BooleanOptionalAction, help="default: as the server")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=SHORT_PROMPT, help="tokens of the prompt of each stream")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.tokens <= REPLAY_STEP:
        parser.error(f"--tokens: at least {REPLAY_STEP + 1}, because programs are timed after {REPLAY_STEP} steps")
    quantization = read_model_config(options.model, options.quantization).quantization
    int8_inputs = isinstance(quantization, InputFormat) and quantization.int8_inputs
    ceilings = measure_ceilings(getattr(torch, options.dtype), int8_inputs)
    profile, driver = run_workload(options)
    groups = group_steps(profile, options)
    rows = {kind: summarise(steps, profile, driver) for kind, steps in groups.items()}
    for row in rows.values():
        row["floor"] = floor_seconds(row, ceilings)
    print_report(rows, ceilings)
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items() if key != "json"}
        report = {"machine": machine(), "settings": settings, "ceilings": ceilings, "rows": rows}
        options.json.write_text(json.dumps(msgspec.to_builtins(report), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
