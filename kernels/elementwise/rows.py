"""Sums, products and choices of rows, and the limits of logits: compiled on a CPU, so that a recorded program can hold
them."""

from torch import Tensor

from kernels.dispatch import cpu_kernels


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b for two of [num_tokens, size]."""
    cpu = cpu_kernels() if a.device.type == "cpu" else None
    return cpu.rows.combine(a, b, False) if cpu and cpu.rows.supports_combine(a, b) else a + b


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a * b for two of [num_tokens, size]."""
    cpu = cpu_kernels() if a.device.type == "cpu" else None
    return cpu.rows.combine(a, b, True) if cpu and cpu.rows.supports_combine(a, b) else a * b


def gate_rows(x: Tensor, gates: Tensor) -> Tensor:
    """sigmoid(gates) * x for x [num_tokens, size] and a gate for each row, [num_tokens, 1]."""
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and cpu.rows.supports_gates(x, gates):
        return cpu.rows.gate(x, gates)  # type: ignore[no-any-return]
    return gates.sigmoid() * x


def take_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x.index_select(0, indices) for x [num_tokens, ...] and int64 indices, each below num_tokens."""
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and cpu.rows.supports_take_rows(x, indices):
        return cpu.rows.take_rows(x, indices)  # type: ignore[no-any-return]
    return x.index_select(0, indices)


def new_rows(x: Tensor) -> Tensor:
    """A tensor of x's shape for the rows of a linear layer, not initialised."""
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    return cpu.parallel.empty_rows(x.shape, x.dtype) if cpu else x.new_empty(x.shape)


def limit(x: Tensor, scale: float, cap: float) -> None:
    """x := cap * tanh(scale * x / cap), in place; scale * x with cap 0. Each operator rounds, as in transformers.

    Bits do not depend on the place of a number in x.
    """
    if scale == 1.0 and not cap:
        return
    cpu = cpu_kernels() if x.device.type == "cpu" else None
    if cpu and cpu.rows.supports_limit(x):
        cpu.rows.limit(x, scale, cap)
    else:
        limit_reference(x, scale, cap)


def limit_reference(x: Tensor, scale: float, cap: float) -> None:
    """limit in torch."""
    if scale != 1.0:
        x *= scale
    if cap:
        x.div_(cap).tanh_().mul_(cap)
