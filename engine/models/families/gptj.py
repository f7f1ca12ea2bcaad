"""GPT-J (Wang and Komatsuzaki 2021): parallel residual with one norm, neighbouring pairs rotated, no attention bias."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import gpt2
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    "transformer.wte": "embedding",
    "transformer.h.{}.ln_1": "layers.{}.attn_norm",
    "transformer.h.{}.attn.q_proj": "layers.{}.qkv.q",
    "transformer.h.{}.attn.k_proj": "layers.{}.qkv.k",
    "transformer.h.{}.attn.v_proj": "layers.{}.qkv.v",
    "transformer.h.{}.attn.out_proj": "layers.{}.attn_out",
    "transformer.h.{}.mlp.fc_in": "layers.{}.mlp_in",
    "transformer.h.{}.mlp.fc_out": "layers.{}.mlp_out",
    "transformer.ln_f": "final_norm",
    "lm_head": "lm_head",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = gpt2.to_config(reader.with_defaults(tie_word_embeddings=False))
    return replace(
        config,
        family="gptj",
        position="rope",
        partial_rotary_factor=reader.size("rotary_dim", 64, high=config.head_dim) / config.head_dim,
        rope_interleaved=True,
        qkv_bias=False,
        out_bias=False,
        parallel_residual=True,
        mlp_norm=False,
        lm_head_bias=True,
    )


FAMILY = Family("gptj", ("GPTJForCausalLM",), to_config, WEIGHTS, prefix="transformer.", buffers=gpt2.FAMILY.buffers)
