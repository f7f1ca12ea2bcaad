"""`--quantization int8|int4|fp8|w8a8`: the matrices of a plain checkpoint are quantised as they are read.

int8 and fp8 have a scale per row; w8a8 is int8 whose inputs are rounded to int8, too, in each call. int4 has one per
group of 32 columns, found by a small search for the least squared error (as in llama.cpp's Q4_0, whose groups have the
same size and codes). Rounding is to nearest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.models.formats.layouts import stored_bytes
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import INT4, QuantizedWeight, concatenate_rows, pack_4bit

GROUP_SIZE = 32  # columns that share a scale of int4
LEVELS = (8.0, 7.75, 7.5, 7.25, 7.0)  # the search: the largest number of a group becomes -level
PLAIN = ("router", "project_in", "project_out")  # parameters that stay plain: small, and many outputs depend on them
MAX_E4M3 = 448.0
BLOCK_ELEMENTS = 1 << 24  # weights that are quantised at a time, which bounds the scratch memory
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class OnLoadFormat:
    """See WeightFormat. method: "int8", "int4", "fp8" or "w8a8"."""

    method: str
    reads_plain: bool = True

    @property
    def int8_inputs(self) -> bool:
        """See InputFormat."""
        return self.method == "w8a8"

    @property
    def name(self) -> str:
        return f"--quantization {self.method}"

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat: every matrix but those of PLAIN, and those whose columns do not come in pairs."""
        plain = any(part in matrix.parameter for part in PLAIN) or matrix.shape[-1] % 2
        return None if plain else {}

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        weight = tensors[".weight"]
        rows, columns = weight.reshape(-1, weight.shape[-1]), weight.shape[-1]  # experts one after the other
        block = max(1, BLOCK_ELEMENTS // columns)
        made = concatenate_rows([self._rows(part.float(), _group_size(matrix)) for part in torch.split(rows, block)])
        assert made is not None
        shape = weight.shape[:-1]
        return replace(made, codes=made.codes.view(*shape, -1), scales=made.scales.view(*shape, -1))

    def _rows(self, weight: Tensor, group_size: int) -> QuantizedWeight:
        if self.method == "int4":
            return quantize_int4(weight, group_size)
        scales = weight.abs().amax(-1, keepdim=True).clamp_min(TINY)
        if self.method in ("int8", "w8a8"):
            scales /= 127
            codes = (weight / scales).round().to(torch.int8)
            return QuantizedWeight(codes, scales, weight.shape[-1], int8_inputs=self.method == "w8a8")
        scales /= MAX_E4M3
        return QuantizedWeight((weight / scales).to(torch.float8_e4m3fn), scales, weight.shape[-1])

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        if self.method == "int4":
            return stored_bytes(matrix.shape, 4, _group_size(matrix), 2)
        return stored_bytes(matrix.shape, 8, 0, 4)


def quantize_int4(weight: Tensor, group_size: int) -> QuantizedWeight:
    """fp32 [..., out, in] -> 4-bit codes with fp16 scales per group_size columns.

    The number of a group with the largest magnitude becomes code -8 at best, as there is no code 8. A group takes the
    scale with the least squared error out of a few around that.
    """
    groups = weight.view(*weight.shape[:-1], -1, group_size)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best_scale, best_error = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for level in LEVELS:
        scale = (largest / -level).half().float()
        codes = _codes(groups, scale)
        error = (groups - codes * scale).square_().sum(-1, keepdim=True)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    codes = (_codes(groups, best_scale) + 8).to(torch.uint8).flatten(-2)
    return QuantizedWeight(pack_4bit(codes), best_scale.squeeze(-1).half(), group_size, codebook=INT4)


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)


def _group_size(matrix: Matrix) -> int:
    """GROUP_SIZE, or the largest smaller power of two that divides the columns."""
    size = GROUP_SIZE
    while matrix.shape[-1] % size:
        size //= 2
    return size
