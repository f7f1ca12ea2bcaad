"""Measures the time of the Worker's host code per decode step, with a model that computes nothing.

    python benchmarks/host_overhead.py [--num-seqs 256] [--vocab-size 64] [--steps 300]

A small vocabulary shows the cost of rows and messages; a real one adds the sampler's arithmetic. Prints milliseconds
per step, from the plan's bytes to the result's: the median and the best on the clock, and the median of CPU time,
which a busy machine distorts less. One thread.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch

from engine.executor.step import NewSequence, SequenceStep, StepPlan, decode_driver_message, encode_frame
from engine.models.config import ModelConfig
from engine.sampling_params import SamplingParams
from engine.worker.device.host import StepLimits
from engine.worker.model_runner import ModelRunner, RunnerParts

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "top_p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top_k 50": SamplingParams(temperature=1.0, top_k=50),
    "penalties": SamplingParams(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.1),
    "5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


class NullDecoder:
    """Takes the place of engine.models.decoder.Decoder: hidden states of nothing, logits made once."""

    recorded = None

    def __init__(self, config: ModelConfig, num_seqs: int, vocab_size: int) -> None:
        self.config = config
        self.logits = torch.randn(num_seqs, vocab_size, generator=torch.Generator().manual_seed(0)) * 2

    def forward(self, input_ids: Any, metadata: Any, kv_caches: Any) -> torch.Tensor:
        return torch.empty(len(input_ids), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(hidden)].clone()


def measure(params: SamplingParams, num_seqs: int, vocab_size: int, steps: int) -> list[tuple[float, float]]:
    """Seconds on the clock and of CPU time of each decode step."""
    model = ModelConfig(
        family="llama", vocab_size=vocab_size, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
        intermediate_size=8, max_position_embeddings=4096, norm="rms", norm_eps=1e-6, position="rope",
        activation="silu", gated_mlp=True,
    )  # fmt: skip
    runner = ModelRunner(
        RunnerParts(
            decoder=NullDecoder(model, num_seqs, vocab_size),  # type: ignore[arg-type]
            kv_caches=[(torch.zeros(8192, 1, BLOCK_SIZE, 8),) * 2],
            limits=StepLimits(num_seqs, max(2048, num_seqs * PROMPT_TOKENS)),
            max_model_len=4096,
            block_size=BLOCK_SIZE,
            eos_token_ids=[0],
            device=torch.device("cpu"),
        )
    )
    prompt = [i % vocab_size for i in range(PROMPT_TOKENS)]
    blocks = list(range(PROMPT_TOKENS // BLOCK_SIZE + 1))
    new = [
        NewSequence(
            seq_id=i,
            token_ids=prompt,
            num_prompt_tokens=PROMPT_TOKENS,
            num_computed_tokens=0,
            block_ids=blocks,
            params=params,
            seed=i,
        )
        for i in range(num_seqs)
    ]
    prefill = [SequenceStep(i, PROMPT_TOKENS, True, []) for i in range(num_seqs)]
    runner.result(runner.launch(StepPlan(0, [], new, [], prefill)))
    seconds = []
    for step in range(steps):
        needs_block = (PROMPT_TOKENS + step) % BLOCK_SIZE == 0  # worse than real: all sequences in one step
        blocks = [x for i in range(num_seqs) for x in (i, i)] if needs_block else []
        step_plan = StepPlan(
            step_id=step,
            removed=[],
            new=[],
            block_copies=[],
            chunks=[],
            decodes=list(range(num_seqs)),
            decode_blocks=blocks,
        )
        body = encode_frame(step_plan)[4:]
        started, cpu_started = time.perf_counter(), time.process_time()
        plan = decode_driver_message(body)
        encode_frame(runner.result(runner.launch(plan)))
        seconds.append((time.perf_counter() - started, time.process_time() - cpu_started))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = {}
    print(f"{arguments.num_seqs} sequences, vocabulary {arguments.vocab_size}: ms per step")
    print(f"{'':14}{'median':>8}{'best':>8}{'CPU':>8}")
    for name, params in PARAMS.items():
        seconds = measure(params, arguments.num_seqs, arguments.vocab_size, arguments.steps)
        wall, cpu = ([1e3 * pair[i] for pair in seconds] for i in range(2))
        row = {"median": statistics.median(wall), "best": min(wall), "cpu": statistics.median(cpu)}
        table[name] = row
        print(f"{name:14}" + "".join(f"{value:8.3f}" for value in row.values()))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(arguments), "ms_per_step": table}, file, indent=2)


if __name__ == "__main__":
    main()
