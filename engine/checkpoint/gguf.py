"""read_gguf: metadata and tensor table of a GGUF file (llama.cpp's container, versions 2 and 3, little endian).

The file is untrusted: each count and length is checked against the file before anything of that size is made.
"""

import mmap
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ModelError

SUFFIX = ".gguf"
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)  # of llama-gguf-split, numbered from 1
MAX_FILES = 1000  # of one model
MAX_KEYS, MAX_TENSORS, MAX_DIMENSIONS, MAX_SIZE = 1 << 16, 1 << 18, 4, 1 << 40
MAX_ENTRIES = 1 << 22  # entries of all arrays; the largest vocabularies with their merges have below 2 million
MAX_NAME, MAX_TEXT = 1 << 10, 1 << 24  # bytes
MIN_KEY, MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of the shortest metadata entry and tensor entry
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20

# Types of metadata values by number.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class TensorType(NamedTuple):
    """How the elements of a tensor are stored: blocks of `block` elements of a row, `num_bytes` each."""

    name: str
    block: int
    num_bytes: int


# By number (ggml.h). A block of the quantised types holds codes and scales.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}
# Types that are refused by name.
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
SERVED_TYPES = ", ".join(kind.name for kind in TENSOR_TYPES.values())
PLAIN_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the model. `start` and `num_bytes` tell the place of its rows in `file`."""

    file: Path
    name: str
    shape: tuple[int, ...]  # the last axis is that of a row, in elements
    kind: TensorType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """The header of a file; of a model in several files that of the first, with the tensors of all."""

    path: Path
    metadata: dict[str, Any]  # numbers, bools, texts, and lists of these
    tensors: dict[str, GgufTensor]
    files: tuple[Path, ...]

    def floats(self, name: str) -> list[float] | None:
        """The numbers of a small F32 tensor; None if the file has none of this name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.kind.name != "F32" or tensor.num_bytes > MAX_TEXT:
            raise ModelError(f"{self.path.name}: tensor {name!r} must be of type F32 and small.")
        numbers = map_file(tensor.file)[tensor.start : tensor.start + tensor.num_bytes]
        return list(struct.unpack(f"<{len(numbers) // 4}f", numbers))


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, and no folder."""
    return path.suffix == SUFFIX and path.is_file()


def split_names(name: str) -> tuple[str, ...]:
    """The names of all files of the model whose first file is called `name`: only itself, if it is not split."""
    match = SPLIT_NAME.fullmatch(name)
    if match is None or not 1 <= int(match[3]) <= MAX_FILES:
        return (name,)
    return tuple(f"{match[1]}-{number:05}-of-{match[3]}{SUFFIX}" for number in range(1, int(match[3]) + 1))


def read_gguf(path: Path) -> Gguf:
    """The header of a model in one file or several. ModelError names the file and the field that is damaged, missing or
    not served."""
    first = _read_file(path)
    count = first.metadata.get("split.count", 0)
    if count in (0, 1):
        return first
    files = tuple(path.with_name(name) for name in split_names(path.name))
    if len(files) != count or path != files[0]:
        raise ModelError(
            f"{path.name}: split.count = {count!r:.100}: the model lies in several files. Give --model the first of "
            "them, called NAME-00001-of-0000N.gguf, or merge them with llama-gguf-split --merge."
        )
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        if not file.is_file():
            raise ModelError(f"{path.parent} lacks the weight file {file.name!r}: the download or copy is incomplete.")
        part = _read_file(file)
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise ModelError(f"{file.name}: split.no and split.count must be {number} and {count}, as in its name.")
        if twice := tensors.keys() & part.tensors.keys():
            raise ModelError(f"{file.name}: tensor {min(twice)!r:.200} is in an earlier file, too.")
        tensors |= part.tensors
    return replace(first, tensors=tensors, files=files)


def _read_file(path: Path) -> Gguf:
    try:
        facts = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}.") from error
    return _read(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: Path, size: int, modified_ns: int) -> Gguf:
    return _Parser(path, map_file(path)).parse()


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file, mapped read-only until nothing refers to them. ModelError if it is empty or unreadable."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


class _Parser:
    """Reads the header from its start to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position, self.entries = path, data, 0, 0

    def parse(self) -> Gguf:
        if self.data[:4] != b"GGUF":
            raise self.damaged("magic", f"is {self.data[:4]!r}, not b'GGUF'")
        self.position = 4
        version = self.number("I", "version")
        if version not in (2, 3):
            raise self.damaged("version", f"{version} is not served (2 and 3 are, little endian)")
        num_tensors = self.count("tensor_count", MIN_TENSOR, MAX_TENSORS)
        num_keys = self.count("metadata_kv_count", MIN_KEY, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self.text(f"metadata key {index}", MAX_NAME)
            if key in metadata:
                raise self.damaged(f"metadata key {key!r}", "occurs twice")
            metadata[key] = self.value(self.number("I", key), key)
        tensors = [self.tensor(index) for index in range(num_tensors)]
        return Gguf(self.path, metadata, self.placed(tensors, metadata), (self.path,))

    def placed(self, tensors: list[GgufTensor], metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        """The tensors with absolute positions, which must not overlap or leave the file."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise self.damaged("general.alignment", f"is {alignment!r:.100}, no multiple of 8")
        base = -(-self.position // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for tensor in tensors:
            field, end = f"tensor {tensor.name!r}", base + tensor.start + tensor.num_bytes
            if tensor.name in placed:
                raise self.damaged(field, "occurs twice")
            if tensor.start % alignment:
                raise self.damaged(f"{field}: offset", f"{tensor.start} is not aligned")
            if end > len(self.data):
                raise self.damaged(f"{field}: offset", f"ends the tensor at byte {end}, the file at {len(self.data)}")
            placed[tensor.name] = replace(tensor, start=base + tensor.start)
        for a, b in pairwise(sorted(placed.values(), key=lambda tensor: tensor.start)):
            if a.start + a.num_bytes > b.start:
                raise self.damaged(f"tensor {b.name!r}: offset", f"overlaps tensor {a.name!r}")
        return placed

    def tensor(self, index: int) -> GgufTensor:
        """An entry of the tensor table; `start` is still relative to the data."""
        name = self.text(f"name of tensor {index}", MAX_NAME)
        field = f"tensor {name!r}"
        axes = self.number("I", f"{field}: n_dimensions")
        if not 1 <= axes <= MAX_DIMENSIONS:
            raise self.damaged(f"{field}: n_dimensions", f"is {axes}, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self.number("Q", f"{field}: dimensions") for _ in range(axes))[::-1]
        if not all(0 < size <= MAX_SIZE for size in shape) or prod(shape) > MAX_SIZE:
            raise self.damaged(f"{field}: dimensions", f"are {list(shape)}, empty or too large")
        number = self.number("I", f"{field}: type")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            name_of = OTHER_TYPES.get(number, f"number {number}")
            raise ModelError(f"{self.path.name}: {field}: type {name_of} is not served; served are {SERVED_TYPES}.")
        if shape[-1] % kind.block:
            raise self.damaged(f"{field}: dimensions", f"rows of {shape[-1]} are no whole blocks of {kind.block}")
        offset = self.number("Q", f"{field}: offset")
        return GgufTensor(self.path, name, shape, kind, offset, prod(shape) // kind.block * kind.num_bytes)

    def value(self, kind: int, field: str) -> Any:
        """A metadata value of the type with this number."""
        if kind in SCALARS:
            return self.number(SCALARS[kind], field)
        if kind == STRING:
            return self.text(field, MAX_TEXT)
        if kind != ARRAY:
            raise self.damaged(f"type of {field}", f"{kind} is unknown")
        element = self.number("I", f"array type of {field}")
        if element not in SCALARS and element != STRING:
            raise self.damaged(f"array type of {field}", f"{element} is not served (nested or unknown)")
        size = 8 if element == STRING else struct.calcsize(f"<{SCALARS[element]}")
        length = self.count(f"length of {field}", size, MAX_ENTRIES - self.entries)
        self.entries += length
        if element == STRING:
            return [self.text(field, MAX_TEXT) for _ in range(length)]
        numbers = struct.unpack_from(f"<{length}{SCALARS[element]}", self.data, self.position)
        self.position += length * size
        return list(numbers)

    def count(self, field: str, size: int, limit: int) -> int:
        """A number of entries of at least `size` bytes, which must fit into the rest of the file."""
        count: int = self.number("Q", field)
        if count > limit or count * size > len(self.data) - self.position:
            raise self.damaged(field, f"is {count}: more than the file or the limit of {limit} holds")
        return count

    def text(self, field: str, limit: int) -> str:
        length = self.number("Q", f"length of {field}")
        if length > limit or length > len(self.data) - self.position:
            raise self.damaged(f"length of {field}", f"is {length}: more than the file or the limit of {limit} holds")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(field, f"is not UTF-8: {error.reason}") from error

    def number(self, code: str, field: str) -> Any:
        size = struct.calcsize(f"<{code}")
        if self.position + size > len(self.data):
            raise self.damaged(field, f"lies beyond the end of the file at byte {len(self.data)}")
        (value,) = struct.unpack_from(f"<{code}", self.data, self.position)
        self.position += size
        return value

    def damaged(self, field: str, reason: str) -> ModelError:
        return ModelError(f"{self.path.name} is no sound GGUF file: {field:.200} {reason}.")
