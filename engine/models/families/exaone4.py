"""EXAONE 4 (LG AI Research 2025): OLMo 2's norms behind attention and MLP, RMSNorm on every head of q and k, and in the
larger size a window on three of four layers; only layers with a window are rotated then."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama, olmo2
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = replace(
        llama.to_config(reader.with_defaults(rms_norm_eps=1e-5)),
        family="exaone4",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        input_norms=False,
        post_norms=True,
        qk_norm="head",
    )
    if reader.raw.get("sliding_window", 4096) is None:
        return config
    pattern = 4 if reader.has("layer_types") else reader.size("sliding_window_pattern", 4)
    between = tuple(layer for layer in range(config.num_layers) if (layer + 1) % pattern)
    window_layers = reader.window_layers(config.num_layers, between) or ()
    return replace(
        config,
        sliding_window=reader.size("sliding_window", 4096),
        window_layers=window_layers,
        nope_layers=tuple(layer for layer in range(config.num_layers) if layer not in window_layers),
    )


FAMILY = Family("exaone4", ("Exaone4ForCausalLM",), to_config, olmo2.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
