"""FP8 checkpoints (E4M3): quant_method "fp8" as DeepSeek, Qwen and transformers write it, and "fbgemm_fp8".

A matrix is stored as `weight` float8_e4m3fn [out, in] and its scales: `weight_scale_inv`, one for each block of
weight_block_size or one for the matrix; or `weight_scale`, one for the matrix or one for each row. value = code *
scale. Scales of activations are read and not used: activations stay in the dtype of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.layouts import (
    EXPONENT_DTYPES,
    PLAIN_PARAMETERS,
    SCALE_DTYPES,
    block_scales,
    decode_scales,
    names_module,
    read_patterns,
    scale_blocks,
    spread_scale,
    stored_bytes,
)
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight

SCALES = (".weight_scale_inv", ".weight_scale")
ACTIVATION_SCALES = (".activation_scale", ".input_scale", ".output_scale", ".input_scale_ub")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """See WeightFormat."""

    name: str
    block: tuple[int, int] | None  # rows and columns that share a scale; None: a scale for the matrix or for each row
    skipped: tuple[str, ...]
    reads_plain: bool = False

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        if matrix.parameter in PLAIN_PARAMETERS or names_module(self.skipped, matrix.module):
            return None
        if len(matrix.shape) == 3:
            return self._all_experts(*matrix.shape)
        weight = {".weight": Stored(matrix.shape, ("F8_E4M3",))}
        unused = {name: Stored(None, SCALE_DTYPES, optional=True) for name in ACTIVATION_SCALES}
        if self.block is None:
            return weight | unused | {name: Stored(None, SCALE_DTYPES, optional=True) for name in SCALES}
        shape = scale_blocks(matrix.shape, self.block)
        return weight | unused | {".weight_scale_inv": Stored(shape, (*SCALE_DTYPES, *EXPONENT_DTYPES))}

    def _all_experts(self, experts: int, rows: int, columns: int) -> Mapping[str, Stored] | None:
        """Llama 4 has one tensor for all experts of a layer: codes [experts, in, out] and scales [experts, 1, out]."""
        if self.name != "fbgemm_fp8":
            return None
        codes = Stored((experts, columns, rows), ("F8_E4M3",))
        return {"": codes, "_scale": Stored((experts, 1, rows), SCALE_DTYPES)}

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        if len(matrix.shape) == 3:
            scales = tensors["_scale"].float().mT.contiguous()
            return QuantizedWeight(tensors[""].mT.contiguous(), scales, matrix.shape[-1])
        scale = next((tensors[name] for name in SCALES if name in tensors), None)
        if scale is None:
            raise ModelError(f"the checkpoint lacks {matrix.module + SCALES[0]!r}, the scale of {matrix.module!r}.")
        return fp8_weight(matrix, tensors[".weight"], scale, self.block)

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        return stored_bytes(matrix.shape, 8, 0 if self.block is None else self.block[1], 4)


def fp8_weight(matrix: Matrix, codes: Tensor, scale: Tensor, block: tuple[int, int] | None) -> QuantizedWeight:
    """E4M3 codes [out, in] with a scale for each block, each row or the matrix, as fp32 scales of groups of columns.

    ModelError names the tensor if the codes hold a NaN or if the number of scales fits none of these.
    """
    if bool((codes.view(torch.uint8) & 127 == 127).any()):
        raise ModelError(f"tensor {matrix.module + '.weight'!r} holds NaN: the checkpoint is damaged.")
    scales = decode_scales(scale).float()
    if block is not None:
        return QuantizedWeight(codes, *block_scales(scales, matrix.shape, block))
    if scales.numel() not in (1, matrix.shape[0]):
        raise ModelError(
            f"the scale of {matrix.module!r} has shape {list(scale.shape)}; wanted is one number, or one for each of "
            f"the {matrix.shape[0]} rows."
        )
    return QuantizedWeight(codes, spread_scale(scales, matrix.shape[0]), matrix.shape[-1])


def read(reader: ConfigReader) -> Fp8Format:
    """The format of a `quantization_config` with quant_method "fp8" or "fbgemm_fp8"."""
    method = reader.choice("quant_method", "fp8", ("fp8", "fbgemm_fp8"))
    reader.choice("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))  # the second is MiniMax-M2's name
    reader.choice("activation_scheme", "dynamic", ("dynamic", "static"))
    reader.choice("scale_fmt", "float", ("float", "ue8m0"))
    skipped = read_patterns(reader, "modules_to_not_convert") + read_patterns(reader, "ignored_layers")
    return Fp8Format(method, read_block(reader, "weight_block_size"), skipped)


def read_block(reader: ConfigReader, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block of scales; None if the field is absent."""
    block = reader.raw.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in block):
        raise ModelError(f"{reader.where}: {name} must be a list of two sizes, not {short(block)}.")
    return block[0], block[1]
