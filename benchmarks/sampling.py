"""Measures what a decode step costs by the sampling that its requests ask for.

    python -m benchmarks.sampling [--model .cache/models/qwen-500m] [--streams 1 16] [--tokens 32] [--repeats 3]
                                  [--only greedy chat] [--json PATH]

`python benchmarks/make_models.py qwen-500m` makes a model with a vocabulary of 151,936 tokens: sampling costs by its
size. A number is milliseconds per step, the median of the repeats, which take turns; below it the ratio to greedy
steps. Other programs on the machine add time.

Random weights give nearly flat distributions, which is the worst case of top_p: its nucleus holds most tokens.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from engine.llm import LLM
from engine.models.families import read_model_config
from engine.sampling_params import SamplingParams
from server.commands.bench.report import describe, machine, write_json

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "top_k": {"temperature": 0.7, "top_k": 20},
    "chat": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},  # Qwen2.5's defaults
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"temperature": 0.0, "logit_bias": {5: 1.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
PROMPT, SHORT = 16, 4  # tokens of a prompt; tokens of the runs whose time is taken off


def step_seconds(
    llm: LLM, rng: random.Random, streams: int, tokens: int, vocab_size: int, kind: dict[str, Any]
) -> float:
    """The time of a decode step: that of long answers less that of short ones, which have the same prefill."""

    def run(max_tokens: int) -> float:
        prompts = [[rng.randrange(300, vocab_size) for _ in range(PROMPT)] for _ in range(streams)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kind)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    short = run(SHORT)
    return (run(SHORT + tokens) - short) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/qwen-500m"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=32, help="steps of a run, default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        parser.error(f"--model: {options.model} holds no model; `python benchmarks/make_models.py qwen-500m` makes one")
    kinds = {name: KINDS[name] for name in KINDS if name in options.only}
    vocab_size = read_model_config(options.model).vocab_size
    results: dict[str, dict[str, list[float]]] = {}
    print(describe(machine()))
    print(f"{options.model.name}, vocabulary of {vocab_size} tokens; milliseconds per step")
    print(f"{'streams':>7}" + "".join(f"{name:>11}" for name in kinds))
    with LLM(str(options.model), kv_cache_memory="512MiB", enable_prefix_caching=False) as llm:
        rng = random.Random(0)
        for streams in options.streams:
            times: dict[str, list[float]] = {name: [] for name in kinds}
            for repeat in range(-1, options.repeats):  # the first is a warm-up
                for name, kind in kinds.items():
                    seconds = step_seconds(llm, rng, streams, options.tokens, vocab_size, kind)
                    if repeat >= 0:
                        times[name].append(1e3 * seconds)
            results[str(streams)] = times
            medians = {name: statistics.median(values) for name, values in times.items()}
            print(f"{streams:7}" + "".join(f"{value:11.2f}" for value in medians.values()))
            if "greedy" in medians:
                print(" " * 7 + "".join(f"{value / medians['greedy']:11.2f}" for value in medians.values()))
    if options.json is not None:
        settings = {key: str(value) for key, value in vars(options).items() if key != "json"}
        write_json(options.json, settings, {"ms_per_step": results}, [])


if __name__ == "__main__":
    main()
