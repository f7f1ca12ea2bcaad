"""Mixture of experts (Shazeer et al. 2017): a token's MLP is the weighted sum of a few experts out of many.

On a GPU the experts of a step are two grouped GEMMs, one launch each: gate|up with the gated activation, and down. The
kernels visit rows in the order of `sort_by_expert`, read them in place and write results where the sum reads them, so
nothing is copied. The sum adds a token's experts in the order of their rank, in fp32 and without atomics.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.card import read_card
from kernels.dispatch import cpu_kernels, use_triton
from kernels.elementwise.activation import gated_activation, gated_activation_reference, kernel_name
from kernels.linear.moe_kernels import ExpertFormula, Matrices, choose_tile, grouped_experts, tile_table
from kernels.linear.moe_routing import Routing, RoutingRule, route
from kernels.linear.packed import PackedLinear
from kernels.quantized.linear import QuantizedLinear, make_linear
from kernels.quantized.weight import QuantizedWeight

SILU = ExpertFormula("silu")
ExpertLinear = PackedLinear | QuantizedLinear


class Experts:
    """The experts of one layer, packed for their device.

    gate_up [num_experts, 2 * inner, hidden] = [gate | up], down [num_experts, hidden, inner], plain or quantised;
    biases [num_experts, 2 * inner] and [num_experts, hidden]. On a CPU they are packed for grouped products, too
    (kernels/cpu/experts), or every expert has linear layers of its own where those do not serve them.
    """

    def __init__(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        formula: ExpertFormula = SILU,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        compresses: bool = False,
    ) -> None:
        """dtype: of inputs and results; None for that of the plain weights. compresses: see PackedLinear."""
        self.num_experts, self.hidden_size, self.inner_size = down.shape
        self.formula = formula
        self.dtype = dtype or (gate_up.dtype if isinstance(gate_up, Tensor) else torch.float32)
        self.layers: list[tuple[ExpertLinear, ExpertLinear]] = []
        self.packed: Any = None  # PackedExperts or None
        if use_triton(gate_up if isinstance(gate_up, Tensor) else gate_up.codes):
            self.gate_up, self.down = Matrices.of(gate_up, gate_up_bias), Matrices.of(down, down_bias)
            self.tiles = self.down.tiles if self.down.permutations is not None else self.gate_up.tiles
            return
        cpu = cpu_kernels()
        gate = cpu and cpu.activations.Gate(
            "clamped" if formula.clamp_limit else kernel_name(formula.activation),
            formula.clamp_limit,
            formula.clamp_alpha,
        )
        if cpu and cpu.experts.supports_experts(gate_up, down, (gate_up_bias, down_bias), gate, self.dtype):
            on_input = formula.weights_on_input
            self.packed = cpu.experts.PackedExperts(gate_up, down, gate_up_bias, down_bias, gate, on_input, compresses)
        else:  # the plain copies of packed weights are dropped
            layers = (self._linears(*both, compresses) for both in ((gate_up, gate_up_bias), (down, down_bias)))
            self.layers = list(zip(*layers, strict=True))

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden].

        A row's result does not depend on other rows, with two exceptions: on a GPU the number of tokens chooses the
        tile, and with the tile the matrix instruction; on a CPU it chooses whether codes are decoded first.
        """
        if self.layers:
            return self._one_by_one(x, routing)
        if not len(x):
            return torch.empty_like(x)
        if self.packed is not None:
            return self.packed(x, routing.experts, routing.weights)  # type: ignore[no-any-return]
        tile = choose_tile(x.dtype, read_card(x.device), routing.experts.numel(), self.num_experts, self.tiles)
        return grouped_experts(x, self.gate_up, self.down, routing, self.formula, tile)

    def warm_up(self, rule: RoutingRule, correction: Tensor | None, router_dtype: torch.dtype) -> None:
        """Compile every variant that a later call with logits in router_dtype can launch."""
        x = torch.zeros((1, self.hidden_size), dtype=self.dtype, device=self.down.codes.device)
        routing = route(x.new_zeros((1, self.num_experts), dtype=router_dtype), rule, correction)
        for _, tile in tile_table(x.dtype.itemsize, read_card(x.device), self.tiles):
            grouped_experts(x, self.gate_up, self.down, routing, self.formula, tile)

    def _linears(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, compresses: bool) -> list[ExpertLinear]:
        """One linear layer for each expert."""
        biases = [None] * self.num_experts if bias is None else list(bias)
        parts = [weight[i] if isinstance(weight, Tensor) else weight.expert(i) for i in range(self.num_experts)]
        return [make_linear(part, one, self.dtype, compresses) for part, one in zip(parts, biases, strict=True)]

    def _one_by_one(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute each expert that has tokens. A row is summed in the order of its experts' numbers, in fp32."""
        order = routing.experts.flatten().argsort(stable=True)
        counts = routing.experts.flatten().bincount(minlength=self.num_experts).tolist()
        weights, top_k = routing.weights.flatten(), routing.experts.shape[1]
        on_input = self.formula.weights_on_input
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for (gate_up, down), pairs in zip(self.layers, order.split(counts), strict=True):
            if not len(pairs):
                continue
            rows = pairs // top_k
            inputs = x.index_select(0, rows)
            if on_input:
                inputs = (inputs.float() * weights[pairs, None]).to(x.dtype)
            result = down(_activated(gate_up(inputs), self.formula)).float()
            out.index_add_(0, rows, result if on_input else result * weights[pairs, None])
        return out.to(x.dtype)


def _activated(x: Tensor, formula: ExpertFormula) -> Tensor:
    """[num_rows, 2 * inner] = [gate | up] -> [num_rows, inner]"""
    if not formula.clamp_limit:
        return gated_activation(x, formula.activation)
    return _clamped(x, formula)


def _clamped(x: Tensor, formula: ExpertFormula) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=formula.clamp_limit), up.clamp(-formula.clamp_limit, formula.clamp_limit)
    return gate * torch.sigmoid(gate * formula.clamp_alpha) * (up + 1)


def experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    formula: ExpertFormula = SILU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The formula in fp32, token by token, rounded once."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token in range(len(x)):
        for weight, expert in zip(routing.weights[token], routing.experts[token].tolist(), strict=True):
            row, factor = (x[token].float() * weight, 1) if formula.weights_on_input else (x[token].float(), weight)
            wide = gate_up[expert].float() @ row
            wide = wide if gate_up_bias is None else wide + gate_up_bias[expert].float()
            inner = gated_activation_reference(wide[None], formula.activation)[0]
            inner = _clamped(wide, formula) if formula.clamp_limit else inner
            result = down[expert].float() @ inner
            out[token] += factor * (result if down_bias is None else result + down_bias[expert].float())
    return out.to(x.dtype)
