"""Tokens per second of quantised weights on a CPU, against llama.cpp on the same GGUF files, in one run.

    python -m venv .cache/bench/llama
    .cache/bench/llama/bin/pip install llama-cpp-python numpy
    python -m benchmarks.quantized [--model .cache/models/llama-90m] [--peer .cache/bench/llama/bin/python]
                                   [--types Q4_K Q6_K] [--quantizations int8] [--prompt 512] [--tokens 128]
                                   [--repeats 3] [--threads N] [--json PATH]

The model is a checkpoint folder of an architecture that GGUF has. It is written as GGUF once per type, and both
servers read the same file; pageserve also quantises the checkpoint itself (--quantization). Per row: single-stream
tokens per second (decode), prompt tokens per second (prefill), bytes of the weights, and the share of the memory
bandwidth that reading the weights of a token once takes. The bandwidth is that of a sum over 1 GiB. Medians of the
repeats; all models stay open and take turns, each repeat with another prompt. --streams also measures so many sequences
at once, at most 16. Without --peer's program, pageserve is measured alone.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.formats.gguf_writer import write_gguf
from engine.llm import LLM
from engine.models.config import ModelConfig
from engine.models.families import read_model_config
from engine.models.loading.load import weight_bytes
from engine.sampling_params import SamplingParams
from engine.worker.device.choice import multiplies_pairs
from kernels.quantized.linear import multiplies_int8_inputs
from server.commands.bench.report import machine

TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")  # of GGUF; --types also takes those of MORE_TYPES
MORE_TYPES = ("Q4_1", "Q5_0", "Q5_1", "Q5_K")
# Applied to the checkpoint as it is loaded.
QUANTIZATIONS = ("int8", "w8a8", "int4") if multiplies_int8_inputs() else ("int8", "int4")
SHORT_PROMPT = 16  # tokens before the measured decode
Run = Callable[[list[list[int]], int], dict[str, float]]  # prompts, tokens -> seconds


class Peer:
    """benchmarks/llama_cpp_peer.py in its own environment."""

    def __init__(self, python: Path, threads: int, files: list[Path]) -> None:
        script = Path(__file__).with_name("llama_cpp_peer.py")
        command = [str(python), str(script), str(threads), *map(str, files)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, file: Path, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Seconds of the prompts with their first tokens, and of the tokens after these."""
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {"file": str(file), "prompts": prompts, "tokens": tokens}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the llama.cpp process has ended; see its message above")
        reply: dict[str, float] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def gguf_file(checkpoint: Path, kind: str) -> Path:
    """The checkpoint as a GGUF file of a type, written once."""
    file = Path(".cache/bench/gguf") / checkpoint.name / f"{kind}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(checkpoint, file.with_suffix(".part"), kind).rename(file)
    return file


def open_engine(model: Path, quantization: str | None) -> LLM:
    """pageserve with a bf16 model."""
    return LLM(
        str(model), dtype="bfloat16", quantization=quantization, kv_cache_memory="256MiB", enable_prefix_caching=False
    )


def run_engine(engine: LLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Seconds of the prompts with their first tokens, and of the tokens after these."""
    times = []
    for count in (1, tokens) if tokens > 1 else (1,):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        started = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - started)
    return {"prefill_s": times[0], "decode_s": times[-1] - times[0]}


def read_share(config: ModelConfig) -> float:
    """The share of the weights that a token reads: of the experts it takes a few."""
    idle = 0
    for layer in range(config.num_layers):
        if (moe := config.experts(layer)) is not None:
            idle += (moe.num_experts - moe.experts_per_token) * 3 * moe.intermediate_size * config.hidden_size
    return 1 - idle / config.num_parameters()


def read_bandwidth() -> float:
    """Bytes per second of a sum over 1 GiB, best of five."""
    values, times = torch.ones(1 << 28), []
    for _ in range(5):
        started = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - started)
    return values.nbytes / min(times)


def measure(runs: dict[str, Run], vocab_size: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Tokens per second by name of the run; the runs take turns."""
    rng = random.Random(0)
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in runs}

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]

    def add(name: str, figure: str, value: float) -> None:
        figures[name].setdefault(figure, []).append(value)

    for repeat in range(options.repeats + 1):
        long, short, many = prompts(1, options.prompt), prompts(1, SHORT_PROMPT), prompts(options.streams, SHORT_PROMPT)
        for name, run in runs.items():
            prefill, decode = run(long, 1), run(short, options.tokens)
            if repeat:  # the first round warms up
                add(name, "prefill", options.prompt / prefill["prefill_s"])
                add(name, "decode", (options.tokens - 1) / decode["decode_s"])
            if options.streams:
                together = run(many, options.tokens)
                if repeat:
                    add(name, "streams", options.streams * (options.tokens - 1) / together["decode_s"])
    return {
        name: {f"{figure}_tokens_per_s": statistics.median(values) for figure, values in rows.items()}
        | {f"{figure}_runs": values for figure, values in rows.items()}
        for name, rows in figures.items()
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llama-90m"))
    parser.add_argument("--peer", type=Path, default=Path(".cache/bench/llama/bin/python"))
    parser.add_argument("--types", nargs="+", choices=[*TYPES, *MORE_TYPES], default=list(TYPES))
    parser.add_argument("--quantizations", nargs="*", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config, bandwidth = read_model_config(options.model), read_bandwidth()
    vocab_size, share = config.vocab_size, read_share(config)
    files = {kind: gguf_file(options.model, kind) for kind in options.types}
    runs: dict[str, Run] = {}
    sizes: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        peer = None
        if options.peer.exists():
            peer = Peer(options.peer, options.threads, list(files.values()))
            stack.callback(peer.close)
        for kind, file in files.items():
            runs[f"pageserve {kind}"] = partial(run_engine, stack.enter_context(open_engine(file, None)))
            sizes[f"pageserve {kind}"] = weight_bytes(read_model_config(file), 2, multiplies_pairs("cpu"))
            if peer is not None:
                runs[f"llama.cpp {kind}"] = partial(peer.run, file)
                sizes[f"llama.cpp {kind}"] = file.stat().st_size
        for quantization in options.quantizations:
            engine = stack.enter_context(open_engine(options.model, quantization))
            runs[f"pageserve {quantization}"] = partial(run_engine, engine)
            sizes[f"pageserve {quantization}"] = weight_bytes(read_model_config(options.model, quantization), 2)
        figures = measure(runs, vocab_size, options)
    for name, row in figures.items():
        row["weight_bytes"] = sizes[name]
        row["bandwidth_share"] = row["decode_tokens_per_s"] * sizes[name] * share / bandwidth
        streams = f"{row['streams_tokens_per_s']:8.0f}" if "streams_tokens_per_s" in row else " " * 8
        print(
            f"{name:16} {sizes[name] / 1e6:8.1f} MB  decode {row['decode_tokens_per_s']:7.1f}  prefill "
            f"{row['prefill_tokens_per_s']:7.0f}  {options.streams} streams {streams} tokens/s  "
            f"{row['bandwidth_share']:.0%} of {bandwidth / 1e9:.0f} GB/s"
        )
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items() if key != "json"}
        report = {"machine": machine(), "settings": settings, "read_bytes_per_s": bandwidth, "figures": figures}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
