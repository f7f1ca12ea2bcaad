"""PickleFile: the tensors of a pytorch_model.bin, read by torch's own unpickler, which builds tensors and nothing else.

torch.load(weights_only=True) refuses every class and function outside a short list of its own before it calls one.
"""

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.loading.tensor_file import Header

DTYPE_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


class PickleFile:
    """See TensorFile."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        """See TensorFile."""
        return list(self._tensors)

    def header(self, name: str) -> Header:
        """See TensorFile."""
        tensor = self._tensors[name]
        return Header(tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))

    def tensor(self, name: str) -> Tensor:
        """See TensorFile."""
        return self._tensors[name].detach()


@contextmanager
def open_pickle(path: Path) -> Iterator[PickleFile]:
    """Open a pickled dict of tensors, mapped into memory if it is in torch's zip form. ModelError if the file is
    damaged, holds something else, or names code to run; such code never runs."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
        if is_zip:
            _check_zip(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise ModelError(_refusal(path, str(error))) from None
    except MemoryError as error:
        raise ModelError(f"{path.name} is damaged: it asks for more memory than this machine has.") from error
    except EOFError as error:
        raise ModelError(f"{path.name} is damaged or incomplete: it ends too early.") from error
    except Exception as error:  # a damaged pickle makes the unpickler raise anything: KeyError, TypeError, EOFError ...
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{path.name} is damaged or incomplete: {reason[0][:200]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{path.name} does not hold tensors by name, as save_pretrained() writes them.")
    yield PickleFile({str(name): tensor for name, tensor in tensors.items()})


def _check_zip(path: Path) -> None:
    """ModelError if the zip file holds more bytes unpacked than it has: torch writes its records uncompressed."""
    with zipfile.ZipFile(path) as file:
        unpacked = sum(entry.file_size for entry in file.infolist())
    if unpacked > path.stat().st_size:
        raise ModelError(f"{path.name} is damaged: its records claim {unpacked} bytes, more than the file has.")


def _refusal(path: Path, reason: str) -> str:
    found = re.search(r"(?:GLOBAL |Unsupported (?:global|class) )'?([\w.]+)", reason)
    if found is None:
        return f"{path.name} is damaged or incomplete: it is not a pickle of tensors."
    return (
        f"{path.name} would run {found[1]} when unpickled, which is refused: a file of weights holds tensors only. "
        "No code was run."
    )
