"""Allocates the parameters of a model that are held as plain tensors."""

from collections.abc import Collection, Mapping
from math import prod

import torch
from torch import Tensor

from engine.errors import ModelError


def allocate(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, float32: Collection[str] = ()
) -> dict[str, Tensor]:
    """Uninitialised parameters of these shapes, those named in `float32` in fp32. ModelError if the device has no
    room."""
    try:
        return {
            name: torch.empty(shape, dtype=torch.float32 if name in float32 else dtype, device=device)
            for name, shape in shapes.items()
        }
    except (RuntimeError, MemoryError) as error:
        gib = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize / 2**30
        raise ModelError(f"no room on {device} for {gib:.1f} GiB of weights in {dtype}: {error}") from error
