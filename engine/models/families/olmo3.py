"""OLMo 3 (OLMo Team 2025): OLMo 2 with a window on three of four layers, whose RoPE is not scaled."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import gemma2, gemma3, llama, olmo2
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    reader = reader.with_defaults(rope_theta=5e5)
    full, windowed = gemma3.rope_readers(reader)
    config = olmo2.to_config(full)
    between = tuple(layer for layer in range(config.num_layers) if (layer + 1) % 4)
    return replace(
        config,
        family="olmo3",
        sliding_window=gemma2.window(reader),
        window_layers=reader.window_layers(config.num_layers, between),
        window_rope_theta=windowed.rope_theta(reader.number("rope_theta", above=1.0)),
    )


FAMILY = Family("olmo3", ("Olmo3ForCausalLM",), to_config, olmo2.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
