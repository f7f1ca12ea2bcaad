"""Qwen3 (Yang et al. 2025), dense: Qwen2 with RMSNorm on every head of q and k in place of the biases."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama, qwen2
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **llama.WEIGHTS,
    "model.layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.k_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    attention_bias = reader.flag("attention_bias", False)
    return replace(
        qwen2.to_config(reader),
        family="qwen3",
        head_dim=reader.size("head_dim", 128),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm="head",
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
