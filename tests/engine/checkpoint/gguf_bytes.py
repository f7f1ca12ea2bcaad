"""Bytes of small GGUF files, sound or damaged, without the `gguf` package."""

import struct
from collections.abc import Sequence
from pathlib import Path


def text(value: str) -> bytes:
    """A string: its length and its bytes."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor_entry(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """A row of the tensor table; `dims` in the file's order, the row length first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    *entries: bytes,
    keys: Sequence[bytes] = (),
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    """A file; the counts default to the true ones."""
    num_tensors = len(entries) if num_tensors is None else num_tensors
    num_keys = len(keys) if num_keys is None else num_keys
    header = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(entries)
    return header + b"\0" * (-len(header) % 32) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    """A metadata entry."""
    return text(name) + struct.pack("<I", kind) + value


def write(folder: Path, content: bytes) -> Path:
    """The path of a new file."""
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path
