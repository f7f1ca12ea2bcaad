"""SmolLM3 (Bakouch et al. 2025): LLaMA without rotary embedding in every fourth layer, or in the listed layers."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    nope_layers = reader.nope_layers(config.num_layers)
    windowed = reader.flag("use_sliding_window", False) and reader.has("sliding_window")
    return replace(
        config,
        family="smollm3",
        num_kv_heads=reader.size("num_key_value_heads", 4),
        rope_theta=reader.rope_theta(2e6),
        nope_layers=nope_layers,
        sliding_window=reader.size("sliding_window") if windowed else 0,
        window_layers=reader.window_layers(config.num_layers, nope_layers),
        tie_embeddings=reader.flag("tie_word_embeddings", True),
    )


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
