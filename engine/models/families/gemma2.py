"""Gemma 2 (Gemma Team 2024): Gemma with norms on both sides of attention and MLP, soft caps on scores and logits, and a
window on every other layer."""

from dataclasses import replace

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import gemma, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **llama.WEIGHTS,
    "model.layers.{}.post_attention_layernorm": "layers.{}.attn_post_norm",
    "model.layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.post_feedforward_layernorm": "layers.{}.mlp_post_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = gemma.to_config(reader)
    return replace(
        config,
        family="gemma2",
        activation=reader.activation("hidden_activation", "gelu_pytorch_tanh"),
        post_norms=True,
        sliding_window=window(reader),
        window_layers=reader.window_layers(config.num_layers, tuple(range(0, config.num_layers, 2))),
        attn_scale=reader.number("query_pre_attn_scalar", 256) ** -0.5,
        attn_softcap=softcap(reader, "attn_logit_softcapping", 50.0),
        logit_softcap=softcap(reader, "final_logit_softcapping", 30.0),
    )


def window(reader: ConfigReader) -> int:
    """`sliding_window`. An explicit null is refused, as in transformers, and does not mean the default."""
    if reader.raw.get("sliding_window", 4096) is None:
        raise ModelError(f"{reader.where}: sliding_window = null is not supported; give its length in tokens.")
    return reader.size("sliding_window", 4096)


def softcap(reader: ConfigReader, name: str, default: float) -> float:
    """A soft cap: 0 (off) for an explicit null, `default` if absent."""
    return reader.number(name, default) if reader.raw.get(name, default) is not None else 0.0


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
