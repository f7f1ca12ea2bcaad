"""StableLM (Bellagente et al. 2024), 3B to 2-12B: LLaMA with LayerNorm and a quarter of each head rotated; in the 12B
LayerNorm on every head of q and k, each head with its own weights."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **llama.WEIGHTS,
    "model.layers.{}.self_attn.q_layernorm.norms.{head}": "layers.{}.q_norm",
    "model.layers.{}.self_attn.k_layernorm.norms.{head}": "layers.{}.k_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    parallel = reader.flag("use_parallel_residual", False)
    return replace(
        llama.to_config(reader, rotary_share=0.25),
        family="stablelm",
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        qkv_bias=reader.flag("use_qkv_bias", False),
        out_bias=False,
        mlp_bias=False,
        parallel_residual=parallel,
        mlp_norm=not parallel,
        qk_norm="per_head" if reader.flag("qk_layernorm", False) else None,
        qk_norm_kind="layer",
    )


FAMILY = Family("stablelm", ("StableLmForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
