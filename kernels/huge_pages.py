"""Memory in huge pages, for the weights that every step of a CPU reads.

Linux maps memory in pages of 4 KiB. A step that streams weights then needs another entry of the TLB for every 64 cache
lines, and a missing entry stalls the core while the page tables are read: twice in a virtual machine, the guest's and
the host's. A huge page (2 MiB on x86-64) needs one entry in place of 512. Two cores of an AMD EPYC in a virtual
machine: a linear layer in bf16 with 12 to 24 rows takes 7 to 14 % less time, with 64 rows 3 %.

The kernel gives huge pages to mappings that ask for them (madvise), where an administrator has not turned them off.
Tensors share a mapping, because a mapping ends with a huge page that may be almost empty. Elsewhere, `empty` is
torch's.

The KV cache stays in small pages. Attention over 100 MB takes 5 to 10 % less time in huge ones, but blocks take memory
when they are first used, in the middle of a step, and a huge page may take milliseconds there: 6 where the host has to
find the memory first. New servers then lost a tenth of their tokens per second with chats.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MAPPING_BYTES = 64 << 20  # size of a mapping that tensors share; pages that none of them uses take no memory
ALIGNMENT = 64
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


@cache
def page_bytes() -> int:
    """The size of a huge page; 0 if the kernel gives none, or only such as are too large for the weights of a layer."""
    try:
        allowed = "[never]" not in (SETTINGS / "enabled").read_text()
        size = int((SETTINGS / "hpage_pmd_size").read_text()) if allowed and hasattr(mmap, "MADV_HUGEPAGE") else 0
    except (OSError, ValueError):
        return 0
    return size if size <= MAPPING_BYTES // 2 else 0


class Arena:
    """Gives tensors one place after the other in mappings of huge pages. A mapping is freed with its last tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None  # the one that has room
        self._used = 0  # bytes of it, from its first huge page on

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Like torch.empty. No page is touched."""
        size, page = math.prod(shape) * dtype.itemsize, page_bytes()
        if not (size and page):
            return torch.empty(shape, dtype=dtype)
        try:
            with self._lock:
                place = self._place(size, page)
        except (OSError, ValueError):  # torch.empty names the bytes that cannot be had
            return torch.empty(shape, dtype=dtype)
        return place.view(dtype).view(shape)

    def _place(self, size: int, page: int) -> Tensor:
        if size > MAPPING_BYTES // 2:
            return _part(_map(size, page), page, 0, size)
        mapping = self._mapping() if self._mapping is not None else None
        if mapping is None or self._used + size > MAPPING_BYTES:
            mapping, self._used = _map(MAPPING_BYTES, page), 0
            self._mapping = weakref.ref(mapping)
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return _part(mapping, page, start, size)


def _map(size: int, page: int) -> mmap.mmap:
    """A mapping that holds `size` bytes from its first huge page on."""
    mapping = mmap.mmap(-1, (-(-size // page) + 1) * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _part(mapping: mmap.mmap, page: int, start: int, size: int) -> Tensor:
    """uint8 [size]: `size` bytes of a mapping, from byte `start` of its first huge page on."""
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start += -whole.data_ptr() % page
    return whole[start : start + size]


empty = Arena().empty


def copy(x: Tensor) -> Tensor:
    """A dense copy of a tensor of a CPU."""
    return empty(x.shape, x.dtype).copy_(x)
