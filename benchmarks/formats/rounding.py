"""Rounds a matrix to nearest in the number types of quantised checkpoints, and packs the codes bit by bit.

The code shares nothing with engine/models/formats: the tests use it as their oracle.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0


class Integers(NamedTuple):
    """(codes - zeros) * scales, with a scale and a zero for each group of columns."""

    codes: Tensor  # int64 [out, in], 0 to 2 ** bits - 1
    scales: Tensor  # [out, groups]
    zeros: Tensor  # int64 [out, groups]
    groups: Tensor  # int64 [in]: the group of each column

    def values(self) -> Tensor:
        """fp32 [out, in]"""
        exact = (self.codes - self.zeros[:, self.groups]).double() * self.scales[:, self.groups].double()
        return exact.float()


def integers(
    weight: Tensor, bits: int, groups: Tensor, symmetric: bool, scale_dtype: torch.dtype = torch.float16
) -> Integers:
    """Codes of `bits` for a matrix [out, in] whose column j belongs to groups[j]."""
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    parts = [weight[:, groups == group] for group in range(count)]
    low = torch.stack([part.amin(-1).clamp(max=0) for part in parts], -1)
    high = torch.stack([part.amax(-1).clamp(min=0) for part in parts], -1)
    if symmetric:
        scales = (torch.maximum(-low, high) / (top // 2)).clamp(min=1e-6).to(scale_dtype)
        zeros = torch.full(low.shape, 1 << (bits - 1))
    else:
        scales = ((high - low) / top).clamp(min=1e-6).to(scale_dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = (weight / scales.float()[:, groups]).round() + zeros[:, groups]
    return Integers(codes.clamp(0, top).long(), scales, zeros, groups)


def in_order(columns: int, group_size: int) -> Tensor:
    """The group of each column where groups follow each other; -1: one group."""
    return torch.arange(columns) // (group_size if group_size > 0 else columns)


def shuffled(columns: int, group_size: int) -> Tensor:
    """The group of each column after act-order, which puts columns in groups by their importance."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    groups = torch.empty(columns, dtype=torch.int64)
    groups[order] = in_order(columns, group_size)
    return groups


def words(codes: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Codes packed along `dim` into int32, the first in the lowest bits; zeros fill the last word."""
    table = np.moveaxis(codes.numpy().astype(np.uint64), dim, -1)
    per_word = 32 // bits
    packed = np.zeros((*table.shape[:-1], -(-table.shape[-1] // per_word)), np.uint64)
    for column in range(table.shape[-1]):
        packed[..., column // per_word] |= table[..., column] << np.uint64(bits * (column % per_word))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, dim)))


def nibbles(codes: Tensor, low_first: bool = True) -> Tensor:
    """Two codes a byte, uint8 [..., n / 2]; low_first: the even one in the low half."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    low, high = (even, odd) if low_first else (odd, even)
    return (low + 16 * high).to(torch.uint8)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The index of the nearest entry of the table, int64."""
    flat = values.flatten()
    return torch.cat([(part[:, None] - table).abs().argmin(-1) for part in flat.split(65536)]).view(values.shape)


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """[out, in] -> [out, groups, group_size]"""
    return weight.view(weight.shape[0], -1, group_size)


def block_peaks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The largest magnitude of each block of rows and columns, [blocks down, blocks across]."""
    return torch.stack([
        torch.stack([part.abs().max() for part in band.split(columns, 1)]) for band in weight.split(rows, 0)
    ])  # fmt: skip


def spread(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """A number for each block -> one for each element of a matrix of `shape`."""
    down, across = torch.arange(shape[0]) // rows, torch.arange(shape[1]) // columns
    return scales[down][:, across]
