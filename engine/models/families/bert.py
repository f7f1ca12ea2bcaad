"""BERT (Devlin et al. 2019) and models of its shape: RoBERTa, XLM-RoBERTa, DistilBERT. Encoders, for embeddings.

Learned positions, LayerNorm after each residual addition and after the embeddings, GELU. RoBERTa counts positions
from the row after that of its padding token; DistilBERT has no token types, and other tensor names.
"""

from collections.abc import Callable
from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.reader import MAX_LAYERS, ConfigReader

MODULES = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.position_embeddings": "position_embedding",
    "embeddings.token_type_embeddings": "token_type_embedding",
    "embeddings.LayerNorm": "embedding_norm",
    "encoder.layer.{}.attention.self.query": "layers.{}.qkv.q",
    "encoder.layer.{}.attention.self.key": "layers.{}.qkv.k",
    "encoder.layer.{}.attention.self.value": "layers.{}.qkv.v",
    "encoder.layer.{}.attention.output.dense": "layers.{}.attn_out",
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attn_norm",
    "encoder.layer.{}.intermediate.dense": "layers.{}.mlp_in",
    "encoder.layer.{}.output.dense": "layers.{}.mlp_out",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.mlp_norm",
}
DISTILBERT_MODULES = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.position_embeddings": "position_embedding",
    "embeddings.LayerNorm": "embedding_norm",
    "transformer.layer.{}.attention.q_lin": "layers.{}.qkv.q",
    "transformer.layer.{}.attention.k_lin": "layers.{}.qkv.k",
    "transformer.layer.{}.attention.v_lin": "layers.{}.qkv.v",
    "transformer.layer.{}.attention.out_lin": "layers.{}.attn_out",
    "transformer.layer.{}.sa_layer_norm": "layers.{}.attn_norm",
    "transformer.layer.{}.ffn.lin1": "layers.{}.mlp_in",
    "transformer.layer.{}.ffn.lin2": "layers.{}.mlp_out",
    "transformer.layer.{}.output_layer_norm": "layers.{}.mlp_norm",
}
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.weight", "pooler.dense.bias")
HEADS = ("cls.", "lm_head.", "vocab_")  # heads of masked language models, not loaded


def bert_config(reader: ConfigReader) -> ModelConfig:
    hidden_size = reader.size("hidden_size")
    num_heads = reader.size("num_attention_heads")
    reader.require("position_embedding_type", "absolute")
    reader.require("is_decoder", False)
    reader.require("add_cross_attention", False)
    return ModelConfig(
        family="bert",
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=reader.size("num_hidden_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=reader.head_dim(hidden_size, num_heads),
        intermediate_size=reader.size("intermediate_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        position="learned",
        activation=reader.activation("hidden_act", "gelu"),
        gated_mlp=False,
        pre_norm=False,
        final_norm=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,  # an encoder has no lm_head
        causal=False,
        embeds_only=True,
        embedding_norm=True,
        token_types=reader.size("type_vocab_size", 2),
        dtype=reader.dtype(),
    )


def roberta_config(reader: ConfigReader) -> ModelConfig:
    config = bert_config(reader)
    offset = reader.size("pad_token_id", 1, low=0, high=config.max_position_embeddings - 2) + 1
    return replace(
        config,
        family=str(reader.raw.get("model_type") or "roberta"),
        position_offset=offset,
        max_position_embeddings=config.max_position_embeddings - offset,
    )


def distilbert_config(reader: ConfigReader) -> ModelConfig:
    renamed = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    renamed |= {"intermediate_size": "hidden_dim", "hidden_act": "activation"}
    raw = {**reader.raw, **{ours: reader.raw.get(theirs) for ours, theirs in renamed.items()}}
    return replace(bert_config(ConfigReader(raw, reader.where)), family="distilbert", token_types=0)


def _family(
    model_type: str,
    stem: str,
    to_config: Callable[[ConfigReader], ModelConfig],
    prefix: str,
    modules: dict[str, str] = MODULES,
) -> Family:
    return Family(
        model_type,
        (f"{stem}Model", f"{stem}ForMaskedLM"),
        to_config,
        {prefix + theirs: ours for theirs, ours in modules.items()},
        prefix=prefix,
        buffers=BUFFERS,
        heads=HEADS,
    )


FAMILIES = (
    _family("bert", "Bert", bert_config, "bert."),
    _family("roberta", "Roberta", roberta_config, "roberta."),
    _family("xlm-roberta", "XLMRoberta", roberta_config, "roberta."),
    _family("distilbert", "DistilBert", distilbert_config, "distilbert.", DISTILBERT_MODULES),
)
