"""Norm and activation that round their rows to 8 bits in the same kernel, beside the two kernels one after the
other."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_check.bench import Bench
from benchmarks.kernel_speed import Case, Shape
from kernels.elementwise.activation import gated_activation
from kernels.elementwise.quantized_rows import (
    QuantizedRows,
    gated_activation_quantized,
    quantize_rows,
    rms_norm_quantized,
)
from kernels.elementwise.rms_norm import rms_norm

TYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
Rounding = Callable[[Tensor], QuantizedRows]  # from the rows that a kernel may write over


def run(bench: Bench, shape: Shape, num_rows: int) -> None:
    """A case for each kernel. The bytes of both figures are those of the fused kernel, so that the shares compare."""
    for to in TYPES:
        for name, measure in (("rms_norm + residual", measure_norm), ("gated_activation silu", measure_activation)):
            run_one = partial(measure, bench, shape, num_rows, to)
            bench.recorder.case(f"{name} to {to} {num_rows} rows", run_one, seconds=30)


def measure_norm(bench: Bench, shape: Shape, num_rows: int, to: str) -> None:
    x, residual, weight = (torch.randn(size, device=bench.device).to(shape.dtype)
                           for size in ((num_rows, shape.hidden_size),) * 2 + ((shape.hidden_size,),))  # fmt: skip

    def fused(total: Tensor) -> QuantizedRows:
        return rms_norm_quantized(x, weight, 1e-5, TYPES[to], total)[0]

    def separate(total: Tensor) -> QuantizedRows:
        return quantize_rows(rms_norm(x, weight, 1e-5, total)[0], TYPES[to])

    _measure(bench, f"rms_norm + residual to {to}", fused, separate, residual, (3 * x.itemsize + 1) * x.numel())


def measure_activation(bench: Bench, shape: Shape, num_rows: int, to: str) -> None:
    gate_up = torch.randn(num_rows, 2 * shape.intermediate_size, device=bench.device).to(shape.dtype)

    def separate(rows: Tensor) -> QuantizedRows:
        return quantize_rows(gated_activation(rows, "silu"), TYPES[to])

    num_bytes = gate_up.numel() * gate_up.itemsize + gate_up.numel() // 2
    fused = partial(gated_activation_quantized, name="silu", to=TYPES[to])
    _measure(bench, f"gated_activation silu to {to}", fused, separate, gate_up, num_bytes)


def _measure(bench: Bench, name: str, fused: Rounding, separate: Rounding, rows: Tensor, num_bytes: int) -> None:
    compare(fused(rows.clone()), separate(rows.clone()))
    for by, call in (("ours", fused), ("separate", separate)):
        label = name + ", two kernels" * (by == "separate")
        bench.time(Case(label, f"{len(rows)} rows", partial(call, rows), num_bytes), by=by)


def compare(fused: QuantizedRows, separate: QuantizedRows) -> None:
    """AssertionError where more than two codes and one in a thousand differ: a norm's last bit may, on a CPU."""
    differ = fused.codes.view(torch.uint8) != separate.codes.view(torch.uint8)
    if int(differ.sum()) > max(2, differ.numel() // 1000):
        raise AssertionError("the fused kernel's codes differ from those of the separate kernels")
