"""Tiny random vision-language models of transformers: the oracle of their text halves."""

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma4Config,
    Llama4Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

VOCAB = 97
# Parts of the names of tensors that text does not need.
VISION = ("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "embed_vision.")
TEXT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
TEXT |= {"pad_token_id": None, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
YARN |= {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 40, "attention_chunk_size": 7, "floor_scale": 8}
GEMMA4_TEXT: dict[str, Any] = {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "sliding_window": 7}
GEMMA4_TEXT |= {"pad_token_id": 0}
GEMMA4_TEXT |= {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA4_TOWER = {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 16}


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}}


def _mistral3(**text: Any) -> PreTrainedConfig:
    tower = {**TOWER, "model_type": "pixtral", "head_dim": 16}
    return Mistral3Config(text_config={**TEXT, **text}, vision_config=tower, tie_word_embeddings=False)


CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3_vision": lambda: Gemma3Config(
        text_config={**TEXT, "sliding_window": 7, "sliding_window_pattern": 2},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    ),
    "gemma4_vision": lambda: Gemma4Config(
        text_config={**TEXT, **GEMMA4_TEXT},
        vision_config={**{k: TOWER[k] for k in TOWER if k not in ("image_size", "patch_size")}, **GEMMA4_TOWER},
        audio_config=None,
        tie_word_embeddings=False,
    ),
    "mistral3": lambda: _mistral3(model_type="mistral", sliding_window=None),
    "mistral3_ministral3": lambda: _mistral3(model_type="ministral3", rope_parameters=YARN),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**TEXT, **_mrope(1, 1, 2), "head_dim": 8},
        vision_config={**BLOCKS, "fullatt_block_indexes": [0]},
        tie_word_embeddings=False,
    ),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config={**TEXT, **_mrope(1, 1, 2), "head_dim": 8},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 1, "num_heads": 2},
        tie_word_embeddings=False,
    ),
    "llama4_vision": lambda: Llama4Config(
        text_config={**TEXT, **LLAMA4, "num_hidden_layers": 4, "interleave_moe_layer_step": 2},
        vision_config={**TOWER, **dict.fromkeys(("vision_output_dim", "projector_input_dim"), 32)},
        tie_word_embeddings=False,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**TEXT, **_mrope(4, 2, 2)},
        vision_config={**BLOCKS, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config={
            **TEXT,
            **_mrope(4, 2, 2),
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
        },
        vision_config={**BLOCKS, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    ),
}
