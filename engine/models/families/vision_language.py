"""The text halves of vision-language checkpoints: `text_config` is the config.json of a text family, and the tensors of
the vision tower are skipped by name."""

from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import gemma3, gemma4, llama4, ministral3, mistral, qwen2, qwen3, qwen3_moe
from engine.models.family import Family
from engine.models.reader import ConfigReader, short

# The text model's tensors as transformers 4 and 5 write them -> as a text checkpoint has them.
RENAMES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
TOWERS: tuple[str, ...] = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.")
TOWERS += ("audio_tower.", "embed_vision.", "embed_audio.")
SKIPPED = tuple(f"{prefix}{tower}" for prefix in ("", "model.") for tower in TOWERS)
GEMMA3: dict[str, Any] = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
GEMMA3 |= {"max_position_embeddings": 131072}  # fields that published checkpoints leave out


def text_half(model_type: str, architecture: str, families: dict[str, Family], **defaults: Any) -> Family:
    """The family of a vision-language checkpoint. families: by text_config's model_type, all with the same weights."""

    def to_config(reader: ConfigReader) -> ModelConfig:
        text = reader.object("text_config") if reader.has("text_config") else reader  # Qwen2.5-VL began without
        kind = text.raw.get("model_type") or next(iter(families))
        if kind not in families:
            raise ModelError(f"{text.where}: model_type {short(kind)} is not served; known are {', '.join(families)}.")
        both = {name: reader.raw[name] for name in ("tie_word_embeddings", "dtype", "torch_dtype") if reader.has(name)}
        text = ConfigReader({**text.raw, **both}, text.where).with_defaults(**defaults)
        return replace(families[kind].to_config(text), family=model_type)

    first = next(iter(families.values()))
    return replace(
        first,
        model_type=model_type,
        architectures=(architecture,),
        to_config=to_config,
        renames=RENAMES,
        heads=SKIPPED,
    )


def qwen3_vl_moe_config(reader: ConfigReader) -> ModelConfig:
    """Qwen3-MoE whose router always divides the scores of the chosen experts by their sum."""
    return qwen3_moe.to_config(ConfigReader({**reader.raw, "norm_topk_prob": True}, reader.where))


QWEN3_VL_MOE = replace(
    qwen3_moe.FAMILY,
    to_config=qwen3_vl_moe_config,
    expert_tensors={name: replace(tensor, transposed=True) for name, tensor in qwen3_moe.EXPERT_TENSORS.items()},
)
QWEN2_VL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
QWEN3_VL_MOE_DEFAULTS = {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "rope_theta": 5e5}

FAMILIES = (
    text_half("gemma3", "Gemma3ForConditionalGeneration", {"gemma3_text": gemma3.FAMILY}, **GEMMA3),
    text_half("gemma4", "Gemma4ForConditionalGeneration", {"gemma4_text": gemma4.FAMILY}),
    text_half(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {"mistral": mistral.FAMILY, "ministral3": ministral3.FAMILY},
    ),
    text_half(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {"qwen2_5_vl_text": qwen2.FAMILY, "qwen2_5_vl": qwen2.FAMILY},
        **QWEN2_VL_DEFAULTS,
    ),
    text_half(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {"qwen2_vl_text": qwen2.FAMILY, "qwen2_vl": qwen2.FAMILY},
        **QWEN2_VL_DEFAULTS,
    ),
    text_half("qwen3_vl", "Qwen3VLForConditionalGeneration", {"qwen3_vl_text": qwen3.FAMILY}, rope_theta=5e5),
    text_half(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        {"qwen3_vl_moe_text": QWEN3_VL_MOE},
        **QWEN3_VL_MOE_DEFAULTS,
    ),
    text_half("llama4", "Llama4ForConditionalGeneration", {"llama4_text": llama4.FAMILY}),
)
