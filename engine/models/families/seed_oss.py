"""Seed-OSS (ByteDance 2025): LLaMA with wide heads and biases on q, k and v."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(
        llama.to_config(reader.with_defaults(head_dim=128, num_key_value_heads=8)),
        family="seed_oss",
        qkv_bias=reader.flag("attention_bias", True),
        out_bias=reader.flag("attention_out_bias", False),
    )


FAMILY = Family("seed_oss", ("SeedOssForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
