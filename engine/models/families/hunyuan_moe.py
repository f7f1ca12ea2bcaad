"""Hunyuan-A13B (Tencent 2025): Hunyuan with experts in every layer, and a shared MLP of the width of an expert."""

from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import hunyuan, llama, qwen3_moe
from engine.models.family import Family
from engine.models.reader import ConfigReader, short

WEIGHTS = {
    **{theirs: ours for theirs, ours in hunyuan.WEIGHTS.items() if ".mlp." not in theirs},
    **{theirs.replace("mlp.gate", "mlp.gate.wg"): ours for theirs, ours in qwen3_moe.EXPERT_WEIGHTS.items()},
    "model.layers.{}.mlp.shared_mlp.gate_proj": "layers.{}.shared.mlp_in.gate",
    "model.layers.{}.mlp.shared_mlp.up_proj": "layers.{}.shared.mlp_in.up",
    "model.layers.{}.mlp.shared_mlp.down_proj": "layers.{}.shared.mlp_out",
}
BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")  # one number, or one per layer


def to_config(reader: ConfigReader) -> ModelConfig:
    reader = ConfigReader({**reader.raw, **{name: _one(reader, name) for name in BY_LAYER}}, reader.where)
    config = hunyuan.to_config(reader)
    width = config.intermediate_size
    reader.require("moe_intermediate_size", width)  # transformers reads intermediate_size alone
    reader.require("num_shared_expert", 1)
    reader.require("moe_layer_num_skipped", 0)
    moe = MoEConfig(
        num_experts=reader.num_experts(1),
        experts_per_token=reader.size("num_experts_per_tok", reader.size("moe_topk", 1)),
        intermediate_size=width,
        norm_topk_prob=True,
        router_float32=True,
        shared_size=width,
    )
    return replace(config, family="hunyuan_v1_moe", moe=moe)


def _one(reader: ConfigReader, name: str) -> Any:
    """The number that a field gives to every layer."""
    value = reader.raw.get(name)
    if not isinstance(value, list) or not value:
        return value
    if any(entry != value[0] for entry in value):
        raise ModelError(f"{reader.where}: {name} must be the same for every layer, not {short(value)}.")
    return value[0]


FAMILY = Family(
    "hunyuan_v1_moe",
    ("HunYuanMoEV1ForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    other_types=("hunyuan",),  # in the first config.json, before transformers had the model
    expert_tensors=qwen3_moe.EXPERT_TENSORS,
)
