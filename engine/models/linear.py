"""Linear layers from a dict of loaded weights."""

from torch import Tensor

from kernels.linear import PackedLinear


def take_linear(weights: dict[str, Tensor], name: str) -> PackedLinear:
    """Make the linear layer called `name` and drop its entries, so that a packed layer's plain copy is freed."""
    return PackedLinear(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))
