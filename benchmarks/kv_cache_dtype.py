"""Measures the quality that each --kv-cache-dtype costs and the memory that it saves, on the bundled model.

    python -m benchmarks.kv_cache_dtype [--dtype float32] [--documents 400] [--prompts 64] [--tokens 128] [--json PATH]

Per cache dtype: bytes of KV cache per token and blocks in 1 GiB; perplexity of held-out documents (those of
training/evaluate.py), every key and value written to the paged cache and read back from it; and
how often the most likely next token is the one that the unquantised cache chose, over greedy answers to held-out
prompts of which each cache is told all earlier tokens ("same token"), and how far into an answer the first difference
comes ("until different", as a share of its length). And the milliseconds of one layer's decode attention, 16 sequences
of 4,096 tokens, 12 heads over 4 KV heads of 64, on the threads of this process (OMP_NUM_THREADS), the dtypes in turns.
Needs transformers (the test extras).
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.layers.attention import BatchMetadata
from engine.models.loading.load import load_model
from engine.worker.cache.kv_cache import allocate_kv_caches
from kernels.attention.decode import paged_attention
from kernels.cache.reshape_and_cache import reshape_and_cache
from kernels.kv_format import KV_FORMATS, KVFormat
from server.commands.bench.report import describe, machine
from training.evaluate import FOLDER, held_out_documents
from training.train import IGNORE, encode

BLOCK_SIZE = 16
PROMPT_TOKENS = 24
ROUNDS = 15  # timings per kernel
MAX_TOKENS = 2048  # most tokens of a document: the model's context


@dataclass(frozen=True)
class Figures:
    """One row of the table. Shares are of 1."""

    cache_dtype: str
    bytes_per_token: int
    blocks_per_gib: int
    perplexity: float
    same_token: float
    until_different: float
    attention_ms: float


class PagedModel:
    """The bundled model over a paged cache of one dtype: one sequence at a time, in blocks that are not in order."""

    def __init__(self, config: ModelConfig, decoder: Decoder, dtype: torch.dtype, kv_format: KVFormat | None) -> None:
        num_blocks = MAX_TOKENS // BLOCK_SIZE
        self.decoder = decoder
        self.caches = allocate_kv_caches(config, num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"), kv_format)
        self.table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))

    def logits(self, ids: list[int], start: int = 0) -> Tensor:
        """fp32 [len(ids), vocab] for tokens start, start + 1, ... of a sequence whose earlier ones are in the cache."""
        count, positions = len(ids), torch.arange(start, start + len(ids))
        metadata = BatchMetadata(
            positions=positions,
            slot_mapping=self.table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            num_decodes=int(count == 1),
            block_tables=self.table.int()[None],
            seq_lens=torch.tensor([start + count], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0] if count == 1 else [0, count], dtype=torch.int32),
            max_seqlen_q=0 if count == 1 else count,
        )
        return self.decoder.compute_logits(self.decoder.forward(torch.tensor(ids), metadata, self.caches)).float()

    def perplexity(self, documents: list[tuple[list[int], list[int]]]) -> float:
        """exp(mean loss per learned token); documents are token ids and labels."""
        total, count = 0.0, 0
        for ids, labels in documents:
            targets = torch.tensor(labels[1:])
            loss = F.cross_entropy(self.logits(ids)[:-1], targets, ignore_index=IGNORE, reduction="sum")
            total, count = total + float(loss), count + int((targets != IGNORE).sum())
        return math.exp(total / count)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The most likely continuation, token by token."""
        ids = [*prompt, int(self.logits(prompt)[-1].argmax())]
        while len(ids) < len(prompt) + num_tokens:
            ids.append(int(self.logits(ids[-1:], len(ids) - 1).argmax()))
        return ids[len(prompt) :]

    def agreement(self, prompt: list[int], answer: list[int]) -> Tensor:
        """Whether each token of `answer` is the most likely one after those before it: bool [len(answer)]."""
        chosen = self.logits(prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1)
        return chosen == torch.tensor(answer)


def encoded_documents(count: int) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of held-out documents, as long as the model's context at most."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    encoded = [encode(tokenizer, document) for document in held_out_documents(count)]
    return [(ids[:MAX_TOKENS], labels[:MAX_TOKENS]) for ids, labels in encoded]


def attention_milliseconds(dtype: torch.dtype) -> dict[str, float]:
    """Medians of one decode attention by cache dtype, A B C D A B C D."""
    num_seqs, context, num_heads, num_kv_heads, head_dim = 16, 4096, 12, 4, 64
    blocks = context // BLOCK_SIZE
    q = torch.randn(num_seqs, num_heads, head_dim).to(dtype)
    tables = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).int()
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
    rows = torch.randn(num_seqs * context, num_kv_heads, head_dim).to(dtype)
    calls: dict[str, Callable[[], Tensor]] = {}
    for kv_format in (None, *KV_FORMATS.values()):
        cache_dtype = getattr(torch, kv_format.dtype_name) if kv_format else dtype
        width = kv_format.width(head_dim) if kv_format else head_dim
        k, v = (torch.empty(num_seqs * blocks, num_kv_heads, BLOCK_SIZE, width, dtype=cache_dtype) for _ in range(2))
        reshape_and_cache(rows, rows, k, v, torch.arange(len(rows)))
        call = partial(paged_attention, q, k, v, tables, seq_lens, scale=head_dim**-0.5)
        calls[_name(dtype, kv_format)] = call
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def _name(dtype: torch.dtype, kv_format: KVFormat | None) -> str:
    return kv_format.name if kv_format else str(dtype).removeprefix("torch.")


def measure(dtype: torch.dtype, num_documents: int, num_prompts: int, num_tokens: int) -> Iterator[Figures]:
    """A row for the unquantised cache, then one for each format."""
    config = read_model_config(FOLDER)
    decoder = load_model(FOLDER, config, dtype=dtype, device=torch.device("cpu"), load_format="auto", seed=0)
    documents = encoded_documents(num_documents)
    prompts = [ids[:PROMPT_TOKENS] for ids, _ in documents[:num_prompts]]
    attention = attention_milliseconds(dtype)
    answers: list[list[int]] = []
    for kv_format in (None, *KV_FORMATS.values()):
        model = PagedModel(config, decoder, dtype, kv_format)
        answers = answers or [model.greedy(prompt, num_tokens) for prompt in prompts]
        same = torch.stack([model.agreement(*pair) for pair in zip(prompts, answers, strict=True)]).float()
        per_token = config.kv_bytes_per_token(dtype.itemsize, kv_format)
        yield Figures(
            cache_dtype=_name(dtype, kv_format),
            bytes_per_token=per_token,
            blocks_per_gib=(1 << 30) // (BLOCK_SIZE * per_token),
            perplexity=model.perplexity(documents),
            same_token=float(same.mean()),
            until_different=float(same.cumprod(1).mean()),
            attention_ms=attention[_name(dtype, kv_format)],
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of weights and activations"
    )
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts, rows = machine(), []
    print(describe(facts))
    titles = ("KV cache", "bytes/token", "blocks/GiB", "perplexity", "same token", "until different", "attention ms")
    print("{:<10}{:>12}{:>12}{:>12}{:>12}{:>17}{:>14}".format(*titles))
    for row in measure(getattr(torch, options.dtype), options.documents, options.prompts, options.tokens):
        rows.append(asdict(row))
        print(f"{row.cache_dtype:<10}{row.bytes_per_token:>12}{row.blocks_per_gib:>12}{row.perplexity:>12.4f}"
              f"{row.same_token:>12.2%}{row.until_different:>17.2%}{row.attention_ms:>14.2f}", flush=True)  # fmt: skip
    if options.json:
        settings = {name: getattr(options, name) for name in ("dtype", "documents", "prompts", "tokens")}
        settings["threads"] = torch.get_num_threads()
        options.json.write_text(json.dumps({"machine": facts, "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
