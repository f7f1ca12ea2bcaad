"""dots.llm1 (Huo et al. 2025): Qwen3 attention with the experts of GLM-4.5."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families import glm4_moe, llama, qwen3_moe
from engine.models.family import Family
from engine.models.reader import ConfigReader

DEFAULTS = {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 0}


def to_config(reader: ConfigReader) -> ModelConfig:
    config = llama.to_config(reader)
    upper_layers = tuple(range(min(reader.size("max_window_layers", 62, low=0), config.num_layers), config.num_layers))
    window = reader.raw.get("sliding_window", 4096) is not None
    return replace(
        config,
        family="dots1",
        mlp_bias=False,
        qk_norm="head",
        sliding_window=reader.size("sliding_window", 4096) if window else 0,
        window_layers=reader.window_layers(config.num_layers, upper_layers),
        moe=glm4_moe.moe_config(reader.with_defaults(**DEFAULTS), config.num_layers),
    )


FAMILY = Family(
    "dots1",
    ("Dots1ForCausalLM",),
    to_config,
    glm4_moe.WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    expert_tensors=qwen3_moe.EXPERT_TENSORS,
)
