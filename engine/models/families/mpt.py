"""MPT (MosaicML 2023): ALiBi, LayerNorm and linear layers without bias, in some sizes q, k and v limited to a range."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import MAX_LAYERS, ConfigReader

WEIGHTS = {
    "transformer.wte": "embedding",
    "transformer.blocks.{}.norm_1": "layers.{}.attn_norm",
    "transformer.blocks.{}.attn.Wqkv": "layers.{}.qkv",
    "transformer.blocks.{}.attn.out_proj": "layers.{}.attn_out",
    "transformer.blocks.{}.norm_2": "layers.{}.mlp_norm",
    "transformer.blocks.{}.ffn.up_proj": "layers.{}.mlp_in",
    "transformer.blocks.{}.ffn.down_proj": "layers.{}.mlp_out",
    "transformer.norm_f": "final_norm",
    "lm_head": "lm_head",
}
REQUIRED = {"attn_type": "multihead_attention", "alibi": True, "prefix_lm": False, "qk_ln": False, "qk_gn": False}
REQUIRED |= {"rope": False, "sliding_window_size": -1}


def to_config(reader: ConfigReader) -> ModelConfig:
    attention, hidden_size = reader.object("attn_config"), reader.size("d_model")
    for name, served in REQUIRED.items():
        attention.require(name, served)
    reader.require("no_bias", True)
    reader.choice("norm_type", "layernorm", ("layernorm", "low_precision_layernorm"))
    reader = reader.with_defaults(
        hidden_size=hidden_size,
        num_hidden_layers=reader.size("n_layers", high=MAX_LAYERS),
        num_attention_heads=reader.size("n_heads"),
        intermediate_size=reader.size("expansion_ratio", 4) * hidden_size,
        max_position_embeddings=reader.size("max_seq_len"),
        tie_word_embeddings=True,
    )
    return replace(
        llama.to_config(reader),
        family="mpt",
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        norm_bias=False,
        position="alibi",
        alibi_bias_max=attention.number("alibi_bias_max", 8.0),
        clip_qkv=attention.number("clip_qkv") if attention.raw.get("clip_qkv") else 0.0,
        attn_scale=attention.number("softmax_scale") if attention.has("softmax_scale") else None,
        logits_scale=_logit_scale(reader, hidden_size),
        activation="gelu",
        gated_mlp=False,
    )


def _logit_scale(reader: ConfigReader, hidden_size: int) -> float:
    """The factor of the logits: a number, or the one name that MPT's training code knows."""
    if reader.raw.get("logit_scale") == "inv_sqrt_d_model":
        return float(hidden_size**-0.5)
    return reader.number("logit_scale", 1.0)


FAMILY = Family("mpt", ("MPTForCausalLM", "MptForCausalLM"), to_config, WEIGHTS, prefix="transformer.")
