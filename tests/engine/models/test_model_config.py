"""config.json -> ModelConfig: old and new spellings, and every field that cannot be honoured refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig

from engine.errors import ModelError
from engine.models import reader
from engine.models.config import MoEConfig
from engine.models.families import GROUPS, model_config, read_model_config
from kernels.linear import moe_routing
from tests.engine.models.tiny_models import CASES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2}
QWEN3_MOE = {**MIXTRAL, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 512}
LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}  # 12 of 16 values
PHI4_MINI = {**PHI3, "rope_scaling": LONGROPE, "partial_rotary_factor": 0.75}
SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
GRANITE = {**LLAMA, "architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GPT_NEOX = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
STARCODER2 = {**LLAMA, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
STABLELM = {**LLAMA, "architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
PHI = {**LLAMA, "architectures": ["PhiForCausalLM"], "model_type": "phi"}
OPT = {**LLAMA, "architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 160}
GEMMA = {**MIXTRAL, "architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
GEMMA2 = {**GEMMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
LINEAR8 = {"rope_type": "linear", "factor": 8.0}


def had_older_spelling(name: str) -> bool:
    """True if transformers wrote the case's RoPE in another way before version 5; Ministral 3 is younger, and gpt-oss
    without rope_scaling is YaRN."""
    config = CASES[name]().to_dict()
    rope = config.get("rope_parameters") or {}
    plain = rope.get("rope_type") == "default" and config["model_type"] == "gpt_oss"
    return "rope_type" in rope and "llama_4_scaling_beta" not in rope and not plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "by latent attention (MLA), and only caches of keys"),
        ({"architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 32}, "recurrent states (linear att"),
        (
            {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"linear_num_value_heads": 4}},
            "recurr",
        ),
        ({"model_type": "minimax", "layer_types": ["linear_attention"]}, "recurrent states (linear attention)"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent states (Mamba)"),
        (
            {"architectures": ["Gemma4UnifiedForCausalLM"], "global_head_dim": 512},
            "caches with larger heads in some layers (global_head_dim)",
        ),
        (
            {"model_type": "gemma3n", "text_config": {"num_kv_shared_layers": 15}},
            "share (num_kv_shared_layers), and only",
        ),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "The nearest served model_type is qwen3."),
        ({"architectures": ["LlamaForSequenceClassification"]}, "The nearest served model_type is llama."),
        ({"model_type": "falcon3"}, "The nearest served model_type is falcon."),
        (
            {"architectures": ["XverseForCausalLM"], "auto_map": {}},
            "(auto_map) is never run. Served are, by model_type:",
        ),
        ({"architectures": [7, "x" * 100_000], "model_type": 7}, "is not served. Served are"),
    ],
)
def test_an_unknown_architecture_names_the_reason_or_the_nearest(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as error:
        model_config(fields)
    first, *groups = str(error.value).splitlines()
    assert words in first and len(first) < 500
    assert len(groups) == len(GROUPS) and any(line.startswith("  Qwen: qwen, qwen2") for line in groups)


def test_first_llama_spelling() -> None:
    """LLaMA 1 and 2 checkpoints say nothing of head_dim, rope or dtype's new name: transformers' defaults hold."""
    config = model_config({**LLAMA, "torch_dtype": "float16", "rope_scaling": None})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (4, 16, 10000.0, 1e-6)
    assert (config.dtype, config.tie_embeddings, config.rope_scaling) == ("float16", False, None)


@pytest.mark.parametrize("name", sorted(name for name in CASES if had_older_spelling(name)))
def test_spelling_before_transformers_5(name: str) -> None:
    """rope_theta and rope_scaling at the top, torch_dtype: the same ModelConfig."""
    new = CASES[name]().to_dict() | {"architectures": None, "dtype": "bfloat16"}
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    rope = dict(new["rope_parameters"])
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"} if "neox" in name else {}
    old |= {names.get(key, key): rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    old["torch_dtype"] = "bfloat16"
    if rope["rope_type"] != "default":
        old["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    assert model_config(old) == model_config(new)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            2048,
        ),
    ],
)
def test_longest_sequence(rope: dict[str, Any], longest: int) -> None:
    assert model_config({**LLAMA, "rope_parameters": rope}).max_position_embeddings == longest


def test_window_layers() -> None:
    assert model_config(QWEN2).window(1) == 0
    upper = model_config({**QWEN2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1})
    assert [upper.window(layer) for layer in range(2)] == [0, 9]
    listed = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    assert [model_config({**QWEN2, **listed}).window(layer) for layer in range(2)] == [9, 0]
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
    assert model_config(mistral).window(0) == 4096  # what MistralConfig takes where the field is absent
    assert model_config({**mistral, "sliding_window": None}).window(0) == 0


def test_sizes_of_a_known_model() -> None:
    """Llama-3.2-1B: 1,235,814,400 parameters; 16 layers of 8 KV heads of 64 in bf16 are 32 KiB a token."""
    config = model_config(
        {
            **LLAMA,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        }
    )
    assert config.num_parameters() == 1_235_814_400
    assert config.kv_bytes_per_token(2) == 32 << 10


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (LLAMA, {"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration.*Served are"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*not served"),
        (LLAMA, {"architectures": None, "model_type": "t5"}, "model_type 't5' is not served"),
        (LLAMA, {"architectures": None, "model_type": None}, "not served"),
        (LLAMA, {"architectures": ["X"], "auto_map": {"AutoModel": "x.Y"}}, "own code .auto_map. is never run"),
        (LLAMA, {"model_type": "mistral"}, "contradicts itself"),
        (LLAMA, {"model_type": "evil"}, "contradicts itself"),
        (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        (LLAMA, {"hidden_size": None}, "has no hidden_size"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size must be an integer"),
        (LLAMA, {"hidden_size": 64.0}, "hidden_size must be an integer"),
        (LLAMA, {"hidden_size": True}, "hidden_size must be an integer"),
        (LLAMA, {"hidden_size": 0}, "hidden_size must be an integer from 1"),
        (LLAMA, {"hidden_size": 10**4000}, "hidden_size must be an integer from 1"),
        (LLAMA, {"hidden_size": 66}, "cannot share hidden size 66"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 10000"),
        (LLAMA, {"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        (LLAMA, {"head_dim": 15}, "even head_dim"),
        (LLAMA, {"hidden_act": "xielu"}, "hidden_act 'xielu' is not served; known are"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0"),
        (LLAMA, {"attention_bias": "yes"}, "attention_bias must be true or false"),
        (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn' is not served"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling has no short_factor"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "short_factor": [1, "2"]}}, "short_factor must list numbers"),
        (PHI4_MINI, {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}}, "long_factor must list 6 numbers, not 7"),
        (PHI4_MINI, {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 6}}, "long_factor must list numbers above 0"),
        (PHI4_MINI, {"rope_scaling": LONGROPE | {"type": "yarn"}}, "rope_type 'yarn' is not served in Phi-3"),
        (PHI4_MINI, {"original_max_position_embeddings": None}, "has no original_max_position_embeddings"),
        (PHI4_MINI, {"original_max_position_embeddings": 1}, "original_max_position_embeddings must be .* from 2"),
        (PHI4_MINI, {"partial_rotary_factor": 0.7}, r"even head_dim, not 11 \(partial_rotary_factor 0.7\)"),
        (PHI4_MINI, {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number above 0 and at most 1,"),
        (LLAMA, {"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a number above 0"),
        (LLAMA, {"rope_scaling": {"type": ["linear"]}}, "is not supported"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor must be a number .* at most 10000"),
        (LLAMA, {"rope_theta": 1.0}, "rope_theta must be a number above 1"),
        (LLAMA, {"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta must be a number above 1"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling must be an object"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type is not supported"),
        (
            LLAMA,
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "low_freq_factor must be below",
        ),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        (MIXTRAL, {"num_local_experts": 1}, "num_experts_per_tok 2 is above the number of experts, 1"),
        (MIXTRAL, {"num_local_experts": 8, "num_experts": 4}, "num_experts is not num_local_experts"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
        (MIXTRAL, {"num_local_experts": 513}, "num_local_experts must be an integer from 1 to 512"),
        (QWEN3_MOE, {"mlp_only_layers": [2]}, "mlp_only_layers must list numbers of layers, 0 to 1, not \\[2\\]"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers must list numbers"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types must list one type for each of the 2 layers"),
        (QWEN2, {"layer_types": ["full_attention", "linear_attention"]}, "holds .*linear_attention"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers must list 0 or 1 for each of the 2 layers, not \\[1\\]"),
        (SMOLLM3, {"no_rope_layers": [1, "0"]}, "no_rope_layers must list 0 or 1"),
        (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be an integer from 1"),
        (GRANITE, {"residual_multiplier": 0}, "residual_multiplier must be a number above 0"),
        (GRANITE, {"logits_scaling": -8.0}, "logits_scaling must be a number above 0"),
        (GRANITE, {"embedding_multiplier": "12"}, "embedding_multiplier must be a number above 0"),
        (GRANITE, {"attention_multiplier": True}, "attention_multiplier must be a number above 0"),
        (GPT_NEOX, {"rotary_pct": 0.2}, r"even head_dim, not 3 \(partial_rotary_factor 0.2\)"),
        (GPT_NEOX, {"rotary_pct": 0.05}, "even head_dim, not 0"),
        (GPT_NEOX, {"rotary_pct": 2}, "rotary_pct must be a number above 0 and at most 1"),
        (GPT_NEOX, {"use_parallel_residual": "no"}, "use_parallel_residual must be true or false"),
        (STARCODER2, {"use_bias": 1}, "use_bias must be true or false"),
        (STARCODER2, {"sliding_window": 0}, "sliding_window must be an integer from 1"),
        (STABLELM, {"use_parallel_residual": 0}, "use_parallel_residual must be true or false"),
        (PHI, {"qk_layernorm": True}, "qk_layernorm = True is not supported"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        (GPT2, {"n_head": 5}, "cannot share hidden size 64"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        (GEMMA2, {"is_causal": False}, "attention to later tokens .* a cap of attention scores"),
        (QWEN2, {"is_causal": "no"}, "is_causal must be true or false"),
        (GEMMA, {"hidden_act": "silu", "hidden_activation": "gelu"}, "hidden_act is not hidden_activation"),
        (GEMMA, {"hidden_activation": "xielu"}, "hidden_activation 'xielu' is not served"),
        (GEMMA2, {"sliding_window": None}, "sliding_window = null is not supported"),
        (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a number above 0"),
        (GEMMA2, {"final_logit_softcapping": "30"}, "final_logit_softcapping must be a number above 0"),
        (GEMMA2, {"query_pre_attn_scalar": -256}, "query_pre_attn_scalar must be a number above 0"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        (GEMMA3, {"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a number above 0"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer from 1"),
        (GEMMA3, {"rope_local_base_freq": 1}, "rope_local_base_freq must be a number above 1"),
        (GEMMA3, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling has no factor"),
        (GEMMA3, {"rope_scaling": "linear"}, "rope_scaling must be an object"),
        (GEMMA3, {"rope_parameters": LINEAR8}, "must be by layer type, .* it holds .'factor', 'rope_type'"),
        (GEMMA3, {"rope_parameters": {"full_attention": 8}}, "rope_parameters: full_attention must be an object"),
        (GEMMA3, {"rope_parameters": {"sliding_attention": LINEAR8}}, "sliding_attention: only rope_type default"),
        (GEMMA3, {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "is not served"),
    ],
)
def test_refusals(base: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    model_config(base)
    with pytest.raises(ModelError, match=message):
        model_config({**base, **fields})


# config.json of published models, without what is not read
GEMMA_2B = {
    **GEMMA,
    "vocab_size": 256000,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
GEMMA_2_2B = {
    **GEMMA_2B,
    **{name: GEMMA2[name] for name in ("architectures", "model_type")},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
}
GEMMA_3_1B = {
    **GEMMA_2B,
    **{name: GEMMA3[name] for name in ("architectures", "model_type")},
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
MIXTRAL_8X7B = {
    **MIXTRAL,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B_A3B = {
    **QWEN3_MOE,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


PHI_4_MINI = {
    **PHI4_MINI,
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
PYTHIA_2_8B = {
    **GPT_NEOX,
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
STARCODER2_3B = {
    **STARCODER2,
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
}
STABLELM_2_1_6B = {
    **STABLELM,
    "vocab_size": 100352,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "use_qkv_bias": True,
}
PHI_2 = {
    **PHI,
    "vocab_size": 51200,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "partial_rotary_factor": 0.4,
}
SMOLLM3_3B = {
    **SMOLLM3,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (GEMMA_2B, 2_506_172_416),
        (GEMMA_2_2B, 2_614_341_888),
        (GEMMA_3_1B, 999_885_952),
        (PHI_4_MINI, 3_836_021_760),
        (SMOLLM3_3B, 3_075_098_624),
        (PYTHIA_2_8B, 2_775_208_960),
        (STARCODER2_3B, 3_030_371_328),
        (STABLELM_2_1_6B, 1_644_515_328),
        (PHI_2, 2_779_683_840),
    ],
    ids=[
        "Mixtral-8x7B",
        "Qwen3-30B-A3B",
        "Gemma-2b",
        "Gemma-2-2b",
        "Gemma-3-1b",
        "Phi-4-mini",
        "SmolLM3-3B",
        "Pythia-2.8b",
        "StarCoder2-3b",
        "StableLM-2-1.6B",
        "Phi-2",
    ],
)
def test_parameters_of_published_models(raw: dict[str, Any], count: int) -> None:
    assert model_config(raw).num_parameters() == count


def test_longrope() -> None:
    """Served unasked up to the trained length; a window as wide as the longest sequence is none."""
    config = model_config(PHI_4_MINI)
    assert (config.max_position_embeddings, config.max_positions, config.sliding_window) == (4096, 131072, 0)
    assert (config.rotary_dim, config.head_dim, config.norm_eps) == (96, 128, 1e-5)
    assert not config.has_long_rope(4096) and config.has_long_rope(4097)
    scaling = config.rope_scaling
    assert scaling is not None and scaling.attention_factor == pytest.approx(1.1902380714238083)  # of Phi-3.5, too
    first = model_config({**PHI_4_MINI, "rope_scaling": PHI_4_MINI["rope_scaling"] | {"type": "su"}})
    assert first == config
    short = model_config({**PHI3, "max_position_embeddings": 4096, "sliding_window": 2047})  # Phi-3-mini-4k
    assert (short.max_positions, short.sliding_window, short.rope_scaling) == (4096, 2047, None)


def test_the_router_takes_as_many_experts_as_config_json_may_ask_for() -> None:
    assert reader.MAX_EXPERTS == moe_routing.MAX_EXPERTS


def test_mixtures() -> None:
    """Absent fields have transformers' defaults; the layers with a plain MLP are those that transformers builds."""
    mixtral, qwen = model_config(MIXTRAL), model_config(QWEN3_MOE)
    assert mixtral.moe == MoEConfig(8, 2, 160, norm_topk_prob=True)
    assert (mixtral.norm_eps, mixtral.rope_theta, mixtral.sliding_window) == (1e-5, 1e6, 0)
    assert qwen.moe == MoEConfig(128, 8, 768, norm_topk_prob=False)
    assert (qwen.norm_eps, qwen.rope_theta, qwen.sliding_window, qwen.qk_norm) == (1e-6, 1e4, 0, "head")
    layers = {"num_hidden_layers": 6, "decoder_sparse_step": 3, "mlp_only_layers": [5, 5]}
    sparse = model_config({**QWEN3_MOE, **layers})
    assert [sparse.experts(i) is not None for i in range(6)] == [False, False, True, False, False, False]
    assert sparse.mlp_activations == 8 * (3 * 768 + 64) + 2 * 128 + 64
    assert model_config({**MIXTRAL, "num_experts": 4}).moe == model_config({**MIXTRAL, "num_local_experts": 4}).moe


def test_rope_that_gpt_oss_leaves_out() -> None:
    """Without rope_scaling it is YaRN, as in transformers' GptOssConfig."""
    raw = {**MIXTRAL, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    rope = GptOssConfig().rope_parameters
    assert rope["rope_type"] == "yarn" and rope["truncate"] is False
    assert model_config(raw) == model_config({**raw, "rope_parameters": rope})
    assert model_config({**raw, "rope_scaling": None, "rope_theta": 5e4}).rope_scaling == model_config(raw).rope_scaling


def test_gemmas() -> None:
    """Absent fields have transformers' defaults, an explicit null is none; windows are where it has them."""
    gemma = model_config({**GEMMA, "hidden_act": "gelu", "hidden_activation": None})  # as Gemma's first release
    assert (gemma.head_dim, gemma.activation, gemma.tie_embeddings, gemma.sliding_window) == (256, "gelu_tanh", True, 0)
    assert (gemma.norm_weight_offset, gemma.embedding_scale, gemma.attn_scale, gemma.post_norms) == (1, 8, None, False)
    second = model_config({**GEMMA2, "num_hidden_layers": 3})
    assert (second.attn_softcap, second.logit_softcap, second.attn_scale, second.post_norms) == (50, 30, 1 / 16, True)
    assert [second.window(i) for i in range(3)] == [4096, 0, 4096]
    uncapped = model_config({**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.attn_softcap, uncapped.logit_softcap) == (0, 0)
    third = model_config({**GEMMA3, "num_hidden_layers": 7})
    assert (third.attn_softcap, third.logit_softcap, third.qk_norm) == (0, 0, "head")
    assert (third.rope_theta, third.window_rope_theta, third.rope_scaling) == (1e6, 1e4, None)
    assert [third.window(i) > 0 for i in range(7)] == [True, True, True, True, True, False, True]


def test_rope_of_gemma_3_by_layer_type() -> None:
    """The spelling before transformers 5, that of today, and both in one file give the same; the maximum is as it
    stands, stretched already."""
    full = {**LINEAR8, "rope_theta": 5e5}
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    new = model_config({**GEMMA3, "num_hidden_layers": 3, "rope_parameters": ropes, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]})  # fmt: skip
    old = {**GEMMA3, "num_hidden_layers": 3, "sliding_window_pattern": 2, "rope_scaling": LINEAR8}
    assert model_config({**old, "rope_theta": 5e5, "rope_local_base_freq": 500}) == new
    ropes["full_attention"] = {"rope_theta": 5e5}
    assert model_config({**old, "rope_parameters": ropes}) == new
    assert (new.rope_theta, new.window_rope_theta, new.max_position_embeddings) == (5e5, 500, 2048)
    assert new.rope_scaling is not None and (new.rope_scaling.kind, new.rope_scaling.factor) == ("linear", 8)
    local = new.window_rope()
    assert local is not None and (local.rope_theta, local.rope_scaling) == (500, None)
    assert model_config(GEMMA2).window_rope() is None


def test_factors() -> None:
    """The multipliers of Granite-3.1-8B, and the defaults: attention is not even divided by the root of head_dim."""
    factors = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0}
    config = model_config({**GRANITE, **factors, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5})
    assert (config.attn_scale, config.logits_scale) == (0.0078125, 1 / 16)
    assert (config.embedding_scale, config.norm_eps) == pytest.approx((12 / 0.22, 1e-5 / 0.22**2))
    plain = model_config(GRANITE)
    assert (plain.attn_scale, plain.embedding_scale, plain.logits_scale, plain.norm_eps) == (1.0, 1.0, 1.0, 1e-6)


def test_parallel_residual() -> None:
    """Attention's result waits for that of the MLP, which the memory plan counts."""
    sequential = model_config({**GPT_NEOX, "use_parallel_residual": False})
    assert model_config(GPT_NEOX).mlp_activations - sequential.mlp_activations == 64
    assert sequential.mlp_activations == 2 * 160 + 64
    assert model_config(PHI).num_parameters() == model_config({**PHI, "tie_word_embeddings": True}).num_parameters() + (
        PHI["vocab_size"] * PHI["hidden_size"]
    )


def test_layers_without_rotary_embedding() -> None:
    """By default every fourth layer has no rotation, and would have no window; other defaults are transformers'."""
    config = model_config({**SMOLLM3, "num_hidden_layers": 9})
    assert (config.nope_layers, config.num_kv_heads, config.rope_theta) == ((3, 7), 4, 2e6)
    assert config.tie_embeddings and config.sliding_window == 0
    window = {"use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2}
    assert [model_config({**SMOLLM3, **window}).window(layer) for layer in range(2)] == [0, 9]
    assert model_config({**SMOLLM3, "no_rope_layers": [0, 1, 1]}).nope_layers == (0,)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_malformed_config_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_no_config_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_model_config(tmp_path)


def test_no_torch_is_needed() -> None:
    """`pageserve plan` reads configs on machines that have no torch."""
    code = "import sys, engine.models.families; assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_config_json_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert read_model_config(tmp_path) == model_config(GPT2)
