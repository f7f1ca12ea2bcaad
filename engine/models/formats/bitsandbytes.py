"""Checkpoints of bitsandbytes: nf4 and fp4 with absmax per block (Dettmers et al. 2023, QLoRA), and int8 per row.

4 bits: `weight` uint8 [out * in / 2, 1] of codes in the order of the matrix, the even column in the high half of a
byte; `weight.absmax`, one number per block of the flattened matrix; `weight.quant_map`, the meanings of the codes. With
double quantisation absmax is uint8 [blocks], and stands for nested_quant_map[absmax] * nested_absmax + nested_offset.
8 bits: `weight` int8 [out, in] and `SCB` fp32 [out]; value = weight * SCB / 127. Outlier columns, which bitsandbytes
multiplies in fp16 by the same weights, need no step of their own: no activation is quantised here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd, prod

from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.layouts import PLAIN_PARAMETERS, names_module, read_patterns, spread_scale, stored_bytes
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight

BLOCK = 64  # weights that share an absmax, by default
KINDS = ("nf4", "fp4")


@dataclass(frozen=True, slots=True)
class BitsAndBytesFormat:
    """See WeightFormat."""

    kind: str  # "nf4", "fp4" or "int8"
    skipped: tuple[str, ...]
    name: str = "bitsandbytes"
    reads_plain: bool = False

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        plain = matrix.parameter in PLAIN_PARAMETERS
        if plain or len(matrix.shape) != 2 or names_module(self.skipped, matrix.module):
            return None
        if self.kind == "int8":
            return {
                ".weight": Stored(matrix.shape, ("I8",)),
                ".SCB": Stored(matrix.shape[:1], ("F32",)),
                ".weight_format": Stored(None, ("U8",), optional=True),
            }
        return {
            ".weight": Stored((ceil(prod(matrix.shape) / 2), 1), ("U8",)),
            ".weight.absmax": Stored(None, ("U8", "F32")),
            ".weight.quant_map": Stored((16,), ("F32",)),
            ".weight.nested_absmax": Stored(None, ("F32",), optional=True),
            ".weight.nested_quant_map": Stored((256,), ("F32",), optional=True),
            f".weight.quant_state.bitsandbytes__{self.kind}": Stored(None, ("U8",)),
        }

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        rows, columns = matrix.shape
        if self.kind == "int8":
            if bool((tensors.get(".weight_format", tensors[".SCB"].new_zeros(1)) != 0).any()):
                raise ModelError(f"{matrix.module + '.weight_format'!r} is not 0: only the layout 'row' is served.")
            return QuantizedWeight(tensors[".weight"], spread_scale(tensors[".SCB"] / 127, rows), columns)
        state = self._state(matrix, tensors)
        absmax = tensors[".weight.absmax"]
        if absmax.itemsize == 1:
            absmax = _nested_absmax(matrix, absmax, tensors, state)
        block = state.size("blocksize", BLOCK)
        if columns % 2 or absmax.numel() != ceil(rows * columns / block):
            raise ModelError(
                f"{matrix.module + '.weight.absmax'!r} has {absmax.numel()} numbers; wanted is one for each {block} "
                f"of {rows} x {columns} weights, with an even number of columns."
            )
        group = gcd(block, columns)  # blocks of the flattened matrix may cross rows
        scales = absmax.repeat_interleave(block // group)[: rows * columns // group].view(rows, -1).contiguous()
        octets = tensors[".weight"].view(rows, -1)
        codes = (octets << 4) | (octets >> 4)
        return QuantizedWeight(codes, scales, group, codebook=tuple(tensors[".weight.quant_map"].tolist()))

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        return stored_bytes(matrix.shape, 8, 0, 4) if self.kind == "int8" else stored_bytes(matrix.shape, 4, BLOCK, 4)

    def _state(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> ConfigReader:
        """The fields of quant_state: JSON in the bytes of a tensor."""
        name = f".weight.quant_state.bitsandbytes__{self.kind}"
        where = f"tensor {matrix.module + name!r}"
        try:
            state = json.loads(bytes(tensors[name].tolist()))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{where} is not JSON: {error}") from error
        if not isinstance(state, dict) or state.get("shape") != list(matrix.shape):
            raise ModelError(f"{where}: {short(state)} does not have the shape {list(matrix.shape)}.")
        return ConfigReader(state, where)


def _nested_absmax(matrix: Matrix, codes: Tensor, tensors: Mapping[str, Tensor], state: ConfigReader) -> Tensor:
    table, outer = tensors.get(".weight.nested_quant_map"), tensors.get(".weight.nested_absmax")
    if table is None or outer is None:
        raise ModelError(f"the checkpoint lacks {matrix.module + '.weight.nested_absmax'!r} or nested_quant_map.")
    block = state.size("nested_blocksize", 256)
    if outer.numel() != ceil(codes.numel() / block):
        raise ModelError(f"{matrix.module + '.weight.nested_absmax'!r} has {outer.numel()} numbers, too few or many.")
    spread = outer.repeat_interleave(block)[: codes.numel()]
    return table[codes.long()] * spread + state.number("nested_offset", 0.0, above=-1e12)


def read(reader: ConfigReader) -> BitsAndBytesFormat:
    """The format of a `quantization_config` with quant_method "bitsandbytes"."""
    four, eight = (
        reader.flag(name, False) or reader.flag(f"_{name}", False) for name in ("load_in_4bit", "load_in_8bit")
    )
    if four == eight:
        raise ModelError(f"{reader.where}: load_in_4bit or load_in_8bit must be true, and not both.")
    reader.require("llm_int8_has_fp16_weight", False)
    skipped = read_patterns(reader, "llm_int8_skip_modules")
    if eight:
        return BitsAndBytesFormat("int8", skipped)
    reader.require("bnb_4bit_quant_storage", "uint8")
    return BitsAndBytesFormat(reader.choice("bnb_4bit_quant_type", "fp4", KINDS), skipped)
