"""Linear layers over weights in 4 or 8 bits."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import cpu_kernels, use_triton
from kernels.elementwise.activation import kernel_name
from kernels.linear.packed import PackedLinear
from kernels.quantized.code_matmul import WARM_UP_ROWS, CodeMatmul, supports_code_matmul
from kernels.quantized.scaled_matmul import ScaledMatmul, multiplies_in_8_bits, supports_scaled_matmul
from kernels.quantized.weight import Part, QuantizedWeight

FEW_ROWS = 16  # up to so many rows, reading the weights takes longer than multiplying
BLOCK_ELEMENTS = 1 << 24  # weights that the reference dequantises at a time


class QuantizedLinear:
    """y = x @ weight.T + bias for a matrix [out_features, in_features] in codes.

    A CPU reads the codes packed in bf16 and, apart from nf4, in fp32 (kernels/cpu/quantized/code_linear.py), and so
    does a GPU (code_matmul.py). With more than FEW_ROWS rows, a GPU rounds the inputs of weights in e4m3 and W8A8 to 8
    bits where it multiplies those (scaled_matmul.py). Elsewhere the weight is dequantised to x's dtype in each call, a
    part at a time.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """dtype: of the inputs and results."""
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype, self.permutation = bias, dtype, weight.permutation
        self._code_matmul = CodeMatmul(weight) if use_triton(weight.codes) and supports_code_matmul(weight) else None
        self.weight = weight if self._code_matmul is None else None
        rounds = dtype != torch.float32 and multiplies_in_8_bits(weight.codes.dtype, weight.codes.device)
        self._scaled_matmul = ScaledMatmul(weight) if rounds and supports_scaled_matmul(weight) else None
        compiled = weight.codes.device.type == "cpu" and (self._code_matmul is None or dtype == torch.bfloat16)
        cpu = cpu_kernels() if compiled else None
        if cpu and cpu.code_linear.supports_codes(weight, dtype):
            keeps_inputs = dtype == torch.float32 and weight.int8_inputs
            self._packed = cpu.code_linear.PackedCodes(replace(weight, int8_inputs=False) if keeps_inputs else weight)
            self._multiply = cpu.code_linear.code_linear if dtype == torch.bfloat16 else cpu.code_floats.code_linear_f32
            self.weight = None

    @property
    def rounded_inputs(self) -> torch.dtype | None:
        """The type of the QuantizedRows as which more than FEW_ROWS rows may come; None: as none."""
        return None if self._scaled_matmul is None else self._scaled_matmul.codes.dtype

    def __call__(self, x: Any) -> Tensor:
        """x: Tensor [num_tokens, in_features], or QuantizedRows (see rounded_inputs) -> [num_tokens, out_features]"""
        if self._scaled_matmul is not None and len(x) > FEW_ROWS:
            return self._scaled_matmul(x, self.bias)
        if self.weight is not None:
            return linear_reference(x, self.weight, self.bias)
        x = x if self.permutation is None else _take_columns(x, self.permutation)
        if self._code_matmul is not None:
            return self._code_matmul(x, self.bias)
        return self._multiply(x, self._packed, self.bias)

    def warm_up(self) -> None:
        """Compile the kernels of a GPU for any number of rows."""
        if self._code_matmul is not None:
            most_rows = FEW_ROWS if self._scaled_matmul is not None else WARM_UP_ROWS[-1]
            self._code_matmul.warm_up(self.dtype, self.bias, most_rows)
        if self._scaled_matmul is not None:
            self._scaled_matmul.warm_up(self.dtype, self.bias)

    @property
    def shape_and_kind(self) -> tuple[object, ...]:
        """Layers that are alike in it need the same kernels."""
        has_bias, matmul = self.bias is not None, self._code_matmul
        if matmul is None:
            return (self.out_features, self.in_features, has_bias)
        return (matmul.shape, matmul.scales.dtype, has_bias)

    def with_bias(self, bias: Tensor | None) -> "QuantizedLinear":
        """The same layer with another bias; the two share the weight."""
        layer = copy(self)
        layer.bias = bias
        return layer

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, for an embedding that shares it: int64 [n] -> [n, in_features]."""
        if (source := self.weight or self._code_matmul) is not None:
            return source.rows(indices).dequantize(self.dtype)
        values = self._packed.rows(indices)
        if self.permutation is not None:
            values = torch.empty_like(values).index_copy_(-1, self.permutation.long(), values)
        return values.to(self.dtype)


class QuantizedGatedLinear:
    """gated_activation(x @ weight.T + bias, name) for a weight [gate | up] in W8A8, [2n, in_features], in one kernel of
    the CPU: the sums are not rounded and written in between. x [num_tokens, in_features]."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, name: str) -> None:
        """Only for what `supports_quantized_gate` accepts."""
        cpu = cpu_kernels()
        assert cpu is not None
        self.out_features = weight.shape[0]
        order = cpu.linear.interleave(torch.arange(self.out_features))
        self._packed, self._linear = cpu.code_linear.PackedCodes(weight.rows(order)), cpu.code_linear.gated_code_linear
        self._bias, self._gate = (
            None if bias is None else bias[order],
            cpu.activations.Gate(kernel_name(name)).arguments,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, n]"""
        return self._linear(x, self._packed, self._bias, self._gate)  # type: ignore[no-any-return]


def multiplies_int8_inputs() -> bool:
    """True if this CPU rounds the inputs of weights in W8A8 in a bf16 model."""
    cpu = cpu_kernels()
    return cpu is not None and cpu.features.HAS_INT8_DOT


def supports_quantized_gate(weight: QuantizedWeight, name: str, dtype: torch.dtype) -> bool:
    """True if QuantizedGatedLinear serves a weight with the activation `name`, for inputs of a dtype."""
    if weight.device.type != "cpu" or dtype != torch.bfloat16 or weight.permutation is not None:
        return False
    cpu = cpu_kernels()
    if cpu is None or kernel_name(name) not in cpu.activations.FUNCTIONS:
        return False
    return cpu.code_linear.supports_gated_code_linear(weight)  # type: ignore[no-any-return]


class PartedLinear:
    """A linear layer whose rows are parts of different kinds: QuantizedWeights or plain tensors [rows, in_features]."""

    def __init__(self, parts: Sequence[Part], bias: Tensor | None, dtype: torch.dtype) -> None:
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else [part.contiguous() for part in bias.split(sizes)]
        self.out_features, self.in_features = sum(sizes), parts[0].shape[1]
        self.parts = [make_linear(part, some, dtype) for part, some in zip(parts, biases, strict=True)]

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]"""
        return _concatenate([part(x) for part in self.parts])


def make_linear(
    weight: Part, bias: Tensor | None, dtype: torch.dtype, compresses: bool = False
) -> QuantizedLinear | PackedLinear:
    """The layer of a part. compresses: see PackedLinear."""
    if isinstance(weight, Tensor):
        return PackedLinear(weight, bias, compresses)
    return QuantizedLinear(weight, bias, dtype)


def _concatenate(parts: list[Tensor]) -> Tensor:
    cpu = cpu_kernels() if parts[0].device.type == "cpu" else None
    return cpu.rows.concatenate(parts) if cpu else torch.cat(parts, -1)  # type: ignore[no-any-return]


def _take_columns(x: Tensor, columns: Tensor) -> Tensor:
    cpu = cpu_kernels() if x.device.type == "cpu" and x.dtype == torch.bfloat16 else None
    return cpu.rows.take_columns(x, columns) if cpu else x.index_select(1, columns)  # type: ignore[no-any-return]


def linear_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in torch, by dequantised rows."""
    rows = max(1, BLOCK_ELEMENTS // weight.in_features)
    blocks = [
        F.linear(x, weight.row_range(start, start + rows).dequantize(x.dtype))
        for start in range(0, weight.shape[0], rows)
    ]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
    return out if bias is None else out + bias
