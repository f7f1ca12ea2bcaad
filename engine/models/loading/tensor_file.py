"""TensorFile: one weight file of a checkpoint, whatever its container."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

# Bytes of an element by the name of its type in safetensors headers; other containers use the same names.
ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class Header(NamedTuple):
    """Shape and type of a tensor, known without its data."""

    shape: tuple[int, ...]
    dtype: str  # a key of ELEMENT_BYTES, or the container's own name of another type


class TensorFile(Protocol):
    """An open weight file. ModelError from any method names the file where it is damaged."""

    def names(self) -> list[str]:
        """The names of all tensors, in the order in which reading them is fastest."""

    def header(self, name: str) -> Header:
        """Shape and type of a tensor, without reading it."""

    def tensor(self, name: str) -> Tensor:
        """A tensor in host memory, with the type of its header. It may share memory with the open file."""


OpenTensorFile = Callable[[Path], AbstractContextManager[TensorFile]]
