"""Linear layers and activations in two sets: the fastest, or batch-invariant (each row independent of the others)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.models.layers.adapted import AdaptedLinear, AdapterLayers
from engine.models.parallel.ranks import Ranks, Summed
from kernels.dispatch import cpu_kernels, use_triton
from kernels.elementwise.activation import activation, gated_activation, has_row_kernel
from kernels.linear.choice import ChosenLinear, LinearChoices, choose_on_device
from kernels.linear.invariant import InvariantLinear, RowCounts
from kernels.linear.packed import PackedGatedLinear, PackedLinear, supports_gated_linear
from kernels.quantized.linear import PartedLinear, QuantizedGatedLinear, QuantizedLinear, supports_quantized_gate
from kernels.quantized.weight import QuantizedWeight, Weight

Linear = (
    PackedLinear
    | PackedGatedLinear
    | ChosenLinear
    | InvariantLinear
    | QuantizedLinear
    | QuantizedGatedLinear
    | PartedLinear
    | AdaptedLinear
)
Activate = Callable[[Tensor, str], Tensor]
Elementwise = Callable[[Tensor], Tensor]
Part = TypeVar("Part", bound=PackedLinear | QuantizedLinear)
Layer = TypeVar("Layer", bound=Callable[[Tensor], Tensor])


@dataclass(frozen=True, slots=True)
class FastOperators:
    """Linear layers by the fastest of a few kernels on a GPU, by packed weights on a CPU; activations in one pass over
    all rows."""

    choices: LinearChoices = field(default_factory=LinearChoices, compare=False)
    dtype: torch.dtype = torch.float32  # the model's
    ranks: Ranks | None = None  # None: one device has the whole model
    adapters: AdapterLayers | None = field(default=None, compare=False)  # None: served without adapters
    compresses: bool = False  # see PackedLinear
    quantized: dict[object, QuantizedLinear] = field(default_factory=dict, compare=False)  # one layer of each kind

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """y = x @ weight.T + bias."""
        if isinstance(weight, tuple):
            parted = PartedLinear(weight, bias, self.dtype)
            for part in parted.parts:
                self.note(part)
            return parted
        if isinstance(weight, QuantizedWeight):
            return self.note(QuantizedLinear(weight, bias, self.dtype))
        return self.choices.linear(weight, bias) if weight.is_cuda else PackedLinear(weight, bias, self.compresses)

    def note(self, layer: Part) -> Part:
        """Keep the first quantised layer of each kind for choose_kernels."""
        if isinstance(layer, QuantizedLinear):
            self.quantized.setdefault(layer.shape_and_kind, layer)
        return layer

    def gated_linear(
        self, weight: Weight, bias: Tensor | None, name: str
    ) -> PackedGatedLinear | QuantizedGatedLinear | None:
        """A linear layer with the activation of a gated MLP in one kernel; None where there is no such kernel."""
        if self.adapters is not None:
            return None
        if isinstance(weight, QuantizedWeight) and supports_quantized_gate(weight, name, self.dtype):
            return QuantizedGatedLinear(weight, bias, name)
        if isinstance(weight, Tensor) and supports_gated_linear(weight, bias, name):
            return PackedGatedLinear(weight, bias, name, self.compresses)
        return None

    def choose_kernels(self, device: torch.device, max_rows: int) -> None:
        """Choose the kernels of a GPU's linear layers for up to max_rows rows, and of the sums over ranks, and compile
        those of quantised layers, before CUDA graphs are recorded."""
        if self.ranks is not None:
            self.ranks.choose_sum(device, self.dtype)
        if self.choices.layers:
            choose_on_device(self.choices, device, max_rows)
        for layer in self.quantized.values():
            layer.warm_up()
        self.quantized.clear()

    def activation(self, gated: bool) -> Activate:
        """(rows, name) -> rows, see kernels/elementwise/activation.py."""
        return gated_activation if gated else activation

    def elementwise(self, function: Elementwise) -> Elementwise:
        """The function, rows -> rows, as these operators apply it."""
        return function


@dataclass(frozen=True, slots=True)
class InvariantOperators:
    """Operators for `--batch-invariant`: a row's result has the same bits whatever other rows the batch has.

    Attention has its own switch, AttentionPlan.batch_invariant. Norms, rotary embedding and sampling compute each row
    by itself anyway.
    """

    row_counts: RowCounts = field(default_factory=RowCounts)
    dtype: torch.dtype = torch.float32  # the model's
    ranks: None = None  # the order of a sum over ranks would depend on the number of rows
    adapters: None = None  # the number of rows of an adapter would choose the kernel of its product
    compresses: bool = False  # InvariantLinear keeps plain weights alone

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See FastOperators."""
        assert isinstance(weight, Tensor), "operators_for refuses quantised weights"
        return InvariantLinear(weight, bias, self.row_counts)

    def note(self, layer: Part) -> Part:
        """There is nothing to compile before."""
        return layer

    def gated_linear(self, weight: Weight, bias: Tensor | None, name: str) -> None:
        """The activation is a kernel of its own."""

    def choose_kernels(self, device: torch.device, max_rows: int) -> None:
        """There is one kernel, whatever the number of rows."""

    def activation(self, gated: bool) -> Activate:
        """See FastOperators."""
        return _gated_by_row if gated else _by_row

    def elementwise(self, function: Elementwise) -> Elementwise:
        """See FastOperators."""
        return lambda x: function(x) if x.is_cuda else _each_row(function, x)


Operators = FastOperators | InvariantOperators


def operators_for(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
    ranks: Ranks | None = None,
    adapters: AdapterLayers | None = None,
    compresses: bool = False,
) -> Operators:
    """The operators for a model, or for a rank's part of one. compresses: see PackedLinear; not with batch_invariant.
    ConfigError if batch_invariant is set but a kernel for it is missing."""
    if not batch_invariant:
        return FastOperators(dtype=dtype, ranks=ranks, adapters=adapters, compresses=compresses)
    if adapters is not None:
        raise ConfigError(
            "batch_invariant is not served with adapters (lora): the number of rows of an adapter chooses the kernel "
            "of its product. Leave one of the two out."
        )
    if ranks is not None:
        raise ConfigError(
            "batch_invariant is not served with tensor_parallel_size: the order of a sum over ranks depends on the "
            "number of rows. Leave one of the two out."
        )
    if config.quantization is not None:
        raise ConfigError(
            f"batch_invariant is not served for {config.quantization.name} weights: the number of rows chooses their "
            "kernel. Leave the option off, or use a checkpoint in bf16, fp16 or fp32."
        )
    if config.moe is not None:
        raise ConfigError(
            "batch_invariant is not served for mixtures of experts: how many tokens an expert gets chooses its kernel. "
            "Leave the option off."
        )
    problem = _cpu_problem(config, dtype) if device.type == "cpu" and not use_triton(torch.empty(0)) else None
    if problem is not None:
        raise ConfigError(f"batch_invariant cannot be kept on this CPU: {problem}.")
    return InvariantOperators(dtype=dtype)


def _cpu_problem(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """The reason why attention or RMSNorm would use torch, whose sums depend on the shape; None if there is none."""
    if cpu_kernels() is None:
        return "numba is missing, install it"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the kernels that keep it compute in float32 and bfloat16, not {dtype}: set dtype"
    odd = next((heads.head_dim for heads in config.head_shapes() if heads.head_dim % 16), 0)
    if config.causal and odd:
        return f"its attention kernel needs a head_dim in 16s, this model has {odd}: leave the option off"
    if config.norm == "rms" and config.hidden_size % 16:
        return f"its RMSNorm needs a hidden_size in 16s, this model has {config.hidden_size}: leave the option off"
    return None


def _gated_by_row(x: Tensor, name: str) -> Tensor:
    by_row = has_row_kernel(x, name, gated=True)
    return gated_activation(x, name) if by_row else _each_row(partial(gated_activation, name=name), x)


def _by_row(x: Tensor, name: str) -> Tensor:
    by_row = has_row_kernel(x, name, gated=False)
    return activation(x, name) if by_row else _each_row(partial(activation, name=name), x)


def _each_row(function: Elementwise, x: Tensor) -> Tensor:
    """Apply the function to each row as a tensor of its own.

    torch on a CPU computes the last few numbers of each thread's share by other code than the rest, so the bits of a
    number would depend on its place in the tensor.
    """
    return torch.cat([function(row) for row in torch.split(x, 1)])


def rounded_inputs(linear: Linear) -> torch.dtype | None:
    """The type in 8 bits in which more than FEW_ROWS rows may come to the layer, from the kernel of the norm or
    activation before it; None if it takes rows in 16 bits alone."""
    return linear.rounded_inputs if isinstance(linear, QuantizedLinear) else None


def take_linear(weights: dict[str, Weight], name: str, operators: Operators) -> Linear:
    """Make the linear layer called `name` and drop its entries, so that the plain copy of packed weights is freed."""
    linear = operators.linear(weights.pop(f"{name}.weight"), take_optional(weights, f"{name}.bias"))
    return with_adapters(linear, name, operators)


def take_gated_linear(
    weights: dict[str, Weight], name: str, activation: str, operators: Operators
) -> PackedGatedLinear | QuantizedGatedLinear | None:
    """Make the layer called `name` with its activation in one kernel and drop its entries; None where there is no such
    kernel."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    assert bias is None or isinstance(bias, Tensor), f"{name}.bias is quantised"
    layer = operators.gated_linear(weight, bias, activation)
    if layer is not None:
        del weights[f"{name}.weight"]
        weights.pop(f"{name}.bias", None)
    return layer


def with_adapters(linear: Layer, name: str, operators: Operators) -> Layer | AdaptedLinear:
    """The layer called `name` with the additions of adapters; the layer itself where the model is served without."""
    return linear if operators.adapters is None else operators.adapters.wrap(name, linear)


def summed(layer: Layer, operators: Operators) -> Layer | Summed:
    """The layer with its output summed over the ranks; the layer itself where one device has the whole model."""
    return layer if operators.ranks is None else Summed(layer, operators.ranks)


def take_tensor(weights: dict[str, Weight], name: str) -> Tensor:
    """Drop the entry called `name`, which is never quantised, and return it."""
    tensor = weights.pop(name)
    assert isinstance(tensor, Tensor), f"{name} is quantised"
    return tensor


def take_optional(weights: dict[str, Weight], name: str) -> Tensor | None:
    """take_tensor; None if there is no such entry."""
    return take_tensor(weights, name) if name in weights else None


def take_plain(weights: dict[str, Weight], name: str, dtype: torch.dtype) -> Tensor:
    """Drop the entry called `name` and return it in plain form, [..., out, in] in `dtype` if it was quantised."""
    return _plain(weights.pop(name), dtype)


def _plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    parts = weight if isinstance(weight, tuple) else (weight,)
    plain = [part if isinstance(part, Tensor) else part.dequantize(dtype) for part in parts]
    return plain[0] if len(plain) == 1 else torch.cat(plain)
