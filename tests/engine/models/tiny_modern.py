"""Tiny random transformers models of today's dense families, and of the text halves of vision-language checkpoints."""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Glm4Config,
    GlmConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    MinistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    PreTrainedConfig,
    SeedOssConfig,
    StableLmConfig,
)

VOCAB = 97


def _tiny(kind: Callable[..., PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": None,
    }
    return kind(**{**sizes, **changes})


def _rope(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **rope}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
MINISTRAL3 = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
MINISTRAL3 |= {"original_max_position_embeddings": 8}  # queries of several periods in prompts of this size
MIXED = ["full_attention", "sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
GRANITE: dict[str, Any] = {"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4}
GRANITE |= {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22}
CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "seed_oss": lambda: _tiny(SeedOssConfig, head_dim=12),
    "seed_oss_biases": lambda: _tiny(
        SeedOssConfig, head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "apertus": lambda: _tiny(ApertusConfig, rope_parameters=LLAMA3),
    "apertus_relu2": lambda: _tiny(ApertusConfig, hidden_act="relu2", attention_bias=True, head_dim=16),
    "stablelm_12b": lambda: _tiny(StableLmConfig, qk_layernorm=True, use_parallel_residual=True),
    "arcee": lambda: _tiny(ArceeConfig),
    "nemotron": lambda: _tiny(NemotronConfig),
    "nemotron_biases": lambda: _tiny(
        NemotronConfig, attention_bias=True, mlp_bias=True, **_rope(partial_rotary_factor=0.25), norm_eps=1e-3
    ),
    "ernie4_5": lambda: _tiny(Ernie4_5Config, head_dim=16, tie_word_embeddings=False),
    "ernie4_5_biases": lambda: _tiny(Ernie4_5Config, head_dim=12, use_bias=True),
    "glm": lambda: _tiny(GlmConfig, head_dim=16),
    "glm4": lambda: _tiny(Glm4Config, head_dim=16),
    "glm4_no_bias": lambda: _tiny(
        Glm4Config, head_dim=12, attention_bias=False, tie_word_embeddings=True, **_rope(partial_rotary_factor=1.0)
    ),
    "hunyuan": lambda: _tiny(HunYuanDenseV1Config, head_dim=16),
    "hunyuan_alpha": lambda: _tiny(
        HunYuanDenseV1Config, head_dim=12, attention_bias=True, **_rope(rope_type="dynamic", alpha=1000.0, factor=1.0)
    ),
    "granite4": lambda: _tiny(
        GraniteMoeHybridConfig,
        **GRANITE,
        logits_scaling=6.0,
        shared_intermediate_size=40,
        position_embedding_type="rope",
    ),
    "granite4_nope": lambda: _tiny(
        GraniteMoeHybridConfig, **GRANITE | {"embedding_multiplier": 3.0}, tie_word_embeddings=True, attention_bias=True
    ),
    "hyperclovax": lambda: _tiny(
        transformers.HyperCLOVAXConfig, embedding_multiplier=6.0, attention_multiplier=0.25, logits_scaling=0.3
    ),
    "hyperclovax_no_post_norm": lambda: _tiny(
        transformers.HyperCLOVAXConfig,
        use_post_norm=False,
        residual_multiplier=0.22,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
    ),
    "ministral": lambda: _tiny(MinistralConfig, head_dim=16, sliding_window=9, layer_types=MIXED),
    "ministral3": lambda: _tiny(Ministral3Config, head_dim=16, rope_parameters=MINISTRAL3),
    "ministral3_window": lambda: _tiny(
        Ministral3Config, head_dim=12, sliding_window=9, tie_word_embeddings=True, rope_parameters=MINISTRAL3
    ),
    "olmo": lambda: _tiny(OlmoConfig, clip_qkv=0.8, attention_bias=True),
    "olmo2": lambda: _tiny(Olmo2Config),
    "olmo2_biases": lambda: _tiny(Olmo2Config, attention_bias=True, num_key_value_heads=6, rms_norm_eps=1e-3),
    "olmo3": lambda: _tiny(
        Olmo3Config,
        num_hidden_layers=4,
        sliding_window=9,
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "exaone4": lambda: _tiny(Exaone4Config, num_hidden_layers=4, sliding_window=9),
    "exaone4_full": lambda: _tiny(
        Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 3, head_dim=16, tie_word_embeddings=True
    ),
    "cohere": lambda: _tiny(CohereConfig, tie_word_embeddings=False, logit_scale=0.3),
    "cohere_qk_norm": lambda: _tiny(CohereConfig, use_qk_norm=True, attention_bias=True, logit_scale=0.3),
    "cohere2": lambda: _tiny(
        Cohere2Config, num_hidden_layers=4, sliding_window=9, logit_scale=0.3, tie_word_embeddings=False
    ),
    "cohere2_layer_types": lambda: _tiny(Cohere2Config, sliding_window=9, layer_types=MIXED, attention_bias=True),
}
if not hasattr(transformers, "HyperCLOVAXConfig"):  # transformers 5.17 may have none: no oracle there
    CASES = {name: make for name, make in CASES.items() if not name.startswith("hyperclovax")}
