"""Reads what Linux knows about the memory of this process."""

import re

from torch import Tensor


def mapping_of(address: int) -> tuple[int, int, list[str]] | None:
    """(first address, end, flags) of the mapping of this process that holds an address; None if there is none."""
    with open("/proc/self/smaps") as file:
        found = None
        for line in file:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                start, end = (int(part, 16) for part in match.groups())
                found = (start, end) if start <= address < end else None
            elif found and line.startswith("VmFlags:"):
                return *found, line.split()[1:]
    return None


def asks_for_huge_pages(x: Tensor) -> bool:
    mapping = mapping_of(x.data_ptr())
    return mapping is not None and "hg" in mapping[2]
