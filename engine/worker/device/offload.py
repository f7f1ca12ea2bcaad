"""Moves the memory of tensors from the device to host memory and back, while the tensors stay the same objects."""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.garbage_collector import thaw_garbage


class Offloaded:
    """The content of tensors in host memory; their storages are empty until `restore`.

    A storage is emptied in place (as FSDP does between uses), so every view and every owner of a tensor sees it come
    back. Recorded CUDA graphs hold addresses: they must be gone before. A storage that torch cannot resize stays where
    it is: the buffer of a sum over ranks (engine/models/parallel/symmetric_memory.py), which other processes have
    mapped.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.num_bytes = 0
        for storage in {storage._cdata: storage for storage in map(Tensor.untyped_storage, tensors)}.values():
            size = storage.nbytes()
            if size and storage.resizable():
                self._moved.append((storage, _bytes_of(storage).to("cpu", copy=True)))
                storage.resize_(0)
                self.num_bytes += size

    def restore(self) -> None:
        """Allocate the storages again and copy their content back."""
        for storage, content in self._moved:
            storage.resize_(content.numel())
            _bytes_of(storage).copy_(content)
        self._moved.clear()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_on(device: torch.device) -> list[Tensor]:
    """Every live tensor of this process on a device of this type: weights, tables of positions, workspaces."""
    thaw_garbage()
    # isinstance would ask a weak proxy for the class of its object, and raise where that object is gone.
    tensors = (found for found in gc.get_objects() if issubclass(type(found), Tensor))
    return [tensor for tensor in tensors if tensor.device.type == device.type]


def device_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process holds for tensors; 0 for a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def free_cached_bytes() -> None:
    """Give the GPU memory that no tensor uses back to the driver, the workspaces of cuBLAS too."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
