"""EXAONE 3, 3.5 and Deep (LG AI Research 2024): LLaMA under the weight names of GPT-2."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family
from engine.models.reader import ConfigReader

LAYER = "transformer.h.{}"
WEIGHTS = {
    "transformer.wte": "embedding",
    f"{LAYER}.ln_1": "layers.{}.attn_norm",
    f"{LAYER}.attn.attention.q_proj": "layers.{}.qkv.q",
    f"{LAYER}.attn.attention.k_proj": "layers.{}.qkv.k",
    f"{LAYER}.attn.attention.v_proj": "layers.{}.qkv.v",
    f"{LAYER}.attn.attention.out_proj": "layers.{}.attn_out",
    f"{LAYER}.ln_2": "layers.{}.mlp_norm",
    f"{LAYER}.mlp.c_fc_0": "layers.{}.mlp_in.gate",
    f"{LAYER}.mlp.c_fc_1": "layers.{}.mlp_in.up",
    f"{LAYER}.mlp.c_proj": "layers.{}.mlp_out",
    "transformer.ln_f": "final_norm",
    "lm_head": "lm_head",
}
NAMES = {"num_hidden_layers": "num_layers", "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}


def to_config(reader: ConfigReader) -> ModelConfig:
    fields = {ours: reader.raw.get(theirs) for ours, theirs in NAMES.items()}
    config = llama.to_config(reader.with_defaults(**fields).with_defaults(**DEFAULTS))
    return replace(config, family="exaone", qkv_bias=False, out_bias=False, mlp_bias=False)


FAMILY = Family("exaone", ("ExaoneForCausalLM",), to_config, WEIGHTS, prefix="transformer.", buffers=llama.BUFFERS)
