"""ROWS: what `make formats` measures. A new kind of checkpoint adds its row here, or its layout to layouts.py."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.formats.gguf_blocks import K_TYPES
from benchmarks.formats.gguf_writer import write_gguf
from benchmarks.formats.layouts import layouts
from benchmarks.formats.writers import Layout, write_checkpoint

GROUP = 64  # columns that share a scale: it divides the sizes of the bundled model
QUANTIZATIONS = ("int8", "int4", "fp8")  # choices of --quantization


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to measure."""

    folder: Path
    meant: Path | None = None  # a plain fp32 checkpoint of what its codes mean; None: what the loader makes of them
    options: dict[str, Any] = field(default_factory=dict)  # further fields of EngineConfig


GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", *K_TYPES)

Make = Callable[[Path, Path], Checkpoint]  # a plain checkpoint of one file and an empty folder -> the checkpoint


def _plain(dtype: torch.dtype, source: Path, target: Path) -> Checkpoint:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    _copy_files(source, target, {"dtype": str(dtype).removeprefix("torch.")})
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(target)


def _quantized(layout: Layout, source: Path, target: Path) -> Checkpoint:
    meant = write_checkpoint(source, target, layout)
    folder = target / "meant"
    _copy_files(source, folder, {"dtype": "float32"})
    save_file(meant, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(target, folder)


def _on_load(method: str, source: Path, target: Path) -> Checkpoint:
    """The plain checkpoint, which the engine quantises as it loads it."""
    return replace(_plain(torch.bfloat16, source, target), options={"quantization": method})


def _gguf(kind: str, source: Path, target: Path) -> Checkpoint:
    target.mkdir(parents=True, exist_ok=True)
    return Checkpoint(write_gguf(source, target / "model.gguf", kind))


def _copy_files(source: Path, target: Path, changes: dict[str, Any]) -> None:
    """The JSON files of a checkpoint, with other fields in config.json."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | changes))


ROWS: dict[str, Make] = {
    "fp32": partial(_plain, torch.float32),
    "bf16": partial(_plain, torch.bfloat16),
    **{f"--quantization {method}": partial(_on_load, method) for method in QUANTIZATIONS},
    **{name: partial(_quantized, layout) for name, layout in layouts(GROUP).items()},
    **{f"gguf {kind}": partial(_gguf, kind) for kind in GGUF_TYPES},
}
