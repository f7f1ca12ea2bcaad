"""HyperCLOVA X SEED Think (NAVER 2025): Granite whose factor multiplies the logits, with norms behind attention and the
MLP, too."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import granite, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **llama.WEIGHTS,
    "model.layers.{}.post_norm1": "layers.{}.attn_post_norm",
    "model.layers.{}.post_norm2": "layers.{}.mlp_post_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    post_norms = reader.flag("use_post_norm", True)
    if post_norms:
        reader.require("residual_multiplier", 1.0)  # granite's norm_eps for other values would reach these norms, too
    config = granite.to_config(reader)
    return replace(
        config,
        family="hyperclovax",
        post_norms=post_norms,
        attn_scale=config.attn_scale if reader.has("attention_multiplier") else None,
        logits_scale=reader.number("logits_scaling", 1.0),
    )


FAMILY = Family("hyperclovax", ("HyperCLOVAXForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
