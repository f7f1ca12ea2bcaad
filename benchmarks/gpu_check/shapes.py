"""The models that are measured: their published shapes with random weights, and the workload of nano-vllm."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu_check.names import LLAMA, LLAMA_2, QWEN

CONFIGS: dict[str, dict[str, Any]] = {
    LLAMA: {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    QWEN: {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    LLAMA_2: {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {"hidden_act": "silu", "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "attention_bias": False}
TINY = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NanoRequest:
    """One request of the nano-vllm benchmark: a prompt of random ids and exactly `output` tokens."""

    prompt: list[int]
    output: int


def model_config(name: str, tiny: bool) -> dict[str, Any]:
    """The contents of config.json; tiny: the same family at toy size."""
    return {**COMMON, **CONFIGS[name], **(TINY if tiny else {})}


def write_model(name: str, folder: Path, tiny: bool) -> Path:
    """A checkpoint folder without weights, for load_format "dummy": config.json and a tokenizer with every id."""
    config = model_config(name, tiny)
    folder = folder / name.lower()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    word_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level: the 256 bytes, then made-up words, so that every sampled id becomes some text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"Ġw{i}" for i in range(vocab_size - len(alphabet))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def nano_workload(tiny: bool, seed: int = 0) -> list[NanoRequest]:
    """256 requests, prompts and outputs of 100 to 1024 tokens, drawn as nano-vllm's bench.py draws them.

    First every prompt's length, then its ids, prompt after prompt; then every output's length. With seed 0 the outputs
    are 133,966 tokens, the figure that its README gives.
    """
    rng = random.Random(seed)
    count, low, high, largest_id = (6, 4, 24, 255) if tiny else (256, 100, 1024, 10000)
    prompts = [[rng.randint(0, largest_id) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return [NanoRequest(prompt, rng.randint(low, high)) for prompt in prompts]
