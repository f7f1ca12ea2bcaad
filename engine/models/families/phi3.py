"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini (Abdin et al. 2024): LLaMA whose checkpoints fuse q|k|v and gate|up;
LongRoPE in the sizes for 128k tokens; Phi-4-mini rotates three quarters of each head."""

from dataclasses import replace

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".qkv." not in ours and ".mlp_in." not in ours},
    "model.layers.{}.self_attn.qkv_proj": "layers.{}.qkv",
    "model.layers.{}.mlp.gate_up_proj": "layers.{}.mlp_in",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader, rotary_share=1.0)
    scaling = config.rope_scaling
    if scaling is not None:
        if scaling.kind != "longrope":
            raise ModelError(f"config.json: rope_type '{scaling.kind}' is not served in Phi-3; known is longrope.")
        reader.size("original_max_position_embeddings")  # transformers reads this field, whatever rope_scaling says
    window = reader.size("sliding_window") if reader.has("sliding_window") else 0
    return replace(
        config,
        family="phi3",
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        # Phi-3.5 and Phi-4-mini say 262144, more than any sequence: kernels without a window are faster.
        sliding_window=window if window < config.max_positions else 0,
    )


FAMILY = Family("phi3", ("Phi3ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
