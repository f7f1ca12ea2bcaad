"""Tiny random encoders of transformers: the oracle of test_encoder.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

VOCAB = 97


def sizes(**changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    return {**sizes, "num_attention_heads": 4, "max_position_embeddings": 80, **changes}


CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: BertConfig(**sizes()),
    "bert_options": lambda: BertConfig(**sizes(hidden_act="gelu_new", layer_norm_eps=1e-5, type_vocab_size=1)),
    "roberta": lambda: RobertaConfig(**sizes(pad_token_id=1, type_vocab_size=1)),
    "xlm_roberta": lambda: XLMRobertaConfig(**sizes(pad_token_id=3, type_vocab_size=1, num_hidden_layers=2)),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCAB, dim=48, hidden_dim=80, n_layers=3, n_heads=4, max_position_embeddings=80
    ),
    # Decoders that attend to later tokens, too.
    "llama_both_ways": lambda: LlamaConfig(**decoder_sizes(mlp_bias=True)),
    "qwen2_both_ways": lambda: Qwen2Config(**decoder_sizes()),  # gte-Qwen2
    "mistral_both_ways": lambda: MistralConfig(**decoder_sizes(sliding_window=9)),
    "qwen2_window_both_ways": lambda: Qwen2Config(
        **decoder_sizes(sliding_window=9, use_sliding_window=True, max_window_layers=1)
    ),
    "qwen3_both_ways": lambda: Qwen3Config(**decoder_sizes(head_dim=16)),
    "gemma3_both_ways": lambda: Gemma3TextConfig(  # EmbeddingGemma
        **sizes(num_key_value_heads=2, head_dim=16, sliding_window=12, use_bidirectional_attention=True)
    ),
    # Heads that a CPU computes in blocks of keys.
    "bert_blocks": lambda: BertConfig(**sizes(hidden_size=64, num_attention_heads=2)),
    "mistral_blocks": lambda: MistralConfig(**decoder_sizes(head_dim=32, sliding_window=9)),
    "qwen3_blocks": lambda: Qwen3Config(**decoder_sizes(head_dim=32)),
    "gemma3_blocks": lambda: Gemma3TextConfig(
        **sizes(num_key_value_heads=2, head_dim=64, sliding_window=12, use_bidirectional_attention=True)
    ),
}


def decoder_sizes(**changes: Any) -> dict[str, Any]:
    return sizes(num_key_value_heads=2, is_causal=False, tie_word_embeddings=False, **changes)


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.25
            parameter.copy_(noise if parameter.dim() >= 2 else parameter + noise)
    return model.eval()


def save_encoder(name: str, folder: Path, **changes: Any) -> PreTrainedModel:
    config = CASES[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    model = randomise(AutoModel.from_config(config, attn_implementation="eager"))
    model.save_pretrained(folder)
    return AutoModel.from_pretrained(folder, attn_implementation="eager").eval()  # Gemma 3 halves its window each time


DENSE = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}


def save_dense(folder: Path, number: int, size: int, out: int, bias: bool = False, **settings: Any) -> torch.nn.Linear:
    layer = torch.nn.Linear(size, out, bias=bias)
    place = folder / f"{number}_Dense"
    place.mkdir()
    sizes = {"in_features": size, "out_features": out}
    (place / "config.json").write_text(json.dumps(DENSE | sizes | settings))
    save_file({f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}, place / "model.safetensors")
    return layer


def save_modules(folder: Path, *names: str) -> None:
    modules = [{"path": f"{i}_{name}" if i else "", "type": f"a.{name}"} for i, name in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
