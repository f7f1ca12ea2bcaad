"""The families that are served. To add one: a file here, its name in GROUPS, a case in tests/engine/models."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoint.raw_config import read_config, read_quantization_file
from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import (
    apertus,
    aquila,
    arcee,
    baichuan,
    bert,
    bloom,
    cohere,
    cohere2,
    dbrx,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone,
    exaone4,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    granitemoehybrid,
    granitemoeshared,
    hunyuan,
    hunyuan_moe,
    hyperclovax,
    internlm,
    internlm2,
    internlm3,
    llama,
    llama4,
    mimo,
    minicpm,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral_params,
    mixtral,
    mpt,
    nemotron,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    vision_language,
)
from engine.models.family import Family, bidirectional, find_family, without_head
from engine.models.formats import read_quantization
from engine.models.parallel.shard import shard_model
from engine.models.reader import ConfigReader

GROUPS: Mapping[str, tuple[Family, ...]] = {
    "LLaMA and Mistral": (
        llama.FAMILY,
        llama4.FAMILY,
        mistral.FAMILY,
        mistral_params.FAMILY,
        mixtral.FAMILY,
        ministral.FAMILY,
        ministral3.FAMILY,
        smollm3.FAMILY,
        arcee.FAMILY,
    ),
    "Qwen": (
        qwen.FAMILY,
        qwen2.FAMILY,
        qwen2_moe.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
    ),
    "Gemma": (
        gemma.FAMILY,
        gemma2.FAMILY,
        gemma3.FAMILY,
        gemma4.FAMILY,
    ),
    "GPT and OPT": (
        gpt2.FAMILY,
        gpt_neox.FAMILY,
        gptj.FAMILY,
        gpt_bigcode.FAMILY,
        gpt_oss.FAMILY,
        starcoder2.FAMILY,
        opt.FAMILY,
    ),
    "Phi, Granite, StableLM, Nemotron, Apertus": (
        phi.FAMILY,
        phi3.FAMILY,
        phimoe.FAMILY,
        granite.FAMILY,
        granitemoe.FAMILY,
        granitemoeshared.FAMILY,
        granitemoehybrid.FAMILY,
        stablelm.FAMILY,
        nemotron.FAMILY,
        apertus.FAMILY,
    ),
    "OLMo and Cohere": (
        olmo.FAMILY,
        olmo2.FAMILY,
        olmo3.FAMILY,
        olmoe.FAMILY,
        cohere.FAMILY,
        cohere2.FAMILY,
    ),
    "BLOOM, Falcon, MPT": (
        bloom.FAMILY,
        falcon.FAMILY,
        mpt.FAMILY,
        dbrx.FAMILY,
    ),
    "Chinese and Korean laboratories": (
        aquila.FAMILY,
        baichuan.FAMILY,
        internlm.FAMILY,
        internlm2.FAMILY,
        internlm3.FAMILY,
        glm.FAMILY,
        glm4.FAMILY,
        glm4_moe.FAMILY,
        ernie4_5.FAMILY,
        ernie4_5_moe.FAMILY,
        hunyuan.FAMILY,
        hunyuan_moe.FAMILY,
        minimax_m2.FAMILY,
        minicpm.FAMILY,
        mimo.FAMILY,
        seed_oss.FAMILY,
        dots1.FAMILY,
        exaone.FAMILY,
        exaone4.FAMILY,
        hyperclovax.FAMILY,
    ),
    "text halves of vision-language models": vision_language.FAMILIES,
    "encoders for embeddings": bert.FAMILIES,
}
FAMILIES = tuple(family for group in GROUPS.values() for family in group)


def read_model_config(
    model_dir: Path, quantization: str | None = None, rank: int = 0, num_ranks: int = 1
) -> ModelConfig:
    """The ModelConfig of a checkpoint, from its config.json, params.json or GGUF file alone. Older quantised ones
    have a second file of settings, see QUANTIZATION_FILES.

    quantization: how a plain checkpoint is quantised as it is loaded, see EngineConfig. ModelError if it is no plain
    checkpoint of a decoder. With num_ranks, the part of one rank; ModelError if the model cannot be divided.
    """
    return shard_model(_read_whole(model_dir, quantization), rank, num_ranks)


def _read_whole(model_dir: Path, quantization: str | None) -> ModelConfig:
    raw = read_config(model_dir)
    model = model_config(raw)
    if raw.get("quantization_config") is None and (found := read_quantization_file(model_dir)):
        name, settings = found
        model = replace(model, quantization=read_quantization({"quantization_config": settings}, name))
    if quantization is None:
        return model
    if model.quantization is not None:
        raise ModelError(
            f"quantization={quantization!r}: the checkpoint is quantised already ({model.quantization.name}). "
            "Leave the setting out."
        )
    if not model.causal:
        raise ModelError(f"quantization={quantization!r} is not served for an encoder. Leave the setting out.")
    return quantized_on_load(model, quantization)


def quantized_on_load(model: ModelConfig, quantization: str) -> ModelConfig:
    """The config of a plain checkpoint that is quantised as it is loaded, see EngineConfig."""
    from engine.models.formats.on_load import OnLoadFormat  # imports torch, which a plain plan does not need

    return replace(model, quantization=OnLoadFormat(quantization))


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json. ModelError names the field that is wrong or not served."""
    family = find_family(raw, GROUPS)
    reader = ConfigReader(raw)
    config = family.to_config(reader)
    parts = reader, reader.object("text_config")
    if config.causal and not all(part.flag("is_causal", True) for part in parts):
        config = bidirectional(config)
    elif family.base_architectures.intersection(raw.get("architectures") or ()):
        config = without_head(config)
    return replace(config, quantization=read_quantization(raw))


def family_of(config: ModelConfig) -> Family:
    """The family whose weight names the checkpoint uses."""
    return next(family for family in FAMILIES if family.model_type == config.family)
