"""Mistral (Jiang et al. 2023): LLaMA with a sliding window and never a bias."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    # An absent sliding_window means 4096, as in Mistral-7B-v0.1; only an explicit null switches the window off.
    window = reader.size("sliding_window", 4096) if reader.raw.get("sliding_window", 4096) is not None else 0
    return replace(
        config,
        family="mistral",
        num_kv_heads=reader.size("num_key_value_heads"),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        sliding_window=window,
        window_layers=reader.window_layers(config.num_layers, None),
    )


FAMILY = Family("mistral", ("MistralForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
