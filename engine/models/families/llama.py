"""LLaMA (Touvron et al. 2023) and models of its shape: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.reader import MAX_LAYERS, ConfigReader

WEIGHTS = {
    "model.embed_tokens": "embedding",
    "model.layers.{}.input_layernorm": "layers.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "layers.{}.qkv.q",
    "model.layers.{}.self_attn.k_proj": "layers.{}.qkv.k",
    "model.layers.{}.self_attn.v_proj": "layers.{}.qkv.v",
    "model.layers.{}.self_attn.o_proj": "layers.{}.attn_out",
    "model.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.mlp.gate_proj": "layers.{}.mlp_in.gate",
    "model.layers.{}.mlp.up_proj": "layers.{}.mlp_in.up",
    "model.layers.{}.mlp.down_proj": "layers.{}.mlp_out",
    "model.norm": "final_norm",
    "lm_head": "lm_head",
}
BUFFERS = ("rotary_emb.inv_freq",)


def to_config(reader: ConfigReader, rotary_share: float | None = None) -> ModelConfig:
    """The config of a LLaMA-like model. rotary_share: default of partial_rotary_factor; None refuses that field."""
    hidden_size = reader.size("hidden_size")
    num_heads = reader.size("num_attention_heads")
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        family="llama",
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=reader.size("num_hidden_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=reader.size("num_key_value_heads", num_heads),
        head_dim=reader.head_dim(hidden_size, num_heads),
        intermediate_size=reader.size("intermediate_size"),
        max_position_embeddings=reader.max_position(),
        norm="rms",
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        position="rope",
        rope_theta=reader.rope_theta(),
        rope_scaling=reader.rope_scaling(partial=rotary_share is not None),
        partial_rotary_factor=1.0 if rotary_share is None else reader.partial_rotary_factor(rotary_share),
        activation=reader.activation("hidden_act", "silu"),
        gated_mlp=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
        tie_embeddings=reader.flag("tie_word_embeddings", False),
        dtype=reader.dtype(),
    )


# The second name is that of the first converted checkpoints.
FAMILY = Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), to_config, WEIGHTS, prefix="model.", buffers=BUFFERS)
