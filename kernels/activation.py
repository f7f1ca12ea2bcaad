"""Activation functions of the MLP, plain and gated."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import cpu_kernels

_gelu_tanh = partial(F.gelu, approximate="tanh")

# The names that checkpoints use in config.json ("hidden_act", "activation_function").
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(x: Tensor, name: str) -> Tensor:
    """Apply the activation called `name` to every element; ValueError names the known ones."""
    return _activation(name)(x)


def gated_activation(x: Tensor, name: str) -> Tensor:
    """[num_tokens, 2n] = [gate | up] -> activation(gate) * up, [num_tokens, n] (SwiGLU and its relatives)."""
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and name in ("silu", "swish") and cpu.elementwise.supports_silu_mul(x):
        return cpu.elementwise.silu_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return _activation(name)(gate) * up


def gated_activation_reference(x: Tensor, name: str) -> Tensor:
    """The same in fp32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    return (_activation(name)(gate) * up).to(x.dtype)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
