"""Measures the cost of structured output: seconds per output token with a form and without, in turns A B A B.

    python -m benchmarks.structured [--model DIR] [--dtype bfloat16] [--at-once 1,8] [--rounds 5] [--json PATH]

Both sides sample the same number of tokens from the same prompts with one engine: plain text with ignore_eos, and forms
that do not end before that. A first use of each form (compiled, and its first masks) is left out. The time per token is
that of a batch, less that of its prompts with one token, over the tokens that come after: on the wall clock, and as
processor time of the Worker, which is the one to trust on a machine with other things to do.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from server.commands.bench.report import describe, machine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "emails": {"type": "array", "items": {"type": "string", "format": "email"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}},
    },
    "required": ["name", "age", "emails", "address"],
}
FORMS: dict[str, StructuredOutput | None] = {
    "json_schema": StructuredOutput.json_schema({"type": "array", "items": PERSON, "minItems": 1000}),
    "json": StructuredOutput.json_schema({"type": "array", "minItems": 1000}),
    "regex": StructuredOutput("regex", r"([A-Z][a-z]{1,12} ?){1000}"),
}
CLOCKS = ("wall", "worker")
TEXT = "Once upon a time there was a fox who lived in a wood and told stories to the rabbits. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batches = [int(n) for n in options.at_once.split(",")]
    with LLM(options.model, dtype=options.dtype, device=options.device, enable_prefix_caching=False) as llm:
        runs = [measure(llm, name, n, options.tokens, options.rounds) for n in batches for name in FORMS]
    facts = machine()
    print(describe(facts))
    print("milliseconds for each step; the ratios are medians over neighbouring runs")
    print(f"{'form':14}{'at once':>8}   {'clock':8}{'plain':>10}{'formed':>10}{'formed / plain':>16}")
    for run in runs:
        for clock in CLOCKS:
            plain, formed = (statistics.median(run[clock][side]) for side in ("plain", "formed"))
            ratio = ratio_of(run[clock])
            print(f"{run['form']:14}{run['at_once']:8}   {clock:8}{plain:10.3f}{formed:10.3f}{ratio:16.3f}")
    if options.json:
        settings = {"model": options.model, "dtype": options.dtype, "tokens": options.tokens}
        document = {"machine": facts, "settings": settings, "runs": runs}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(llm: LLM, name: str, at_once: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per step of every round, on both clocks, plain and with the form."""
    run: dict[str, Any] = {"form": name, "at_once": at_once}
    run |= {clock: {"plain": [], "formed": []} for clock in CLOCKS}
    for counted in range(rounds + 1):
        for side, form in (("plain", None), ("formed", FORMS[name])):
            times = time_per_step(llm, form, at_once, num_tokens)
            for clock, milliseconds in zip(CLOCKS, times, strict=True):
                if counted:  # the first round compiles and warms up
                    run[clock][side].append(milliseconds)
    return run


def ratio_of(sides: dict[str, list[float]]) -> float:
    return statistics.median(b / a for a, b in zip(sides["plain"], sides["formed"], strict=True))


def time_per_step(llm: LLM, form: StructuredOutput | None, at_once: int, num_tokens: int) -> tuple[float, ...]:
    """Milliseconds on each of CLOCKS."""
    first, whole = (times(llm, form, at_once, n) for n in (1, num_tokens))
    return tuple(1e3 * (b - a) / (num_tokens - 1) for a, b in zip(first, whole, strict=True))


def times(llm: LLM, form: StructuredOutput | None, at_once: int, num_tokens: int) -> tuple[float, float]:
    """Seconds on each of CLOCKS."""
    words = llm.tokenizer.encode(TEXT)
    prompts = [words[i:] + words[:i] for i in range(at_once)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=num_tokens, ignore_eos=True, structured_output=form)
        for i in range(at_once)
    ]
    started, processor = time.perf_counter(), worker_seconds(llm)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), "a form ended early"
    return time.perf_counter() - started, worker_seconds(llm) - processor


def worker_seconds(llm: LLM) -> float:
    """User and system time of the Worker (Linux)."""
    fields = Path(f"/proc/{llm.driver.worker_pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
