"""Activations of a CPU's MLPs: plain, gated, and xIELU; and the tanh of soft caps."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.dots import exp2, inverse
from kernels.cpu.elementwise.work import CHUNK, DTYPES
from kernels.cpu.parallel import ParallelKernel, empty, jit, next_item, parallel_kernel
from kernels.cpu.simd import WIDTH, advance, choose, fma, load, mul, splat, store, sub

GELU_TANH, GELU, QUICK_GELU, RELU, RELU2, CLAMPED = range(1, 7)
# The functions of `activated`, and those of `gated`.
FUNCTIONS = {"silu": 0, "gelu_tanh": GELU_TANH, "gelu": GELU, "quick_gelu": QUICK_GELU, "relu": RELU, "relu2": RELU2}
GATES = FUNCTIONS | {"clamped": CLAMPED}
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
QUICK = 1.702
LOG2_E = 1 / math.log(2)
# The complementary error function: Abramowitz and Stegun 1964, formula 7.1.26, off by 1.5e-7 at most.
ERFC_STEP = 0.3275911
ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
# exp(x) - 1 - x = x^2 (1/2 + x (1/6 + ...)) near 0, where the difference of floats has no digits left.
EXP_REST = (1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)
EXP_REST_FROM = -0.5
# tanh(x) = x (1 + x^2 (-1/3 + ...)) near 0, where the quotient of exponentials has no digits left.
TANH_SERIES = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)
TANH_SERIES_BELOW = 0.3
TANH_IS_ONE = 20.0


class Gate(NamedTuple):
    """A function of `gated`: a name of GATES, and the numbers of "clamped"."""

    function: str
    limit: float = 0.0
    slope: float = 0.0

    @property
    def arguments(self) -> tuple[int, float, float]:
        """function, limit and slope as kernels take them."""
        return GATES[self.function], self.limit, self.slope


@jit
def _exp(x, rough):
    return exp2(mul(x, splat(np.float32(LOG2_E)))) if rough else simd.exp(x)


@jit
def _inverse(x, rough):
    return inverse(x) if rough else simd.div(splat(np.float32(1)), x)


@jit
def _sigmoid(x, rough):
    zero, one, limit = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(-88))
    bounded = simd.larger(limit, x)  # exp(88) is the largest that fits fp32
    return _inverse(simd.add(one, _exp(sub(zero, bounded), rough)), rough)


@jit
def _normal_cdf(x, rough):
    """The share of a normal distribution below x: erfc(-x / sqrt(2)) / 2, with few of its digits lost far below 0."""
    zero, one, half = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(0.5))
    z = mul(simd.maximum(x, sub(zero, x)), splat(np.float32(math.sqrt(0.5))))
    t = _inverse(fma(z, splat(np.float32(ERFC_STEP)), one), rough)
    series = splat(np.float32(ERFC[0]))
    for coefficient in ERFC[1:]:
        series = fma(series, t, splat(np.float32(coefficient)))
    tail = mul(mul(mul(series, t), _exp(sub(zero, mul(z, z)), rough)), half)
    return choose(x, zero, sub(one, tail), tail)


@jit
def tanh(x):
    """The hyperbolic tangent of a vector, off by 1e-7 at most."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    size = simd.maximum(x, sub(zero, x))
    square = mul(size, size)
    near = splat(np.float32(TANH_SERIES[0]))
    for coefficient in TANH_SERIES[1:]:
        near = fma(near, square, splat(np.float32(coefficient)))
    bounded = choose(size, splat(np.float32(TANH_IS_ONE)), splat(np.float32(TANH_IS_ONE)), size)
    power = simd.exp(simd.add(bounded, bounded))
    far = sub(one, simd.div(splat(np.float32(2)), simd.add(power, one)))
    result = choose(size, splat(np.float32(TANH_SERIES_BELOW)), far, mul(size, near))
    return simd.keep_nan(choose(x, zero, result, sub(zero, result)), x)


@jit
def activated(x, function, rough):
    """A function of FUNCTIONS, of a vector. GELU by tanh is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) (Hendrycks &
    Gimpel 2016, section 2). rough: the result is rounded to bf16, off by 2e-3, and may be off by 2e-4 before."""
    if function >= RELU:
        positive = simd.larger(splat(np.float32(0)), x)
        return mul(positive, positive) if function == RELU2 else positive
    if function == GELU:
        return mul(x, _normal_cdf(x, rough))
    z = x
    if function == GELU_TANH:
        linear, cubic = splat(np.float32(GELU_LINEAR)), splat(np.float32(GELU_LINEAR * 0.044715))
        z = mul(x, fma(cubic, mul(x, x), linear))
    elif function == QUICK_GELU:
        z = mul(x, splat(np.float32(QUICK)))
    return mul(x, _sigmoid(z, rough))


@jit
def gated(gate, up, function, limit, slope, rough):
    """activated(gate) * up of vectors. CLAMPED: g * sigmoid(slope * g) * (u + 1), where g = min(gate, limit) and u = up
    limited to -limit .. limit (gpt-oss)."""
    if function == CLAMPED:
        most, least, one = splat(limit), splat(-limit), splat(np.float32(1))
        gate, up = simd.smaller(most, gate), simd.larger(least, simd.smaller(most, up))
        return mul(mul(gate, _sigmoid(mul(gate, splat(slope)), rough)), simd.add(up, one))
    return mul(activated(gate, function, rough), up)


@jit
def _gate_items(args, x, out):
    rows, size, stride, per_item, function = args[4], args[5], args[6], args[7], args[8]
    limit, slope = np.float32(simd.as_float(args[9])), np.float32(simd.as_float(args[10]))
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            gate, up, target = advance(x, row * stride), advance(x, row * stride + size), advance(out, row * size)
            for i in range(0, size, WIDTH):
                store(target, i, gated(load(gate, i), load(up, i), function, limit, slope, simd.is_bf16(out)))
        item = next_item(args)


@parallel_kernel("7q2d")
def _gate_bf16(args):
    _gate_items(args, simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]))


@parallel_kernel("7q2d")
def _gate_f32(args):
    _gate_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]))


@jit
def _activate_items(args, x, out):
    rows, size, stride, per_item, function = args[4], args[5], args[6], args[7], args[8]
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            source, target = advance(x, row * stride), advance(out, row * size)
            for i in range(0, size, WIDTH):
                store(target, i, activated(load(source, i), function, simd.is_bf16(out)))
        item = next_item(args)


@parallel_kernel("7q")
def _activate_bf16(args):
    _activate_items(args, simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]))


@parallel_kernel("7q")
def _activate_f32(args):
    _activate_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]))


@jit
def _xielu(x, positive, negative, beta):
    """See kernels.elementwise.xielu."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    square = mul(x, x)
    series = splat(np.float32(EXP_REST[0]))
    for coefficient in EXP_REST[1:]:
        series = fma(series, x, splat(np.float32(coefficient)))
    far = sub(sub(simd.exp(choose(x, zero, zero, x)), one), x)
    below = mul(negative, choose(x, splat(np.float32(EXP_REST_FROM)), mul(square, series), far))
    return fma(beta, x, choose(x, zero, mul(positive, square), below))


@jit
def _xielu_items(args, x, out):
    rows, size, stride, per_item = args[4], args[5], args[6], args[7]
    positive, negative = splat(np.float32(simd.as_float(args[8]))), splat(np.float32(simd.as_float(args[9])))
    beta = splat(np.float32(simd.as_float(args[10])))
    item = next_item(args)
    while item < args[1]:
        for row in range(item * per_item, min(rows, (item + 1) * per_item)):
            source, target = advance(x, row * stride), advance(out, row * size)
            for i in range(0, size, WIDTH):
                store(target, i, _xielu(load(source, i), positive, negative, beta))
        item = next_item(args)


@parallel_kernel("6q3d")
def _xielu_bf16(args):
    _xielu_items(args, simd.pointer_bf16(args[2]), simd.pointer_bf16(args[3]))


@parallel_kernel("6q3d")
def _xielu_f32(args):
    _xielu_items(args, simd.pointer_f32(args[2]), simd.pointer_f32(args[3]))


def supports_rows(x: Tensor, halves: int = 1) -> bool:
    """True for [rows, n] with a dense last axis, whose `halves` parts are whole vectors."""
    return x.dtype in DTYPES and x.ndim == 2 and x.stride(1) == 1 and x.shape[1] % (halves * WIDTH) == 0


def supports_gate(x: Tensor, function: str) -> bool:
    """True for [rows, 2n] with rows of whole vectors, and a function of FUNCTIONS."""
    return function in FUNCTIONS and supports_rows(x, 2)


def supports_activation(x: Tensor, function: str) -> bool:
    """True for [rows, n] with rows of whole vectors, and a function of FUNCTIONS."""
    return function in FUNCTIONS and supports_rows(x)


def gate(x: Tensor, function: Gate) -> Tensor:
    """act(gate) * up, see kernels.elementwise.activation.gated_activation."""
    kernel = _gate_bf16 if x.dtype == torch.bfloat16 else _gate_f32
    return _run(kernel, x, x.shape[1] // 2, *function.arguments)


def activate(x: Tensor, function: str) -> Tensor:
    """See kernels.elementwise.activation.activation."""
    kernel = _activate_bf16 if x.dtype == torch.bfloat16 else _activate_f32
    return _run(kernel, x, x.shape[1], FUNCTIONS[function])


def xielu(x: Tensor, positive: float, negative: float, beta: float) -> Tensor:
    """See kernels.elementwise.xielu."""
    kernel = _xielu_bf16 if x.dtype == torch.bfloat16 else _xielu_f32
    return _run(kernel, x, x.shape[1], positive, negative, beta)


def _run(kernel: ParallelKernel, x: Tensor, size: int, *parameters: float) -> Tensor:
    """Run a kernel over rows [rows, any] -> [rows, size]."""
    out, per_item = empty((x.shape[0], size), x.dtype), max(1, CHUNK // size)
    kernel(
        -(-x.shape[0] // per_item), x.data_ptr(), out.data_ptr(), x.shape[0], size, x.stride(0), per_item, *parameters
    )
    return out
