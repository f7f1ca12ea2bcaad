"""Linear layers from a dict of loaded weights."""

from torch import Tensor

from engine.models.layers.operators import Linear, Operators


def take_linear(weights: dict[str, Tensor], name: str, operators: Operators) -> Linear:
    """Make the linear layer called `name` and drop its entries, so that a packed layer's plain copy is freed."""
    return operators.linear(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))
