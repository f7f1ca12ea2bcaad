"""Finds the weight files of a checkpoint folder, checks that they are safe to open, and opens them by their ending."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from engine.checkpoint.gguf import SUFFIX, is_gguf
from engine.checkpoint.links import path_inside
from engine.checkpoint.weight_files import Layout, find_layout, no_weights
from engine.errors import ModelError
from engine.models.loading.gguf_file import open_gguf
from engine.models.loading.pickle_file import open_pickle
from engine.models.loading.safetensors_file import open_safetensors
from engine.models.loading.tensor_file import OpenTensorFile, TensorFile

CONTAINERS: Mapping[str, OpenTensorFile] = {".safetensors": open_safetensors, ".bin": open_pickle, SUFFIX: open_gguf}


def find_weight_files(model_dir: Path) -> list[Path]:
    """The weight files of a checkpoint: the single file, or each file that the index names, once."""
    if is_gguf(model_dir):
        return [model_dir]
    layout = find_layout(model_dir)
    if layout is None:
        raise ModelError(no_weights(model_dir, on_hub=False))
    return [check_shard_path(model_dir, name, layout) for name in layout.names(model_dir)]


def open_weight_file(path: Path) -> AbstractContextManager[TensorFile]:
    """Open a weight file. ModelError if it is damaged, here or as its tensors are read."""
    return CONTAINERS[path.suffix](path)


def check_shard_path(model_dir: Path, name: str, layout: Layout) -> Path:
    """The path of a shard; ModelError unless it is a file inside the folder (engine/checkpoint/links.py)."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts or relative.suffix != layout.suffix:
        raise ModelError(
            f"{layout.index_file} names {name!r}: a shard must be a {layout.suffix} file inside the model's folder."
        )
    if not path_inside(model_dir, relative).is_file():
        raise ModelError(f"{model_dir} lacks the weight file {name!r}: the download or copy is incomplete.")
    return model_dir / relative
