#!/usr/bin/env python3
"""Checkpoints with random weights and a real tokenizer, for benchmarks: no download, the same bytes on every machine.

    python benchmarks/make_models.py [NAME ...] [--out .cache/models]        default: llama-tiny llama-90m; also minilm
    python benchmarks/make_models.py llama-90m-w8a8                          int8 in the layout of llm-compressor

Speed does not depend on what the weights say, only on their shapes. llama-tiny is so small that the engine's own work
shows; llama-90m keeps a CPU busy; qwen-500m, in the shape of Qwen2.5-0.5B, has a large vocabulary; gpt2-90m has
LayerNorms and a plain GELU; moe-900m, built like Qwen3-30B-A3B, has 64 experts in each layer, of which a token takes 8.
The tokenizer is a byte-level BPE trained on this Python's standard library, so text workloads and the chat endpoint
work, too.
"""

import argparse
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]  # run as a script, this folder is not installed

from benchmarks.formats.layouts import layouts  # noqa: E402
from benchmarks.formats.writers import write_checkpoint  # noqa: E402

VOCAB_SIZE = 8192
CONTEXT_LENGTH = 4096
ENCODER_VOCAB_SIZE = 30522
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads
SHAPES = {
    "llama-tiny": (128, 352, 4, 4, 2),
    "llama-90m": (768, 2048, 12, 12, 4),
    "llama-500m": (1536, 4096, 20, 24, 8),
    "qwen-500m": (896, 4864, 24, 14, 2),
    "gpt2-90m": (768, 3072, 12, 12, 12),
    "moe-900m": (1024, 512, 8, 16, 4),
}
QWEN_VOCAB_SIZE = 151936  # most of these ids have no text
ENCODER = "minilm"
W8A8 = "-w8a8"  # behind the name of a shape
NAMES = (*SHAPES, *(name + W8A8 for name in SHAPES if name.startswith(("llama", "qwen"))), ENCODER)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over source files that every Python has; ChatML as its chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(stdlib_sources(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        model_max_length=CONTEXT_LENGTH,
        chat_template=CHAT_TEMPLATE,
    )


def stdlib_sources() -> list[str]:
    """Texts that every Python has."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in sources[:150]]


def make_encoder(folder: Path) -> int:
    """An encoder in the shape of all-MiniLM-L6-v2, in fp32, with WordPiece; returns its number of parameters."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=ENCODER_VOCAB_SIZE, special_tokens=special, show_progress=False)
    words.train_from_iterator(stdlib_sources(), trainer)
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = BertConfig(
        vocab_size=ENCODER_VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = BertModel(config)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=512,
    ).save_pretrained(folder)  # fmt: skip
    return sum(parameter.numel() for parameter in model.parameters())


def make_model(name: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> int:
    """Write one checkpoint in bf16 with the seed 0; returns its number of parameters."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[name]
    family = name.split("-")[0]
    vocab_size = QWEN_VOCAB_SIZE if family == "qwen" else len(tokenizer)
    common = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    common |= {"pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True}
    if family == "gpt2":
        config: PreTrainedConfig = GPT2Config(
            **common, n_embd=hidden, n_inner=intermediate, n_layer=layers, n_head=heads, n_positions=CONTEXT_LENGTH
        )
    else:
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
        sizes |= {"num_key_value_heads": kv_heads, "max_position_embeddings": CONTEXT_LENGTH}
        if family == "moe":
            sizes |= {"moe_intermediate_size": intermediate, "num_experts": 64, "num_experts_per_tok": 8}
            config = Qwen3MoeConfig(**common, **sizes, head_dim=hidden // heads, norm_topk_prob=True)
        else:
            config = (Qwen2Config if family == "qwen" else LlamaConfig)(
                **common, **sizes, intermediate_size=intermediate
            )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "models", help="default: %(default)s")
    options = parser.parse_args(argv)
    names = options.names or ["llama-tiny", "llama-90m"]
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(NAMES)}")
    tokenizer = train_tokenizer()
    for name in names:
        folder = options.out / name
        if name == ENCODER:
            count = make_encoder(folder)
        elif name.endswith(W8A8):
            with TemporaryDirectory() as plain:
                count = make_model(name.removesuffix(W8A8), Path(plain), tokenizer)
                write_checkpoint(Path(plain), folder, layouts()["compressed-tensors w8a8"])
        else:
            count = make_model(name, folder, tokenizer)
        print(f"{name}: {count / 1e6:.1f} M parameters in {options.out / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
