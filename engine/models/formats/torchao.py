"""Checkpoints of torchao as transformers 5 writes them: safetensors with the inner tensors of each weight.

`_weight_qdata`, `_weight_scale` and `_weight_zero_point` stand in place of `weight`. quant_type names the
configuration that quantised the checkpoint, and with it their layout:
- int8 (Int8Tensor) and int4 in bytes (IntxUnpackedToInt8Tensor): qdata int8 [out, in], scale and zero_point
  [out, groups]; value = (qdata - zero_point) * scale;
- int4 (Int4Tensor, packing format "plain"): qdata [out, in / 2], two's complement, the even column in the low half;
  scale and zero_point [groups, out]; value = qdata * scale + zero_point;
- float8 (Float8Tensor): qdata float8_e4m3fn [out, in], scale [out, 1] or [1, 1].
Inputs are int8, too, with the configurations of INT8_INPUTS; other activations are not quantised, even if quant_type
asks for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.fp8 import fp8_weight
from engine.models.formats.layouts import (
    PLAIN_PARAMETERS,
    SCALE_DTYPES,
    integer_weight,
    names_module,
    read_patterns,
    stored_bytes,
)
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import INT4, QuantizedWeight

QDATA, SCALE, ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
ACTIVATION_SCALE = "._weight_act_quant_scale"  # read and not used
# _type of quant_type -> kind of tensor
CONFIGURATIONS = {
    "Int8WeightOnlyConfig": "int8",
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "Int8StaticActivationInt8WeightConfig": "int8",
    "IntxWeightOnlyConfig": "intx",
    "Int8DynamicActivationIntxWeightConfig": "intx",
    "Int4WeightOnlyConfig": "int4",
    "Float8WeightOnlyConfig": "float8",
    "Float8DynamicActivationFloat8WeightConfig": "float8",
    "Float8StaticActivationFloat8WeightConfig": "float8",
}
INT8_INPUTS = ("Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig")
INTX_BITS = {"int4": 4, "int8": 8}


@dataclass(frozen=True, slots=True)
class TorchAoFormat:
    """See WeightFormat."""

    kind: str  # a value of CONFIGURATIONS
    bits: int
    group_size: int  # columns; 0: all
    skipped: tuple[str, ...]
    with_head: bool  # the head is quantised, too
    int8_inputs: bool = False
    name: str = "torchao"
    reads_plain: bool = False

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        plain = matrix.parameter in PLAIN_PARAMETERS and not (self.with_head and matrix.parameter == "lm_head.weight")
        if plain or len(matrix.shape) != 2 or names_module(self.skipped, matrix.module):
            return None
        rows, columns = matrix.shape
        unused = {ACTIVATION_SCALE: Stored(None, SCALE_DTYPES, optional=True)}
        if self.kind == "int4":
            groups = (columns // self._group(columns), rows)
            qdata = Stored((rows, columns // 2), ("I8", "U8"))
            return {QDATA: qdata, SCALE: Stored(groups, SCALE_DTYPES), ZERO: Stored(groups, SCALE_DTYPES)}
        if self.kind == "float8":
            return unused | {QDATA: Stored(matrix.shape, ("F8_E4M3",)), SCALE: Stored(None, SCALE_DTYPES)}
        groups = (rows, columns // self._group(columns))
        return unused | {
            QDATA: Stored(matrix.shape, ("I8",)),
            SCALE: Stored(groups, SCALE_DTYPES),
            ZERO: Stored(groups, ("I8",), optional=True),
        }

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        qdata, scale, group = tensors[QDATA], tensors[SCALE], self._group(matrix.shape[-1])
        if self.kind == "float8":
            return fp8_weight(matrix, qdata, scale, None)
        if self.kind == "int4":
            codes = qdata.view(torch.uint8) ^ 0x88  # two's complement -> code 0 is -8
            scales, offsets = (tensors[name].T.float().contiguous() for name in (SCALE, ZERO))
            return QuantizedWeight(codes, scales, group, offsets, INT4)
        middle = 1 << (self.bits - 1)
        codes = (qdata.to(torch.int16) + middle).to(torch.uint8)
        zeros = None if ZERO not in tensors else tensors[ZERO].to(torch.int16) + middle
        weight = integer_weight(codes, self.bits, scale, group, zeros)
        return replace(weight, int8_inputs=self.int8_inputs)

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        return stored_bytes(matrix.shape, self.bits, self.group_size, 4, offsets=self.kind == "int4")

    def _group(self, columns: int) -> int:
        return self.group_size if 0 < self.group_size < columns else columns


def read(reader: ConfigReader) -> TorchAoFormat:
    """The format of a `quantization_config` with quant_method "torchao"."""
    quant_type: Any = reader.raw.get("quant_type")
    default = quant_type.get("default") if isinstance(quant_type, Mapping) else None
    if not isinstance(default, Mapping) or not isinstance(default.get("_data"), Mapping):
        raise ModelError(
            f"{reader.where}: quant_type {short(quant_type)} is not served; served is what transformers 5 writes: "
            'an object {"default": {"_type": ..., "_data": ...}}.'
        )
    where = f"{reader.where}: quant_type"
    outer, inner = ConfigReader(default, where), ConfigReader(default["_data"], f"{where}: _data")
    configuration = outer.choice("_type", "none", tuple(CONFIGURATIONS))
    kind = CONFIGURATIONS[configuration]
    if outer.size("_version", 1) < 2:
        raise ModelError(
            f"{where}: _version 1 of {default['_type']} is not served; save it with torchao 0.15 or later."
        )
    return TorchAoFormat(
        kind,
        _read_bits(inner, kind),
        _read_group_size(inner, kind),
        read_patterns(reader, "modules_to_not_convert"),
        reader.flag("include_input_output_embeddings", False),
        configuration in INT8_INPUTS,
    )


def _read_bits(inner: ConfigReader, kind: str) -> int:
    if kind == "intx":
        _member(inner, "intx_packing_format", "UNPACKED_TO_INT8", ("UNPACKED_TO_INT8",))
        return INTX_BITS[_member(inner, "weight_dtype", "int8", tuple(INTX_BITS))]
    if kind == "int4":
        _member(inner, "int4_packing_format", "PLAIN", ("PLAIN", "plain"))
    if kind == "float8":
        _member(inner, "packing_format", "PLAIN", ("PLAIN",))
        _member(inner, "weight_dtype", "float8_e4m3fn", ("float8_e4m3fn",))
    return 4 if kind == "int4" else 8


def _read_group_size(inner: ConfigReader, kind: str) -> int:
    """Columns of a group by group_size, or by the granularity of the weights; 0: one scale per row."""
    if kind == "float8":
        return 0
    if inner.has("group_size"):
        return inner.size("group_size")
    if kind == "int4":
        return 128
    field = "weight_granularity" if inner.has("weight_granularity") else "granularity"
    value = inner.raw.get(field)
    if value is None or isinstance(value, list):
        return 32 if kind == "intx" else 0
    reader = ConfigReader(value if isinstance(value, Mapping) else {}, f"{inner.where}: {field}")
    granularity = reader.choice("_type", "none", ("PerRow", "PerGroup", "PerAxis"))
    data = reader.raw.get("_data")
    if granularity != "PerGroup":
        return 0
    return ConfigReader(data if isinstance(data, Mapping) else {}, reader.where).size("group_size")


def _member(inner: ConfigReader, name: str, default: str, choices: tuple[str, ...]) -> str:
    """A member of an enumeration, written as {"_type": ..., "_data": member}."""
    value = inner.raw.get(name)
    member = value.get("_data") if isinstance(value, Mapping) else value
    return ConfigReader({name: member}, inner.where).choice(name, default, choices)
