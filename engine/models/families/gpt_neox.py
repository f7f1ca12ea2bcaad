"""GPT-NeoX (Black et al. 2022) and Pythia: LayerNorm, a quarter of each head rotated, parallel residual."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    "gpt_neox.embed_in": "embedding",
    "gpt_neox.layers.{}.input_layernorm": "layers.{}.attn_norm",
    "gpt_neox.layers.{}.attention.query_key_value": "layers.{}.qkv",
    "gpt_neox.layers.{}.attention.dense": "layers.{}.attn_out",
    "gpt_neox.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
    "gpt_neox.layers.{}.mlp.dense_h_to_4h": "layers.{}.mlp_in",
    "gpt_neox.layers.{}.mlp.dense_4h_to_h": "layers.{}.mlp_out",
    "gpt_neox.final_layer_norm": "final_norm",
    "embed_out": "lm_head",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader, rotary_share=reader.number("rotary_pct", 0.25, high=1.0))
    attention_bias = reader.flag("attention_bias", True)
    return replace(
        config,
        family="gpt_neox",
        num_kv_heads=config.num_heads,
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        rope_theta=reader.rope_theta(reader.number("rotary_emb_base", 10000.0, above=1.0)),
        activation=reader.activation("hidden_act", "gelu"),
        gated_mlp=False,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=True,
        parallel_residual=reader.flag("use_parallel_residual", True),
    )


FAMILY = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="gpt_neox.",
    qkv_grouped=True,
    renames={"lm_head.weight": "embed_out.weight"},  # the name in memory of transformers 5
    buffers=(".attention.bias", ".attention.masked_bias", *llama.BUFFERS),
)
