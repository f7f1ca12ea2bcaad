"""Aquila and Aquila2 (BAAI 2023): LLaMA's architecture and weight names; the 34B size of Aquila2 shares KV heads."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(llama.to_config(reader), family="aquila")


FAMILY = Family(
    "aquila", ("AquilaForCausalLM", "AquilaModel"), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS
)
