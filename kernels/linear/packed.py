"""The linear layer of inference. Its weights are packed once for their device."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import cpu_kernels
from kernels.elementwise.activation import kernel_name


class PackedLinear:
    """y = x @ weight.T + bias. weight [out_features, in_features]; x [num_tokens, in_features].

    On a CPU the weight is packed into panels for our own kernels (kernels/cpu/linear: panels.py for bf16, floats.py for
    fp32). If the CPU lacks their instructions, bf16 is packed into oneDNN's blocked layout, 2-4 times faster than
    F.linear at 1 to 16 rows and no slower above. The plain copy is then dropped: `weight` is None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, compresses: bool = False) -> None:
        """compresses: where our own kernel serves the weight, keep a second copy, without loss in 12 bits a weight, for
        few rows (kernels/cpu/linear/compressed.py)."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight: Tensor | None = weight
        self.packed_weight: Tensor | None = None
        self.panels: Tensor | None = None
        self.compressed: Any = None  # CompressedPanels or None
        self.floats: Any = None  # FloatPanels or None
        cpu = cpu_kernels() if weight.device.type == "cpu" else None
        if cpu and cpu.float_linear.supports_floats(weight, bias):
            self.floats, self.weight = cpu.float_linear.FloatPanels(weight), None
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return
        if cpu and cpu.linear.supports_linear(weight, bias):
            self.panels, self._linear = cpu.linear.pack(weight), cpu.linear.linear
            self.compressed = cpu.compressed_linear.compress(self.panels) if compresses else None
            self.weight = None
        elif _packing_works():
            self.packed_weight = _pack(weight)
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]"""
        if self.compressed is not None and self.compressed.takes(x):
            return self.compressed.linear(x, self.bias, self.out_features)  # type: ignore[no-any-return]
        if self.panels is not None:
            return self._linear(x, self.panels, self.bias, self.out_features)
        if self.floats is not None:
            return self.floats.linear(x, self.bias)  # type: ignore[no-any-return]
        if self.packed_weight is not None:
            return _packed_linear(x, self.packed_weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class PackedGatedLinear:
    """gated_activation(x @ weight.T + bias, name) for a weight [gate | up], [2n, in_features], in one kernel of the
    CPU: the sums are not rounded and written in between. x [num_tokens, in_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, name: str, compresses: bool = False) -> None:
        """Only for what `supports_gated_linear` accepts. compresses: see PackedLinear."""
        cpu = cpu_kernels()
        assert cpu is not None
        self.out_features = weight.shape[0]
        self.bias = None if bias is None else cpu.linear.interleave(bias)
        self._function = kernel_name(name)
        self._panels, self._linear = cpu.linear.pack(cpu.linear.interleave(weight)), cpu.linear.gated_linear
        self.compressed: Any = cpu.compressed_linear.compress(self._panels) if compresses else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, n]"""
        if self.compressed is not None and self.compressed.takes(x):
            return self.compressed.gated_linear(x, self.bias, self.out_features, self._function)  # type: ignore[no-any-return]
        return self._linear(x, self._panels, self.bias, self.out_features, self._function)  # type: ignore[no-any-return]


def supports_gated_linear(weight: Tensor, bias: Tensor | None, name: str) -> bool:
    """True if PackedGatedLinear serves a weight and its bias with the activation `name`."""
    cpu = cpu_kernels() if weight.device.type == "cpu" else None
    return cpu is not None and cpu.linear.supports_gated_linear(weight, bias, kernel_name(name))


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def _packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")


@cache
def _packing_works() -> bool:
    """True if torch's private operators for oneDNN exist here and agree with F.linear."""
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.linspace(-1, 1, 48, dtype=torch.bfloat16)
    try:
        for x in (weight[:1], weight[:20]):
            packed = _packed_linear(x, _pack(weight), bias).float()
            if not torch.allclose(packed, F.linear(x.float(), weight.float(), bias.float()), atol=0.1, rtol=0.02):
                return False
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True
