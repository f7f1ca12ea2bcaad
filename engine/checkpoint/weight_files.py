"""The weight files of a checkpoint folder by name: safetensors if there are any, else pickles. Reads none of them."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.gguf import SPLIT_NAME, SUFFIX, is_gguf, read_gguf
from engine.checkpoint.json_files import read_json_object
from engine.errors import ModelError


class Layout(NamedTuple):
    """Names of the files in which the weights lie: one file, or the files that an index names."""

    single: str
    index_file: str
    suffix: str

    def names(self, folder: Path) -> tuple[str, ...]:
        """The files that the index names, else the single file, whether or not they exist. ModelError for a bad index.

        The single file takes precedence where both are there.
        """
        if (folder / self.single).is_file() or not (folder / self.index_file).is_file():
            return (self.single,)
        weight_map = read_json_object(folder / self.index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / self.index_file} has no weight_map.")
        if not all(isinstance(name, str) and name and "\0" not in name for name in weight_map.values()):
            raise ModelError(f"{folder / self.index_file}: weight_map must map each tensor to a file name.")
        return tuple(sorted(set(weight_map.values())))

    def is_in(self, folder: Path) -> bool:
        """Whether the folder holds the single file or the index."""
        return (folder / self.single).is_file() or (folder / self.index_file).is_file()


LAYOUTS = (
    Layout("model.safetensors", "model.safetensors.index.json", ".safetensors"),
    Layout("consolidated.safetensors", "consolidated.safetensors.index.json", ".safetensors"),  # mistral's own
    Layout("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin"),
)


SHARD_NAME = re.compile(r"-\d+-of-\d+\.")  # a part of the weights, which only an index makes whole
FILES_SHOWN = 20
OTHER_WEIGHTS = (".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")


def find_layout(folder: Path) -> Layout | None:
    """The layout of the folder's weights: the first of LAYOUTS that it holds, else other_layout; None without
    weights."""
    known = next((layout for layout in LAYOUTS if layout.is_in(folder)), None)
    return known or other_layout(path.name for path in folder.glob("*.safetensors*"))


def has_all_weights(folder: Path) -> bool:
    """True if every weight file of the folder is there, as it is not in a folder with a config.json alone."""
    if is_gguf(folder):
        return True
    layout = find_layout(folder)
    return layout is not None and all((folder / name).is_file() for name in layout.names(folder))


def existing_weight_files(folder: Path) -> Iterator[Path]:
    """The files of the folder that hold its weights, or of a model in GGUF. ModelError for a bad index."""
    if is_gguf(folder):
        yield from read_gguf(folder).files
        return
    layout = find_layout(folder)
    for name in () if layout is None else layout.names(folder):
        if (folder / name).is_file():
            yield folder / name


def choose_gguf(folder: Path | str, names: Iterable[str]) -> str | None:
    """The GGUF file among the files of a folder or repository, the first of a model in several files; None if there is
    none. ModelError for several models."""
    every = sorted(name for name in names if name.endswith(SUFFIX) and not Path(name).name.startswith("mmproj"))
    found = [name for name in every if not _continues(name, every)]
    if len(found) > 1:
        shown = ", ".join(found[:FILES_SHOWN]) + (", ..." if len(found) > FILES_SHOWN else "")
        raise ModelError(f"{folder} holds {len(found)} GGUF files: {shown}. Give --model the path of one of them.")
    return found[0] if found else None


def _continues(name: str, names: list[str]) -> bool:
    """True for the later files of a model whose first file is among the names."""
    match = SPLIT_NAME.fullmatch(name)
    return match is not None and int(match[2]) != 1 and f"{match[1]}-00001-of-{match[3]}{SUFFIX}" in names


def other_layout(names: Iterable[str]) -> Layout | None:
    """The layout of safetensors called otherwise, such as AutoGPTQ's gptq_model-4bit-128g.safetensors, among the files
    of a folder or repository; None unless there is exactly one."""
    index, here = ".safetensors.index.json", [name for name in names if "/" not in name]
    found = {name.removesuffix(".index.json") for name in here if name.endswith(index)} or {
        name for name in here
        if name.endswith(".safetensors") and not name.startswith("adapter") and not SHARD_NAME.search(name)
    }  # fmt: skip
    single = found.pop() if len(found) == 1 else None
    return None if single is None else Layout(single, f"{single}.index.json", ".safetensors")


def no_weights(folder: Path, on_hub: bool) -> str:
    """The message for a folder without weights."""
    wanted = ", ".join(f"{layout.single}, {layout.index_file}" for layout in LAYOUTS) + ", *.gguf"
    others = sorted(path.name for ending in OTHER_WEIGHTS for path in folder.glob(f"*{ending}"))
    message = f"{folder} holds no weights{' on the hub' if on_hub else ''}: none of {wanted}"
    if not others:
        return message
    return f"{message}; {others[0]} is not read: load it with transformers and save it with save_pretrained()"
