"""InternLM3 (InternLM Team 2025): LLaMA with heads of 128; transformers saves it as LlamaForCausalLM."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(head_dim=128, num_key_value_heads=2, rms_norm_eps=1e-5))
    # The published config.json has qkv_bias and bias, that of transformers attention_bias and mlp_bias.
    bias = reader.flag("bias", config.mlp_bias)
    return replace(
        config,
        family="internlm3",
        qkv_bias=reader.flag("qkv_bias", config.qkv_bias),
        out_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(
    "internlm3",
    ("InternLM3ForCausalLM", "LlamaForCausalLM"),
    to_config,
    llama.WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
)
