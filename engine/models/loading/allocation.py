"""Allocates the parameters of a model, and counts their bytes in the form in which they are held."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import family_of
from engine.models.loading.pieces import checkpoint_pieces, matrix_of


def allocate(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Uninitialised parameters of these shapes. ModelError if the device has no room."""
    try:
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    except (RuntimeError, MemoryError) as error:
        gib = weight_bytes(config, dtype.itemsize) / 2**30
        raise ModelError(f"no room on {device} for {gib:.1f} GiB of weights in {dtype}: {error}") from error


def weight_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes of the weights, quantised or not. A device that packs a tied lm_head separately holds more."""
    total = config.weight_bytes(dtype_bytes)
    if config.quantization is None:
        return total
    for name, piece in checkpoint_pieces(config, family_of(config)).items():
        matrix = matrix_of(name, piece)
        if matrix is not None and config.quantization.tensors(matrix) is not None:
            total += config.quantization.num_bytes(matrix, dtype_bytes) - prod(matrix.shape) * dtype_bytes
    return total
