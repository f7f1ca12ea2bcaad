#!/usr/bin/env python3
"""The same question as benchmarks/admission.py, asked of the whole engine: the bundled model in a pool too small.

    python -m benchmarks.admission_engine [--json FILE] [--repeats 3]

Two loads, all at once: stories that end where the model ends them, and outputs that all reach max_tokens. Plain and
predicted admission take turns, each in an engine of its own that has served the load once before: the kernels are
compiled then, and the prediction has learned. Prints medians, and the ratio of the speeds. Steps and computed tokens
hardly vary where the clock of a busy machine does.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from engine import LLM, SamplingParams

SETTINGS = {"num_blocks": 160, "max_num_seqs": 64, "enable_prefix_caching": False}
OPENINGS = (
    "Once upon a time",
    "The little fox",
    "Tom and Mia went to the park",
    "One day, a big bear",
    "Lily had a dog",
)
LOADS = {
    "stories": {"max_tokens": 384, "temperature": 1.0},
    "at limit": {"max_tokens": 192, "temperature": 1.0, "ignore_eos": True},
}


def measure(llm: LLM, load: str, num_requests: int) -> dict[str, float]:
    """One run of a load; the same tokens every time, as each request has its seed."""
    prompts = [f"{OPENINGS[i % len(OPENINGS)]}. " * (1 + i % 7) for i in range(num_requests)]
    params = [SamplingParams(seed=i, **LOADS[load]) for i in range(num_requests)]  # type: ignore[arg-type]
    scheduler, steps = llm.driver.scheduler, llm.driver.stats.iteration_tokens
    num_steps, num_computed = steps.total, steps.sum
    preemptions, delayed = scheduler.num_preemptions, scheduler.admission.num_delayed
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "tokens_per_s": sum(len(output.outputs[0].token_ids) for output in outputs) / seconds,
        "steps": steps.total - num_steps,
        "computed_tokens": steps.sum - num_computed,
        "preemptions": scheduler.num_preemptions - preemptions,
        "delayed": scheduler.admission.num_delayed - delayed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write all runs as JSON, too")
    arguments = parser.parse_args()
    runs: list[dict[str, object]] = []
    for load in LOADS:
        medians = {}
        with LLM(admission="plain", **SETTINGS) as plain, LLM(admission="predict", **SETTINGS) as predict:
            sides = {"plain": plain, "predict": predict}
            for llm in sides.values():
                measure(llm, load, arguments.requests)
            for _ in range(arguments.repeats):
                for name, llm in sides.items():
                    runs.append({"load": load, "admission": name, **measure(llm, load, arguments.requests)})
            for name in sides:
                mine = [run for run in runs if (run["load"], run["admission"]) == (load, name)]
                middle = {
                    figure: statistics.median(float(str(run[figure])) for run in mine)
                    for figure in ("tokens_per_s", "preemptions", "steps", "computed_tokens")
                }
                medians[name] = middle["tokens_per_s"]
                figures = "  ".join(f"{figure} {value:.0f}" for figure, value in middle.items())
                print(f"{load:9}{name:8}{figures}", flush=True)
        print(f"{load:9}predict / plain {medians['predict'] / medians['plain']:.3f}", flush=True)
    if arguments.json:
        text = json.dumps({"arguments": vars(arguments), "settings": SETTINGS, "runs": runs}, indent=1)
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
