"""GgufFile: the tensors of a GGUF file by their names in Hugging Face's form."""

import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.gguf import Gguf, map_file, read_gguf
from engine.checkpoint.gguf_names import Placed, placed_tensors
from engine.errors import ModelError
from engine.models.loading.tensor_file import Header

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """See TensorFile; a model in several files is one. A tensor of a quantised type is given as the bytes of its rows,
    uint8 [out, bytes]."""

    def __init__(self, gguf: Gguf, data: dict[Path, mmap.mmap]) -> None:
        self._data = data
        self._placed: dict[str, Placed] = {}
        for placed in placed_tensors(gguf):
            if placed.name in self._placed:
                raise ModelError(f"{gguf.path.name}: two tensors have the place of {placed.name!r:.200}.")
            self._placed[placed.name] = placed

    def names(self) -> list[str]:
        """See TensorFile."""
        return list(self._placed)

    def header(self, name: str) -> Header:
        """See TensorFile."""
        placed = self._placed[name]
        return Header(placed.shape, placed.tensor.kind.name)

    def tensor(self, name: str) -> Tensor:
        """See TensorFile."""
        placed = self._placed[name]
        kind = placed.tensor.kind
        rows = self._bytes(placed)
        if placed.paired_heads:
            rows = _unpaired(rows, placed)
        dtype = PLAIN.get(kind.name)
        if dtype is None:
            return rows
        values = rows.contiguous().view(dtype).view(placed.shape[::-1] if placed.transposed else placed.shape)
        if placed.transposed:
            values = values.mT
        return values + placed.offset if placed.offset else values

    def _bytes(self, placed: Placed) -> Tensor:
        """The tensor's bytes, uint8 [rows, bytes of a row], shared with the file; a vector has one number a row."""
        tensor = placed.tensor
        parts = 1 if placed.expert is None else tensor.shape[0]
        size = tensor.num_bytes // parts
        start = tensor.start + size * (placed.expert or 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # no code writes to it
            flat = torch.frombuffer(self._data[tensor.file], dtype=torch.uint8, count=size, offset=start)
        shape = tensor.shape if placed.expert is None else tensor.shape[1:]
        return flat.view(shape[0] if len(shape) == 1 else prod(shape[:-1]), -1)


def _unpaired(rows: Tensor, placed: Placed) -> Tensor:
    """Rows of heads in pairs (0, half), (1, half + 1), ... -> the first halves of all pairs, then the second."""
    if len(rows) % (2 * placed.paired_heads):
        raise ModelError(f"tensor {placed.tensor.name!r:.200}: its {len(rows)} rows are not those of whole heads.")
    return rows.view(placed.paired_heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(len(rows), -1)


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """Open a .gguf file, the first of the model's. ModelError if one is damaged."""
    gguf = read_gguf(path)
    yield GgufFile(gguf, {file: map_file(file) for file in gguf.files})
