"""Allocates the parameters of a model that are held as plain tensors."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from engine.errors import ModelError


def allocate(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised parameters of these shapes. ModelError if the device has no room."""
    try:
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    except (RuntimeError, MemoryError) as error:
        gib = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize / 2**30
        raise ModelError(f"no room on {device} for {gib:.1f} GiB of weights in {dtype}: {error}") from error
