"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with experts, and a shared expert behind a sigmoid gate."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama, qwen3_moe
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **llama.WEIGHTS,
    **qwen3_moe.EXPERT_WEIGHTS,
    "model.layers.{}.mlp.shared_expert.gate_proj": "layers.{}.shared.mlp_in.gate",
    "model.layers.{}.mlp.shared_expert.up_proj": "layers.{}.shared.mlp_in.up",
    "model.layers.{}.mlp.shared_expert.down_proj": "layers.{}.shared.mlp_out",
    "model.layers.{}.mlp.shared_expert_gate": "layers.{}.shared_gate",
}
DEFAULTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    moe = qwen3_moe.moe_config(reader.with_defaults(**DEFAULTS), config.num_layers)
    windowed = reader.flag("use_sliding_window", False) and reader.raw.get("sliding_window", 4096) is not None
    lower_layers = tuple(range(0, min(reader.size("max_window_layers", 28, low=0), config.num_layers), 2))
    return replace(
        config,
        family="qwen2_moe",
        qkv_bias=reader.flag("qkv_bias", True),
        out_bias=False,
        mlp_bias=False,
        sliding_window=reader.size("sliding_window", 4096) if windowed else 0,
        window_layers=reader.window_layers(config.num_layers, lower_layers),
        moe=replace(moe, shared_size=reader.size("shared_expert_intermediate_size", 5632), shared_gate=True),
    )


FAMILY = Family(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    expert_tensors=qwen3_moe.EXPERT_TENSORS,
)
