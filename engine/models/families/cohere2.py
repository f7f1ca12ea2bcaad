"""Command R7B and Command A (Cohere 2025): Command R with a window on three of four layers; the fourth has no rotation
and no window."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import cohere, gemma2, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    reader.require("use_qk_norm", False)
    config = cohere.to_config(reader.with_defaults(rope_theta=1e4))
    pattern = reader.size("sliding_window_pattern", 4)
    between = tuple(layer for layer in range(config.num_layers) if (layer + 1) % pattern)
    window_layers = reader.window_layers(config.num_layers, between) or ()
    return replace(
        config,
        family="cohere2",
        sliding_window=gemma2.window(reader),
        window_layers=window_layers,
        nope_layers=tuple(layer for layer in range(config.num_layers) if layer not in window_layers),
    )


FAMILY = Family("cohere2", ("Cohere2ForCausalLM",), to_config, cohere.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
