"""GPT BigCode: SantaCoder (Ben Allal et al. 2023) and StarCoder (Li et al. 2023): GPT-2 with one KV head."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import gpt2
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = gpt2.to_config(reader)
    return replace(
        config,
        family="gpt_bigcode",
        num_kv_heads=1 if reader.flag("multi_query", True) else config.num_heads,
        activation=reader.activation("activation_function", "gelu_pytorch_tanh"),
    )


FAMILY = Family(
    "gpt_bigcode",
    ("GPTBigCodeForCausalLM",),
    to_config,
    gpt2.WEIGHTS,
    prefix="transformer.",
    qkv_grouped=True,
    buffers=gpt2.FAMILY.buffers,
)
