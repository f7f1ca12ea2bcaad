"""Measures what it costs to keep JSON whole within max_tokens: the Worker's processor time for the masks of one answer.

    python -m benchmarks.json_ends [--model DIR] [--spare 4,16,30,1000] [--repeats 5] [--json FILE]

Each answer is given; max_tokens is its length and `spare` tokens more. While few are left, a mask leaves out tokens
that lead to no end in time (engine/worker/sampling/grammar_ends.py). The step waits for the masks of all its rows. The
cost depends on the vocabulary: give a model with the tokenizer that matters. Milliseconds: the sum over an answer and
its dearest mask, medians of the repetitions; `without`: the sum without this limit.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.grammars.compiler import Compiler
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer
from engine.worker.batch.input_batch import SampleTargets
from engine.worker.sampling.grammar_cache import GrammarCache
from engine.worker.sampling.grammar_rows import GrammarRows
from server.commands.bench.report import describe, machine

CLASS = {
    "type": "object",
    "properties": {"sentiment": {"enum": ["positive", "negative", "neutral"]}, "confidence": {"type": "number"}},
    "required": ["sentiment", "confidence"],
    "additionalProperties": False,
}
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
    "required": ["street", "city"],
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "emails": {"type": "array", "items": {"type": "string"}},
        "address": ADDRESS,
    },
    "required": ["name", "age", "emails", "address"],
}
ANSWERS: dict[str, tuple[dict[str, Any], Any]] = {
    "class": (CLASS, {"sentiment": "positive", "confidence": 0.93}),
    "person": (
        PERSON,
        {
            "name": "Ada Lovelace",
            "age": 36,
            "emails": ["ada@example.com", "countess@example.org"],
            "address": {"street": "12 St James Square", "city": "London"},
        },
    ),
    "json_object": (
        {"type": "object"},
        {"answer": "The quick brown fox jumps over the lazy dog", "steps": [1, 2, 3], "done": True},
    ),
}
NUM_PROMPT = 1


class Answers:
    """Makes the masks of given answers, as the Worker does."""

    def __init__(self, model: str) -> None:
        model_dir = resolve_model(EngineConfig(model=model))
        tokenizer, self._ends = Tokenizer(model_dir), read_eos_token_ids(model_dir)
        self.vocab_size = tokenizer.vocab_size
        vocabulary = Vocabulary(tokenizer.to_json(), self.vocab_size, self._ends)
        tokenizer.close()
        self._cache = GrammarCache()
        self._cache.set_vocabulary(vocabulary)
        self._compiler = Compiler(vocabulary)

    def tokens_of(self, name: str) -> list[int]:
        return [*self._compiler.tokens_of(json.dumps(ANSWERS[name][1])), self._ends[0]]

    def mask_times(self, name: str, spare: int, limited: bool) -> list[float]:
        """Processor seconds of each mask of an answer that ends `spare` tokens before its limit. limited: False lets
        the text be cut."""
        output, token_ids = StructuredOutput.json_schema(ANSWERS[name][0]), self.tokens_of(name)
        max_tokens = len(token_ids) + spare if limited else 1 << 20
        rows = GrammarRows(self._cache, self._ends)
        rows.add(0, SamplingParams(max_tokens=max_tokens, structured_output=output), NUM_PROMPT)
        known, times = np.zeros((1, NUM_PROMPT + len(token_ids)), np.int32), []
        known[0, NUM_PROMPT:] = token_ids
        for position in range(NUM_PROMPT, known.shape[1]):
            at, started = SampleTargets(np.array([0]), np.array([0]), np.array([position])), time.thread_time()
            words, failed = rows.masks(at, np.array([0]), known)
            times.append(time.thread_time() - started)
            token_id = int(known[0, position])
            assert not failed and words[0, token_id >> 5] >> (token_id & 31) & 1, "the answer is not allowed"
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--spare", default="4,16,30,1000")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    answers, runs = Answers(options.model), []
    for name in ANSWERS:
        answers.mask_times(name, 4, True)  # compiles
        without = statistics.median(sum(answers.mask_times(name, 0, False)) for _ in range(options.repeats))
        for spare in map(int, options.spare.split(",")):
            times = [answers.mask_times(name, spare, True) for _ in range(options.repeats)]
            total, dearest = (1e3 * statistics.median(map(of, times)) for of in (sum, max))
            num_tokens = len(answers.tokens_of(name))
            facts = {"answer": name, "tokens": num_tokens, "spare": spare, "ms": total, "dearest_ms": dearest}
            runs.append({**facts, "without_ms": 1e3 * without})
    host = machine()
    print(describe(host))
    print(f"vocabulary of {answers.vocab_size} tokens; milliseconds")
    print(f"{'answer':14}{'tokens':>8}{'spare':>8}{'sum':>10}{'dearest':>10}{'without':>10}")
    for run in runs:
        print(f"{run['answer']:14}{run['tokens']:8}{run['spare']:8}", end="")
        print(f"{run['ms']:10.2f}{run['dearest_ms']:10.2f}{run['without_ms']:10.2f}")
    if options.json:
        settings = {"vocab_size": answers.vocab_size, "repeats": options.repeats}
        document = {"machine": host, "settings": settings, "runs": runs}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
