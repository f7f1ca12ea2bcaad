"""GLM-4.5 and 4.6 (Team GLM 2025): dense layers, then sigmoid routing with a correction, and shared experts."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama, qwen3, qwen3_moe
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **qwen3.WEIGHTS,
    **qwen3_moe.EXPERT_WEIGHTS,
    "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.correction.bias",
    "model.layers.{}.mlp.shared_experts.gate_proj": "layers.{}.shared.mlp_in.gate",
    "model.layers.{}.mlp.shared_experts.up_proj": "layers.{}.shared.mlp_in.up",
    "model.layers.{}.mlp.shared_experts.down_proj": "layers.{}.shared.mlp_out",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(rms_norm_eps=1e-5), rotary_share=0.5)
    return replace(
        config,
        family="glm4_moe",
        out_bias=False,
        mlp_bias=False,
        qk_norm="head" if reader.flag("use_qk_norm", False) else None,
        moe=moe_config(reader, config.num_layers),
    )


def moe_config(reader: ConfigReader, num_layers: int) -> MoEConfig:
    """The fields that DeepSeek-V3 introduced."""
    width = reader.size("moe_intermediate_size", 1408)
    return MoEConfig(
        num_experts=reader.num_experts(128, "n_routed_experts"),
        experts_per_token=reader.size("num_experts_per_tok", 8),
        intermediate_size=width,
        norm_topk_prob=reader.flag("norm_topk_prob", True),
        dense_layers=tuple(range(min(reader.size("first_k_dense_replace", 1, low=0), num_layers))),
        scoring="sigmoid",
        correction_bias=True,
        num_groups=reader.size("n_group", 1),
        groups_per_token=reader.size("topk_group", 1),
        scaling=reader.number("routed_scaling_factor", 1.0),
        router_float32=True,
        shared_size=width * reader.size("n_shared_experts", 1, low=0),
    )


FAMILY = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    heads=("model.layers.46.", "model.layers.92."),  # layers that predict more tokens (GLM-4.5-Air, GLM-4.5)
    expert_tensors=qwen3_moe.EXPERT_TENSORS,
)
