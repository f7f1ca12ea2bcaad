"""BLOOM (Le Scao et al. 2022): LayerNorm, also of the embeddings, ALiBi, biases everywhere; qkv is stored by head."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

LAYER_WEIGHTS = {
    "h.{}.input_layernorm": "layers.{}.attn_norm",
    "h.{}.self_attention.query_key_value": "layers.{}.qkv",
    "h.{}.self_attention.dense": "layers.{}.attn_out",
    "h.{}.post_attention_layernorm": "layers.{}.mlp_norm",
    "h.{}.mlp.dense_h_to_4h": "layers.{}.mlp_in",
    "h.{}.mlp.dense_4h_to_h": "layers.{}.mlp_out",
}
WEIGHTS = {
    "transformer.word_embeddings": "embedding",
    "transformer.word_embeddings_layernorm": "embedding_norm",
    **{f"transformer.{theirs}": ours for theirs, ours in LAYER_WEIGHTS.items()},
    "transformer.ln_f": "final_norm",
    "lm_head": "lm_head",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader.require("apply_residual_connection_post_layernorm", False)
    hidden_size = reader.size("n_embed" if reader.has("n_embed") else "hidden_size")
    reader = reader.with_defaults(
        hidden_size=hidden_size,
        num_hidden_layers=reader.raw.get("n_layer"),
        num_attention_heads=reader.raw.get("n_head"),
        intermediate_size=4 * hidden_size,
        max_position_embeddings=reader.size("seq_length", 2048),
        tie_word_embeddings=True,
    )
    config = llama.to_config(reader)
    return replace(
        config,
        family="bloom",
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        embedding_norm=True,
        position="alibi",
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


# The second name is that of some published config.json, whose tensors lack the prefix.
FAMILY = Family(
    "bloom", ("BloomForCausalLM", "BloomModel"), to_config, WEIGHTS, prefix="transformer.", qkv_grouped=True
)
