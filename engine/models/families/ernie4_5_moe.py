"""ERNIE 4.5 (Baidu 2025) with experts: softmax scores with a correction for the choice, and shared experts."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import ernie4_5, glm4_moe, llama, qwen3_moe
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader

CORRECTION = "model.layers.{}.mlp.moe_statics.e_score_correction_bias"


def to_config(reader: ConfigReader) -> ModelConfig:
    head_dim = reader.head_dim(reader.size("hidden_size"), reader.size("num_attention_heads"))
    config = ernie4_5.to_config(reader.with_defaults(head_dim=head_dim, num_key_value_heads=4))
    return replace(config, family="ernie4_5_moe", moe=_moe(reader, config.num_layers))


def _moe(reader: ConfigReader, num_layers: int) -> MoEConfig:
    """Experts in every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index (-1: the last)."""
    reader.require("moe_norm_min", 1e-12)
    first, last = reader.size("moe_layer_start_index", 1, low=0), reader.size("moe_layer_end_index", -1, low=-1)
    step, end = reader.size("moe_layer_interval", 1), num_layers if last == -1 else last + 1
    width = reader.size("moe_intermediate_size", 1536)
    return MoEConfig(
        num_experts=reader.num_experts(64, "moe_num_experts"),
        experts_per_token=reader.size("moe_k", 6),
        intermediate_size=width,
        norm_topk_prob=True,
        dense_layers=tuple(i for i in range(num_layers) if not first <= i < end or (i + 1) % step),
        correction_bias=True,
        router_float32=True,
        shared_size=width * reader.size("moe_num_shared_experts", 2, low=0),
    )


FAMILY = Family(
    "ernie4_5_moe",
    ("Ernie4_5_MoeForCausalLM",),
    to_config,
    {theirs: ours for theirs, ours in glm4_moe.WEIGHTS.items() if "correction" not in ours and "_norm" not in ours}
    | {theirs: ours for theirs, ours in llama.WEIGHTS.items() if "_norm" in ours},
    prefix="model.",
    buffers=llama.BUFFERS,
    heads=("model.mtp_",),  # the part that predicts more tokens
    renames={".mlp.gate.moe_statics.": ".mlp.moe_statics."},
    expert_tensors={**qwen3_moe.EXPERT_TENSORS, CORRECTION: ExpertTensor("layers.{}.correction.bias", single=True)},
)
