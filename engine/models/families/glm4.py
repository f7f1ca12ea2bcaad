"""GLM-4-0414 and GLM-Z1 (Team GLM 2025): GLM-4 with norms on both sides of attention and MLP."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import glm, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **glm.WEIGHTS,
    "model.layers.{}.post_self_attn_layernorm": "layers.{}.attn_post_norm",
    "model.layers.{}.post_mlp_layernorm": "layers.{}.mlp_post_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(glm.to_config(reader), family="glm4", post_norms=True)


FAMILY = Family("glm4", ("Glm4ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
