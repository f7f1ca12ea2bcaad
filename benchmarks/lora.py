"""Tokens per second of the base model against those of eight LoRA adapters in one batch. Prints JSON.

    python -m benchmarks.lora [--model .cache/models/llama-90m] [--rank 8] [--streams 16 64] [--tokens 64] [--rounds 3]

The adapters have random factors for all seven matrices of a layer and are written as PEFT writes them. One Driver with
its Worker serves both; the streams of a round have all no adapter, then each one of the eight in turn. Decode speed:
the median over the rounds, from the first token of the last stream to the end of the first. The model must name its
matrices as LLaMA does.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.driver import Driver
from engine.models.config import ModelConfig
from engine.models.families import read_model_config
from engine.request import Request
from engine.sampling_params import SamplingParams
from server.commands.bench.report import machine

NUM_ADAPTERS = 8
PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llama-90m"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options)), indent=1))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every number of streams."""
    with tempfile.TemporaryDirectory() as folder:
        model = read_model_config(options.model)
        for i in range(NUM_ADAPTERS):
            write_adapter(Path(folder) / str(i), model, options.rank, seed=i)
        adapters = tuple(f"a{i}={folder}/{i}" for i in range(NUM_ADAPTERS))
        config = EngineConfig(
            model=str(options.model), lora=adapters, max_lora_rank=max(16, options.rank), max_loras=NUM_ADAPTERS,
            enable_prefix_caching=False, max_num_seqs=max(options.streams), max_model_len=1024,
        )  # fmt: skip
        driver = Driver(config)
        await driver.start()
        try:
            await driver.wait_ready()
            found = []
            for streams in options.streams:
                names = [f"a{i % NUM_ADAPTERS}" for i in range(streams)]
                speeds: dict[str, list[float]] = {"base": [], "adapters": []}
                for number in range(options.rounds + 1):
                    for kind, own in (("base", [""] * streams), ("adapters", names)):
                        speed = await run(driver, own, options.tokens)
                        if number:  # the first round warms up
                            speeds[kind].append(speed)
                base, adapted = (statistics.median(speeds[kind]) for kind in ("base", "adapters"))
                found.append(
                    {"streams": streams, "base_tokens_per_s": round(base), "adapters_tokens_per_s": round(adapted),
                     "ratio": round(adapted / base, 3)}
                )  # fmt: skip
        finally:
            await driver.stop()
    return {"machine": machine(), "model": str(options.model), "dtype": driver.model.dtype, "rank": options.rank,
            "adapters": NUM_ADAPTERS, "results": found}  # fmt: skip


async def run(driver: Driver, adapters: list[str], num_tokens: int) -> float:
    """Decode tokens per second of one stream per entry, each with the adapter that it names."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = torch.randint(3, driver.model.vocab_size, (len(adapters), PROMPT_TOKENS)).tolist()
    times: list[list[float]] = []

    async def read(number: int, adapter: str) -> None:
        own: list[float] = []
        times.append(own)
        async for output in driver.generate(Request(str(number), prompts[number], params, adapter=adapter)):
            own += [time.perf_counter()] * sum(len(part.token_ids) for part in output.outputs)

    await asyncio.gather(*(read(number, adapter) for number, adapter in enumerate(adapters)))
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    return sum(begin < moment <= end for own in times for moment in own) / (end - begin)


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> None:
    """An adapter with random factors for all matrices of the layers."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    hidden, inner = model.hidden_size, model.intermediate_size
    q, k, v = model.qkv_rows(0)
    shapes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (k, hidden), "self_attn.v_proj": (v, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(model.num_layers):
        for name, (rows, columns) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 50
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
