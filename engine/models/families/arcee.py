"""AFM (Arcee 2025): LLaMA with a plain MLP of squared ReLUs."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".mlp_in." not in ours},
    "model.layers.{}.mlp.up_proj": "layers.{}.mlp_in",
}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader.with_defaults(rms_norm_eps=1e-5, hidden_act="relu2"))
    return replace(config, family="arcee", gated_mlp=False)


FAMILY = Family("arcee", ("ArceeForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
