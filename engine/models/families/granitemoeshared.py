"""Granite 3 MoE with a shared MLP (IBM 2025)."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import granitemoe, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **granitemoe.WEIGHTS,
    "model.layers.{}.shared_mlp.input_linear": "layers.{}.shared.mlp_in",
    "model.layers.{}.shared_mlp.output_linear": "layers.{}.shared.mlp_out",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = granitemoe.to_config(reader)
    assert config.moe is not None
    moe = replace(config.moe, shared_size=reader.size("shared_intermediate_size", 0, low=0))
    return replace(config, family="granitemoeshared", moe=moe)


FAMILY = Family(
    "granitemoeshared",
    ("GraniteMoeSharedForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    renames=granitemoe.RENAMES,
    expert_tensors=granitemoe.EXPERT_TENSORS,
)
