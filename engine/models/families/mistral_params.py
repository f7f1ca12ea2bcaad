"""Mistral as in Mistral AI's own repositories: params.json, consolidated.safetensors; q and k rotate neighbours."""

from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.reader import MAX_LAYERS, ConfigReader

WEIGHTS = {
    "tok_embeddings": "embedding",
    "layers.{}.attention_norm": "layers.{}.attn_norm",
    "layers.{}.attention.wq": "layers.{}.qkv.q",
    "layers.{}.attention.wk": "layers.{}.qkv.k",
    "layers.{}.attention.wv": "layers.{}.qkv.v",
    "layers.{}.attention.wo": "layers.{}.attn_out",
    "layers.{}.ffn_norm": "layers.{}.mlp_norm",
    "layers.{}.feed_forward.w1": "layers.{}.mlp_in.gate",
    "layers.{}.feed_forward.w3": "layers.{}.mlp_in.up",
    "layers.{}.feed_forward.w2": "layers.{}.mlp_out",
    "norm": "final_norm",
    "output": "lm_head",
}
NOT_SERVED = ("moe", "vision_encoder", "multimodal", "quantization", "yarn", "llama_4_scaling", "lora")


def to_config(reader: ConfigReader) -> ModelConfig:
    for name in NOT_SERVED:
        reader.require(name, None)
    hidden_size, num_heads = reader.size("dim"), reader.size("n_heads")
    return ModelConfig(
        family="mistral_params",
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=reader.size("n_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=reader.size("n_kv_heads", num_heads),
        head_dim=reader.head_dim(hidden_size, num_heads),
        intermediate_size=reader.size("hidden_dim"),
        max_position_embeddings=reader.size("max_position_embeddings", reader.size("max_seq_len", 32768)),
        norm="rms",
        norm_eps=reader.number("norm_eps", 1e-5),
        position="rope",
        rope_theta=reader.number("rope_theta", 10000.0, above=1.0),
        rope_interleaved=True,
        activation="silu",
        gated_mlp=True,
        sliding_window=reader.size("sliding_window") if reader.has("sliding_window") else 0,
        tie_embeddings=reader.flag("tied_embeddings", False),
        dtype=reader.choice("dtype", "bfloat16", ("float32", "bfloat16", "float16")),
    )


FAMILY = Family("mistral_params", ("MistralParams",), to_config, WEIGHTS, prefix="")
