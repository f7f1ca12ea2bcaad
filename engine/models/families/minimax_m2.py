"""MiniMax-M2 (MiniMax 2025): Mixtral with RMSNorm over the rows of q and of k, a part of each head rotated, and sigmoid
routing with a correction."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama, mixtral, qwen3
from engine.models.family import Family
from engine.models.reader import ConfigReader

CORRECTION = ".block_sparse_moe.e_score_correction_bias"
WEIGHTS = {
    **mixtral.WEIGHTS,
    **{theirs: ours for theirs, ours in qwen3.WEIGHTS.items() if ".self_attn." in theirs},
    f"model.layers.{{}}{CORRECTION}": "layers.{}.correction.bias",
}
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6}


def to_config(reader: ConfigReader) -> ModelConfig:
    reader = reader.with_defaults(**DEFAULTS)
    for name, served in {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True}.items():
        reader.require(name, served)
    head_dim = reader.size("head_dim")
    config = llama.to_config(reader, rotary_share=reader.size("rotary_dim", head_dim, high=head_dim) / head_dim)
    moe = MoEConfig(
        num_experts=reader.num_experts(256),
        experts_per_token=reader.size("num_experts_per_tok", 8),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
        scoring="sigmoid",
        correction_bias=True,
        router_float32=True,
    )
    return replace(config, family="minimax_m2", qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm="all", moe=moe)


FAMILY = Family(
    "minimax_m2",
    ("MiniMaxM2ForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    other_types=("minimax",),  # in the first config.json, as in MiniMax-Text-01, whose architecture is another
    renames={**mixtral.RENAMES, ".mlp.e_score_correction_bias": CORRECTION},
    expert_tensors=mixtral.EXPERT_TENSORS,
)
