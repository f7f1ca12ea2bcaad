"""Checkpoints of NVIDIA's ModelOpt, quant_algo NVFP4 and FP8.

NVFP4: `weight` uint8 [out, in / 2] of E2M1 codes, the even column in the low half, `weight_scale` float8_e4m3fn
[out, in / 16] and `weight_scale_2`, one number; value = code * weight_scale * weight_scale_2. FP8: `weight`
float8_e4m3fn and `weight_scale`, one number or one for each row. Scales of activations are read and not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from re import escape
from typing import Any

from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.fp8 import fp8_weight
from engine.models.formats.layouts import FP4, PLAIN_PARAMETERS, SCALE_DTYPES, names_module, read_names, stored_bytes
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight

GROUP = 16
ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
UNUSED = (".input_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class ModelOptFormat:
    """See WeightFormat."""

    nvfp4: bool
    skipped: tuple[str, ...]
    name: str = "modelopt"
    reads_plain: bool = False

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        plain = matrix.parameter in PLAIN_PARAMETERS or names_module(self.skipped, matrix.module)
        if plain or len(matrix.shape) != 2:
            return None
        unused = {name: Stored(None, SCALE_DTYPES, optional=True) for name in UNUSED}
        if not self.nvfp4:
            scale = Stored(None, SCALE_DTYPES)
            return unused | {".weight": Stored(matrix.shape, ("F8_E4M3",)), ".weight_scale": scale}
        rows, columns = matrix.shape
        return unused | {
            ".weight": Stored((rows, columns // 2), ("U8",)),
            ".weight_scale": Stored((rows, columns // GROUP), ("F8_E4M3",)),
            ".weight_scale_2": Stored(None, SCALE_DTYPES),
        }

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        if not self.nvfp4:
            return fp8_weight(matrix, tensors[".weight"], tensors[".weight_scale"], None)
        scale = tensors[".weight_scale_2"].float()
        return nvfp4_weight(tensors[".weight"], tensors[".weight_scale"], scale)

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        if self.nvfp4:
            return stored_bytes(matrix.shape, 4, GROUP, 4)
        return stored_bytes(matrix.shape, 8, 0, 4)


def nvfp4_weight(codes: Tensor, scales: Tensor, scale: Tensor) -> QuantizedWeight:
    """NVFP4 codes uint8 [out, in / 2], E4M3 scales [out, in / 16] and the fp32 scale of the matrix, one number."""
    return QuantizedWeight(codes.contiguous(), scales.float() * scale.reshape(()), GROUP, codebook=FP4)


def read(reader: ConfigReader) -> ModelOptFormat:
    """The format of a `quantization_config` with quant_method "modelopt"."""
    inner: Any = reader.raw.get("quantization")  # the layout of hf_quant_config.json
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise ModelError(f"{reader.where}: quantization must be an object, not {short(inner)}.")
        reader = ConfigReader(inner, f"{reader.where}: quantization")
    algorithm = reader.choice("quant_algo", "none", ALGORITHMS)
    if algorithm == "NVFP4":
        reader.require("group_size", GROUP)
    patterns = _read_globs(reader, "ignore") + _read_globs(reader, "exclude_modules")
    return ModelOptFormat(algorithm == "NVFP4", patterns)


def _read_globs(reader: ConfigReader, name: str) -> tuple[str, ...]:
    """A list of names in which * stands for any characters, as regular expressions."""
    return tuple(escape(entry).replace(r"\*", ".*") for entry in read_names(reader, name))
