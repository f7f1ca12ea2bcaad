"""Apertus (Swiss AI Initiative 2025): LLaMA with a plain MLP of xIELU activations, and RMSNorm on every head of q and
k."""

from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig
from engine.models.families import arcee, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in arcee.WEIGHTS.items() if "layernorm" not in theirs},
    "model.layers.{}.attention_layernorm": "layers.{}.attn_norm",
    "model.layers.{}.feedforward_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.k_norm",
    "model.layers.{}.mlp.act_fn.alpha_p": "layers.{}.xielu.alpha_p.weight",
    "model.layers.{}.mlp.act_fn.alpha_n": "layers.{}.xielu.alpha_n.weight",
}
ROPE: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_parameters": ROPE, "rope_theta": 1.2e7}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader.require("post_norm", False)
    reader.require("qk_norm", True)
    learned = reader.raw.get("hidden_act") in (None, "xielu")
    plain = ConfigReader({**reader.raw, "hidden_act": None}, reader.where) if learned else reader
    config = llama.to_config(plain.with_defaults(**DEFAULTS))
    activation = "xielu" if learned else config.activation
    return replace(config, family="apertus", activation=activation, gated_mlp=False, mlp_bias=False, qk_norm="head")


FAMILY = Family(
    "apertus",
    ("ApertusForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=(".act_fn.eps", *llama.BUFFERS),
    constants={".act_fn.beta": 0.5},
)
