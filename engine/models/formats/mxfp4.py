"""MXFP4 checkpoints of gpt-oss: experts in E2M1 with an exponent for 32 columns (OCP Microscaling Formats 1.0).

The matrices [experts, out, in] of a layer are stored as `_blocks` uint8 [experts, out, in / 32, 16], the even column in
the low half of a byte, and `_scales` uint8 [experts, out, in / 32] with the meaning 2 ** (byte - 127).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.models.formats.layouts import FP4, decode_scales, names_module, read_patterns, stored_bytes
from engine.models.reader import ConfigReader
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight

GROUP = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """See WeightFormat."""

    skipped: tuple[str, ...]
    name: str = "mxfp4"
    reads_plain: bool = False

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        if len(matrix.shape) != 3 or names_module(self.skipped, matrix.module):
            return None
        groups = (*matrix.shape[:-1], matrix.shape[-1] // GROUP)
        return {"_blocks": Stored((*groups, GROUP // 2), ("U8",)), "_scales": Stored(groups, ("U8",))}

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        codes = tensors["_blocks"].flatten(-2).contiguous()
        return QuantizedWeight(codes, decode_scales(tensors["_scales"]), GROUP, codebook=FP4)

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        return stored_bytes(matrix.shape, 4, GROUP, 2)


def read(reader: ConfigReader) -> Mxfp4Format:
    """The format of a `quantization_config` with quant_method "mxfp4"."""
    return Mxfp4Format(read_patterns(reader, "modules_to_not_convert"))
