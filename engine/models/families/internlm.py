"""InternLM (InternLM Team 2023), 7B and 20B: LLaMA, in the 7B size with biases on q, k, v and attention's output."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    rotary = reader.object("rotary")
    # "dynamic" changes frequencies for sequences above max_position_embeddings only, which are not served.
    rotary.choice("type", "origin", ("origin", "dynamic"))
    config = llama.to_config(reader)
    bias = reader.flag("bias", True)
    return replace(
        config,
        family="internlm",
        num_kv_heads=config.num_heads,
        rope_theta=rotary.number("base", config.rope_theta, above=1.0),
        qkv_bias=bias,
        out_bias=bias,
    )


FAMILY = Family("internlm", ("InternLMForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
