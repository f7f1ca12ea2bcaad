"""OLMo 1 (Groeneveld et al. 2024): LLaMA with a LayerNorm without weights; q, k and v are clipped in some sizes."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {theirs: ours for theirs, ours in llama.WEIGHTS.items() if "norm" not in theirs}


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(
        llama.to_config(reader),
        family="olmo",
        norm="layer",
        norm_eps=1e-5,
        norm_weight=False,
        norm_bias=False,
        mlp_bias=False,
        clip_qkv=reader.number("clip_qkv") if reader.has("clip_qkv") else 0.0,
    )


FAMILY = Family("olmo", ("OlmoForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
