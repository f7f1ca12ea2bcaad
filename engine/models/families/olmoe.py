"""OLMoE (Muennighoff et al. 2024): experts in every layer, RMSNorm over the rows of q and of k."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama, qwen3, qwen3_moe
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(rms_norm_eps=1e-5))
    moe = MoEConfig(
        num_experts=reader.num_experts(64),
        experts_per_token=reader.size("num_experts_per_tok", 8),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=reader.flag("norm_topk_prob", False),
    )
    return replace(
        config,
        family="olmoe",
        mlp_bias=False,
        qk_norm="all",
        clip_qkv=reader.number("clip_qkv") if reader.has("clip_qkv") else 0.0,
        moe=moe,
    )


FAMILY = Family(
    "olmoe",
    ("OlmoeForCausalLM",),
    to_config,
    {**qwen3.WEIGHTS, **qwen3_moe.EXPERT_WEIGHTS},
    prefix="model.",
    buffers=llama.BUFFERS,
    expert_tensors=qwen3_moe.EXPERT_TENSORS,
)
