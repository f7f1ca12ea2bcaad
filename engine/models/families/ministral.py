"""Ministral 8B (Mistral AI 2024): Mistral with a window on the listed layers only."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama, mistral
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(mistral.to_config(reader.with_defaults(num_key_value_heads=8)), family="ministral")


FAMILY = Family(
    "ministral", ("MinistralForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS
)
