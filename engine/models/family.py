"""Family: one model family as data: its names in config.json and the names of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.reader import ConfigReader, short


@dataclass(frozen=True, slots=True)
class Family:
    """`weights` maps module names of the checkpoint to our names (ModelConfig.parameter_shapes). "{}" is the layer
    number, "{expert}" the number of the expert, which is the first axis of our tensor.

    Our name may be a part of a fused matrix: "layers.{}.qkv.q" is the q rows of "layers.{}.qkv". `prefix` is the name
    of the base model inside the causal-lm model; some checkpoints leave the prefix out. `transposed`: the linear
    weights of the layers are stored [in, out]. `qkv_grouped`: the rows of qkv are the query heads of the first KV head,
    its key and its value, then those of the next KV head, instead of all of q, all of k and all of v. `renames`: parts
    of tensor names that stand in some checkpoints for the names in `weights`. `buffers` and `heads`: endings and
    beginnings of tensor names that loading skips.
    """

    model_type: str
    architectures: tuple[str, ...]
    to_config: Callable[[ConfigReader], ModelConfig]
    weights: Mapping[str, str]
    prefix: str
    transposed: bool = False
    qkv_grouped: bool = False
    buffers: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)


def find_family(raw: Mapping[str, Any], families: Sequence[Family]) -> Family:
    """The family of a config.json, by `architectures`, else by `model_type`. ModelError where the two disagree."""
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    names = architectures if isinstance(architectures, list) else []
    by_architecture = [family for family in families if any(name in family.architectures for name in names)]
    by_type = [family for family in families if family.model_type == model_type]
    found = by_architecture if names else by_type
    if not found:
        served = ", ".join(name for family in families for name in family.architectures)
        asked = f"architectures {short(names)}" if names else f"model_type {short(model_type)}"
        code = "; the checkpoint's own code (auto_map) is never run" if "auto_map" in raw else ""
        raise ModelError(f"config.json: {asked} is not served{code}. Served are: {served}.")
    if model_type is not None and by_type != found:
        raise ModelError(
            f"config.json contradicts itself: architectures {short(names)}, but model_type {short(model_type)}."
        )
    return found[0]
