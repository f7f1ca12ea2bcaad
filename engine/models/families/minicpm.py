"""MiniCPM 1 and 4 (OpenBMB 2024, 2025), dense: Granite, whose factors follow from the depth and the width."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import granite
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    for name, served in {"num_experts": 0, "mixer_types": None, "sparse_config": None}.items():
        reader.require(name, served)
    hidden_size, num_layers = reader.size("hidden_size"), reader.size("num_hidden_layers")
    factors = {
        "embedding_multiplier": reader.number("scale_emb", 1.0),
        "residual_multiplier": reader.number("scale_depth", 1.0) / num_layers**0.5,
        "logits_scaling": hidden_size / reader.size("dim_model_base", 1),
    }
    config = granite.to_config(reader.with_defaults(**factors, tie_word_embeddings=True))
    return replace(config, family="minicpm", attn_scale=None, mlp_bias=False)


FAMILY = replace(granite.FAMILY, model_type="minicpm", architectures=("MiniCPMForCausalLM",), to_config=to_config)
