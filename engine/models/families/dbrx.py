"""DBRX (Databricks 2024): LayerNorm without bias, clipped q, k and v, and experts that share one tensor."""

from dataclasses import replace

from engine.models.config import ModelConfig, MoEConfig
from engine.models.families import llama
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader

BLOCK = "transformer.blocks.{}"
WEIGHTS = {
    "transformer.wte": "embedding",
    f"{BLOCK}.norm_attn_norm.norm_1": "layers.{}.attn_norm",
    f"{BLOCK}.norm_attn_norm.attn.Wqkv": "layers.{}.qkv",
    f"{BLOCK}.norm_attn_norm.attn.out_proj": "layers.{}.attn_out",
    f"{BLOCK}.norm_attn_norm.norm_2": "layers.{}.mlp_norm",
    f"{BLOCK}.ffn.router.layer": "layers.{}.router",
    "transformer.norm_f": "final_norm",
    "lm_head": "lm_head",
}
EXPERT_TENSORS = {
    f"{BLOCK}.ffn.experts.mlp.w1": ExpertTensor("layers.{}.experts_in.gate.weight", flat=True),
    f"{BLOCK}.ffn.experts.mlp.v1": ExpertTensor("layers.{}.experts_in.up.weight", flat=True),
    f"{BLOCK}.ffn.experts.mlp.w2": ExpertTensor("layers.{}.experts_out.weight", flat=True, transposed=True),
}
SIZES = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
SIZES |= {"max_position_embeddings": "max_seq_len"}


def to_config(reader: ConfigReader) -> ModelConfig:
    attention, mlp = reader.object("attn_config"), reader.object("ffn_config")
    mlp.require("moe_normalize_expert_weights", 1.0)
    sizes = {ours: reader.size(theirs) for ours, theirs in SIZES.items()}
    width, rope_theta = mlp.size("ffn_hidden_size", 3584), attention.rope_theta(reader.rope_theta())
    moe = MoEConfig(
        num_experts=mlp.num_experts(4, "moe_num_experts"),
        experts_per_token=mlp.size("moe_top_k", 1),
        intermediate_size=width,
        norm_topk_prob="moe_normalize_expert_weights" not in mlp.raw or mlp.has("moe_normalize_expert_weights"),
    )
    return replace(
        llama.to_config(reader.with_defaults(**sizes, intermediate_size=width)),
        family="dbrx",
        num_kv_heads=attention.size("kv_n_heads", 1),
        norm="layer",
        norm_bias=False,
        norm_eps=1e-5,
        rope_theta=rope_theta,
        activation=mlp.object("ffn_act_fn").activation("name", "silu"),
        clip_qkv=attention.number("clip_qkv") if attention.has("clip_qkv") else 0.0,
        moe=moe,
    )


FAMILY = Family("dbrx", ("DbrxForCausalLM",), to_config, WEIGHTS, prefix="transformer.", expert_tensors=EXPERT_TENSORS)
