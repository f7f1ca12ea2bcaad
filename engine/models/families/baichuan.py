"""Baichuan 1 and 2 (Yang et al. 2023): LLaMA with q|k|v in one matrix. The 13B sizes have ALiBi; Baichuan 2
normalises the rows of its head."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".qkv." not in ours},
    "model.layers.{}.self_attn.W_pack": "layers.{}.qkv",
}
BAICHUAN_2_VOCAB = 125_696  # config.json tells the normalised head by nothing else; Baichuan 1 has 64,000


def to_config(reader: ConfigReader) -> ModelConfig:
    # Only the 7B sizes, which rotate q and k, give max_position_embeddings; the 13B sizes give model_max_length alone.
    alibi = not reader.has("max_position_embeddings")
    if alibi:
        reader = reader.with_defaults(max_position_embeddings=reader.size("model_max_length"))
    config = llama.to_config(reader)
    return replace(
        config,
        family="baichuan",
        num_kv_heads=config.num_heads,
        position="alibi" if alibi else "rope",
        normalized_head=config.vocab_size >= BAICHUAN_2_VOCAB,
    )


FAMILY = Family(
    "baichuan",
    ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
)
