"""Hunyuan (Tencent 2025), dense: LLaMA with RMSNorm on every head of q and k after the rotation, and a fixed NTK factor
of the rotary base."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **llama.WEIGHTS,
    "model.layers.{}.self_attn.query_layernorm": "layers.{}.q_norm",
    "model.layers.{}.self_attn.key_layernorm": "layers.{}.k_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader.require("use_qk_norm", True)
    reader.require("use_cla", False)  # layers that share keys and values, which transformers' code does not have
    return replace(
        llama.to_config(reader.with_defaults(rms_norm_eps=1e-5)),
        family="hunyuan_v1_dense",
        mlp_bias=False,
        qk_norm="head",
        qk_norm_after_rope=True,
    )


FAMILY = Family(
    "hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS
)
