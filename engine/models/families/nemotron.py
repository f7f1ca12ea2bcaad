"""Nemotron 4 and Minitron (Parmar et al. 2024), dense: LayerNorm whose weights are stored less 1, a plain MLP of
squared ReLUs, half of each head rotated."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import arcee, llama
from engine.models.family import Family
from engine.models.reader import ConfigReader


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(
        llama.to_config(reader.with_defaults(hidden_act="relu2"), rotary_share=0.5),
        family="nemotron",
        norm="layer",
        norm_eps=reader.number("norm_eps", 1e-5),
        norm_weight_offset=1.0,
        gated_mlp=False,
    )


FAMILY = Family("nemotron", ("NemotronForCausalLM",), to_config, arcee.WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
