"""Granite 3 (IBM 2024), dense: LLaMA with factors on the embeddings, attention, the residual stream and the logits."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    # With x = m y, "x += m f(norm(x)), starting at x = e" becomes "y += f(norm(m y)), starting at y = e / m". RMSNorm
    # ignores m if its epsilon is divided by m squared, so residual_multiplier costs the layers nothing.
    residual = reader.number("residual_multiplier", 1.0)
    return replace(
        config,
        family="granite",
        norm_eps=config.norm_eps / residual**2,
        attn_scale=reader.number("attention_multiplier", 1.0),
        embedding_scale=reader.number("embedding_multiplier", 1.0) / residual,
        logits_scale=1.0 / reader.number("logits_scaling", 1.0),
    )


FAMILY = Family("granite", ("GraniteForCausalLM",), to_config, llama.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
