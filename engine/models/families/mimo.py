"""MiMo-7B (Xiaomi 2025): Qwen2, with layers that predict more tokens, which are not loaded."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import qwen2
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(qwen2.to_config(reader), family="mimo")


FAMILY = replace(
    qwen2.FAMILY,
    model_type="mimo",
    architectures=("MiMoForCausalLM",),
    to_config=to_config,
    heads=("model.mtp_layers.",),
)
