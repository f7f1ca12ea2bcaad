"""Finds the weight files of a checkpoint folder, checks that they are safe to open, and opens them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from engine.checkpoint.json_files import read_json_object
from engine.checkpoint.links import path_inside
from engine.errors import ModelError
from engine.models.loading.safetensors_file import open_safetensors
from engine.models.loading.tensor_file import OpenTensorFile, TensorFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

CONTAINERS: Mapping[str, OpenTensorFile] = {".safetensors": open_safetensors}  # by the ending of the file's name


def find_weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the single file, or each file that the index names, once."""
    if (model_dir / SINGLE_FILE).is_file():
        return [check_shard_path(model_dir, SINGLE_FILE)]
    if (model_dir / INDEX_FILE).is_file():
        return [check_shard_path(model_dir, name) for name in _names_in_index(model_dir / INDEX_FILE)]
    raise ModelError(
        f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}. Pickle formats (.bin, .pt, .pth, .ckpt) are never "
        "read, as they can run code: load them with transformers and write safetensors with save_pretrained()."
    )


def open_weight_file(path: Path) -> AbstractContextManager[TensorFile]:
    """Open a weight file by its ending. ModelError if it is damaged, here or as its tensors are read."""
    return CONTAINERS[path.suffix](path)


def check_shard_path(model_dir: Path, name: str) -> Path:
    """The path of a shard; ModelError unless it is a file inside the folder (engine/checkpoint/links.py)."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts or relative.suffix != ".safetensors":
        raise ModelError(f"{INDEX_FILE} names {name!r}: a shard must be a .safetensors file inside the model's folder.")
    if not path_inside(model_dir, relative).is_file():
        raise ModelError(f"{model_dir} lacks the weight file {name!r}: the download or copy is incomplete.")
    return model_dir / relative


def _names_in_index(index: Path) -> list[str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map.")
    if not all(isinstance(name, str) and name and "\0" not in name for name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must map each tensor to a file name.")
    return sorted(set(weight_map.values()))
