"""Checkpoints of llm-compressor in the formats of compressed-tensors: integers, FP8, MXFP4 and NVFP4.

`config_groups` gives each group of modules a scheme: the type of the weights and which of them share a scale. A
weight says if its scheme asks for activations in int8, too (W8A8). Scales of activations in the file are not used, and
other activations stay in the dtype of the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.fp8 import fp8_weight, read_block
from engine.models.formats.layouts import (
    EXPONENT_DTYPES,
    FP4,
    SCALE_DTYPES,
    code_permutation,
    decode_scales,
    even_groups,
    integer_weight,
    read_patterns,
    scale_blocks,
    spellings,
    spread_scale,
    stored_bytes,
    unpack_words,
)
from engine.models.formats.modelopt import nvfp4_weight
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight

PACKED = "pack-quantized"  # 4 or 8 bits in words of 32
INTEGERS = ("int-quantized", "naive-quantized")  # one int8 for each weight
FLOATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized", NVFP4, MXFP4)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
UNUSED = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one group of modules are stored."""

    targets: tuple[str, ...]
    layout: str  # one of FORMATS
    integer: bool  # False: floating point
    bits: int
    symmetric: bool
    strategy: str
    group_size: int  # columns, with strategy "group" or "tensor_group"
    block: tuple[int, int] | None  # with strategy "block"
    act_order: bool
    int8_inputs: bool

    def group(self, columns: int) -> int:
        """Columns that share a scale."""
        return self.group_size if 0 < self.group_size < columns else columns

    @property
    def packs_zeros(self) -> bool:
        """The zeros are in words, as the weights; else one int8 for each scale."""
        return self.layout == PACKED and self.strategy in ("channel", "group")

    def scale_shape(self, matrix: Matrix) -> tuple[int, ...] | None:
        """The shape of `weight_scale`; None if it holds one number in one of several shapes."""
        if self.strategy == "tensor":
            return None
        if self.block is not None:
            return scale_blocks(matrix.shape, self.block)
        return (*matrix.shape[:-1], ceil(matrix.shape[-1] / self.group(matrix.shape[-1])))


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """See WeightFormat."""

    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]
    name: str = "compressed-tensors"
    reads_plain: bool = False

    @property
    def int8_inputs(self) -> bool:
        """See InputFormat."""
        return any(scheme.int8_inputs for scheme in self.schemes)

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        scheme = self._scheme(matrix)
        if scheme is None:
            return None
        unused = {name: Stored(None, (*SCALE_DTYPES, "I8"), optional=True) for name in UNUSED}
        rows, columns = matrix.shape
        groups = scheme.scale_shape(matrix)
        if scheme.layout == NVFP4:
            scales = {".weight_scale": Stored(groups, ("F8_E4M3",)), ".weight_global_scale": Stored(None, SCALE_DTYPES)}
            return unused | scales | {".weight_packed": Stored((rows, columns // 2), ("U8",))}
        if scheme.layout == MXFP4:
            scales = {".weight_scale": Stored(groups, EXPONENT_DTYPES)}
            return unused | scales | {".weight_packed": Stored((rows, columns // 2), ("U8",))}
        if not scheme.integer:
            scales = {".weight_scale": Stored(groups, (*SCALE_DTYPES, *EXPONENT_DTYPES))}
            return unused | scales | {".weight": Stored(matrix.shape, ("F8_E4M3",))}
        per_word = 32 // scheme.bits
        zeros = Stored(groups, ("I8",), optional=scheme.symmetric)
        if scheme.packs_zeros and groups is not None:
            zeros = Stored((ceil(groups[0] / per_word), groups[1]), ("I32",), optional=scheme.symmetric)
        scales = {".weight_scale": Stored(groups, SCALE_DTYPES), ".weight_g_idx": Stored((columns,), ("I32",), True)}
        scales[".weight_zero_point"] = zeros
        if scheme.layout != PACKED:
            return unused | scales | {".weight": Stored(matrix.shape, ("I8",))}
        return (
            unused
            | scales
            | {
                ".weight_packed": Stored((rows, ceil(columns / per_word)), ("I32",)),
                ".weight_shape": Stored((2,), ("I64", "I32"), optional=True),
            }
        )

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        scheme = self._scheme(matrix)
        assert scheme is not None
        scales = decode_scales(tensors[".weight_scale"])
        if scheme.layout == NVFP4:
            return nvfp4_weight(tensors[".weight_packed"], scales, 1 / tensors[".weight_global_scale"].float())
        if scheme.layout == MXFP4:
            return QuantizedWeight(tensors[".weight_packed"].contiguous(), scales, scheme.group_size, codebook=FP4)
        if scheme.integer:
            return _integer_weight(matrix, scheme, scales, tensors)
        if scheme.strategy == "group":
            groups = even_groups(scales.float(), scheme.group(matrix.shape[-1]), matrix.shape[-1])
            return QuantizedWeight(tensors[".weight"], *groups)
        return fp8_weight(matrix, tensors[".weight"], scales, scheme.block)

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        scheme = self._scheme(matrix)
        assert scheme is not None
        half = scheme.layout == MXFP4 or (scheme.integer and scheme.symmetric)
        group_size = scheme.group_size if scheme.block is None else scheme.block[1]
        return stored_bytes(
            matrix.shape,
            scheme.bits,
            group_size,
            2 if half else 4,
            offsets=not scheme.symmetric,
            permuted=scheme.act_order,
        )

    def _scheme(self, matrix: Matrix) -> Scheme | None:
        """The scheme of the first group that names the module; "Linear" names every linear layer."""
        plain = matrix.parameter == "embedding.weight" or _names(self.ignored, matrix.module)
        if plain or len(matrix.shape) != 2:
            return None
        for scheme in self.schemes:
            if "Linear" in scheme.targets or _names(scheme.targets, matrix.module):
                return scheme
        return None


def _names(patterns: tuple[str, ...], module: str) -> bool:
    """True if one of the patterns is the module's name, or "re:" and a regular expression for the start of it."""
    names = spellings(module)
    expressions = [key[3:] for key in patterns if key.startswith("re:")]
    return any(name in patterns for name in names) or any(re.match(key, name) for key in expressions for name in names)


def _integer_weight(matrix: Matrix, scheme: Scheme, scales: Tensor, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    rows, columns = matrix.shape
    middle = 1 << (scheme.bits - 1)
    zeros = tensors.get(".weight_zero_point")
    if scheme.layout == PACKED:
        codes = unpack_words(tensors[".weight_packed"], scheme.bits)[:, :columns]
    else:
        codes = (tensors[".weight"].to(torch.int16) + middle).to(torch.uint8)
    if zeros is not None:
        packed = scheme.packs_zeros
        zeros = unpack_words(zeros.T, scheme.bits)[:, :rows].T if packed else zeros.to(torch.int16) + middle
    if scheme.strategy == "tensor":
        scales = spread_scale(scales, rows)
        zeros = None if zeros is None else spread_scale(zeros, rows)
    if scheme.block is not None:
        scales = scales.repeat_interleave(scheme.block[0], 0)[:rows]
        zeros = None if zeros is None else zeros.repeat_interleave(scheme.block[0], 0)[:rows]
    group = scheme.group(columns) if scheme.block is None else scheme.block[1]
    permutation = None
    if (g_idx := tensors.get(".weight_g_idx")) is not None and bool((g_idx >= 0).all()):
        permutation = code_permutation(g_idx, group, matrix)
    if permutation is not None:
        codes = codes[:, permutation.long()]
    weight = integer_weight(codes, scheme.bits, scales, group, zeros, permutation, scheme.symmetric)
    return replace(weight, int8_inputs=scheme.int8_inputs)


def read(reader: ConfigReader) -> CompressedFormat:
    """The format of a `quantization_config` with quant_method "compressed-tensors"."""
    reader.require("quantization_status", "compressed")
    for field in ("sparsity_config", "transform_config"):
        if (value := reader.raw.get(field)) and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ModelError(f"{reader.where}: {field} = {short(value)} is not served; use a checkpoint without it.")
    groups: Any = reader.raw.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise ModelError(f"{reader.where}: config_groups must map names to schemes, not {short(groups)}.")
    schemes = [
        _read_scheme(ConfigReader(group, f"{reader.where}: config_groups: {name}"), reader)
        for name, group in groups.items()
        if "weights" not in group or group["weights"] is not None  # null: the group has activations or the cache alone
    ]
    # An exact name or a regular expression comes before "Linear", which names every linear layer.
    schemes.sort(key=lambda scheme: "Linear" in scheme.targets)
    return CompressedFormat(tuple(schemes), read_patterns(reader, "ignore"))


def _read_scheme(group: ConfigReader, outer: ConfigReader) -> Scheme:
    weights: Any = group.raw.get("weights")
    if not isinstance(weights, Mapping):
        raise ModelError(f"{group.where}: weights must be an object, not {short(weights)}.")
    # Groups have a format of their own where the checkpoint mixes formats.
    layout = (group if group.has("format") else outer).choice("format", "none", FORMATS)
    reader = ConfigReader(weights, f"{group.where}: weights")
    kind, bits = reader.choice("type", "int", ("int", "float")), reader.size("num_bits")
    wanted = {PACKED: ("int", (4, 8)), "int-quantized": ("int", (8,)), NVFP4: ("float", (4,)), MXFP4: ("float", (4,))}
    wanted["naive-quantized"] = (kind, (8,))
    served = wanted.get(layout, ("float", (8,)))
    if kind != served[0] or bits not in served[1]:
        raise ModelError(
            f"{reader.where}: num_bits {bits} of type {kind!r} in format {layout!r} is not served; "
            f"served is type {served[0]!r} of {' or '.join(map(str, served[1]))} bits."
        )
    reader.require("dynamic", False)
    act_order = str(reader.raw.get("actorder") or "none")
    if act_order not in ("none", "weight", "static", "group", "dynamic"):
        raise ModelError(f"{reader.where}: actorder {short(act_order)} is not served; served are weight and group.")
    symmetric = reader.flag("symmetric", True)
    if kind == "float" and not symmetric:
        reader.require("symmetric", True)
    strategy = reader.choice("strategy", "group" if (reader.raw.get("group_size") or -1) > 0 else "tensor", STRATEGIES)
    grouped = strategy in ("group", "tensor_group")
    return Scheme(
        read_patterns(group, "targets"),
        layout,
        kind == "int",
        bits,
        symmetric,
        strategy,
        reader.size("group_size", low=1) if grouped else 0,
        _read_structure(reader) if strategy == "block" else None,
        act_order in ("group", "dynamic"),
        kind == "int" and bits == 8 and _rounds_to_int8(group.raw.get("input_activations")),
    )


def _rounds_to_int8(activations: Any) -> bool:
    """True for the input_activations of a scheme that are int8."""
    is_object = isinstance(activations, Mapping)
    return is_object and activations.get("num_bits") == 8 and activations.get("type", "int") == "int"


def _read_structure(reader: ConfigReader) -> tuple[int, int]:
    """block_structure: [rows, columns], or "128x128" in older files."""
    value = reader.raw.get("block_structure")
    if isinstance(value, str) and re.fullmatch(r"\d{1,5}x\d{1,5}", value):
        value = [int(part) for part in value.split("x")]
    block = read_block(ConfigReader({"block_structure": value}, reader.where), "block_structure")
    if block is None:
        raise ModelError(f"{reader.where} has no block_structure.")
    return block
