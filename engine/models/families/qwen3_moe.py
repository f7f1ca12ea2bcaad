"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts; some layers may keep a plain MLP."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama, qwen3
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader

EXPERTS = "model.layers.{}.mlp.experts.{expert}"
EXPERT_WEIGHTS = {
    "model.layers.{}.mlp.gate": "layers.{}.router",
    f"{EXPERTS}.gate_proj": "layers.{}.experts_in.gate",
    f"{EXPERTS}.up_proj": "layers.{}.experts_in.up",
    f"{EXPERTS}.down_proj": "layers.{}.experts_out",
}
EXPERT_TENSORS = {  # names of transformers 5 in memory
    "model.layers.{}.mlp.experts.gate_up_proj": ExpertTensor("layers.{}.experts_in.weight"),
    "model.layers.{}.mlp.experts.down_proj": ExpertTensor("layers.{}.experts_out.weight"),
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    windowed = reader.flag("use_sliding_window", False) and reader.has("sliding_window")
    return replace(
        config,
        family="qwen3_moe",
        num_kv_heads=reader.size("num_key_value_heads"),
        mlp_bias=False,
        qk_norm="head",
        sliding_window=reader.size("sliding_window") if windowed else 0,
        moe=moe_config(reader, config.num_layers),
    )


def moe_config(reader: ConfigReader, num_layers: int) -> MoEConfig:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not name."""
    step = reader.size("decoder_sparse_step", 1)
    plain = {layer for layer in range(num_layers) if (layer + 1) % step}
    return MoEConfig(
        num_experts=reader.num_experts(128),
        experts_per_token=reader.size("num_experts_per_tok", 8),
        intermediate_size=reader.size("moe_intermediate_size", 768),
        norm_topk_prob=reader.flag("norm_topk_prob", False),
        dense_layers=tuple(sorted(plain.union(reader.layers("mlp_only_layers", num_layers)))),
    )


FAMILY = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    to_config,
    {**qwen3.WEIGHTS, **EXPERT_WEIGHTS},
    prefix="model.",
    buffers=llama.BUFFERS,
    expert_tensors=EXPERT_TENSORS,
)
