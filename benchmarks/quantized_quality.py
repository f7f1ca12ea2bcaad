"""Measures the quality that each --quantization costs the bundled model, as it is served in bfloat16.

    python -m benchmarks.quantized_quality [--documents 200] [--prompts 32] [--tokens 64] [--json PATH]

For the plain weights and each method: perplexity of held-out documents (those of training/evaluate.py), and how often
the most likely next token is the one that the plain weights chose, over their greedy answers to held-out prompts
("same token"). `make formats` computes in fp32, so it does not see that w8a8 rounds inputs, too. w8a8 is left out on a
CPU without AVX512-VNNI. "w8a8 gpu" rounds as a GPU does, by the reference of its kernels: one scale for a row of inputs
where a CPU has one for 256 of them, and no rounding of up to 16 rows.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

from benchmarks.formats.rows import QUANTIZATIONS
from benchmarks.kv_cache_dtype import PROMPT_TOKENS, PagedModel, encoded_documents
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from kernels.quantized.linear import multiplies_int8_inputs
from server.commands.bench.report import describe, machine
from training.evaluate import FOLDER

ON_GPU = "w8a8 gpu"


@dataclass(frozen=True)
class Figures:
    """One row of the table. same_token is a share of 1."""

    weights: str
    perplexity: float
    same_token: float


def measure(num_documents: int, num_prompts: int, num_tokens: int) -> Iterator[Figures]:
    """A row for the plain weights, then one for each method."""
    documents = encoded_documents(num_documents)
    prompts = [ids[:PROMPT_TOKENS] for ids, _ in documents[:num_prompts]]
    answers: list[list[int]] = []
    on_cpu = ["w8a8"] if multiplies_int8_inputs() else []  # elsewhere it would be int8
    for method in (None, *QUANTIZATIONS, *on_cpu, ON_GPU):
        config = read_model_config(FOLDER, "w8a8" if method == ON_GPU else method)
        with as_on_gpu() if method == ON_GPU else contextlib.nullcontext():
            decoder = load_model(
                FOLDER, config, dtype=torch.bfloat16, device=torch.device("cpu"), load_format="auto", seed=0
            )
        model = PagedModel(config, decoder, torch.bfloat16, None)
        answers = answers or [model.greedy(prompt, num_tokens) for prompt in prompts]
        same = torch.stack([model.agreement(*pair) for pair in zip(prompts, answers, strict=True)]).float()
        yield Figures(method or "bfloat16", model.perplexity(documents), float(same.mean()))


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Layers that are made inside round their inputs as those of a GPU."""
    with (
        mock.patch("kernels.quantized.linear.multiplies_in_8_bits", lambda dtype, device: dtype == torch.int8),
        mock.patch("engine.models.layers.operators.supports_quantized_gate", lambda *given: False),
    ):
        yield


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts, rows = machine(), []
    print(describe(facts))
    print(f"{'weights':12}{'perplexity':>12}{'same token':>12}")
    with torch.inference_mode():
        for row in measure(options.documents, options.prompts, options.tokens):
            rows.append(row)
            print(f"{row.weights:12}{row.perplexity:12.4f}{row.same_token:12.1%}", flush=True)
    if options.json:
        settings = {"documents": options.documents, "prompts": options.prompts, "tokens": options.tokens}
        document = {"machine": facts, "settings": settings, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
