"""Tiny random transformers models, one for every behaviour that a family can have. They are the oracle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.engine.models import tiny_classic, tiny_modern, tiny_moe, tiny_text_halves

VOCAB = 97  # odd on purpose: nothing may rely on a padded vocabulary


def _llama_like(kind: Callable[..., PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return kind(**{**sizes, **changes})


def _gpt2(**changes: Any) -> GPT2Config:
    return GPT2Config(vocab_size=VOCAB, n_embd=48, n_head=4, n_layer=3, n_positions=128, **changes)


def _opt(**changes: Any) -> OPTConfig:
    sizes: dict[str, Any] = {"hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    return OPTConfig(vocab_size=VOCAB, max_position_embeddings=128, **{**sizes, **changes})


def _gpt_neox(**changes: Any) -> PreTrainedConfig:
    return _llama_like(GPTNeoXConfig, **{"num_attention_heads": 3, "num_key_value_heads": None, **changes})


def _rope(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **rope}}


def _phi3(**changes: Any) -> PreTrainedConfig:
    return _llama_like(Phi3Config, **{"pad_token_id": None, **changes})


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.4], "long_factor": [1.0, 2.5, 7.0]}  # of 3 pairs
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
# Not tied: scaled embeddings outweigh what so few layers add, and a tied head then repeats the last token. Soft caps
# that numbers of this size feel: the defaults are 50 and 30.
GEMMA2 = {"head_dim": 16, "sliding_window": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
GEMMA2 |= {"tie_word_embeddings": False}
GEMMA3 = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 11, "tie_word_embeddings": False}
# Full layers have heads of their own. MOE4: 26B-A4B; SHARED: E2B, whose last layers share KV and are wide.
GEMMA4: dict[str, Any] = {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 7}
GEMMA4 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 0}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False}
K_EQ_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 4.0}
MOE4 = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20}
SHARED: dict[str, Any] = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CORRECTION = ("e_score_correction_bias", "layer_scalar")
CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _llama_like(LlamaConfig),
    "llama_tied": lambda: _llama_like(LlamaConfig, tie_word_embeddings=True),
    "llama_biases": lambda: _llama_like(LlamaConfig, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama_multi_head": lambda: _llama_like(LlamaConfig, num_key_value_heads=6, rms_norm_eps=1e-3),
    "llama_head_dim": lambda: _llama_like(LlamaConfig, head_dim=16, **_rope(rope_type="default", rope_theta=500.0)),
    "llama_rope_llama3": lambda: _llama_like(LlamaConfig, **_rope(**LLAMA3, original_max_position_embeddings=32)),
    "llama_rope_linear": lambda: _llama_like(LlamaConfig, **_rope(rope_type="linear", factor=4.0)),
    "llama_rope_dynamic": lambda: _llama_like(LlamaConfig, **_rope(rope_type="dynamic", factor=2.0)),
    "llama_rope_yarn": lambda: _llama_like(
        LlamaConfig, **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "llama_rope_yarn_options": lambda: _llama_like(
        LlamaConfig,
        **_rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.3,
            truncate=False,
        ),
    ),
    "mistral": lambda: _llama_like(MistralConfig, sliding_window=11),
    "mistral_no_window": lambda: _llama_like(MistralConfig, sliding_window=None, head_dim=16),
    "qwen2": lambda: _llama_like(Qwen2Config),
    "qwen2_window": lambda: _llama_like(
        Qwen2Config, use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: _llama_like(Qwen3Config, head_dim=16),
    "qwen3_window_bias": lambda: _llama_like(
        Qwen3Config,
        head_dim=12,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": lambda: _llama_like(MixtralConfig, intermediate_size=36, num_local_experts=5),
    "mixtral_window": lambda: _llama_like(MixtralConfig, sliding_window=11, num_experts_per_tok=3, head_dim=16),
    "qwen3_moe": lambda: _llama_like(Qwen3MoeConfig, head_dim=16, norm_topk_prob=True, **MOE),
    "qwen3_moe_plain_layers": lambda: _llama_like(
        Qwen3MoeConfig,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        **MOE,
    ),
    "gemma": lambda: _llama_like(GemmaConfig, head_dim=16),
    "gemma_options": lambda: _llama_like(
        GemmaConfig, head_dim=12, attention_bias=True, tie_word_embeddings=False, **_rope(rope_theta=500.0)
    ),
    "gemma2": lambda: _llama_like(Gemma2Config, query_pre_attn_scalar=24, **GEMMA2),
    "gemma2_options": lambda: _llama_like(
        Gemma2Config,
        head_dim=12,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_activation="silu",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": lambda: _llama_like(Gemma3TextConfig, sliding_window_pattern=3, **GEMMA3),
    "gemma3_options": lambda: _llama_like(
        Gemma3TextConfig,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=ROPES,
        query_pre_attn_scalar=24,
        final_logit_softcapping=4.0,
        attention_bias=True,
        **GEMMA3,
    ),
    "gemma4": lambda: _llama_like(Gemma4TextConfig, **{**GEMMA4, **K_EQ_V, **MOE4, **SHARED}),
    "gemma4_dense": lambda: _llama_like(Gemma4TextConfig, **GEMMA4, **K_EQ_V),
    "gemma4_experts": lambda: _llama_like(Gemma4TextConfig, **GEMMA4, **MOE4),
    "gemma4_same_heads": lambda: _llama_like(Gemma4TextConfig, **{**GEMMA4, "global_head_dim": 16}),
    "gemma4_shared": lambda: _llama_like(Gemma4TextConfig, **{**GEMMA4, **SHARED}),
    "phi3": _phi3,
    "phi3_window_head_dim": lambda: _phi3(sliding_window=11, num_attention_heads=4, tie_word_embeddings=True),
    "phi3_longrope": lambda: _phi3(
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        sliding_window=512,
        **_rope(**LONGROPE, partial_rotary_factor=0.75),
    ),
    "smollm3": lambda: _llama_like(SmolLM3Config, num_hidden_layers=4, pad_token_id=None),
    "smollm3_window": lambda: _llama_like(
        SmolLM3Config,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=9,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        pad_token_id=None,
    ),
    "granite": lambda: _llama_like(
        GraniteConfig,
        embedding_multiplier=12.0,
        attention_multiplier=0.25,
        residual_multiplier=0.22,
        logits_scaling=6.0,
    ),
    "granite_epsilon": lambda: _llama_like(  # as large as the squares of the residual stream
        GraniteConfig, residual_multiplier=3.0, attention_multiplier=0.3, rms_norm_eps=0.1, attention_bias=True
    ),
    "gpt_neox": _gpt_neox,
    "gpt_neox_sequential": lambda: _gpt_neox(
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        **_rope(rope_type="linear", factor=2.0, rope_theta=500.0, partial_rotary_factor=1.0),
    ),
    "starcoder2": lambda: _llama_like(Starcoder2Config, sliding_window=11),
    "starcoder2_no_bias": lambda: _llama_like(
        Starcoder2Config, use_bias=False, tie_word_embeddings=False, hidden_act="gelu", norm_epsilon=1e-3
    ),
    "stablelm": lambda: _llama_like(StableLmConfig, use_qkv_bias=True),
    "stablelm_parallel": lambda: _llama_like(
        StableLmConfig, use_parallel_residual=True, hidden_act="gelu", tie_word_embeddings=True
    ),
    "phi": lambda: _llama_like(PhiConfig),
    "phi_tied": lambda: _llama_like(
        PhiConfig, head_dim=16, tie_word_embeddings=True, hidden_act="relu", **_rope(partial_rotary_factor=0.25)
    ),
    "gpt2": _gpt2,
    "gpt2_options": lambda: _gpt2(
        n_inner=64, activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False
    ),
    "opt": _opt,
    "opt_350m": lambda: _opt(do_layer_norm_before=False, word_embed_proj_dim=40, num_hidden_layers=2),
    "opt_no_bias": lambda: _opt(enable_bias=False, _remove_final_layer_norm=True, activation_function="gelu"),
    **tiny_classic.CASES,
    **tiny_modern.CASES,
    **tiny_text_halves.CASES,
    **tiny_moe.CASES,
}
REFERENCES = tiny_classic.REFERENCES  # config.json of families that transformers has no code for
ALL_CASES = (*CASES, *REFERENCES)


def build_model(name: str) -> PreTrainedModel | tiny_classic.Reference:
    """Random fp32 weights; biases and norm weights too, which a fresh model leaves at 0 and 1."""
    if name in REFERENCES:
        return tiny_classic.Reference(REFERENCES[name])
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if name in tiny_text_halves.CASES else AutoModelForCausalLM
    model = kind.from_config(
        CASES[name](),
        attn_implementation=tiny_classic.ATTENTION.get(name, "eager"),
        experts_implementation="eager",
    ).eval()
    tiny_classic.repair(name, model)
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Draw every parameter anew, and the corrections of routing, which are buffers in some families."""
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTION)]
    for parameter in (*model.parameters(), *corrections):
        noise = torch.randn_like(parameter)
        if parameter.dim() >= 2:  # 3: all experts in one
            parameter.copy_(noise * 0.25)
        else:
            parameter.add_(noise * 0.25)


def num_text_parameters(oracle: torch.nn.Module) -> int:
    """The number of parameters without those of a vision tower, and with the corrections of routing."""
    corrections = [(name, buffer) for name, buffer in oracle.named_buffers() if name.endswith(CORRECTION)]
    named = [*oracle.named_parameters(), *corrections]
    return sum(p.numel() for name, p in named if not any(part in name for part in tiny_text_halves.VISION))


# Families that are another layout of a family above, with a test of their own: test_mistral_params.py,
# test_other_names.py.
OTHER_LAYOUTS = {"mistral_params", "mimo", "minicpm"}


def save_model(name: str, folder: Path, **options: Any) -> PreTrainedModel | tiny_classic.Reference:
    model = build_model(name)
    model.save_pretrained(folder, **options)
    return model


def load_oracle(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def oracle_logits(model: PreTrainedModel | tiny_classic.Reference, token_ids: list[int]) -> torch.Tensor:
    """fp32 [len(token_ids), vocab]"""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
