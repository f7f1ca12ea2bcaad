"""Gemma (Gemma Team 2024): LLaMA with a gated GELU, norms that multiply by 1 + weight, and scaled, tied embeddings."""

from dataclasses import replace

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    reader.require("use_bidirectional_attention", False)
    return replace(
        config,
        family="gemma",
        num_kv_heads=reader.size("num_key_value_heads"),
        head_dim=reader.size("head_dim", 256),
        activation=_activation(reader),
        mlp_bias=False,
        norm_weight_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        round_embedding_scale=True,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _activation(reader: ConfigReader) -> str:
    """The activation. The first releases say "gelu", in one of two fields, and mean its tanh approximation."""
    names = [name for name in ("hidden_act", "hidden_activation") if reader.has(name)] or ["hidden_act"]
    kinds = {reader.activation(name, "gelu_pytorch_tanh") for name in names}
    kinds = {"gelu_tanh" if kind == "gelu" else kind for kind in kinds}
    if len(kinds) > 1:
        raise ModelError(f"{reader.where} contradicts itself: hidden_act is not hidden_activation.")
    return kinds.pop()


FAMILY = Family("gemma", ("GemmaForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
