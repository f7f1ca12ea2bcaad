"""OLMo 2 (OLMo Team 2025): LLaMA with norms behind attention and MLP in place of before them, and RMSNorm over all
heads of q and of k."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if "layernorm" not in theirs},
    "model.layers.{}.post_attention_layernorm": "layers.{}.attn_post_norm",
    "model.layers.{}.post_feedforward_layernorm": "layers.{}.mlp_post_norm",
    "model.layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.k_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(
        llama.to_config(reader.with_defaults(rms_norm_eps=1e-5)),
        family="olmo2",
        mlp_bias=False,
        input_norms=False,
        post_norms=True,
        qk_norm="all",
    )


FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
