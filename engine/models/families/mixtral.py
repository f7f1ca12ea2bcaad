"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer, their weights normalised over the chosen ones."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader

EXPERTS = "model.layers.{}.block_sparse_moe.experts.{expert}"
WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".mlp." not in theirs},
    "model.layers.{}.block_sparse_moe.gate": "layers.{}.router",
    f"{EXPERTS}.w1": "layers.{}.experts_in.gate",
    f"{EXPERTS}.w3": "layers.{}.experts_in.up",
    f"{EXPERTS}.w2": "layers.{}.experts_out",
}
# Names of transformers 5 in memory.
RENAMES = {".mlp.gate.": ".block_sparse_moe.gate.", ".mlp.experts.": ".block_sparse_moe.experts."}
EXPERT_TENSORS = {
    "model.layers.{}.block_sparse_moe.experts.gate_up_proj": ExpertTensor("layers.{}.experts_in.weight"),
    "model.layers.{}.block_sparse_moe.experts.down_proj": ExpertTensor("layers.{}.experts_out.weight"),
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    moe = MoEConfig(
        num_experts=reader.num_experts(8),
        experts_per_token=reader.size("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
    )
    return replace(
        config,
        family="mixtral",
        num_kv_heads=reader.size("num_key_value_heads"),
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        rope_theta=reader.rope_theta(1e6),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        sliding_window=reader.size("sliding_window") if reader.has("sliding_window") else 0,
        moe=moe,
    )


FAMILY = Family(
    "mixtral",
    ("MixtralForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    renames=RENAMES,
    expert_tensors=EXPERT_TENSORS,
)
