"""Output tokens per second of the bundled model by block size: the whole engine, all sizes in turns."""

import contextlib
import random
import statistics
import time
from typing import Any

from engine.llm import LLM
from engine.sampling_params import SamplingParams

SIZES = (8, 16, 32, 64, 128)
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS, REPEATS = 32, 200, 64, 5


def measure_speed() -> list[dict[str, Any]]:
    """One engine per size, all open, each measured once per round: what disturbs the machine disturbs all alike."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    runs: dict[int, list[float]] = {size: [] for size in SIZES}
    with contextlib.ExitStack() as stack:
        engines = {
            size: stack.enter_context(LLM(block_size=size, kv_cache_memory="256MiB", enable_prefix_caching=False))
            for size in SIZES
        }
        vocabulary = next(iter(engines.values())).tokenizer.encode
        words = vocabulary("Once upon a time there was a fox who lived in a wood and told stories to the rabbits.")
        prompts = [[rng.choice(words) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
        for repeat in range(REPEATS + 1):
            for size, engine in engines.items():
                started = time.perf_counter()
                engine.generate(prompts, params, use_tqdm=False)
                if repeat:  # the first round warms up
                    runs[size].append(NUM_PROMPTS * OUTPUT_TOKENS / (time.perf_counter() - started))
    return [{"block_size": size, "tokens_per_s": statistics.median(runs[size]), "runs": runs[size]} for size in SIZES]
