"""InternLM2 and 2.5 (Cai et al. 2024): LLaMA under other weight names, with q, k and v stored by KV head."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    "model.tok_embeddings": "embedding",
    "model.layers.{}.attention_norm": "layers.{}.attn_norm",
    "model.layers.{}.attention.wqkv": "layers.{}.qkv",
    "model.layers.{}.attention.wo": "layers.{}.attn_out",
    "model.layers.{}.ffn_norm": "layers.{}.mlp_norm",
    "model.layers.{}.feed_forward.w1": "layers.{}.mlp_in.gate",
    "model.layers.{}.feed_forward.w3": "layers.{}.mlp_in.up",
    "model.layers.{}.feed_forward.w2": "layers.{}.mlp_out",
    "model.norm": "final_norm",
    "output": "lm_head",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.flag("bias", True)
    return replace(llama.to_config(reader), family="internlm2", qkv_bias=bias, out_bias=bias)


FAMILY = Family(
    "internlm2",
    ("InternLM2ForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    qkv_grouped=True,
    buffers=llama.BUFFERS,
)
