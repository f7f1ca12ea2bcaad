"""Measures the cost of `--batch-invariant`: tokens per second of the bundled model with it and without, in turns.

    python -m benchmarks.batch_invariant [--dtype bfloat16] [--device cpu] [--rounds 5] [--json PATH]

Two engines are open at once and are measured A B A B, so that what disturbs the machine disturbs both. Decode: greedy
answers of 64 tokens to short prompts, one at a time and 16 at once. Prefill: prompts of 400 tokens, 1 token of answer.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from server.commands.bench.report import describe, machine

# name -> (prompts at once, prompt tokens, output tokens)
WORKLOADS = {"decode, 1": (1, 16, 64), "decode, 16": (16, 16, 64), "prefill, 8 x 400": (8, 400, 1)}
TEXT = "Once upon a time there was a fox who lived in a wood and told stories to the rabbits. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = measure(options.dtype, options.device, options.rounds)
    facts = machine()
    print(describe(facts))
    print(f"{'tokens/s, medians':24}{'without':>10}{'with':>10}{'with / without':>16}")
    for name, (without, invariant) in runs.items():
        medians = statistics.median(without), statistics.median(invariant)
        print(f"{name:24}{medians[0]:10.0f}{medians[1]:10.0f}{medians[1] / medians[0]:16.2f}")
    if options.json:
        settings = {"dtype": options.dtype, "device": options.device}
        options.json.write_text(json.dumps({"machine": facts, **settings, "runs": runs}, indent=1) + "\n")


def measure(dtype: str, device: str, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Workload -> tokens per second of every round, (without, with) the option."""
    runs: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in WORKLOADS}
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                LLM(dtype=dtype, device=device, batch_invariant=invariant, num_blocks=1024, enable_prefix_caching=False)
            )
            for invariant in (False, True)
        ]
        for counted in range(rounds + 1):
            for name, workload in WORKLOADS.items():
                for engine, speeds in zip(engines, runs[name], strict=True):
                    speed = tokens_per_second(engine, *workload)
                    if counted:  # the first round warms up
                        speeds.append(speed)
    return runs


def tokens_per_second(engine: LLM, num_prompts: int, prompt_tokens: int, output_tokens: int) -> float:
    """Output tokens, or prompt tokens where the answer is one token."""
    words = engine.tokenizer.encode(TEXT * (prompt_tokens // 8))
    prompts = [words[i : i + prompt_tokens] for i in range(num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return num_prompts * (prompt_tokens if output_tokens == 1 else output_tokens) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
