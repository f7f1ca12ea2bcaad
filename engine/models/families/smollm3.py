"""SmolLM3 (Bakouch et al. 2025): LLaMA without rotary embedding in every fourth layer, or in the listed layers."""

from dataclasses import replace

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader, short


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    nope_layers = _nope_layers(reader, config.num_layers)
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


def _nope_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`no_rope_layers` has a number for each layer: 1 with rotary embedding, 0 without."""
    interval = reader.size("no_rope_layer_interval", 4)
    rotates = reader.raw.get("no_rope_layers")
    if rotates is None:
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(rotates, list) or len(rotates) < num_layers or any(rotate not in (0, 1) for rotate in rotates):
        raise ModelError(
            f"config.json: no_rope_layers must list 0 or 1 for each of the {num_layers} layers, not {short(rotates)}."
        )
    return tuple(layer for layer in range(num_layers) if not rotates[layer])


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
