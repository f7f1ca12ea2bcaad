"""config.json of published checkpoints -> ModelConfig: families of earlier papers, whose fields have many names."""

from typing import Any

import pytest

from engine.errors import ModelError
from engine.models.families import model_config

LLAMA_7B: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                            "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
                            "max_position_embeddings": 2048, "vocab_size": 103168}  # fmt: skip
BLOOM_560M = {"architectures": ["BloomModel"], "model_type": "bloom", "n_embed": 1024, "n_layer": 24,
              "num_attention_heads": 16, "layer_norm_epsilon": 1e-5, "offset_alibi": 100, "pretraining_tp": 1,
              "apply_residual_connection_post_layernorm": False, "vocab_size": 250880}  # fmt: skip
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_embed": 14336, "n_layer": 70, "n_head": 112,
         "seq_length": 2048, "vocab_size": 250880, "pretraining_tp": 4, "n_inner": None}  # fmt: skip
FALCON_7B = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False, "bias": False,
             "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
             "num_hidden_layers": 32, "parallel_attn": True, "vocab_size": 65024}  # fmt: skip
FALCON_40B = {**FALCON_7B, "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
              "new_decoder_architecture": True}  # fmt: skip
FALCON_FIRST = {"architectures": ["RWForCausalLM"], "model_type": "RefinedWebModel", "alibi": False, "bias": False,
                "hidden_size": 4544, "multi_query": True, "n_head": 71, "n_layer": 32, "parallel_attn": True,
                "vocab_size": 65024}  # fmt: skip
FALCON_40B_FIRST = {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "alibi": False, "bias": False,
                    "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60, "parallel_attn": True,
                    "vocab_size": 65024}  # fmt: skip
FALCON_RW = {**FALCON_7B, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False,
             "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24}  # fmt: skip
STARCODER = {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "activation_function": "gelu",
             "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192,
             "attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True,
             "scale_attn_weights": True, "vocab_size": 49152}  # fmt: skip
GPTJ_6B = {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "activation_function": "gelu_new",
           "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True,
           "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False, "vocab_size": 50400}  # fmt: skip
MPT_ATTENTION = {"alibi": True, "alibi_bias_max": 16, "attn_impl": "torch", "attn_type": "multihead_attention",
                 "attn_uses_sequence_id": False, "clip_qkv": 6, "prefix_lm": False, "qk_ln": False,
                 "softmax_scale": None}  # fmt: skip
MPT_STORYWRITER = {"architectures": ["MPTForCausalLM"], "model_type": "mpt", "attn_config": MPT_ATTENTION,
                   "d_model": 4096, "expansion_ratio": 4, "learned_pos_emb": True, "logit_scale": None,
                   "max_seq_len": 65536, "n_heads": 32, "n_layers": 32, "no_bias": True, "vocab_size": 50432,
                   "norm_type": "low_precision_layernorm", "torch_dtype": "bfloat16"}  # fmt: skip
BAICHUAN_7B = {**LLAMA_7B, "architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan", "vocab_size": 64000}
BAICHUAN2_13B = {**BAICHUAN_7B, "architectures": ["BaichuanForCausalLM"], "max_position_embeddings": None,
                 "model_max_length": 4096, "vocab_size": 125696}  # fmt: skip
QWEN_7B = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "vocab_size": 151936, "hidden_size": 4096,
           "intermediate_size": 22016, "kv_channels": 128, "max_position_embeddings": 32768, "no_bias": True,
           "num_attention_heads": 32, "num_hidden_layers": 32, "rotary_emb_base": 10000, "rotary_pct": 1.0,
           "scale_attn_weights": True, "seq_length": 8192, "use_dynamic_ntk": True, "use_logn_attn": True}  # fmt: skip
QWEN_FIRST = {**QWEN_7B, "hidden_size": None, "n_embd": 4096, "num_attention_heads": None, "n_head": 32,
              "num_hidden_layers": None, "n_layer": 32, "intermediate_size": None, "ffn_hidden_size": 22016,
              "max_position_embeddings": None, "n_positions": 8192, "seq_length": 2048}  # fmt: skip
INTERNLM_20B = {**LLAMA_7B, "architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": False,
                "rotary": {"base": 10000, "type": "dynamic"}}  # fmt: skip

GRANITE_4_MICRO = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
                   "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12,
                   "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 8192, "layer_types":
                   ["attention"] * 40, "logits_scaling": 10, "mamba_d_state": 256, "max_position_embeddings": 131072,
                   "num_attention_heads": 40, "num_experts_per_tok": 0, "num_hidden_layers": 40,
                   "num_key_value_heads": 8, "num_local_experts": 0, "position_embedding_type": "rope",
                   "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000,
                   "shared_intermediate_size": 8192, "tie_word_embeddings": True, "vocab_size": 100352}  # fmt: skip
HUNYUAN_A13B = {**LLAMA_7B, "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe",
                "num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32, "num_shared_expert":
                [1] * 32, "intermediate_size": 3072, "moe_layer_num_skipped": 0, "use_mixed_mlp_moe": True,
                "use_cla": False, "use_qk_norm": True, "head_dim": 128, "num_key_value_heads": 8, "rope_scaling":
                {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                 "type": "dynamic"}, "max_position_embeddings": 32768, "tie_word_embeddings": True}  # fmt: skip
MINIMAX_M2 = {**LLAMA_7B, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128,
              "hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8,
              "num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64,
              "rope_theta": 5000000, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": True,
              "qk_norm_type": "per_layer", "use_routing_bias": True, "attn_type_list": [1] * 62,
              "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                                      "weight_block_size": [128, 128], "modules_to_not_convert":
                                      ["gate", "e_score_correction_bias", "lm_head"]}}  # fmt: skip
EXAONE_3_5 = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "activation_function": "silu",
              "attention_dropout": 0.0, "head_dim": 80, "hidden_size": 2560, "intermediate_size": 7168,
              "layer_norm_epsilon": 1e-5, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_layers": 30,
              "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
              "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000,
              "tie_word_embeddings": True, "vocab_size": 102400}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (BLOOM_560M, {"hidden_size": 1024, "num_heads": 16, "position": "alibi", "max_position_embeddings": 2048}),
        (BLOOM, {"hidden_size": 14336, "num_layers": 70, "num_heads": 112, "intermediate_size": 57344}),
        (FALCON_7B, {"num_kv_heads": 1, "parallel_residual": True, "mlp_norm": False, "position": "rope"}),
        (FALCON_40B, {"num_kv_heads": 8, "parallel_residual": True, "mlp_norm": True, "qkv_bias": False}),
        (FALCON_RW, {"num_kv_heads": 32, "parallel_residual": False, "position": "alibi", "qkv_bias": True}),
        (STARCODER, {"num_kv_heads": 1, "activation": "gelu", "position": "learned", "tie_embeddings": True}),
        (GPTJ_6B, {"rotary_dim": 64, "head_dim": 256, "lm_head_bias": True, "intermediate_size": 16384}),
        (MPT_STORYWRITER, {"clip_qkv": 6.0, "alibi_bias_max": 16.0, "logits_scale": 1.0, "norm_bias": False}),
        (BAICHUAN_7B, {"position": "rope", "normalized_head": False}),
        (BAICHUAN2_13B, {"position": "alibi", "normalized_head": True, "max_position_embeddings": 4096}),
        (QWEN_7B, {"max_position_embeddings": 8192, "intermediate_size": 11008, "qkv_bias": True}),
        (QWEN_7B | {"use_dynamic_ntk": False, "use_logn_attn": False}, {"max_position_embeddings": 32768}),
        (QWEN_FIRST, {"max_position_embeddings": 2048, "hidden_size": 4096, "intermediate_size": 11008}),
        (INTERNLM_20B, {"qkv_bias": False, "out_bias": False, "rope_scaling": None, "max_position_embeddings": 2048}),
        (
            GRANITE_4_MICRO,
            {"head_dim": 64, "moe": None, "nope_layers": (), "attn_scale": 0.015625, "logits_scale": 0.1},
        ),
        (EXAONE_3_5, {"num_layers": 30, "head_dim": 80, "norm_eps": 1e-5, "tie_embeddings": True, "rope_theta": 1e6}),
        (MINIMAX_M2, {"rotary_dim": 64, "qk_norm": "all", "num_layers": 62, "rope_theta": 5e6}),
        ({**MINIMAX_M2, "model_type": "minimax"}, {"family": "minimax_m2"}),  # as first published, and in its copies
        ({**HUNYUAN_A13B, "model_type": "hunyuan"}, {"family": "hunyuan_v1_moe"}),
        (HUNYUAN_A13B, {"qk_norm_after_rope": True, "num_kv_heads": 8, "intermediate_size": 3072}),
    ],
)
def test_published_config(raw: dict[str, Any], fields: dict[str, Any]) -> None:
    config = model_config(raw)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("raw", "fields", "message"),
    [
        (MPT_STORYWRITER, {"no_bias": False}, "no_bias = False is not supported"),
        (MPT_STORYWRITER, {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm' is not served"),
        (MPT_STORYWRITER, {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln = True is not supported"),
        (MPT_STORYWRITER, {"attn_config": {"alibi": False}}, "attn_config: alibi = False is not supported"),
        (MPT_STORYWRITER, {"attn_config": "x"}, "attn_config must be an object"),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, "post_layernorm = True is not supported"),
        (QWEN_7B, {"no_bias": False}, "no_bias = False is not supported"),
        (BAICHUAN2_13B, {"tie_word_embeddings": True}, "tie_word_embeddings is not served where lm_head is normal"),
        (BAICHUAN2_13B, {"model_max_length": None}, "has no model_max_length"),
        (INTERNLM_20B, {"rotary": {"type": "linear"}}, "rotary: type 'linear' is not served; known are origin, dyn"),
        (
            GRANITE_4_MICRO,
            {"layer_types": ["mamba", "attention"] * 20},
            r"recurrent states \(Mamba\), and only layer_ty",
        ),
        (GRANITE_4_MICRO, {"layer_types": None}, r"recurrent states \(Mamba\)"),
        (GRANITE_4_MICRO, {"num_local_experts": 64}, "num_local_experts = 64 is not supported"),
        (GRANITE_4_MICRO, {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi' is not supported"),
        (HUNYUAN_A13B, {"moe_topk": [8, 4] * 16}, "moe_topk must be the same for every layer"),
        (HUNYUAN_A13B, {"num_shared_expert": [2] * 32}, "num_shared_expert = 2 is not supported"),
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    ],
)
def test_fields_that_are_refused(raw: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    model_config(raw)
    with pytest.raises(ModelError, match=message):
        model_config({**raw, **fields})


def test_first_names_of_falcon() -> None:
    assert model_config(FALCON_FIRST) == model_config(FALCON_7B)
    assert model_config(FALCON_40B_FIRST) == model_config(FALCON_40B)


def test_internlm3_by_either_class() -> None:
    raw = {**LLAMA_7B, "model_type": "internlm3", "num_key_value_heads": 2, "qkv_bias": True, "bias": False}
    published, saved = ({**raw, "architectures": [f"{name}ForCausalLM"]} for name in ("InternLM3", "Llama"))
    config = model_config(published)
    assert model_config(saved) == config
    assert (config.family, config.head_dim, config.qkv_bias, config.out_bias) == ("internlm3", 128, True, False)
    assert model_config({**saved, "model_type": None}).family == "llama"
    with pytest.raises(ModelError, match=r"contradicts itself: .*LlamaForCausalLM.*, but model_type 'qwen'"):
        model_config({**saved, "model_type": "qwen"})


def test_rotary_dim_survives_its_share_of_a_head() -> None:
    for head_dim in (12, 44, 46, 80, 256):
        for rotary_dim in range(2, head_dim + 1, 2):
            raw = GPTJ_6B | {"n_embd": 2 * head_dim, "n_head": 2, "rotary_dim": rotary_dim}
            assert model_config(raw).rotary_dim == rotary_dim
