"""Embeddings per second of a MiniLM-shaped model: our server over HTTP against transformers in its own process.

    python -m benchmarks.embeddings [--dtype float32] [--texts 2048] [--rounds 5] [--threads 2]
        [--workloads short paragraphs mixed] [--json PATH]

Random weights in the shape of all-MiniLM-L6-v2 and a WordPiece tokenizer trained on this Python's standard library.
The other side does what sentence-transformers does: texts sorted by length, 32 at a time, padded, mean, normalised; it
tokenises, too. In turns, A B A B; the server is stopped (SIGSTOP) while it does not serve.
Both sides have --threads threads, by default all cores.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from benchmarks.make_models import make_encoder, stdlib_sources
from benchmarks.processes import ServerProcess
from server.commands.bench.report import describe, machine

BATCH_SIZE = 32  # the default of sentence-transformers
# name -> words per text, drawn evenly from this range
WORKLOADS = {"short": (3, 25), "paragraphs": (40, 120), "mixed": (3, 180)}
MODEL = "minilm"


class Transformers:
    """The computation of SentenceTransformer.encode, without its progress bars and checks."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = np.empty((len(texts), self.model.config.hidden_size), np.float32)
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            batch = self.tokenizer([texts[i] for i in rows], padding=True, truncation=True, return_tensors="pt")
            hidden = self.model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"][..., None].float()
            mean = (hidden * mask).sum(1) / mask.sum(1)
            vectors[rows] = torch.nn.functional.normalize(mean).numpy()
        return vectors


class Server:
    """pageserve, asked over HTTP as a client would."""

    def __init__(self, folder: Path, dtype: str, threads: int, log: Path) -> None:
        command = f"python -m server.cli serve --model {folder} --dtype {dtype} --served-model-name {MODEL}"
        self.process = ServerProcess(f"{command} --device cpu --cpu-threads {threads} --port {{port}}", log)
        self.client = httpx.Client(base_url=self.process.base_url, timeout=600)

    def wait_ready(self) -> None:
        while True:
            self.process.check_alive()
            try:
                if self.client.get("/models").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def embed(self, texts: list[str]) -> np.ndarray:
        request = {"model": MODEL, "input": texts, "encoding_format": "float"}
        answer = self.client.post("/embeddings", json=request).raise_for_status().json()
        return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--texts", type=int, default=2048, help="in one request; at most 2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side")
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        make_encoder(folder)
        server = Server(folder, options.dtype, options.threads, Path(temporary) / "server.log")
        try:
            results = measure(server, folder, options)
        finally:
            server.process.stop()
    facts = machine()
    print(describe(facts))
    print(f"{'embeddings/s':24}{'tokens':>8}{'transformers':>14}{'pageserve':>11}{'times':>7}{'one text, ms':>16}")
    for name, row in results.items():
        theirs, ours = (statistics.median(row[side]) for side in ("transformers", "pageserve"))
        alone = "{:.1f} / {:.1f}".format(
            *(statistics.median(row[f"{side}_ms"]) for side in ("transformers", "pageserve"))
        )
        print(f"{name:24}{row['tokens']:8.0f}{theirs:14.0f}{ours:11.0f}{ours / theirs:7.2f}{alone:>16}")
    if options.json:
        settings = {
            "dtype": options.dtype,
            "texts": options.texts,
            "threads": options.threads,
            "batch_size": BATCH_SIZE,
        }
        options.json.write_text(json.dumps({"machine": facts, **settings, "runs": results}, indent=1) + "\n")


def measure(server: Server, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Per workload the embeddings per second and the milliseconds of a single text of each round, for each side."""
    torch.set_num_threads(options.threads)
    server.wait_ready()
    oracle = Transformers(folder, getattr(torch, options.dtype))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    results: dict[str, dict[str, object]] = {}
    for name in options.workloads:
        texts = make_texts(options.texts, *WORKLOADS[name])
        theirs, ours = oracle.embed(texts[:64]), server.embed(texts[:64])  # warms up, too
        nearest = float((theirs * ours).sum(1).min())
        assert nearest > (0.9999 if options.dtype == "float32" else 0.99), f"the vectors differ: {nearest}"
        columns: dict[str, list[float]] = {
            key: [] for key in ("transformers", "pageserve", "transformers_ms", "pageserve_ms")
        }
        for _ in range(options.rounds):
            for side, embed in (("transformers", oracle.embed), ("pageserve", server.embed)):
                (server.process.resume if side == "pageserve" else server.process.pause)()
                columns[side].append(len(texts) / seconds(embed, texts))
                columns[f"{side}_ms"].append(statistics.median(1e3 * seconds(embed, [text]) for text in texts[:20]))
        server.process.resume()
        counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
        results[name] = {"tokens": statistics.mean(counts), **columns}
    return results


def seconds(embed: Callable[[list[str]], np.ndarray], texts: list[str]) -> float:
    started = time.perf_counter()
    embed(texts)
    return time.perf_counter() - started


def make_texts(count: int, low: int, high: int) -> list[str]:
    rng = random.Random(0)
    words = sorted({word for source in stdlib_sources()[:20] for word in source.split() if word.isalpha()})
    return [" ".join(rng.choices(words, k=rng.randint(low, high))) for _ in range(count)]


if __name__ == "__main__":
    main()
