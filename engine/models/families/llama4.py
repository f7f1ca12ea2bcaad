"""Llama 4 (Meta 2025), the text model: experts whose inputs are weighed, chunked attention, layers without RoPE."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig, QueryScaling
from engine.models.families import llama
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader

MLP = "model.layers.{}.feed_forward"
WEIGHTS = {
    **{theirs.replace(".mlp.", ".feed_forward."): ours for theirs, ours in llama.WEIGHTS.items()},
    f"{MLP}.router": "layers.{}.router",
    f"{MLP}.experts.{{expert}}.gate_proj": "layers.{}.experts_in.gate",  # as llm-compressor quantises them
    f"{MLP}.experts.{{expert}}.up_proj": "layers.{}.experts_in.up",
    f"{MLP}.experts.{{expert}}.down_proj": "layers.{}.experts_out",
    f"{MLP}.shared_expert.gate_proj": "layers.{}.shared.mlp_in.gate",
    f"{MLP}.shared_expert.up_proj": "layers.{}.shared.mlp_in.up",
    f"{MLP}.shared_expert.down_proj": "layers.{}.shared.mlp_out",
}
EXPERT_TENSORS = {
    f"{MLP}.experts.gate_up_proj": ExpertTensor("layers.{}.experts_in.weight", transposed=True),
    f"{MLP}.experts.down_proj": ExpertTensor("layers.{}.experts_out.weight", transposed=True),
}
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(**DEFAULTS))
    nope, layers = reader.nope_layers(config.num_layers), range(config.num_layers)
    rotated = tuple(layer for layer in layers if layer not in nope)
    period, factor = reader.size("floor_scale", 8192), reader.number("attn_scale", 0.1)
    tuned = reader.flag("attn_temperature_tuning", True)
    return replace(
        config,
        family="llama4_text",
        intermediate_size=reader.size("intermediate_size_mlp", 16384),
        mlp_bias=False,
        rope_interleaved=True,
        nope_layers=nope,
        qk_norm="head" if reader.flag("use_qk_norm", True) else None,
        qk_norm_layers=rotated,
        qk_norm_kind="l2",
        qk_norm_after_rope=True,
        query_scaling=QueryScaling(factor, period, offset=1, layers=nope) if tuned else None,
        attention_chunk=reader.size("attention_chunk_size", 8192),
        chunk_layers=reader.window_layers(config.num_layers, rotated, "chunked_attention"),
        moe=_moe(reader, config),
    )


def _moe(reader: ConfigReader, config: ModelConfig) -> MoEConfig:
    step = reader.size("interleave_moe_layer_step", 1)
    every = tuple(range(step - 1, config.num_layers, step))
    layers = reader.layers("moe_layers", config.num_layers) if reader.has("moe_layers") else every
    return MoEConfig(
        num_experts=reader.num_experts(16),
        experts_per_token=reader.size("num_experts_per_tok", 1),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=False,
        dense_layers=tuple(layer for layer in range(config.num_layers) if layer not in layers),
        scoring="sigmoid",
        shared_size=config.intermediate_size,
        weights_on_input=True,
    )


FAMILY = Family("llama4_text", ("Llama4ForCausalLM",), to_config, WEIGHTS, "model.", expert_tensors=EXPERT_TENSORS)
