"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): LayerNorm, biases everywhere (lm_head too), parallel residual."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    "model.embed_tokens": "embedding",
    "model.layers.{}.input_layernorm": "layers.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "layers.{}.qkv.q",
    "model.layers.{}.self_attn.k_proj": "layers.{}.qkv.k",
    "model.layers.{}.self_attn.v_proj": "layers.{}.qkv.v",
    "model.layers.{}.self_attn.dense": "layers.{}.attn_out",
    "model.layers.{}.mlp.fc1": "layers.{}.mlp_in",
    "model.layers.{}.mlp.fc2": "layers.{}.mlp_out",
    "model.final_layernorm": "final_norm",
    "lm_head": "lm_head",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader.require("qk_layernorm", False)
    return replace(
        llama.to_config(reader, rotary_share=0.5),
        family="phi",
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        activation=reader.activation("hidden_act", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        parallel_residual=True,
        mlp_norm=False,
        lm_head_bias=True,
    )


FAMILY = Family("phi", ("PhiForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
