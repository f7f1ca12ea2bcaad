"""SafetensorsFile: the tensors of a .safetensors file. The library checks the header before it allocates anything."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.models.loading.tensor_file import Header

MAX_HEADER = 100_000_000  # the library's limit


class SafetensorsFile:
    """See TensorFile."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def names(self) -> list[str]:
        """See TensorFile."""
        return list(self._file.keys())

    def header(self, name: str) -> Header:
        """See TensorFile."""
        part = self._file.get_slice(name)
        return Header(tuple(part.get_shape()), part.get_dtype())

    def tensor(self, name: str) -> Tensor:
        """See TensorFile."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


@contextmanager
def open_safetensors(path: Path) -> Iterator[SafetensorsFile]:
    """Open a .safetensors file. ModelError if it is damaged, here or as its tensors are read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield SafetensorsFile(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path.name} is damaged or incomplete: {error}{_cut_tensor(path)}") from error


def _cut_tensor(path: Path) -> str:
    """The first tensor that the end of a truncated file cuts, for the message; "" if the header cannot be read."""
    try:
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, MAX_HEADER):
                return f" (the file has {size} bytes)"
            header = json.loads(file.read(length))
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        name, end = min(((n, e) for n, e in ends.items() if e > size), key=lambda pair: pair[1])
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return ""
    return f" (tensor {name[:200]!r} ends at byte {end}, the file at byte {size})"
