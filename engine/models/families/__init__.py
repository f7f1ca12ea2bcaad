"""The families that are served. To add one: a file here, its name in FAMILIES, a row in test_families.py."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoint.json_files import read_json_object
from engine.models.config import ModelConfig
from engine.models.families import (
    aquila,
    arcee,
    baichuan,
    bert,
    bloom,
    cohere,
    cohere2,
    ernie4_5,
    exaone4,
    falcon,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gptj,
    granite,
    hunyuan,
    internlm,
    internlm2,
    llama,
    ministral,
    ministral3,
    mistral,
    mixtral,
    mpt,
    nemotron,
    olmo,
    olmo2,
    olmo3,
    opt,
    phi,
    phi3,
    qwen,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    vision_language,
)
from engine.models.family import Family, find_family
from engine.models.formats import read_quantization
from engine.models.reader import ConfigReader

FAMILIES = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    smollm3.FAMILY,
    granite.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    starcoder2.FAMILY,
    stablelm.FAMILY,
    opt.FAMILY,
    aquila.FAMILY,
    baichuan.FAMILY,
    bloom.FAMILY,
    falcon.FAMILY,
    gpt_bigcode.FAMILY,
    gptj.FAMILY,
    internlm.FAMILY,
    internlm2.FAMILY,
    mpt.FAMILY,
    qwen.FAMILY,
    arcee.FAMILY,
    cohere.FAMILY,
    cohere2.FAMILY,
    ernie4_5.FAMILY,
    exaone4.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    hunyuan.FAMILY,
    ministral.FAMILY,
    ministral3.FAMILY,
    nemotron.FAMILY,
    olmo.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    seed_oss.FAMILY,
    *vision_language.FAMILIES,
    *bert.FAMILIES,
)


def read_model_config(model_dir: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint folder, from its config.json alone."""
    return model_config(read_json_object(model_dir / "config.json"))


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json. ModelError names the field that is wrong or not served."""
    family = find_family(raw, FAMILIES)
    return replace(family.to_config(ConfigReader(raw)), quantization=read_quantization(raw))


def family_of(config: ModelConfig) -> Family:
    """The family whose weight names the checkpoint uses."""
    return next(family for family in FAMILIES if family.model_type == config.family)
