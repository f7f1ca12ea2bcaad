"""GLM-4 (Team GLM 2024), as transformers saves it: LLaMA that rotates neighbouring elements of half of each head, with
biases on q, k and v; gate|up is one matrix."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".mlp_in." not in ours},
    "model.layers.{}.mlp.gate_up_proj": "layers.{}.mlp_in",
}
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}


def to_config(reader: ConfigReader) -> ModelConfig:
    return replace(
        llama.to_config(reader.with_defaults(**DEFAULTS), rotary_share=0.5),
        family="glm",
        rope_interleaved=True,
        qkv_bias=reader.flag("attention_bias", True),
        out_bias=False,
        mlp_bias=False,
    )


FAMILY = Family("glm", ("GlmForCausalLM",), to_config, WEIGHTS, prefix="model.", buffers=llama.BUFFERS)
