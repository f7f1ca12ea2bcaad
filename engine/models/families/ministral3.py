"""Ministral 3 (Mistral AI 2025): Mistral with YaRN and queries that grow with the position."""

from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig, QueryScaling
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

ROPE: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
ROPE |= {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_parameters": ROPE}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader = reader.with_defaults(**DEFAULTS)
    rope = reader.object("rope_parameters")
    trained = reader if reader.has("original_max_position_embeddings") else rope  # as in reader.rope_scaling()
    scaling = QueryScaling(rope.number("llama_4_scaling_beta"), trained.size("original_max_position_embeddings"))
    return replace(
        llama.to_config(reader),
        family="ministral3",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        query_scaling=scaling,
        sliding_window=reader.size("sliding_window") if reader.has("sliding_window") else 0,
    )


FAMILY = Family(
    "ministral3", ("Ministral3ForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS
)
