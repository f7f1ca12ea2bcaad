"""The experts of a layer on a CPU: all tokens of a step in two grouped products, over plain weights or codes.

The pairs of a token and an expert are sorted by expert, so that each expert's weights are read once for all of its
rows, and all threads share all experts. A table holds the experts that a step chose. So a recorded program
(kernels/cpu/program.py) can hold a mixture of experts like any other layer.
"""

import torch
from torch import Tensor

from kernels import huge_pages
from kernels.cpu.elementwise.activations import GATES, Gate, gate
from kernels.cpu.elementwise.rows import take_columns
from kernels.cpu.experts.pairs import gather_pairs, sort_pairs, sum_pairs
from kernels.cpu.linear import compressed, panels
from kernels.cpu.linear.places import RowGroups
from kernels.cpu.quantized.code_linear import PackedCodes, grouped_code_linear, supports_codes
from kernels.cpu.simd import WIDTH
from kernels.quantized.weight import QuantizedWeight


class PlainMatrices:
    """Matrices bf16 [num_experts, out, in] in panels, and biases [num_experts, out]."""

    def __init__(self, weight: Tensor, biases: Tensor | None, function: Gate | None, compresses: bool) -> None:
        """function: the matrices are [gate | up], and `multiply` gates. compresses: see kernels.linear.packed."""
        self.num_experts, self.out_features = weight.shape[:2]
        self.biases, self.function = biases, function
        self.fuses = function is not None and self.out_features % panels.COLUMNS == 0
        if self.fuses and biases is not None:
            self.biases = torch.stack([panels.interleave(bias) for bias in biases])
        first = self._in_panels(weight[0])
        self.panels = huge_pages.empty((self.num_experts * len(first), *first.shape[1:]), first.dtype)
        for matrix, target in zip(weight, self.panels.split(len(first)), strict=True):
            target.copy_(self._in_panels(matrix))
        self.compressed = compressed.compress(self.panels) if compresses else None

    def _in_panels(self, matrix: Tensor) -> Tensor:
        return panels.in_panels(panels.interleave(matrix) if self.fuses else matrix)

    def multiply(self, x: Tensor, groups: RowGroups, few: bool) -> Tensor:
        """bf16 [num_pairs, in] -> [num_pairs, out], or half as many columns where there is a gate. few: no block of
        `groups` has more than compressed.MAX_ROWS rows, so that weights in 12 bits serve them."""
        biases, out_features, function = self.biases, self.out_features, self.function
        small = self.compressed if few else None
        if self.fuses and function is not None:
            if small is not None:
                return small.grouped_gated_linear(x, biases, out_features, groups, function)
            return panels.grouped_gated_linear(x, self.panels, biases, out_features, groups, function)
        if small is not None:
            out = small.grouped_linear(x, biases, out_features, groups)
        else:
            out = panels.grouped_linear(x, self.panels, biases, out_features, groups)
        return out if function is None else gate(out, function)


class CodeMatrices:
    """Matrices [num_experts, out, in] in codes, and biases [num_experts, out]."""

    def __init__(self, weight: QuantizedWeight, biases: Tensor | None, function: Gate | None) -> None:
        """function: see PlainMatrices."""
        self.permutation, self.biases, self.function = weight.permutation, biases, function
        self.compressed = None
        self.codes = PackedCodes(weight)

    def multiply(self, x: Tensor, groups: RowGroups, few: bool) -> Tensor:
        """See PlainMatrices; codes have one form for any number of rows."""
        x = x if self.permutation is None else take_columns(x, self.permutation)
        out = grouped_code_linear(x, self.codes, self.biases, groups)
        return out if self.function is None else gate(out, self.function)


class PackedExperts:
    """gate_up [num_experts, 2 * inner, hidden] = [gate | up] and down [num_experts, hidden, inner], plain or in codes,
    with biases [num_experts, 2 * inner] and [num_experts, hidden]."""

    def __init__(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        gate_up_biases: Tensor | None,
        down_biases: Tensor | None,
        function: Gate,
        weights_on_input: bool,
        compresses: bool,
    ) -> None:
        """See supports_experts. weights_on_input: a token's weight multiplies the expert's input."""
        self.num_experts, self.weights_on_input = down.shape[0], weights_on_input
        self.gate_up = _matrices(gate_up, gate_up_biases, function, compresses)
        self.down = _matrices(down, down_biases, None, compresses)
        self.are_compressed = any(matrices.compressed is not None for matrices in (self.gate_up, self.down))

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x bf16 [num_tokens, hidden] with dense rows, experts int32 and weights fp32 [num_tokens, top_k] ->
        [num_tokens, hidden]: the sum over a token's experts, best first. A row has the same bits with any other rows,
        apart from codes that many rows decode first (code_linear.py)."""
        num_tokens, top_k = experts.shape
        few = self.are_compressed and experts.numel() <= compressed.MAX_ROWS * self.num_experts
        pairs = sort_pairs(experts, self.num_experts, compressed.MAX_ROWS if few else panels.ROWS_PER_ITEM)
        groups, on_input = pairs.groups, self.weights_on_input
        # no name for the gathered rows: their memory is free before `down` needs its own
        inner = self.gate_up.multiply(gather_pairs(x, pairs, top_k, weights if on_input else None), groups, few)
        results = self.down.multiply(inner, groups, few)
        return sum_pairs(results, pairs, num_tokens, None if on_input else weights)


def _matrices(
    weight: Tensor | QuantizedWeight, biases: Tensor | None, function: Gate | None, compresses: bool
) -> PlainMatrices | CodeMatrices:
    if isinstance(weight, Tensor):
        return PlainMatrices(weight, biases, function, compresses)
    return CodeMatrices(weight, biases, function)


def supports_experts(
    gate_up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    biases: tuple[Tensor | None, Tensor | None],
    function: Gate,
    dtype: torch.dtype,
) -> bool:
    """True for inputs in bf16 in whole vectors, where a kernel multiplies with each matrix."""
    return (
        dtype == torch.bfloat16
        and function.function in GATES
        and down.shape[1] % WIDTH == down.shape[2] % WIDTH == 0
        and all(_supports_matrices(*both) for both in zip((gate_up, down), biases, strict=True))
    )


def _supports_matrices(weight: Tensor | QuantizedWeight, biases: Tensor | None) -> bool:
    if biases is not None and (biases.dtype != torch.bfloat16 or not biases.is_contiguous()):
        return False
    if isinstance(weight, Tensor):
        return panels.supports_linear(weight[0], None)
    own_orders = weight.permutation is not None and weight.permutation.dim() == 2
    return supports_codes(weight, torch.bfloat16) and not own_orders
