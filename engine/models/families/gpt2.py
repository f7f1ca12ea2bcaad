"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, one fused qkv matrix, linear weights stored [in, out]."""

from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.reader import MAX_LAYERS, ConfigReader

WEIGHTS = {
    "transformer.wte": "embedding",
    "transformer.wpe": "position_embedding",
    "transformer.h.{}.ln_1": "layers.{}.attn_norm",
    "transformer.h.{}.attn.c_attn": "layers.{}.qkv",
    "transformer.h.{}.attn.c_proj": "layers.{}.attn_out",
    "transformer.h.{}.ln_2": "layers.{}.mlp_norm",
    "transformer.h.{}.mlp.c_fc": "layers.{}.mlp_in",
    "transformer.h.{}.mlp.c_proj": "layers.{}.mlp_out",
    "transformer.ln_f": "final_norm",
    "lm_head": "lm_head",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    hidden_size = reader.size("n_embd")
    num_heads = reader.size("n_head")
    reader.require("scale_attn_by_inverse_layer_idx", False)
    reader.require("add_cross_attention", False)
    return ModelConfig(
        family="gpt2",
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=reader.size("n_layer", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=reader.head_dim(hidden_size, num_heads),
        intermediate_size=reader.size("n_inner", 4 * hidden_size),
        max_position_embeddings=reader.size("n_positions"),
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        position="learned",
        activation=reader.activation("activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attn_scale=None if reader.flag("scale_attn_weights", True) else 1.0,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
        dtype=reader.dtype(),
    )


FAMILY = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    to_config,
    WEIGHTS,
    prefix="transformer.",
    transposed=True,
    buffers=(".attn.bias", ".attn.masked_bias"),
)
