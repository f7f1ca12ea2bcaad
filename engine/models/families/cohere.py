"""Command R (Cohere 2024): parallel residual, LayerNorm without bias, neighbouring elements of a head rotated, a factor
of the logits; in Command R+ LayerNorm on every head of q and k."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if not ours.endswith("mlp_norm")},
    "model.layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.k_norm",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(rope_theta=5e5, tie_word_embeddings=True))
    return replace(
        config,
        family="cohere",
        # Command R says 8192 here, and its trained length in model_max_length.
        max_position_embeddings=max(config.max_position_embeddings, reader.size("model_max_length", 1)),
        norm="layer",
        norm_bias=False,
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        parallel_residual=True,
        mlp_norm=False,
        mlp_bias=False,
        rope_interleaved=True,
        qk_norm="per_head" if reader.flag("use_qk_norm", False) else None,
        qk_norm_kind="layer",
        logits_scale=reader.number("logit_scale", 0.0625),
    )


FAMILY = Family("cohere", ("CohereForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
