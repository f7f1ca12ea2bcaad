"""StableLM (Bellagente et al. 2024), 3B to 2-1.6B: LLaMA with LayerNorm and a quarter of each head rotated."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    reader.require("qk_layernorm", False)
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
    )


FAMILY = Family("stablelm", ("StableLmForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
