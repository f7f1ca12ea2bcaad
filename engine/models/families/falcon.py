"""Falcon (Almazrouei et al. 2023): parallel residual. 7B shares one KV head, 40B and 180B share KV heads in groups and
norm attention's and the MLP's input separately; the RW sizes have ALiBi, biases and a sequential residual."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import bloom, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {theirs: ours for theirs, ours in bloom.WEIGHTS.items() if ours != "embedding_norm"}
FIRST_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}
RENAMES = {".ln_attn.": ".input_layernorm.", ".ln_mlp.": ".post_attention_layernorm."}


def to_config(reader: ConfigReader) -> ModelConfig:
    # The first config.json of 40B, which has n_head_kv, does not give new_decoder_architecture.
    grouped = reader.flag("new_decoder_architecture", reader.has("n_head_kv"))
    parallel = grouped or reader.flag("parallel_attn", True)
    bias = reader.flag("bias", False)
    reader = reader.with_defaults(
        intermediate_size=reader.size("ffn_hidden_size", 4 * reader.size("hidden_size")),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **{name: reader.raw.get(first) for name, first in FIRST_NAMES.items()},
    )
    config = llama.to_config(reader)
    shared_heads = 1 if reader.flag("multi_query", True) else config.num_heads
    return replace(
        config,
        family="falcon",
        num_kv_heads=reader.size("num_kv_heads", config.num_heads) if grouped else shared_heads,
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        position="alibi" if reader.flag("alibi", False) else "rope",
        alibi_scaled=True,
        activation=reader.activation("activation", "gelu"),
        gated_mlp=False,
        parallel_residual=parallel,
        mlp_norm=not parallel or (grouped and reader.size("num_ln_in_parallel_attn", 2, high=2) == 2),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(
    "falcon",
    ("FalconForCausalLM", "RWForCausalLM"),
    to_config,
    WEIGHTS,
    prefix="transformer.",
    qkv_grouped=True,
    renames=RENAMES,
    other_types=("RefinedWeb", "RefinedWebModel"),
)
