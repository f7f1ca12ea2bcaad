"""Activation functions of the MLP, plain and gated."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import as_rows, cpu_kernels, tl, triton, use_triton

_gelu_tanh = partial(F.gelu, approximate="tanh")

# Functions by their names in config.json ("hidden_act", "activation_function").
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
# Second names of a function -> its first name: the kernel is compiled once per function.
_SAME_AS = {"swish": "silu"} | dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")

MAX_BLOCK = 1024  # elements per program: with 4 warps and 16-bit numbers, a thread moves 16 bytes of each half


def activation(x: Tensor, name: str) -> Tensor:
    """Apply the activation called `name` to every element of x [num_tokens, size]: one pass. ValueError names the known
    activations."""
    function = _activation(name)
    cpu = _cpu_rows(x, name, gated=False)
    return cpu.activations.activate(x, kernel_name(name)) if cpu else function(x)


def gated_activation(x: Tensor, name: str) -> Tensor:
    """[num_tokens, 2n] = [gate | up] -> activation(gate) * up, [num_tokens, n] (SwiGLU and its relatives).

    ValueError names the known activations. x may have gaps between its rows.
    """
    if use_triton(x):
        return _launch(x, name)
    cpu = _cpu_rows(x, name, gated=True)
    if cpu:
        return cpu.activations.gate(x, cpu.activations.Gate(kernel_name(name)))  # type: ignore[no-any-return]
    gate, up = x.chunk(2, dim=-1)
    return _activation(name)(gate) * up


def has_row_kernel(x: Tensor, name: str, gated: bool) -> bool:
    """True if gated_activation(x, name) or activation(x, name) has a kernel whose results do not depend on a row's
    place."""
    return x.is_cuda or (gated and use_triton(x)) or _cpu_rows(x, name, gated) is not None


def _cpu_rows(x: Tensor, name: str, gated: bool) -> Any:
    """The kernels of a CPU, if they serve the activation of x; else None."""
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu is None:
        return None
    supports = cpu.activations.supports_gate if gated else cpu.activations.supports_activation
    return cpu if supports(x, _SAME_AS.get(name, name)) else None


def kernel_name(name: str) -> str:
    """The first name of a function, which `activate` knows. ValueError names the known activations."""
    _activation(name)
    return _SAME_AS.get(name, name)


def _launch(x, name):
    function = kernel_name(name)
    x = as_rows(x)
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(MAX_BLOCK, power_of_2(size))
        gated_activation_kernel[(num_tokens, -(-size // block))](
            x, out, x.stride(0), SIZE=size, ACTIVATION=function, BLOCK=block, num_warps=4, **launch_options(x.device)
        )
    return out


@triton.jit
def gated_activation_kernel(
    x_ptr,
    out_ptr,
    x_stride_row,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (num_tokens, ceil(SIZE / BLOCK)): computes a part of one row in fp32, rounded once. Moves 3 SIZE elements a
    row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = load_gate_and_up(x_ptr + row * x_stride_row, offs, SIZE)
    result = activate(gate, ACTIVATION) * up
    tl.store(out_ptr + row * SIZE + offs, result.to(out_ptr.dtype.element_ty), mask=offs < SIZE)


@triton.jit
def load_gate_and_up(row_ptr, offs, SIZE: tl.constexpr):
    """Columns `offs` of both halves of a row [2 * SIZE] in fp32, 0 from SIZE on."""
    mask = offs < SIZE
    gate = tl.load(row_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply an activation to fp32 x, by its first name in ACTIVATIONS."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2u
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2", "an activation without a kernel")
        positive = tl.maximum(x, 0.0)
        return positive if ACTIVATION == "relu" else positive * positive


def gated_activation_reference(x: Tensor, name: str) -> Tensor:
    """gated_activation in fp32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    return (_activation(name)(gate) * up).to(x.dtype)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields every function once, and the dtypes."""
    names = sorted(set(ACTIVATIONS) - set(_SAME_AS))
    for dtype, name in [("bf16", name) for name in names] + [("fp16", "silu"), ("fp32", "gelu")]:
        yield AotConfiguration(
            gated_activation_kernel, f"{name} 14336", dtype,
            {"SIZE": 14336, "ACTIVATION": name, "BLOCK": MAX_BLOCK} | pdl_constants(capability), num_warps=4,
            multiples_of_16=("x_stride_row",), quick=(dtype, name) == ("bf16", "silu"),
        )  # fmt: skip
