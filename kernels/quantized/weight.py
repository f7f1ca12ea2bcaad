"""QuantizedWeight: a matrix in 4-bit or 8-bit codes, whatever the format of the checkpoint that it came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

INT4 = tuple(float(code - 8) for code in range(16))  # code 0 is -8, code 15 is 7
UINT4 = tuple(float(code) for code in range(16))


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out_features, in_features], or one matrix per expert [experts, out_features, in_features].

    value = meaning of the code * scale + offset. The meaning depends on the dtype of `codes`: int8 and float8_e4m3fn
    codes mean their own values; a byte of uint8 holds two 4-bit codes, the even column in its low half, and a code
    means `codebook[code]`. `group_size` columns of a row share a scale and an offset.

    With `int8_inputs` the format rounds the inputs to int8, too (W8A8). Devices without such products keep the inputs.

    With `permutation`, column j of the codes belongs to feature permutation[j] of the input (GPTQ's act-order). Experts
    share one, or each has its own.
    """

    codes: Tensor  # int8 or float8_e4m3fn [..., out, in]; uint8 [..., out, in / 2]
    scales: Tensor  # floating point [..., out, in / group_size]
    group_size: int  # in_features: one scale per row
    offsets: Tensor | None = None  # shape and dtype of scales; None: 0
    codebook: tuple[float, ...] | None = None  # 16 values, with uint8 codes only
    permutation: Tensor | None = None  # int32 [in], or [experts, in]
    int8_inputs: bool = False

    def __post_init__(self) -> None:
        assert (self.codes.dtype == torch.uint8) == (self.codebook is not None), "4-bit codes need a codebook"
        groups = (*self.codes.shape[:-1], self.in_features // self.group_size)
        assert self.in_features % self.group_size == 0 and self.scales.shape == groups, "scales do not fit the codes"
        assert self.offsets is None or self.offsets.shape == groups, "offsets do not fit the codes"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def in_features(self) -> int:
        return self.codes.shape[-1] * 8 // self.bits

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that the codes stand for."""
        return (*self.codes.shape[:-1], self.in_features)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, offsets and permutation."""
        tensors = (self.codes, self.scales, self.offsets, self.permutation)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, [..., out, in]: computed in fp32, rounded once to `dtype`. Columns are in the input's order."""
        groups = self._meanings().unflatten(-1, (-1, self.group_size))
        values = groups * self.scales.float().unsqueeze(-1)
        if self.offsets is not None:
            values += self.offsets.float().unsqueeze(-1)
        values = values.flatten(-2)
        if self.permutation is not None:
            order = self.permutation.long().unsqueeze(-2)  # [1, in] or [experts, 1, in]
            values = torch.empty_like(values).scatter_(-1, order.expand_as(values), values)
        return values.to(dtype)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """A copy on another device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            offsets=None if self.offsets is None else self.offsets.to(device),
            permutation=None if self.permutation is None else self.permutation.to(device),
        )

    def rows(self, indices: Tensor) -> "QuantizedWeight":
        """Some rows of a matrix [out, in]: int64 [n]."""
        return self._of_rows(lambda table: table[indices])

    def row_range(self, start: int, end: int) -> "QuantizedWeight":
        """Rows start:end of a matrix [out, in], without a copy."""
        return self._of_rows(lambda table: table[start:end])

    def expert(self, index: int) -> "QuantizedWeight":
        """The matrix [out, in] of one expert, without a copy."""
        chosen = self._of_rows(lambda table: table[index])
        if self.permutation is None or self.permutation.dim() == 1:
            return chosen
        return replace(chosen, permutation=self.permutation[index])

    def _of_rows(self, choose: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        codes = choose(self.codes.view(torch.uint8)).view(self.codes.dtype)  # torch cannot index fp8
        offsets = None if self.offsets is None else choose(self.offsets)
        return replace(self, codes=codes, scales=choose(self.scales), offsets=offsets)

    def _meanings(self) -> Tensor:
        if self.codebook is None:
            return self.codes.float()
        codes = unpack_4bit(self.codes)
        if self.codebook == INT4:
            return codes.float() - 8.0
        return table_of(self.codebook, self.codes.device)[codes.long()]


@cache
def table_of(codebook: tuple[float, ...], device: torch.device) -> Tensor:
    """The values of a codebook, fp32 [16]. Made once: no CUDA graph can be recorded while the host uploads."""
    return torch.tensor(codebook, device=device)


Part = Tensor | QuantizedWeight
Weight = Part | tuple[Part, ...]  # a tuple: the rows of all parts, in order, where these differ in kind


def pack_4bit(codes: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 [..., n] -> two a byte, uint8 [..., n / 2]: the even column in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_4bit(packed: Tensor) -> Tensor:
    """The inverse of pack_4bit: uint8 [..., n / 2] -> uint8 [..., n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def concatenate_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the rows of all parts, in order; None where the parts are of different kinds."""
    first = parts[0]
    alike = all(_same_kind(first, part) and _same_order(first, part) for part in parts)
    return _concatenate(parts, -2) if alike else None


def stack_experts(experts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Weights [out, in] -> one weight [experts, out, in]; None where the experts are of different kinds."""
    first = experts[0]
    if not all(_same_kind(first, expert) for expert in experts):
        return None
    stacked = _concatenate([_with_expert_axis(expert) for expert in experts], 0)
    if all(_same_order(first, expert) for expert in experts):
        return stacked
    in_order = torch.arange(first.in_features, dtype=torch.int32, device=first.device)
    orders = [in_order if expert.permutation is None else expert.permutation for expert in experts]
    return replace(stacked, permutation=torch.stack(orders))


def _concatenate(parts: Sequence[QuantizedWeight], dim: int) -> QuantizedWeight:
    first = parts[0]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts], dim),
        scales=torch.cat([part.scales for part in parts], dim),
        offsets=None if first.offsets is None else torch.cat([p.offsets for p in parts if p.offsets is not None], dim),
    )


def _with_expert_axis(weight: QuantizedWeight) -> QuantizedWeight:
    offsets = None if weight.offsets is None else weight.offsets.unsqueeze(0)
    return replace(weight, codes=weight.codes.unsqueeze(0), scales=weight.scales.unsqueeze(0), offsets=offsets)


def _same_kind(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    same_codes = a.codes.dtype == b.codes.dtype and a.codebook == b.codebook
    same_scales = a.scales.dtype == b.scales.dtype and a.group_size == b.group_size
    same_inputs = a.int8_inputs == b.int8_inputs
    return same_codes and same_scales and same_inputs and (a.offsets is None) == (b.offsets is None)


def _same_order(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    if a.permutation is None or b.permutation is None:
        return a.permutation is b.permutation
    return torch.equal(a.permutation, b.permutation)
