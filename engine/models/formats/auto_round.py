"""Checkpoints of Intel's AutoRound in its own format, quant_method "auto-round": the matrices of GPTQ, or those of AWQ.

packing_format names the layout, and extra_config the modules with other settings: by name, or by a regular expression
that is found anywhere in the name. Modules outside block_name_to_quantize are plain in the file, which tells.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.errors import ModelError
from engine.models.formats.awq import AwqFormat
from engine.models.formats.gptq import GptqFormat, Settings, read_settings
from engine.models.formats.layouts import check_pattern
from engine.models.reader import ConfigReader, short

MAX_BITS = 8  # modules with more bits are plain


@dataclass(frozen=True)
class AutoRoundFormat(GptqFormat):
    """See WeightFormat. named: the settings of modules that extra_config has by name; None: plain. They go first."""

    name: str = "auto-round"
    named: tuple[tuple[str, Settings | None], ...] = ()

    @cached_property
    def _by_name(self) -> dict[str, Settings | None]:
        return dict(self.named)

    def settings_of(self, names: tuple[str, ...]) -> Settings | None:
        """See GptqFormat."""
        found = next((name for name in names if name in self._by_name), None)
        return super().settings_of(names) if found is None else self._by_name[found]


def read(reader: ConfigReader) -> AutoRoundFormat | AwqFormat:
    """The format of a `quantization_config` with quant_method "auto-round"."""
    reader.require("data_type", "int")
    layout, extra = _layout(reader), _extra(reader)
    if "awq" in layout:
        return _awq(reader, extra)
    default = read_settings(reader, Settings(4, 128, True, False))
    settings = {key: None if _is_plain(changes) else read_settings(changes, default) for key, changes in extra.items()}
    return AutoRoundFormat(
        default,
        zero_offset=1,
        lm_head=settings.get("lm_head") is not None,
        skipped=(),
        only=(),
        dynamic=tuple((f".*(?:{key})", chosen) for key, chosen in settings.items() if not _is_name(key)),
        named=tuple((key, chosen) for key, chosen in settings.items() if _is_name(key)),
    )


def _layout(reader: ConfigReader) -> str:
    """packing_format; in the first files, which lack it, `backend`."""
    backend = str(reader.raw.get("backend") or "")
    layout = str(reader.raw.get("packing_format") or (backend if backend.startswith("auto_round") else "auto_gptq"))
    if "gptq" not in layout and "awq" not in layout:
        raise ModelError(
            f"{reader.where}: packing_format {short(layout)} is not served; served are auto_round:auto_gptq and "
            "auto_round:auto_awq."
        )
    return layout


def _awq(reader: ConfigReader, extra: Mapping[str, ConfigReader]) -> AwqFormat:
    reader.require("bits", 4)
    for key, changes in extra.items():
        if changes.raw and not _is_plain(changes):
            raise ModelError(f"{changes.where}: {short(key)} has settings of its own, not served in AWQ's layout.")
    # modules with more bits need no list: their plain tensors are in the file
    return AwqFormat(reader.size("group_size", 128, low=-1), not reader.flag("sym", True), (), name="auto-round")


def _extra(reader: ConfigReader) -> dict[str, ConfigReader]:
    """extra_config: a module's name, or a regular expression for a part of it -> the settings that differ."""
    value: Any = reader.raw.get("extra_config") or {}
    if not isinstance(value, Mapping) or not all(isinstance(changes, Mapping) for changes in value.values()):
        raise ModelError(f"{reader.where}: extra_config must map names of modules to settings, not {short(value)}.")
    for key in value:
        check_pattern(reader, "extra_config", key)
    return {key: ConfigReader(changes, f"{reader.where}: extra_config") for key, changes in value.items()}


def _is_name(key: str) -> bool:
    return re.fullmatch(r"[\w.-]*", key) is not None


def _is_plain(changes: ConfigReader) -> bool:
    return changes.size("bits", 1) > MAX_BITS
