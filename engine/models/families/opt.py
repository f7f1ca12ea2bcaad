"""OPT (Zhang et al. 2022): LayerNorm, learned positions from row 2 on, ReLU. The 350m size normalises after the
residual addition and its embedding is narrower."""

from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.reader import MAX_LAYERS, ConfigReader

WEIGHTS = {
    "model.decoder.embed_tokens": "embedding",
    "model.decoder.embed_positions": "position_embedding",
    "model.decoder.project_in": "project_in",
    "model.decoder.project_out": "project_out",
    "model.decoder.layers.{}.self_attn_layer_norm": "layers.{}.attn_norm",
    "model.decoder.layers.{}.self_attn.q_proj": "layers.{}.qkv.q",
    "model.decoder.layers.{}.self_attn.k_proj": "layers.{}.qkv.k",
    "model.decoder.layers.{}.self_attn.v_proj": "layers.{}.qkv.v",
    "model.decoder.layers.{}.self_attn.out_proj": "layers.{}.attn_out",
    "model.decoder.layers.{}.final_layer_norm": "layers.{}.mlp_norm",
    "model.decoder.layers.{}.fc1": "layers.{}.mlp_in",
    "model.decoder.layers.{}.fc2": "layers.{}.mlp_out",
    "model.decoder.final_layer_norm": "final_norm",
    "lm_head": "lm_head",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    hidden_size = reader.size("hidden_size")
    num_heads = reader.size("num_attention_heads")
    bias = reader.flag("enable_bias", True)
    pre_norm = reader.flag("do_layer_norm_before", True)
    affine = reader.flag("layer_norm_elementwise_affine", True)
    return ModelConfig(
        family="opt",
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=reader.size("num_hidden_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=reader.head_dim(hidden_size, num_heads),
        intermediate_size=reader.size("ffn_dim"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        norm="layer",
        norm_eps=1e-5,
        norm_weight=affine,
        norm_bias=affine,
        pre_norm=pre_norm,
        final_norm=pre_norm and not reader.flag("_remove_final_layer_norm", False),
        position="learned",
        position_offset=2,
        activation=reader.activation("activation_function", "relu"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
        embedding_proj_dim=reader.size("word_embed_proj_dim", hidden_size),
        dtype=reader.dtype(),
    )


FAMILY = Family("opt", ("OPTForCausalLM",), to_config, WEIGHTS, prefix="model.")
