"""Granite 3 MoE (IBM 2024): Granite with experts, all in one tensor of the checkpoint."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import granite, llama
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader

MOE = "model.layers.{}.block_sparse_moe"
WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".mlp." not in theirs},
    f"{MOE}.router.layer": "layers.{}.router",
}
EXPERT_TENSORS = {
    f"{MOE}.input_linear.weight": ExpertTensor("layers.{}.experts_in.weight"),
    f"{MOE}.output_linear.weight": ExpertTensor("layers.{}.experts_out.weight"),
}
RENAMES = {  # names of transformers 5 in memory
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
    ".router.weight": ".router.layer.weight",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = granite.to_config(reader)
    moe = MoEConfig(
        num_experts=reader.num_experts(8),
        experts_per_token=reader.size("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
    )
    return replace(config, family="granitemoe", mlp_bias=False, moe=moe)


FAMILY = Family(
    "granitemoe",
    ("GraniteMoeForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    renames=RENAMES,
    expert_tensors=EXPERT_TENSORS,
)
