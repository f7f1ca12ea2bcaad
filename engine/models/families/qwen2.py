"""Qwen2 and Qwen2.5 (Yang et al. 2024): LLaMA with biases on q, k and v; optional window on the upper layers."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    windowed = reader.flag("use_sliding_window", False) and reader.raw.get("sliding_window", 4096) is not None
    upper_layers = tuple(range(min(reader.size("max_window_layers", 28, low=0), config.num_layers), config.num_layers))
    return replace(
        config,
        family="qwen2",
        num_kv_heads=reader.size("num_key_value_heads"),
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        sliding_window=reader.size("sliding_window", 4096) if windowed else 0,
        window_layers=reader.window_layers(config.num_layers, upper_layers),
    )


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
