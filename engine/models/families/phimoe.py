"""Phi-3.5-MoE (Abdin et al. 2024): LayerNorm with bias, and sparsemixer routing to two experts."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama, mixtral
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(rope_theta=1e6, rms_norm_eps=1e-5))
    reader.require("num_experts_per_tok", 2)
    moe = MoEConfig(
        num_experts=reader.num_experts(16),
        experts_per_token=2,
        intermediate_size=config.intermediate_size,
        norm_topk_prob=False,
        scoring="sparsemixer",
        jitter=reader.number("router_jitter_noise", 0.01, above=-1.0),
    )
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        rope = reader.rope()
        rope.require("long_mscale", factor := rope.number("short_mscale"))
        scaling = replace(scaling, attention_factor=factor)
    return replace(
        config,
        family="phimoe",
        norm="layer",
        rope_scaling=scaling,
        mlp_bias=False,
        sliding_window=reader.size("sliding_window") if reader.has("sliding_window") else 0,
        lm_head_bias=reader.flag("lm_head_bias", False),
        moe=moe,
    )


FAMILY = Family(
    "phimoe",
    ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    to_config,
    mixtral.WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    renames=mixtral.RENAMES,
    expert_tensors=mixtral.EXPERT_TENSORS,
)
