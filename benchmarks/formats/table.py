"""Measures the rows of `make formats`: perplexity, error, bytes and tokens per second."""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.formats.rows import ROWS, Checkpoint
from benchmarks.kv_cache_dtype import PagedModel, encoded_documents
from engine.llm import LLM
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.layers.operators import operators_for
from engine.models.loading.load import load_model
from engine.models.loading.loader import load_weights
from engine.sampling_params import SamplingParams
from kernels.quantized.weight import QuantizedWeight, Weight
from training.evaluate import FOLDER

CPU = torch.device("cpu")
STREAMS = 16
PROMPT_TOKENS = 32
WEIGHT_FILES = (".safetensors", ".gguf")

Document = tuple[list[int], list[int]]  # token ids, and labels for the perplexity


@dataclass(frozen=True)
class Speed:
    """How speed is measured. Rounds of a row and of bf16 alternate, so that both meet the same machine."""

    model: Path  # a plain checkpoint of one file
    tokens: int  # output tokens of each stream
    rounds: int


@dataclass(frozen=True)
class Figures:
    """One row of the table."""

    format: str
    perplexity: float  # on held-out documents, computed in fp32
    logit_error: float  # largest difference of a logit from the weights that the codes mean, computed in fp32
    disk_bytes: int
    memory_bytes: int  # the weights' share, in a bf16 model
    alone: float | None = None  # output tokens per second of one stream, bf16
    alone_to_bf16: float | None = None
    streams: float | None = None  # output tokens per second of STREAMS streams together
    streams_to_bf16: float | None = None


def measure(names: list[str], num_documents: int, speed: Speed | None) -> Iterator[Figures]:
    """A row for each name, in order."""
    documents = encoded_documents(num_documents)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        base = None
        if speed is not None:
            checkpoint = ROWS["bf16"](speed.model, folder / "base")
            base = stack.enter_context(_engine(checkpoint))
        for name in names:
            with TemporaryDirectory() as work:
                row = _quality(name, ROWS[name](FOLDER, Path(work) / "quality"), documents)
                if speed is not None and base is not None:
                    row = replace(row, **_speed(ROWS[name](speed.model, Path(work) / "speed"), base, speed))
                yield row


def _quality(name: str, checkpoint: Checkpoint, documents: list[Document]) -> Figures:
    config = read_model_config(checkpoint.folder, checkpoint.options.get("quantization"))
    model = paged(load_model(checkpoint.folder, config, dtype=torch.float32, device=CPU, load_format="auto", seed=0))
    meant = paged(_meant(checkpoint, config))
    with torch.inference_mode():
        error = max(float((model.logits(ids) - meant.logits(ids)).abs().max()) for ids, _ in documents[:8])
        perplexity = model.perplexity(documents)
    folder = checkpoint.folder  # or a GGUF file
    files = [path for path in (folder.iterdir() if folder.is_dir() else [folder]) if path.suffix in WEIGHT_FILES]
    weights = load_weights(checkpoint.folder, config, torch.bfloat16, CPU)
    return Figures(
        name,
        perplexity,
        error,
        disk_bytes=sum(path.stat().st_size for path in files),
        memory_bytes=sum(_num_bytes(weight) for weight in weights.values()),
    )


def paged(decoder: Decoder) -> PagedModel:
    """A decoder over a paged cache in fp32."""
    return PagedModel(decoder.config, decoder, torch.float32, None)


def _meant(checkpoint: Checkpoint, config: ModelConfig) -> Decoder:
    """The plain fp32 model that the checkpoint stands for."""
    if checkpoint.meant is not None:
        plain = read_model_config(checkpoint.meant)
        return load_model(checkpoint.meant, plain, dtype=torch.float32, device=CPU, load_format="auto", seed=0)
    weights = load_weights(checkpoint.folder, config, torch.float32, CPU)
    plain_weights: dict[str, Weight] = {name: _dequantized(weight) for name, weight in weights.items()}
    return Decoder(config, plain_weights, CPU, None, operators_for(config, torch.float32, CPU, False))


def _dequantized(weight: Weight) -> Tensor:
    parts = weight if isinstance(weight, tuple) else (weight,)
    plain = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def _num_bytes(weight: Weight) -> int:
    parts = weight if isinstance(weight, tuple) else (weight,)
    return sum(part.num_bytes if isinstance(part, QuantizedWeight) else part.nbytes for part in parts)


def _engine(checkpoint: Checkpoint) -> LLM:
    return LLM(
        model=str(checkpoint.folder),
        dtype="bfloat16",
        max_num_seqs=STREAMS,
        kv_cache_memory="256MiB",
        enable_prefix_caching=False,
        **checkpoint.options,
    )


def _speed(checkpoint: Checkpoint, base: LLM, speed: Speed) -> dict[str, Any]:
    """Medians over the rounds; a ratio is the median of the ratios of each round."""
    with _engine(checkpoint) as engine:
        figures = {}
        for field, count in (("alone", 1), ("streams", STREAMS)):
            _tokens_per_second(engine, count, 8)  # the first requests warm up
            pairs = [
                tuple(_tokens_per_second(e, count, speed.tokens) for e in (engine, base)) for _ in range(speed.rounds)
            ]
            figures[field] = statistics.median(own for own, _ in pairs)
            figures[f"{field}_to_bf16"] = statistics.median(own / plain for own, plain in pairs)
    return figures


def _tokens_per_second(engine: LLM, count: int, tokens: int) -> float:
    prompts = [[(7 * stream + position) % 1000 + 10 for position in range(PROMPT_TOKENS)] for stream in range(count)]
    started = time.perf_counter()
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return count * tokens / (time.perf_counter() - started)
