"""Gemma 3 (Gemma Team 2025), text only: Gemma 2 with RMSNorm on every head of q and k in place of the soft caps, five
layers with a window per layer without, and one RoPE for each of the two kinds."""

from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import gemma2, llama
from engine.models.family import Family, bidirectional
from engine.models.reader import ConfigReader, short

WEIGHTS = {
    **gemma2.WEIGHTS,
    "model.layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.k_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader.require("attn_logit_softcapping", None)  # transformers' Gemma 3 does not apply it
    both_ways = reader.flag("use_bidirectional_attention", False)  # EmbeddingGemma
    reader = ConfigReader({**reader.raw, "use_bidirectional_attention": None}, reader.where)
    full, windowed = rope_readers(reader)
    config = gemma2.to_config(full)
    pattern = reader.size("sliding_window_pattern", 6)
    between = tuple(layer for layer in range(config.num_layers) if (layer + 1) % pattern)
    config = replace(
        config,
        family="gemma3_text",
        # config.json has the windows of both sides together
        sliding_window=config.sliding_window // 2 if both_ways else config.sliding_window,
        # max_position_embeddings of these models already includes the factor of rope_scaling.
        max_position_embeddings=reader.size("max_position_embeddings"),
        qk_norm="head",
        window_layers=reader.window_layers(config.num_layers, between),
        attn_softcap=0.0,
        logit_softcap=reader.number("final_logit_softcapping") if reader.has("final_logit_softcapping") else 0.0,
        rope_theta=full.rope_theta(1e6),
        window_rope_theta=windowed.rope_theta(reader.number("rope_local_base_freq", 1e4, above=1.0)),
    )
    return bidirectional(config) if both_ways else config


def rope_readers(reader: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """Two readers of config.json: all layers with the RoPE of layers without a window, and of layers with one.

    transformers 5 writes rope_parameters by layer type. Earlier versions wrote rope_theta and rope_scaling for the
    layers without a window, and rope_local_base_freq for the others.
    """
    kinds = _object(reader, "rope_parameters")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{reader.where}: rope_parameters must be by layer type, full_attention and sliding_attention; it holds "
            f"{short(sorted(unknown))}."
        )
    inner = ConfigReader(kinds, f"{reader.where}: rope_parameters")
    full, windowed = _object(inner, "full_attention"), _object(inner, "sliding_attention")
    scaling = _object(reader, "rope_scaling")
    scaled = {"rope_scaling": {**full, **scaling}, "rope_parameters": None} if scaling else {"rope_parameters": full}
    local = ConfigReader(
        {**reader.raw, "rope_theta": None, "rope_scaling": None, "rope_parameters": windowed}, reader.where
    )
    if local.rope_scaling() is not None:
        raise ModelError(f"{inner.where}: sliding_attention: only rope_type default is served for these layers.")
    return ConfigReader({**reader.raw, **scaled}, reader.where), local


def _object(reader: ConfigReader, name: str) -> dict[str, Any]:
    value = reader.raw.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(f"{reader.where}: {name} must be an object, not {short(value)}.")
    return value


FAMILY = Family("gemma3_text", ("Gemma3ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
