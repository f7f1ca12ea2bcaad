"""StarCoder2 (Lozhkov et al. 2024): LLaMA with LayerNorm, biases everywhere, a plain MLP and a sliding window."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".mlp." not in theirs},
    "model.layers.{}.mlp.c_fc": "layers.{}.mlp_in",
    "model.layers.{}.mlp.c_proj": "layers.{}.mlp_out",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.flag("use_bias", True)
    return replace(
        llama.to_config(reader),
        family="starcoder2",
        num_kv_heads=reader.size("num_key_value_heads", 2),
        norm="layer",
        norm_eps=reader.number("norm_epsilon", 1e-5),
        activation=reader.activation("hidden_act", "gelu_pytorch_tanh"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        sliding_window=reader.size("sliding_window") if reader.has("sliding_window") else 0,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
    )


FAMILY = Family("starcoder2", ("Starcoder2ForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
