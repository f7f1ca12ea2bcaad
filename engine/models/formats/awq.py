"""AWQ checkpoints of 4 bits (Lin et al. 2023) in AutoAWQ's layout "gemm".

A matrix [out, in] is stored as `qweight` int32 [in, out / 8], `scales` [groups, out] and `qzeros` int32 [groups,
out / 8]. A word holds 8 columns of `out`; from its lowest bits on these are the columns in COLUMN_ORDER.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.layouts import (
    PLAIN_PARAMETERS,
    integer_weight,
    names_module,
    read_patterns,
    stored_bytes,
    unpack_words,
)
from engine.models.reader import ConfigReader
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight

COLUMN_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """See WeightFormat."""

    group_size: int  # columns; -1: all
    zero_point: bool
    skipped: tuple[str, ...]
    name: str = "awq"
    reads_plain: bool = False

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        if len(matrix.shape) != 2 or matrix.parameter in PLAIN_PARAMETERS or names_module(self.skipped, matrix.module):
            return None
        rows, columns = matrix.shape
        groups = ceil(columns / self._group(columns))
        return {
            ".qweight": Stored((columns, rows // 8), ("I32",)),
            ".qzeros": Stored((groups, rows // 8), ("I32",)),
            ".scales": Stored((groups, rows), ("F16", "BF16", "F32")),
        }

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        codes, zeros = (_in_order(unpack_words(tensors[name], 4)).T for name in (".qweight", ".qzeros"))
        scales, group = tensors[".scales"].T, self._group(matrix.shape[-1])
        return integer_weight(codes, 4, scales, group, zeros, symmetric=not self.zero_point)

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        scale_bytes = 4 if self.zero_point else 2
        return stored_bytes(matrix.shape, 4, self.group_size, scale_bytes, offsets=self.zero_point)

    def _group(self, columns: int) -> int:
        return self.group_size if 0 < self.group_size < columns else columns


def _in_order(codes: Tensor) -> Tensor:
    """Codes in the order of a word's bits -> in the order of the columns."""
    places = torch.tensor(COLUMN_ORDER).argsort()
    return codes.view(*codes.shape[:-1], -1, 8)[..., places].flatten(-2)


def read(reader: ConfigReader) -> AwqFormat:
    """The format of a `quantization_config` with quant_method "awq"."""
    bits = "bits" if reader.has("bits") else "w_bit"
    group_size = "group_size" if reader.has("group_size") else "q_group_size"
    reader.require(bits, 4)
    # transformers 5 calls the layout "format"; in older files the field is "version", and may be "GEMM".
    for field in ("version", "format"):
        if str(reader.raw.get(field) or "gemm").lower() != "gemm":
            reader.require(field, "gemm")
    if reader.raw.get("backend") == "llm-awq":
        raise ModelError(
            f"{reader.where}: backend 'llm-awq' has a layout that is not served; served is version 'gemm'."
        )
    reader.require("pack_dtype", "int32")
    return AwqFormat(
        reader.size(group_size, 128, low=-1),
        reader.flag("zero_point", True),
        read_patterns(reader, "modules_to_not_convert"),
    )
