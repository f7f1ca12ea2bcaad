"""Measures `--speculative`: tokens per second of a model with it and without, in turns.

    python -m benchmarks.speculation [--model DIR] [--speculative ngram:8] [--dtype bfloat16] [--device cpu]
        [--rounds 40] [--only "ordinary, 16"] [--json PATH]

Two engines are open at once and are measured A B B A, so that what disturbs the machine disturbs both. Repeating text:
greedy answers beyond their end, of those prompts whose answers repeat themselves. The engine without drafts finds them
first, because the last bits of its sums decide which do. Ordinary text: sampled stories. Each with 1, 16 and 64
streams. A round has the same texts in both engines and takes a tenth of a second to a second, so `ratio` is the median
of the rounds' ratios, and half of the rounds lie between the quartiles `low` and `high`.
`equal`: answers of both engines are the same.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from server.commands.bench.report import describe, machine

REPEATING, ORDINARY = "repeating", "ordinary"
STREAMS = (1, 16, 64)
NUM_TOKENS = 256
LETTERS = "a b c d e f g " * 6
NUM_STARTS = 24  # prompts: LETTERS from each of its first tokens on
CONTEXT = 3  # tokens
LEAST_SHARE = 0.9
STORY = "Once upon a time there was a fox who lived in a wood and told stories to the rabbits. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="default: the bundled model")
    parser.add_argument("--speculative", default="ngram:8")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40, help="default: 40, some three minutes")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: the table has quartiles")
    settings = {name: getattr(options, name) for name in ("model", "speculative", "dtype", "device")}
    try:
        runs, equal = measure(settings, options.rounds, options.only)
    except ValueError as error:
        parser.error(str(error))
    facts = machine()
    print(describe(facts))
    print(f"{'tokens/s, medians':24}{'without':>10}{'with':>10}{'ratio':>8}{'low':>8}{'high':>8}{'equal':>8}")
    for name, (without, drafted) in runs.items():
        medians = f"{statistics.median(without):10.0f}{statistics.median(drafted):10.0f}"
        low, ratio, high = statistics.quantiles([b / a for a, b in zip(without, drafted, strict=True)], n=4)
        print(f"{name:24}{medians}{ratio:8.3f}{low:8.2f}{high:8.2f}{equal[name]!s:>8}")
    if options.json:
        document = {"machine": facts, **settings, "rounds": options.rounds, "runs": runs, "equal": equal}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def measure(
    settings: dict[str, str], rounds: int, only: str = ""
) -> tuple[dict[str, tuple[list[float], list[float]]], dict[str, bool]]:
    """(workload -> tokens per second of every round, without and with drafts; workload -> whether answers agree).

    ValueError where repeating text is wanted, and no answer of this model repeats itself.
    """
    workloads = {f"{text}, {streams}": (text, streams) for text in (REPEATING, ORDINARY) for streams in STREAMS}
    workloads = {name: workload for name, workload in workloads.items() if only in name}
    runs: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in workloads}
    equal = dict.fromkeys(workloads, True)
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                LLM(**settings | {"speculative": speculative}, num_blocks=4096, enable_prefix_caching=False)
            )
            for speculative in (None, settings["speculative"])
        ]
        starts = {ORDINARY: range(8)}
        if any(text == REPEATING for text, _ in workloads.values()):
            starts[REPEATING] = repeating_starts(engines[0])
        for counted in range(rounds + 1):
            for name, (text, streams) in workloads.items():
                answers = {}
                for i in (0, 1) if counted % 2 else (1, 0):
                    speed, answers[i] = answer(engines[i], text, streams, counted, starts[text])
                    if counted:  # the first round warms up
                        runs[name][i].append(speed)
                equal[name] &= answers[0] == answers[1]
    return runs, equal


def repeating_starts(engine: LLM) -> Sequence[int]:
    """The tokens of LETTERS from which on the model repeats itself. ValueError if there is none."""
    words = engine.tokenizer.encode(LETTERS)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate([words[i:] for i in range(min(NUM_STARTS, len(words)))], params, use_tqdm=False)
    shares = [repeated_share(output.outputs[0].token_ids) for output in outputs]
    starts = [i for i, share in enumerate(shares) if share >= LEAST_SHARE]
    if not starts:
        raise ValueError(f"no answer of this model repeats {LEAST_SHARE:.0%} of itself; use --only ordinary")
    return starts


def repeated_share(token_ids: Sequence[int]) -> float:
    """The share of the tokens that followed the same CONTEXT tokens when these came last before."""
    followers: dict[tuple[int, ...], int] = {}
    repeated = 0
    for i in range(CONTEXT, len(token_ids)):
        context = tuple(token_ids[i - CONTEXT : i])
        repeated += followers.get(context) == token_ids[i]
        followers[context] = token_ids[i]
    return repeated / max(1, len(token_ids) - CONTEXT)


def answer(
    engine: LLM, text: str, streams: int, number: int, starts: Sequence[int]
) -> tuple[float, list[tuple[int, ...]]]:
    """(output tokens per second, answers) of round `number`. starts: from which tokens of the text on prompts begin."""
    words = engine.tokenizer.encode(LETTERS if text == REPEATING else STORY)
    prompts = [words[starts[(i + number) % len(starts)] :] for i in range(streams)]
    temperature = 0.0 if text == REPEATING else 1.0
    params = SamplingParams(temperature=temperature, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return streams * NUM_TOKENS / seconds, [tuple(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
