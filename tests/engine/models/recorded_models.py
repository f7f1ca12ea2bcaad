"""Small transformers models whose sizes are whole vectors, one for every operator that a recorded program holds."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from kernels.dispatch import cpu_kernels
from tests.engine.models.tiny_models import VOCAB

SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
UNGROUPED = {name: SIZES[name] for name in SIZES if name not in ("head_dim", "num_key_value_heads")}
UNGROUPED |= {"num_attention_heads": 2}
GEMMA4: dict[str, Any] = SIZES | {"num_hidden_layers": 4, "global_head_dim": 64, "sliding_window": 11}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
RECORDED = {
    "llama": LlamaConfig(**SIZES),
    "biases": LlamaConfig(**SIZES, attention_bias=True),
    "qk norm": Qwen3Config(**SIZES),
    "window": MistralConfig(**SIZES, sliding_window=11),
    "gelu": Gemma2Config(**SIZES, sliding_window=11),
    "learned positions": GPT2Config(vocab_size=VOCAB, n_embd=64, n_head=2, n_layer=3, n_positions=128),
    "partial rotation": GPTNeoXConfig(**UNGROUPED),
    "parallel residual": CohereConfig(**UNGROUPED),
    "output norms": Exaone4Config(**SIZES, sliding_window=11),
    "norm of rows": Olmo2Config(**SIZES),
    "squared relu": NemotronConfig(**SIZES, hidden_act="relu2"),
    "xielu": ApertusConfig(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2),
    "experts in every layer but the first": Glm4MoeConfig(
        **SIZES, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1
    ),
    "gated shared expert": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=6, num_experts_per_tok=2
    ),
    "clamped experts": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=11),
    "experts beside the MLP": Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "inputs of layers": Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=2,
        final_logit_softcapping=4.0,
    ),
}


COMPILED = cpu_kernels() is not None and cpu_kernels().features.MULTIPLIES_PAIRS


def save(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, quantization: str | None = None) -> Decoder:
    config = read_model_config(folder, quantization)
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "load_format": "auto", "seed": 0}
    model = load_model(folder, config, **options)
    assert isinstance(model, Decoder)
    return model
