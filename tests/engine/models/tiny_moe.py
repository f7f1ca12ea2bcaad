"""Tiny random transformers models of mixtures of experts."""

from collections.abc import Callable
from typing import Any

from transformers import (
    DbrxConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    MiniMaxM2Config,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

VOCAB = 97


def _tiny(kind: Callable[..., PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": None,
    }
    return kind(**{**sizes, **changes})


def _rope(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **rope}}


def _dbrx(ffn: dict[str, Any], **attention: Any) -> PreTrainedConfig:
    return DbrxConfig(
        vocab_size=VOCAB,
        d_model=48,
        n_heads=6,
        n_layers=2,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 500.0, **attention},
        ffn_config={"ffn_hidden_size": 36, "moe_num_experts": 5, "moe_top_k": 2, **ffn},
        **_rope(rope_theta=500.0),
    )


GLM4 = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "routed_scaling_factor": 1.5}
QWEN2 = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "intermediate_size": 40}
ERNIE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20, "tie_word_embeddings": False}
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22}
GRANITE |= {"logits_scaling": 6.0, "num_local_experts": 5, "num_experts_per_tok": 2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.4, 1.9], "long_factor": [1.0, 2.5, 7.0, 9.0]}
LONGROPE |= {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 128}
LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 4, "num_hidden_layers": 3}
LLAMA4 |= {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5}
GPT_OSS = {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}
CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "olmoe": lambda: _tiny(OlmoeConfig, num_experts=6, num_experts_per_tok=3),
    "olmoe_clip": lambda: _tiny(
        OlmoeConfig, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=0.5, attention_bias=True
    ),
    "qwen2_moe": lambda: _tiny(Qwen2MoeConfig, shared_expert_intermediate_size=28, **QWEN2),
    "qwen2_moe_window": lambda: _tiny(
        Qwen2MoeConfig,
        shared_expert_intermediate_size=28,
        qkv_bias=False,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=9,
        norm_topk_prob=True,
        **QWEN2,
    ),
    "glm4_moe": lambda: _tiny(Glm4MoeConfig, head_dim=16, use_qk_norm=True, **GLM4),
    "glm4_moe_groups": lambda: _tiny(
        Glm4MoeConfig,
        n_group=3,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        attention_bias=True,
        **GLM4,
    ),
    "dots1": lambda: _tiny(Dots1Config, head_dim=12, n_shared_experts=1, sliding_window=None, **GLM4),
    "ernie4_5_moe": lambda: _tiny(Ernie4_5_MoeConfig, **ERNIE),
    "ernie4_5_moe_interval": lambda: _tiny(
        Ernie4_5_MoeConfig,
        num_hidden_layers=4,
        moe_layer_interval=2,
        moe_layer_end_index=2,
        moe_num_shared_experts=0,
        **ERNIE,
    ),
    "granitemoe": lambda: _tiny(GraniteMoeConfig, **GRANITE),
    "granitemoeshared": lambda: _tiny(GraniteMoeSharedConfig, shared_intermediate_size=28, **GRANITE),
    "phimoe": lambda: _tiny(PhimoeConfig, num_local_experts=5, router_jitter_noise=0.2, attention_bias=True),
    "phimoe_longrope": lambda: _tiny(
        PhimoeConfig,
        num_local_experts=5,
        max_position_embeddings=512,
        sliding_window=11,
        lm_head_bias=True,
        **_rope(**LONGROPE),
    ),
    "dbrx": lambda: _dbrx({}),
    "dbrx_options": lambda: _dbrx({"moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}}, clip_qkv=8),
    "gpt_oss": lambda: _tiny(GptOssConfig, **GPT_OSS, **_rope()),
    "gpt_oss_yarn": lambda: _tiny(
        GptOssConfig,
        swiglu_limit=0.5,
        **GPT_OSS,
        **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    ),
    "llama4": lambda: _tiny(Llama4TextConfig, num_experts_per_tok=2, no_rope_layers=[1, 0, 1], **LLAMA4),
    "llama4_interleaved": lambda: _tiny(
        Llama4TextConfig,
        interleave_moe_layer_step=2,
        no_rope_layers=[0, 1, 1],
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        **LLAMA4,
    ),
    "minimax_m2": lambda: _tiny(MiniMaxM2Config, head_dim=16, rotary_dim=8, num_local_experts=6, num_experts_per_tok=3),
    "hunyuan_moe": lambda: _tiny(
        HunYuanMoEV1Config,
        head_dim=12,
        num_experts=6,
        moe_topk=3,
        **_rope(rope_type="dynamic", alpha=1000.0, factor=1.0),
    ),
}
if not hasattr(GptOssConfig, "swiglu_limit"):  # transformers 5.17 takes 7 whatever the file says: no oracle there
    CASES.pop("gpt_oss_yarn")
