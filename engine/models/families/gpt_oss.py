"""gpt-oss (OpenAI 2025): attention sinks, a window on every other layer, experts with biases and a clamped SwiGLU."""

from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader

MLP = "model.layers.{}.mlp"
WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".mlp." not in theirs},
    "model.layers.{}.self_attn.sinks": "layers.{}.sinks.weight",
    f"{MLP}.router": "layers.{}.router",
}
EXPERT_TENSORS = {
    f"{MLP}.experts.gate_up_proj": ExpertTensor("layers.{}.experts_in.weight", transposed=True, interleaved=True),
    f"{MLP}.experts.gate_up_proj_bias": ExpertTensor("layers.{}.experts_in.bias", interleaved=True),
    f"{MLP}.experts.down_proj": ExpertTensor("layers.{}.experts_out.weight", transposed=True),
    f"{MLP}.experts.down_proj_bias": ExpertTensor("layers.{}.experts_out.bias"),
}
ROPE: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
ROPE |= {"original_max_position_embeddings": 4096}
DEFAULTS: dict[str, Any] = {"attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}
DEFAULTS |= {"rope_parameters": ROPE}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(**DEFAULTS))
    moe = MoEConfig(
        num_experts=reader.num_experts(128),
        experts_per_token=reader.size("num_experts_per_tok", 4),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
        router_bias=True,
        bias=True,
        clamp_limit=reader.number("swiglu_limit", 7.0),
        clamp_alpha=reader.number("swiglu_alpha", 1.702),
    )
    return replace(
        config,
        family="gpt_oss",
        mlp_bias=False,
        attention_sinks=True,
        sliding_window=reader.size("sliding_window", 128),
        window_layers=reader.window_layers(config.num_layers, tuple(range(0, config.num_layers, 2))),
        moe=moe,
    )


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), to_config, WEIGHTS, "model.", expert_tensors=EXPERT_TENSORS)
