"""LoraWeights: the factors of one linear layer in `max_loras` slots, and their addition to the layer's output.

Three kinds: stacked tensors for the Triton kernels, a table of addresses for the compiled kernels of a CPU, and a plain
dict for torch elsewhere (fp32 on a CPU).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import cpu_kernels, use_triton
from kernels.lora.rows import RowGroups
from kernels.lora.shrink_expand import Factors, shrink_expand, shrink_expand_reference

Factor = tuple[Tensor, Tensor] | None  # A [rank, in_features] and B [rows of the part, rank], which holds the scale


class LoraWeights(Protocol):
    """The factors of one linear layer. Its output has parts, each with factors of its own: q, k and v, or gate and
    up."""

    def pack(self, factors: Sequence[Factor]) -> Any:
        """The factors of each part, None for a part without, in the form that `set` takes. Any thread may call it."""

    def set(self, slot: int, packed: Any) -> None:
        """Fill a slot with what `pack` made; None for no factors."""

    def add(self, out: Tensor, x: Tensor, groups: RowGroups) -> None:
        """out [num_rows, out_features] += x @ A.T @ B.T, with the factors of each row's slot."""


def make_lora_weights(
    in_features: int, parts: Sequence[int], max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Empty slots for a layer of the model's dtype, whose output has these parts in rows."""
    sizes = tuple(parts)
    if use_triton(torch.empty(0, device=device)):
        return StackedWeights(in_features, sizes, max_loras, max_rank, dtype, device)
    cpu = cpu_kernels() if device.type == "cpu" else None
    if cpu is not None and cpu.lora.supports_lora(in_features, sizes, dtype):
        return PackedWeights(sizes, max_loras, max_rank)
    return PlainWeights(sizes)


def padded_rank(max_rank: int) -> int:
    """Ranks in a slot of the Triton kernels: a power of two from 16 on."""
    return max(16, 1 << (max_rank - 1).bit_length())


def lora_bytes(in_features: int, parts: Sequence[int], max_loras: int, max_rank: int, dtype_bytes: int) -> int:
    """Bytes of the slots of a layer on a GPU."""
    return max_loras * padded_rank(max_rank) * (in_features * len(parts) + sum(parts)) * dtype_bytes


class StackedWeights:
    """Slots as tensors at fixed addresses, for Triton."""

    def __init__(
        self, in_features: int, parts: tuple[int, ...], max_loras: int, max_rank: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        rank = padded_rank(max_rank)
        self.parts = parts
        self._on_gpu = device.type == "cuda"
        self.a = torch.zeros((max_loras, len(parts), rank, in_features), dtype=dtype, device=device)
        self.b = torch.zeros((max_loras, sum(parts), rank), dtype=dtype, device=device)
        self.ranks = torch.zeros((max_loras, len(parts)), dtype=torch.int32, device=device)

    def pack(self, factors: Sequence[Factor]) -> list[Factor]:
        """See LoraWeights. In pinned memory, so that `set` does not wait for the steps that the device still computes.
        Parts that share a tensor share its copy."""
        if not self._on_gpu:
            return list(factors)
        shared = {t.data_ptr(): t for pair in factors if pair for t in pair}
        pinned = {address: t if t.is_cuda else t.pin_memory() for address, t in shared.items()}
        return [pair and (pinned[pair[0].data_ptr()], pinned[pair[1].data_ptr()]) for pair in factors]

    def set(self, slot: int, packed: list[Factor] | None) -> None:
        """See LoraWeights. Copies in the order of the current stream."""
        factors = packed or [None] * len(self.parts)
        ranks = [0 if factor is None else len(factor[0]) for factor in factors]
        for part, (rows, factor) in enumerate(zip(self.b[slot].split(self.parts), factors, strict=True)):
            if factor is None:
                continue
            a, b = factor
            self.a[slot, part, : len(a)].copy_(a, non_blocking=True)
            self.a[slot, part, len(a) :].zero_()
            rows[:, : len(a)].copy_(b, non_blocking=True)
            rows[:, len(a) :].zero_()
        for part, rank in enumerate(ranks):
            self.ranks[slot, part].fill_(rank)

    def add(self, out: Tensor, x: Tensor, groups: RowGroups) -> None:
        """See LoraWeights."""
        shrink_expand(out, x, self.a, self.b, self.ranks, groups.order, groups.starts, self.parts)


class PackedWeights:
    """Slots as addresses of packed factors in a table that a recorded program reads."""

    def __init__(self, parts: tuple[int, ...], max_loras: int, max_rank: int) -> None:
        cpu = cpu_kernels()
        assert cpu is not None, "only compiled kernels read the table"
        self._cpu = cpu
        self._max_rank = -(-max_rank // 16) * 16
        self._table = torch.zeros((max_loras, len(parts), cpu.lora.ENTRY), dtype=torch.int64)
        self._offsets = torch.from_numpy(np.cumsum([0, *parts], dtype=np.int64))
        self._widest = max(parts)
        self._held: list[list[Factor]] = [[] for _ in range(max_loras)]

    def pack(self, factors: Sequence[Factor]) -> list[Factor]:
        """See LoraWeights."""
        lora = self._cpu.lora
        return [None if factor is None else (lora.pack_a(factor[0]), lora.pack_b(factor[1])) for factor in factors]

    def set(self, slot: int, packed: list[Factor] | None) -> None:
        """See LoraWeights."""
        self._table[slot] = 0
        for part, pair in enumerate(packed or ()):
            if pair is not None:
                self._table[slot, part] = torch.tensor([pair[0].data_ptr(), pair[1].data_ptr(), len(pair[0])])
        self._held[slot] = packed or []

    def add(self, out: Tensor, x: Tensor, groups: RowGroups) -> None:
        """See LoraWeights."""
        self._cpu.lora.add_lora(
            out, x, self._table, groups.order, groups.starts, self._offsets, self._widest, self._max_rank
        )


class PlainWeights:
    """Slots as tensors of the host's memory."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = parts
        self._factors: dict[int, Factors] = {}

    def pack(self, factors: Sequence[Factor]) -> Factors:
        """See LoraWeights."""
        return list(zip(self._parts, factors, strict=True))

    def set(self, slot: int, packed: Factors | None) -> None:
        """See LoraWeights."""
        self._factors[slot] = packed or []

    def add(self, out: Tensor, x: Tensor, groups: RowGroups) -> None:
        """See LoraWeights."""
        shrink_expand_reference(out, x, self._factors, groups.order, groups.starts)
