"""dummy_weights: random weights in place of a checkpoint, for load_format "dummy"."""

from math import sqrt

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.loading.allocation import allocate
from engine.models.loading.pieces import is_matrix
from engine.models.weight_format import Matrix
from kernels.quantized.weight import Weight

DUMMY_POOL = 1_048_573  # a prime: rows of a matrix filled from the pool do not repeat


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Weight]:
    """Uniform weights of variance 1 / in_features, norms 1, biases 0. A seed gives the same weights on every device.
    ModelError for the format of a quantised checkpoint, whose tensors cannot be drawn at random.

    One pool of random numbers is repeated over all matrices, because copying is much faster than drawing.
    """
    quantization = config.quantization
    if quantization is not None and not quantization.reads_plain:
        raise ModelError(
            f"load_format dummy draws plain weights, config.json says {quantization.name}: remove "
            "quantization_config there, or load the checkpoint's own weights."
        )
    pool = torch.rand(DUMMY_POOL, generator=torch.Generator().manual_seed(seed)).mul_(2).sub_(1).to(device)
    weights, offset = allocate(config.parameter_shapes(), dtype, device, config.float32_parameters()), 0
    for name, weight in weights.items():
        if weight.dim() == 1 or "norm." in name:
            weight.fill_(1 - config.norm_weight_offset if name.endswith("weight") else 0)
            continue
        _fill(weight.view(-1), pool * sqrt(3 / weight.shape[-1]), offset)
        offset = (offset + weight.numel()) % DUMMY_POOL
    return {name: _quantized(config, name, weight) for name, weight in weights.items()}


def _quantized(config: ModelConfig, name: str, weight: Tensor) -> Weight:
    """The weight as `--quantization` would load it; a format of quantised checkpoints has plain dummy weights."""
    quantization = config.quantization
    if quantization is None or not quantization.reads_plain or weight.dim() < 2 or not is_matrix(name):
        return weight
    matrix = Matrix(name, name, tuple(weight.shape))
    return weight if quantization.tensors(matrix) is None else quantization.quantized(matrix, {".weight": weight})


def _fill(flat: Tensor, pool: Tensor, offset: int) -> None:
    start = 0
    while start < len(flat):
        part = pool[offset : offset + len(flat) - start]
        flat[start : start + len(part)] = part
        start, offset = start + len(part), 0
