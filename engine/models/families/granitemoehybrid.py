"""Granite 4.0 (IBM 2025), the sizes without Mamba layers (Micro, 1B, 350M): Granite 3 whose MLP is named shared_mlp."""

from dataclasses import replace

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import granite, llama
from engine.models.family import OTHER_MEMORY, Family
from engine.models.reader import ConfigReader

WEIGHTS = {
    **{theirs: ours for theirs, ours in llama.WEIGHTS.items() if ".mlp." not in theirs},
    "model.layers.{}.shared_mlp.input_linear": "layers.{}.mlp_in",
    "model.layers.{}.shared_mlp.output_linear": "layers.{}.mlp_out",
}
ATTENTION = {"attention", "full_attention"}  # the name before transformers 5, and since


def to_config(reader: ConfigReader) -> ModelConfig:
    reader = reader.with_defaults(layer_types=reader.raw.get("layers_block_type"))
    types = reader.raw.get("layer_types") or ["mamba"]
    if not isinstance(types, list) or not {str(kind) for kind in types} <= ATTENTION:
        raise ModelError(
            f"{reader.where}: layers of Granite 4.0 H remember earlier tokens by {OTHER_MEMORY['mamba_d_state']}, and "
            "only layer_types of attention are served: those of Granite 4.0 without H in their name."
        )
    reader.require("num_local_experts", 0)
    plain = ConfigReader({**reader.raw, "layer_types": None}, reader.where)
    config = granite.to_config(plain.with_defaults(intermediate_size=1))
    rotated = reader.raw.get("position_embedding_type") == "rope"
    if not rotated:
        reader.require("position_embedding_type", "nope")
    return replace(
        config,
        family="granitemoehybrid",
        intermediate_size=reader.size("shared_intermediate_size", 1024),
        mlp_bias=False,
        nope_layers=() if rotated else tuple(range(config.num_layers)),
    )


FAMILY = Family(
    "granitemoehybrid",
    ("GraniteMoeHybridForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
)
