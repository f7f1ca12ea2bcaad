"""GPTQ checkpoints of 4 or 8 bits (Frantar et al. 2023), as AutoGPTQ, GPTQModel and transformers write them.

A matrix [out, in] is stored as `qweight` int32 [in * bits / 32, out], `scales` [groups, out], `qzeros` int32 [groups,
out * bits / 32] and `g_idx` int32 [in]; words hold the lowest row first. The format "gptq" stores each zero minus 1,
"gptq_v2" stores the zero.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.layouts import (
    PLAIN_PARAMETERS,
    check_pattern,
    code_permutation,
    integer_weight,
    names_module,
    read_patterns,
    spellings,
    stored_bytes,
    unpack_words,
)
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight

FORMATS = ("gptq", "gptq_v2")
BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one matrix."""

    bits: int
    group_size: int  # columns; -1: all
    symmetric: bool
    act_order: bool

    def group(self, columns: int) -> int:
        """Columns of a group."""
        return self.group_size if 0 < self.group_size < columns else columns


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """See WeightFormat."""

    settings: Settings
    zero_offset: int  # added to every stored zero
    lm_head: bool
    skipped: tuple[str, ...]
    only: tuple[str, ...]  # endings of the quantised modules; empty: all
    dynamic: tuple[tuple[str, Settings | None], ...]  # regular expression -> other settings; None: plain
    name: str = "gptq"
    reads_plain: bool = False

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat."""
        settings = self._settings(matrix)
        if settings is None:
            return None
        rows, columns = matrix.shape
        groups, per_word = ceil(columns / settings.group(columns)), 32 // settings.bits
        return {
            ".qweight": Stored((ceil(columns / per_word), rows), ("I32",)),
            ".qzeros": Stored((groups, ceil(rows / per_word)), ("I32",)),
            ".scales": Stored((groups, rows), ("F16", "BF16", "F32")),
            ".g_idx": Stored((columns,), ("I32",), optional=True),
        }

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat."""
        settings = self._settings(matrix)
        assert settings is not None
        rows, columns = matrix.shape
        group = settings.group(columns)
        codes = unpack_words(tensors[".qweight"].T, settings.bits)[:, :columns]
        zeros = unpack_words(tensors[".qzeros"], settings.bits)[:, :rows].T
        zeros = (zeros + self.zero_offset) & ((1 << settings.bits) - 1)
        permutation = None
        if (g_idx := tensors.get(".g_idx")) is not None:
            permutation = code_permutation(g_idx, group, matrix)
        if permutation is not None:
            codes = codes[:, permutation.long()]
        scales = tensors[".scales"].T
        return integer_weight(codes, settings.bits, scales, group, zeros, permutation, settings.symmetric)

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        settings = self._settings(matrix)
        assert settings is not None
        scale_bytes = 2 if settings.symmetric else 4
        return stored_bytes(
            matrix.shape,
            settings.bits,
            settings.group_size,
            scale_bytes,
            offsets=not settings.symmetric,
            permuted=settings.act_order,
        )

    def _settings(self, matrix: Matrix) -> Settings | None:
        if len(matrix.shape) != 2 or (matrix.parameter in PLAIN_PARAMETERS and not self._is_quantized_head(matrix)):
            return None
        if names_module(self.skipped, matrix.module) or (self.only and not matrix.module.endswith(self.only)):
            return None
        return self.settings_of(spellings(matrix.module))

    def settings_of(self, names: tuple[str, ...]) -> Settings | None:
        """The settings of a module that settings may call by any of these names; None: it is plain."""
        for pattern, settings in self.dynamic:
            if any(re.match(pattern, name) for name in names):
                return settings
        return self.settings

    def _is_quantized_head(self, matrix: Matrix) -> bool:
        return self.lm_head and matrix.parameter == "lm_head.weight"


def read(reader: ConfigReader) -> GptqFormat:
    """The format of a `quantization_config` with quant_method "gptq"."""
    # GPTQModel writes both names: checkpoint_format, and format since its version 5.
    field = "checkpoint_format" if reader.has("checkpoint_format") else "format"
    layout = reader.choice(field, "gptq", FORMATS)
    reader.require("is_marlin_format", False)
    reader.require("pack_dtype", "int32")
    settings = read_settings(reader, Settings(4, 128, True, False))
    return GptqFormat(
        settings,
        zero_offset=1 if layout == "gptq" else 0,
        lm_head=reader.flag("lm_head", False),
        skipped=read_patterns(reader, "modules_to_not_convert"),
        only=_read_only(reader),
        dynamic=_read_dynamic(reader, settings),
    )


def read_settings(reader: ConfigReader, default: Settings) -> Settings:
    """The settings of an object; those of `default` for absent fields."""
    bits = reader.size("bits", default.bits)
    if bits not in BITS:
        raise ModelError(f"{reader.where}: bits = {bits} is not served; served are 4 and 8.")
    return Settings(
        bits,
        reader.size("group_size", default.group_size, low=-1),
        reader.flag("sym", default.symmetric),
        reader.flag("desc_act", default.act_order),
    )


def _read_only(reader: ConfigReader) -> tuple[str, ...]:
    """modules_in_block_to_quantize: a list of lists of names inside a layer."""
    value = reader.raw.get("modules_in_block_to_quantize") or []
    names = [name for part in value for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) for name in names):
        raise ModelError(f"{reader.where}: modules_in_block_to_quantize must list names, not {short(value)}.")
    return tuple(f".{name}" for name in names)


def _read_dynamic(reader: ConfigReader, default: Settings) -> tuple[tuple[str, Settings | None], ...]:
    """GPTQModel's `dynamic`: "-:regex" keeps modules plain, "+:regex" or "regex" changes their settings."""
    value: Any = reader.raw.get("dynamic") or {}
    if not isinstance(value, Mapping) or not all(isinstance(changes, Mapping) for changes in value.values()):
        raise ModelError(f"{reader.where}: dynamic must map regular expressions to settings, not {short(value)}.")
    rules: list[tuple[str, Settings | None]] = []
    for key, changes in value.items():
        pattern = key[2:] if key.startswith(("-:", "+:")) else key
        check_pattern(reader, "dynamic", pattern)
        plain = key.startswith("-:")
        rules.append(
            (pattern, None if plain else read_settings(ConfigReader(changes, f"{reader.where}: dynamic"), default))
        )
    return tuple(rules)
