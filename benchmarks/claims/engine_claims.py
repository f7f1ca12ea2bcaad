"""Claims about the engine in this process: against transformers' generate, and against static batches of our own."""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks import admission_engine, memory_speed
from benchmarks.claims.row import Row
from benchmarks.memory_load import SHAREGPT, paged
from engine.llm import LLM
from engine.sampling_params import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
ALONE, TOGETHER = 4, 64  # requests one by one, and at once
Prompts = list[list[int]]


def against_transformers(model: Path, repeats: int) -> list[Row]:
    """Output tokens per second of 64 requests at once, against transformers' generate in bf16: a request at a time, and
    one static batch of 64 of equal lengths, which wastes nothing on padding."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with LLM(str(model), dtype="bfloat16", enable_prefix_caching=False) as llm:
        prompts = _prompts(theirs.config.vocab_size)
        found = _in_turns(
            {
                "ours": lambda: _tokens_per_s(llm, prompts(TOGETHER), [OUTPUT_TOKENS] * TOGETHER),
                "one by one": lambda: _generate(theirs, [[prompt] for prompt in prompts(ALONE)]),
                "static batch": lambda: _generate(theirs, [prompts(TOGETHER)]),
            },
            repeats,
        )
    work = f"{model.name}, {TOGETHER} x {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens"
    return [
        Row("against one by one", "tokens/s", found["ours"], found["one by one"], "transformers", 10.0, note=work),
        Row("against a static batch of 64", "tokens/s", found["ours"], found["static batch"], "transformers", 2.0,
            note=work),
    ]  # fmt: skip


def _generate(model: torch.nn.Module, batches: list[Prompts]) -> float:
    """Output tokens per second of transformers' greedy generate."""
    started, tokens = time.perf_counter(), 0
    for batch in batches:
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
            )  # fmt: skip
        tokens += out[:, ids.shape[1] :].numel()
    return tokens / (time.perf_counter() - started)


def against_static_batches(model: Path, repeats: int) -> list[Row]:
    """Orca's claim (Yu et al. 2022, section 3): sequences that end leave their place to others at once. 128 requests
    whose output lengths vary, at most 32 at a time, against batches of 32 that each wait for their longest."""
    rng, batch, total = random.Random(0), 32, 128
    lengths = [max(4, min(256, round(rng.lognormvariate(3.8, 0.8)))) for _ in range(total)]
    with LLM(str(model), dtype="bfloat16", enable_prefix_caching=False, max_num_seqs=batch) as llm:
        prompts = _prompts(llm.driver.tokenizer.vocab_size)

        def static() -> float:
            all_prompts, started = prompts(total), time.perf_counter()
            for i in range(0, total, batch):
                _tokens_per_s(llm, all_prompts[i : i + batch], lengths[i : i + batch])
            return sum(lengths) / (time.perf_counter() - started)

        found = _in_turns({"ours": lambda: _tokens_per_s(llm, prompts(total), lengths), "static": static}, repeats)
    work = f"{model.name}, outputs of {min(lengths)} to {max(lengths)} tokens, mean {statistics.mean(lengths):.0f}"
    return [Row("continuous batching", "tokens/s", found["ours"], found["static"], "static batches", 1.0, note=work)]


def memory_in_use() -> list[Row]:
    """The share of the KV memory that holds tokens while requests wait (Kwon et al. 2023, figure 2): counts of the real
    scheduler and block manager."""
    shares, _ = paged(SHAREGPT.load(2000))
    work = f"lengths {SHAREGPT.name}, a full queue"
    return [
        Row("KV memory in use", "%", 100 * shares.tokens, 100.0, "the pool", 0.9, note=work),
        Row("KV memory wasted", "%", 100 * shares.waste, 100.0, "the pool", 0.04, at_most=True, note=work),
    ]


def block_sizes() -> list[Row]:
    """Decode speed by block size, bundled model; the default of 16 against the fastest."""
    runs = {row["block_size"]: row["tokens_per_s"] for row in memory_speed.measure_speed()}
    best = max(runs, key=lambda size: runs[size])
    note = "tokens/s by size: " + ", ".join(f"{size} {speed:.0f}" for size, speed in runs.items())
    return [Row("blocks of 16 tokens", "tokens/s", runs[16], runs[best], f"blocks of {best}", 0.9, note=note)]


def predicted_lengths(repeats: int) -> list[Row]:
    """Admission that predicts output lengths against plain admission, in a pool that is too small."""
    settings = admission_engine.SETTINGS
    with LLM(admission="plain", **settings) as plain, LLM(admission="predict", **settings) as predict:
        found = _in_turns(
            {
                name: lambda llm=llm: admission_engine.measure(llm, "stories", 100)["tokens_per_s"]  # type: ignore[misc]
                for name, llm in (("plain", plain), ("predict", predict))
            },
            repeats,
        )
    note = "bundled model, 100 stories in 160 blocks"
    return [Row("admission by predicted length", "tokens/s", found["predict"], found["plain"], "plain", 1.0, note=note)]


def long_context(model: Path, length: int) -> list[Row]:
    """A prompt of `length` tokens: time per token of its decode, against one of 1,000 tokens."""
    settings = {"max_model_len": length + 1024, "num_blocks": (length + 4096) // 16}
    with LLM(str(model), dtype="bfloat16", **settings) as llm:
        prompts = _prompts(llm.driver.tokenizer.vocab_size)
        short, long = (_step_seconds(llm, prompts(1, tokens)[0]) for tokens in (1000, length))
    note = f"{model.name}, first token after {long[0]:.1f} s, {length / long[0]:.0f} prompt tokens/s"
    return [Row(f"a context of {length}", "ms per token", long[1] * 1e3, short[1] * 1e3, "1,000 tokens", note=note)]


def _step_seconds(llm: LLM, prompt: list[int]) -> tuple[float, float]:
    """(seconds to the first token, seconds per token after it). The prefix cache answers after the first run: prompts
    that are computed differ by more than the tokens take."""
    first, again = (1 / _tokens_per_s(llm, [prompt], [1]) for _ in range(2))
    return first, (OUTPUT_TOKENS / _tokens_per_s(llm, [prompt], [OUTPUT_TOKENS]) - again) / (OUTPUT_TOKENS - 1)


def _tokens_per_s(llm: LLM, prompts: Prompts, lengths: list[int]) -> float:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return sum(lengths) / (time.perf_counter() - started)


def _prompts(vocab_size: int) -> Callable[..., Prompts]:
    """Makes prompts of random token ids, other ones with each call."""
    rng = random.Random(0)
    low = min(300, vocab_size // 2)
    return lambda count, length=PROMPT_TOKENS: [
        [rng.randrange(low, vocab_size) for _ in range(length)] for _ in range(count)
    ]


def _in_turns(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Medians of `repeats` rounds in which all sides take turns, after one that warms up."""
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            figure = run()
            if repeat:
                runs[name].append(figure)
    return {name: statistics.median(figures) for name, figures in runs.items()}
