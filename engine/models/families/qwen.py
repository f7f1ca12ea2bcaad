"""Qwen 1 (Bai et al. 2023): LLaMA under other weight names, with biases on q, k and v."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    "transformer.wte": "embedding",
    "transformer.h.{}.ln_1": "layers.{}.attn_norm",
    "transformer.h.{}.attn.c_attn": "layers.{}.qkv",
    "transformer.h.{}.attn.c_proj": "layers.{}.attn_out",
    "transformer.h.{}.ln_2": "layers.{}.mlp_norm",
    "transformer.h.{}.mlp.w1": "layers.{}.mlp_in.up",
    "transformer.h.{}.mlp.w2": "layers.{}.mlp_in.gate",
    "transformer.h.{}.mlp.c_proj": "layers.{}.mlp_out",
    "transformer.ln_f": "final_norm",
    "lm_head": "lm_head",
}
OLD_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
OLD_NAMES |= {"intermediate_size": "ffn_hidden_size", "max_position_embeddings": "n_positions"}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader = reader.with_defaults(**{name: reader.raw.get(old) for name, old in OLD_NAMES.items()})
    reader.require("no_bias", True)
    reader.require("scale_attn_weights", True)
    config = llama.to_config(reader.with_defaults(max_position_embeddings=reader.size("seq_length", 2048)))
    # use_dynamic_ntk and use_logn_attn change nothing up to seq_length, the trained length. Beyond, each token would
    # depend on the length of its whole sequence, which cached keys cannot follow.
    grows = reader.flag("use_dynamic_ntk", False) or reader.flag("use_logn_attn", False)
    longest = min(config.max_position_embeddings, reader.size("seq_length", config.max_position_embeddings))
    return replace(
        config,
        family="qwen",
        num_kv_heads=config.num_heads,
        head_dim=reader.size("kv_channels", config.head_dim),
        intermediate_size=reader.size("intermediate_size", low=2) // 2,
        max_position_embeddings=longest if grows else config.max_position_embeddings,
        norm_eps=reader.number("layer_norm_epsilon", 1e-6),
        rope_theta=reader.number("rotary_emb_base", 10000.0, above=1.0),
        partial_rotary_factor=reader.number("rotary_pct", 1.0, high=1.0),
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
    )


FAMILY = Family(
    "qwen",
    ("QWenLMHeadModel",),
    to_config,
    WEIGHTS,
    prefix="transformer.",
    buffers=("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
)
