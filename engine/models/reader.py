"""ConfigReader: typed access to config.json. Each wrong type or unsupported value is a ModelError naming the field."""

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError
from engine.models.config import RopeScaling

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_EXPERTS = 512  # the limit of the router's kernel
MAX_ROPE_FACTOR = 10_000.0

# Name of an activation in config.json -> name in kernels.elementwise.activation.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
DTYPES = ("float32", "bfloat16", "float16")


def short(value: Any) -> str:
    """repr(value), cut for messages: a damaged or hostile file may hold megabytes."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class ConfigReader:
    """Reads fields of one JSON object. `null` counts as absent; a getter without a default refuses an absent field."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where

    def size(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer from low to high."""
        value = self._get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise ModelError(f"{self.where}: {name} must be an integer from {low} to {high}, not {short(value)}.")
        return value

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """`head_dim`; if absent, hidden_size / num_heads."""
        if not self.has("head_dim") and hidden_size % num_heads:
            raise ModelError(
                f"{self.where}: {num_heads} attention heads cannot share hidden size {hidden_size} evenly."
            )
        return self.size("head_dim", hidden_size // num_heads)

    def number(self, name: str, default: float | None = None, above: float = 0.0, high: float = 1e12) -> float:
        """A number greater than `above` and at most `high`."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not above < value <= high:  # NaN and infinity fail this too
            raise ModelError(
                f"{self.where}: {name} must be a number above {above:g} and at most {high:g}, not {short(value)}."
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise ModelError(f"{self.where}: {name} must be true or false, not {short(value)}.")
        return value

    def activation(self, name: str, default: str) -> str:
        """An activation by its name in kernels.elementwise.activation."""
        return ACTIVATIONS[self.choice(name, default, tuple(ACTIVATIONS))]

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self._get(name, default)
        if value not in choices:
            raise ModelError(f"{self.where}: {name} {short(value)} is not served; known are {', '.join(choices)}.")
        return str(value)

    def object(self, name: str) -> "ConfigReader":
        """A reader of the JSON object in a field; of an empty one if absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise ModelError(f"{self.where}: {name} must be an object, not {short(value)}.")
        return ConfigReader(value, f"{self.where}: {name}")

    def with_defaults(self, **fields: Any) -> "ConfigReader":
        """A reader of the same object with values for absent fields."""
        return ConfigReader({**self.raw, **{k: v for k, v in fields.items() if not self.has(k)}}, self.where)

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def require(self, name: str, served: Any) -> None:
        """Refuse a field that would change the output, unless it is absent or has the one value that is served."""
        value = self.raw.get(name)
        if value is not None and value != served:
            raise ModelError(f"{self.where}: {name} = {short(value)} is not supported (only {served!r} is served).")

    def dtype(self) -> str:
        """The dtype of the saved checkpoint (field "dtype", or "torch_dtype" before transformers 5)."""
        name = "dtype" if self.has("dtype") else "torch_dtype"
        return self.choice(name, "float32", DTYPES)

    def window_layers(
        self, num_layers: int, default: tuple[int, ...] | None, kind: str = "sliding_attention"
    ) -> tuple[int, ...] | None:
        """The layers whose `layer_types` is `kind`, not full_attention; `default` if config.json has no such list."""
        types = self.raw.get("layer_types")
        if types is None:
            return default
        if not isinstance(types, list) or len(types) != num_layers:
            raise ModelError(f"{self.where}: layer_types must list one type for each of the {num_layers} layers.")
        if unknown := {str(name) for name in types} - {"full_attention", kind}:
            raise ModelError(f"{self.where}: layer_types holds {short(sorted(unknown))}, not supported.")
        return tuple(layer for layer, name in enumerate(types) if name == kind)

    def positive_numbers(self, name: str, high: float) -> tuple[float, ...]:
        """A list of numbers above 0 and at most `high`."""
        value = self._get(name, None)
        if not isinstance(value, list) or any(type(x) not in (int, float) or not 0 < x <= high for x in value):
            raise ModelError(
                f"{self.where}: {name} must list numbers above 0 and at most {high:g}, not {short(value)}."
            )
        return tuple(float(x) for x in value)

    def num_experts(self, default: int, name: str = "num_experts") -> int:
        """`name`, `num_experts` or `num_local_experts`: transformers 5 treats them as the same field."""
        names = [name for name in (name, "num_experts", "num_local_experts") if self.has(name)]
        numbers = {self.size(name, high=MAX_EXPERTS) for name in names}
        if len(numbers) > 1:
            raise ModelError(f"{self.where} contradicts itself: num_experts is not num_local_experts.")
        return numbers.pop() if numbers else default

    def layers(self, name: str, num_layers: int) -> tuple[int, ...]:
        """A sorted list of layer numbers; empty if absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < num_layers for i in value):
            raise ModelError(
                f"{self.where}: {name} must list numbers of layers, 0 to {num_layers - 1}, not {short(value)}."
            )
        return tuple(sorted(set(value)))

    def nope_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers without RoPE. `no_rope_layers` has a number for each layer: 1 with rotary embedding, 0 without."""
        interval = self.size("no_rope_layer_interval", 4)
        rotates = self.raw.get("no_rope_layers")
        if rotates is None or rotates == []:
            return tuple(range(interval - 1, num_layers, interval))
        if not isinstance(rotates, list) or len(rotates) < num_layers or any(flag not in (0, 1) for flag in rotates):
            raise ModelError(
                f"{self.where}: no_rope_layers must list 0 or 1 for each of the {num_layers} layers, not "
                f"{short(rotates)}."
            )
        return tuple(layer for layer in range(num_layers) if not rotates[layer])

    def rope_theta(self, default: float = 10000.0) -> float:
        return self.rope().number("rope_theta", self.number("rope_theta", default, above=1.0), above=1.0)

    def partial_rotary_factor(self, default: float) -> float:
        """The share of each head that is rotated."""
        name = "partial_rotary_factor"
        return self.rope().number(name, self.number(name, default, high=1.0), high=1.0)

    def rope_scaling(self, partial: bool = False) -> RopeScaling | None:
        """The RoPE scaling of config.json; None for plain RoPE. Without `partial`, a partial rotation is refused.

        "dynamic" is plain RoPE up to max_position_embeddings and depends on the sequence's length beyond. A cache of
        rotated keys cannot follow that, so "dynamic" is served up to max_position_embeddings only; with an `alpha`
        (Hunyuan) it is fixed. "longrope" changes its factors once, when a sequence outgrows the trained length: see
        max_position.
        """
        rope = self.rope()
        kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
        if kind == "proportional":
            share, factor = rope.number("partial_rotary_factor", 1.0, high=1.0), rope.number("factor", 1.0)
            length = self.size("max_position_embeddings")
            return RopeScaling(kind, factor, length, rotated_share=share)
        if not partial:
            rope.require("partial_rotary_factor", 1.0)
            self.require("partial_rotary_factor", 1.0)
        if kind == "dynamic" and rope.has("alpha"):
            alpha = rope.number("alpha", high=MAX_ROPE_FACTOR)
            return RopeScaling("ntk", alpha, self.size("max_position_embeddings"))
        if kind in ("default", "dynamic", "mrope"):  # mrope's three positions of a token are equal in text
            return None
        if kind == "su":  # the name in Phi-3's first checkpoints
            kind = "longrope"
        if kind not in ("linear", "llama3", "yarn", "longrope"):
            raise ModelError(
                f"{rope.where}: rope_type {short(kind)} is not supported; "
                "served are default, linear, dynamic, llama3, yarn and longrope."
            )
        trained = self if self.has("original_max_position_embeddings") else rope
        length = self.size("max_position_embeddings")
        return _scaling(rope, kind, length, trained.size("original_max_position_embeddings", length, low=2))

    def max_position(self) -> int:
        """The longest sequence that is served by default.

        For "linear", and for "yarn" if max_position_embeddings is still the trained length, it is by convention the
        trained length times the factor. For "longrope" it is the length for which the short factors hold; if
        max_model_len asks for more, all sequences use the long factors.
        """
        length = self.size("max_position_embeddings")
        scaling = self.rope_scaling(partial=True)
        if scaling is None or scaling.kind in ("llama3", "ntk", "proportional"):
            return length
        if scaling.kind == "longrope":
            return min(length, scaling.original_max_position)
        return max(length, int(scaling.original_max_position * scaling.factor))

    def rope(self) -> "ConfigReader":
        """A reader of the fields of RoPE."""
        # transformers 5 writes rope_parameters. If an older rope_scaling exists too, transformers and we use that.
        name = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.where}: {name} must be an object, not {short(value)}.")
        if any(isinstance(entry, dict) for entry in value.values()):
            raise ModelError(f"{self.where}: {name} by layer type is not supported.")
        return ConfigReader(value, f"{self.where}: {name}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None and default is None:
            raise ModelError(f"{self.where} has no {name}.")
        return default if value is None else value


def _scaling(rope: ConfigReader, kind: str, max_position: int, original: int) -> RopeScaling:
    implied = max_position / original if kind in ("yarn", "longrope") else None
    factor = rope.number("factor", implied, high=MAX_ROPE_FACTOR)
    if kind == "linear":
        return RopeScaling(kind, factor, max_position)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise ModelError(f"{rope.where}: low_freq_factor must be below high_freq_factor.")
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        return _longrope(rope, factor, max_position, original)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
    )


def _longrope(rope: ConfigReader, factor: float, max_position: int, original: int) -> RopeScaling:
    """LongRoPE (Ding et al. 2024, section 3): the attention factor keeps the entropy in longer sequences."""
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=rope.number("attention_factor", attention_factor),
        short_factors=rope.positive_numbers("short_factor", MAX_ROPE_FACTOR),
        long_factors=rope.positive_numbers("long_factor", MAX_ROPE_FACTOR),
        long_max_position=max_position,
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """YaRN (Peng et al. 2023, section 3.4): 0.1 ln(factor) + 1. With DeepSeek's mscale fields: a quotient of two."""
    log = math.log(factor) if factor > 1 else 0.0
    if not (rope.raw.get("mscale") and rope.raw.get("mscale_all_dim")):
        return 0.1 * log + 1.0
    return (0.1 * rope.number("mscale") * log + 1.0) / (0.1 * rope.number("mscale_all_dim") * log + 1.0)
