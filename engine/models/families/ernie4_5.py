"""ERNIE 4.5 (Baidu 2025), dense: LLaMA that rotates neighbouring elements of a head."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
DEFAULTS |= {"tie_word_embeddings": True}


def to_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.flag("use_bias", False)
    return replace(
        llama.to_config(reader.with_defaults(**DEFAULTS)),
        family="ernie4_5",
        rope_interleaved=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


# The second architecture is the name in the first checkpoints, which brought code of their own.
NAMES = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
FAMILY = Family("ernie4_5", NAMES, to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
