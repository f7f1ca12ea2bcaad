"""SafetensorsFile: the tensors of a .safetensors file. The library checks the header before it allocates anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.models.loading.tensor_file import Header


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
        raise ModelError(f"{path.name} is damaged or incomplete: {error}") from error
