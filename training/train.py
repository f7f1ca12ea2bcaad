"""Train the bundled model from nothing: corpus, tokenizer, transformer.

    python -m training.train --out DIR

Needs about half an hour on two idle cores with bf16 instructions. The run is a function of its arguments: data, order
and initial weights come from fixed seeds (floating-point sums may differ between machines).
"""

import argparse
import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from training.corpus import PRACTICE_SEED, SPECIAL_TOKENS, TRAIN_SEED, Corpus, Document
from training.tokenizer import save_tokenizer, train_tokenizer

VOCAB_SIZE = 3072
CONTEXT = 2048
TOKENS_PER_STEP = 4096
SHORT, LONG = 512, CONTEXT  # rows of 512 tokens first, of 2048 at the end
LONG_SHARE = 0.12
DECAY_SHARE = 0.4
WARMUP_STEPS = 50
COPY_STEPS = 250  # see repetitions()
IGNORE = -100
EMBEDDING_STD = 0.2
# Written by hand, in the words that every loader knows: transformers 4 and 5, vLLM, llama.cpp's converter.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": [0, 2],
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "use_cache": True,
}
GENERATION_CONFIG = {"eos_token_id": [0, 2], "pad_token_id": 0, "do_sample": True, "temperature": 0.7, "top_p": 0.95}


def keep_memory() -> None:
    """Tell glibc to keep freed memory: giving back and faulting in the logits each step costs up to 3/4 of the time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        m_mmap_max, m_trim_threshold = -4, -1
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Token ids and labels of a document; a label is IGNORE where the model need not learn to write the token."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learn in document.segments:
        segment = tokenizer.encode(text, add_special_tokens=False).ids
        ids += segment
        labels += segment if learn else [IGNORE] * len(segment)
    return ids, labels


def repetitions() -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and labels of random sequences that are said two to six times; the first time need not be learned.

    Only looking back helps here, so the model learns to copy in some hundred steps, and later copies names. From
    stories alone that skill (induction heads: Olsson et al., 2022) comes only after many million tokens.
    """
    rng = random.Random(TRAIN_SEED)
    while True:
        once = [rng.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(rng.randint(2, 40))]
        times = rng.randint(2, 6)
        yield once * times + [0], [IGNORE] * len(once) + once * (times - 1) + [IGNORE]


def documents(tokenizer: Tokenizer, corpus: Corpus) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and labels of a corpus, one document after the other."""
    return (encode(tokenizer, document) for document in corpus.documents())


def packed_rows(source: Iterator[tuple[list[int], list[int]]], length: Callable[[], int]) -> Iterator[Tensor]:
    """Documents one after the other, cut into rows: [3, length() + 1] of token ids, labels and document numbers."""
    waiting = torch.empty(3, 0, dtype=torch.long)
    for number, (ids, labels) in enumerate(source):
        waiting = torch.cat([waiting, torch.tensor([ids, labels, [number] * len(ids)])], dim=1)
        while waiting.shape[1] > (size := length() + 1):
            yield waiting[:, :size]
            waiting = waiting[:, size:]


def make_model() -> LlamaForCausalLM:
    """A fresh model that is ready to learn to copy, which a story needs in every sentence: who was it about?

    The residual stream starts as the embedding alone (outputs of the layers are zero, and embeddings large enough not
    to drown later), the first component of every embedding is one constant, and one head looks one token back.
    """
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="sdpa"))
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.normal_(std=EMBEDDING_STD)
        embedding[:, 0] = 4 * EMBEDDING_STD
        model.model.norm.weight.fill_(0.25 / (EMBEDDING_STD * CONFIG["hidden_size"] ** 0.5))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        look_back(model.model.layers[0].self_attn)
    return model


def look_back(attention: LlamaAttention) -> None:
    """Make the first head of a layer attend to the previous token, whatever the tokens are.

    Half of an induction head (Olsson et al., 2022); the other half is learned within some hundred steps, the whole only
    after many thousand. Query and key come from the constant component: the key is the query turned by the rotary
    angle of one position, so that their product peaks at a distance of one.
    """
    half = CONFIG["head_dim"] // 2
    angle = 1 / CONFIG["rope_theta"] ** (torch.arange(half) / half)
    cos, sin, length = angle.cos(), angle.sin(), 2.75 / (2 * half) ** 0.5
    query = torch.full((2 * half,), length)
    key = torch.cat([query[:half] * cos - query[half:] * sin, query[half:] * cos + query[:half] * sin])
    for projection, row in ((attention.q_proj, query), (attention.k_proj, key)):
        projection.weight[: 2 * half] *= 0.1
        projection.weight[: 2 * half, 0] = row


def make_optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def lr_factor(step: int, steps: int, practice_steps: int) -> float:
    """Warm up, stay, fall linearly to zero over the last DECAY_SHARE; then once more from half the height."""
    if step < steps:
        return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))
    step -= steps
    return 0.5 * min((step + 1) / WARMUP_STEPS, (practice_steps - step) / practice_steps)


def make_loss(model: LlamaForCausalLM, compiled: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Mean cross-entropy over the learned tokens, in bf16 with an fp32 loss; a token sees its own document only.

    Its arguments are ids, labels and document numbers, each [rows, length].
    """

    def loss(ids: Tensor, labels: Tensor, documents: Tensor) -> Tensor:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)

    return torch.compile(loss, dynamic=False) if compiled else loss


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the complete model folder; the weights replace older ones in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "model.safetensors.new").chmod(0o644)
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, CONTEXT)


@dataclass(frozen=True)
class Run:
    """The arguments of a run."""

    out: Path
    steps: int
    practice_steps: int
    lr: float
    processes: int
    compiled: bool
    save_every: int
    resume: bool


def average_gradients(model: LlamaForCausalLM, processes: int) -> None:
    """Mean of the gradients over all processes."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient) / processes)


def update(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """One step of all optimizers at this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def batches(run: Run, tokenizer: Tokenizer, rank: int, first: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(ids, labels, documents) of steps `first`, first + 1, ...: this process' rows, labels shifted by one."""
    copying = packed_rows(repetitions(), lambda: SHORT)
    language = packed_rows(documents(tokenizer, Corpus(TRAIN_SEED)), lambda: length)
    practice = packed_rows(documents(tokenizer, Corpus(PRACTICE_SEED, practice=True)), lambda: SHORT)
    for step in range(run.steps + run.practice_steps):
        length = LONG if (1 - LONG_SHARE) * run.steps <= step < run.steps else SHORT
        rows = copying if step < COPY_STEPS else language if step < run.steps else practice
        batch = [next(rows) for _ in range(TOKENS_PER_STEP // length)][rank :: run.processes]
        if step >= first:
            ids, labels, numbers = torch.stack(batch, dim=1)
            yield ids[:, :-1].contiguous(), labels[:, 1:].contiguous(), numbers[:, :-1].contiguous()


def train(rank: int, run: Run) -> None:
    """The whole run in one of its processes; the first one writes `out` every `save_every` steps and at the end."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // run.processes))
    torch.manual_seed(TRAIN_SEED)
    dist.init_process_group("gloo", rank=rank, world_size=run.processes, init_method=f"file://{run.out}/rendezvous")
    tokenizer = train_tokenizer(Corpus(TRAIN_SEED), VOCAB_SIZE)
    model = make_model()
    loss_of, optimizers = make_loss(model, run.compiled), make_optimizers(model, run.lr)
    first, state_file = 0, run.out / "state.pt"
    if run.resume:
        state = torch.load(state_file)
        first = state["step"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    dist.barrier()
    started, mean = time.monotonic(), 0.0
    for step, batch in enumerate(batches(run, tokenizer, rank, first), first):
        loss = loss_of(*batch)
        loss.backward()
        average_gradients(model, run.processes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizers, run.lr * lr_factor(step, run.steps, run.practice_steps))
        mean = loss.item() if step == first else 0.95 * mean + 0.05 * loss.item()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {mean:.3f} {time.monotonic() - started:.0f} s", flush=True)
        if rank == 0 and (step + 1) % run.save_every == 0:
            save(model, tokenizer, run.out)
            saved = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizers": saved}, f"{state_file}.new")
            os.replace(f"{state_file}.new", state_file)
    if rank == 0:
        save(model, tokenizer, run.out)
        state_file.unlink(missing_ok=True)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--practice-steps", type=int, default=700, help="a second round: more sums, fewer stories")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--processes", type=int, default=2, help="data-parallel processes, which share the cores")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler needed, a little slower)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args()
    keep_memory()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rendezvous").unlink(missing_ok=True)
    run = Run(
        out=args.out,
        steps=args.steps,
        practice_steps=args.practice_steps,
        lr=args.lr,
        processes=args.processes,
        compiled=not args.eager,
        save_every=args.save_every,
        resume=args.resume,
    )
    torch.multiprocessing.start_processes(train, (run,), nprocs=run.processes, start_method="fork")
    (args.out / "rendezvous").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
