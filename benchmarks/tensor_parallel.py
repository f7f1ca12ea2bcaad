"""Counts what the ranks of `--tensor-parallel-size` exchange per step, beside the minimum, and their tokens per second.

    python -m benchmarks.tensor_parallel [--model DIR] [--ranks 2] [--dtype float32] [--device cpu] [--rounds 3]

Calls and bytes are those that one rank gives. The minimum is that of tensor parallelism with whole logits on every rank
(Shoeybi et al. 2019): a sum over the ranks after the embedding, two per layer (one with a parallel residual), and one
collection of logits. Speeds of one rank and of several are measured A B A B on threads that divide the same cores.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.executor.step import NewSequence, Place, SequenceStep, StepPlan
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from server.commands.bench.report import describe, machine

PROMPT_TOKENS, SEQUENCES, OUTPUT_TOKENS = 64, 16, 48
NUM_BLOCKS, BLOCK_SIZE = 512, 16
TEXT = "Once upon a time there was a fox who lived in a wood and told stories to the rabbits. "


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes that a rank sends in a step: the counted ones and the minimum."""

    step: str
    calls: int
    num_bytes: int
    least_calls: int
    least_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = {"model": str(options.model), "dtype": options.dtype, "device": options.device, "num_blocks": 512}
    print(describe(machine()))
    print(f"{'a step of':34}{'calls':>8}{'least':>8}{'bytes':>12}{'least':>12}")
    for traffic in count_traffic(EngineConfig(**settings, tensor_parallel_size=options.ranks)):
        print(
            f"{traffic.step:34}{traffic.calls:8}{traffic.least_calls:8}{traffic.num_bytes:12,}{traffic.least_bytes:12,}"
        )
    speeds = measure_speeds(settings, options.ranks, options.rounds)
    for size, found in speeds.items():
        print(f"{size} rank{'s' * (size > 1)}: {statistics.median(found):.0f} output tokens/s (median of {len(found)})")


def count_traffic(config: EngineConfig) -> list[Traffic]:
    """The traffic of a step with prompts and of a decode step, from ranks without a Driver."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    size = config.tensor_parallel_size
    with tempfile.TemporaryDirectory() as folder:
        places = [Place(rank, size, str(Path(folder) / "rendezvous")) for rank in range(size)]
        ranks = [context.Process(target=_run_rank, args=(config, place, answers), daemon=True) for place in places]
        for rank in ranks:
            rank.start()
        found: list[Traffic] = answers.get(timeout=300)
        for rank in ranks:
            rank.join(30)
    return found


def _run_rank(config: EngineConfig, place: Place, answers: Any) -> None:
    from engine.worker.device.host import set_threads

    set_threads(config.cpu_threads, place.size)  # before torch is imported
    from engine.models.families import read_model_config
    from engine.worker.cache.kv_cache import allocate_kv_caches
    from engine.worker.loaded import load_decoder

    model = read_model_config(Path(config.model), None, place.rank, place.size)
    loaded = load_decoder(config, Path(config.model), model, lambda phase: None, place)
    ranks = loaded.decoder.operators.ranks
    assert ranks is not None, "several ranks"
    kv_caches = allocate_kv_caches(model, NUM_BLOCKS, BLOCK_SIZE, loaded.dtype, loaded.device)
    runner = loaded.make_runner(kv_caches, model.max_position_embeddings, None, eos_token_ids=[])
    prompts = [_new(seq_id) for seq_id in range(SEQUENCES)]
    chunks = [SequenceStep(new.seq_id, PROMPT_TOKENS, True, []) for new in prompts]
    plans = {
        f"{SEQUENCES} prompts of {PROMPT_TOKENS} tokens": StepPlan(1, [], prompts, [], chunks),
        f"{SEQUENCES} decodes": StepPlan(2, [], [], [], [], decodes=list(range(SEQUENCES))),
    }
    per_layer = 1 if model.parallel_residual else 2
    found = []
    for name, plan in plans.items():
        before = ranks.num_calls, ranks.num_bytes
        runner.result(runner.launch(plan))
        # The last layer computes the rows that the step samples, from attention's output on.
        rows, last = plan.num_tokens, SEQUENCES
        sums = model.embedding_size * rows + per_layer * model.hidden_size * (rows * (model.num_layers - 1) + last)
        logits = last * -(-model.vocab_size // place.size)
        least = 2 + per_layer * model.num_layers, (sums + logits) * loaded.dtype.itemsize
        found.append(Traffic(name, ranks.num_calls - before[0], ranks.num_bytes - before[1], *least))
    if place.rank == 0:
        answers.put(found)


def _new(seq_id: int) -> NewSequence:
    num_blocks = -(-(PROMPT_TOKENS + 1) // BLOCK_SIZE)
    return NewSequence(
        seq_id=seq_id,
        token_ids=[1 + (seq_id + i) % 50 for i in range(PROMPT_TOKENS)],
        num_prompt_tokens=PROMPT_TOKENS,
        num_computed_tokens=0,
        block_ids=list(range(seq_id * num_blocks, (seq_id + 1) * num_blocks)),
        params=SamplingParams(temperature=0.0),
        seed=0,
    )


def measure_speeds(settings: dict[str, Any], ranks: int, rounds: int) -> dict[int, list[float]]:
    """Output tokens per second of every round, by number of ranks."""
    speeds: dict[int, list[float]] = {1: [], ranks: []}
    with contextlib.ExitStack() as stack:
        engines = {
            size: stack.enter_context(LLM(**settings, tensor_parallel_size=size, enable_prefix_caching=False))
            for size in speeds
        }
        for counted in range(rounds + 1):
            for size, engine in engines.items():
                speed = _tokens_per_second(engine)
                if counted:  # the first round warms up
                    speeds[size].append(speed)
    return speeds


def _tokens_per_second(engine: LLM) -> float:
    words = engine.tokenizer.encode(TEXT * 8)
    prompts = [words[i : i + PROMPT_TOKENS] for i in range(SEQUENCES)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return SEQUENCES * OUTPUT_TOKENS / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
