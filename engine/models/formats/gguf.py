"""The quantised tensors of GGUF files (llama.cpp's ggml-quants.h): blocks of codes with their scales.

A value is code * scale + offset. The K types hold the scales of 8 or 16 groups of a block as small integers, which a
number in fp16 multiplies: these products are exact in fp32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.formats.layouts import stored_bytes
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import INT4, UINT4, QuantizedWeight, concatenate_rows, pack_4bit

# The values of IQ4_NL's and IQ4_XS's codes.
IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
PACKED_SCALE_BITS = 10  # of the K types: a CPU keeps the integers (kernels/cpu/quantized/scales.py)
BLOCK_ELEMENTS = 1 << 24  # weights that are unpacked at a time, which bounds the scratch memory


class Groups(NamedTuple):
    """The unpacked blocks of some rows, [rows, blocks, ...]."""

    codes: Tensor  # uint8 or int8 [rows, blocks, elements of a block]
    scales: Tensor  # [rows, blocks, groups of a block]
    offsets: Tensor | None = None


class Layout(NamedTuple):
    """A type of blocks. `unpack` takes the bytes, uint8 [rows, blocks, num_bytes]; codebook None: int8 codes."""

    block: int
    num_bytes: int
    group_size: int
    unpack: Callable[[Tensor], Groups]
    codebook: tuple[float, ...] | None = None
    offsets: bool = False
    wide: bool = False  # scales and offsets in fp32 instead of fp16


@dataclass(frozen=True)
class GgufFormat:
    """See WeightFormat. types: name of a quantised module in Hugging Face's form -> type of its tensor, as pairs."""

    types: tuple[tuple[str, str], ...]
    name: str = "gguf"
    reads_plain: bool = False

    @cached_property
    def _type_of(self) -> dict[str, str]:
        return dict(self.types)

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """See WeightFormat. The tensor's shape is that of the matrix, its type the file's own name."""
        kind = self._type_of.get(matrix.module)
        return None if kind is None else {".weight": Stored(matrix.shape, (kind,))}

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """See WeightFormat; the tensor ".weight" holds the bytes of each row, uint8 [out, bytes]."""
        return read_blocks(tensors[".weight"], self._type_of[matrix.module])

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """See WeightFormat."""
        layout = LAYOUTS[self._type_of[matrix.module]]
        bits, scale_bytes = 4 if layout.codebook else 8, 4 if layout.wide else 2
        return stored_bytes(matrix.shape, bits, layout.group_size, scale_bytes, layout.offsets)

    def packed_bytes(self, matrix: Matrix) -> int:
        """See PackedFormat: codes of 5 and 6 bits take 6."""
        kind = self._type_of[matrix.module]
        layout, weights = LAYOUTS[kind], prod(matrix.shape)
        bits = 4 if layout.codebook else 8 if kind == "Q8_0" else 6
        parameters = weights // layout.group_size * (2 if layout.offsets else 1)
        return (weights * bits + parameters * (PACKED_SCALE_BITS if layout.wide else 16)) // 8


def read_blocks(data: Tensor, kind: str) -> QuantizedWeight:
    """The bytes of each row, uint8 [out, bytes], of a type of LAYOUTS -> the matrix."""
    layout = LAYOUTS[kind]
    rows = max(1, BLOCK_ELEMENTS * layout.num_bytes // (data.shape[-1] * layout.block))
    weight = concatenate_rows([_read_rows(part, layout) for part in torch.split(data, rows)])
    assert weight is not None
    return weight


def _read_rows(data: Tensor, layout: Layout) -> QuantizedWeight:
    codes, scales, offsets = layout.unpack(data.view(len(data), -1, layout.num_bytes))
    codes = codes.flatten(1)
    codes = codes.to(torch.int8) if layout.codebook is None else pack_4bit(codes)
    offsets = None if offsets is None else offsets.flatten(1)
    return QuantizedWeight(codes, scales.flatten(1), layout.group_size, offsets, layout.codebook)


def _fp16(data: Tensor, start: int) -> Tensor:
    """The fp16 number at a byte of each block, [..., 1]."""
    return data[..., start : start + 2].contiguous().view(torch.float16)


def _bits(data: Tensor, bits: int, run: int) -> Tensor:
    """Codes of 1, 2 or 4 bits. Each `run` bytes hold the lowest codes of all bytes first, then the next: uint8
    [..., n] -> [..., n * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    parts: Tensor = data.reshape(*data.shape[:-1], -1, 1, run) >> shifts.view(-1, 1)
    return (parts & ((1 << bits) - 1)).flatten(-3)


def _fifth_bits(data: Tensor) -> Tensor:
    """The bits of each byte, lowest first: uint8 [..., 4] -> 0 or 16, [..., 32]."""
    return ((data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _q8_0(data: Tensor) -> Groups:
    return Groups(data[..., 2:].view(torch.int8), _fp16(data, 0))


def _q4_0(data: Tensor) -> Groups:
    return Groups(_bits(data[..., 2:], 4, 16), _fp16(data, 0))


def _q4_1(data: Tensor) -> Groups:
    return Groups(_bits(data[..., 4:], 4, 16), _fp16(data, 0), _fp16(data, 2))


def _q5_0(data: Tensor) -> Groups:
    codes = _bits(data[..., 6:], 4, 16) | _fifth_bits(data[..., 2:6])
    return Groups(codes.view(torch.int8) - 16, _fp16(data, 0))


def _q5_1(data: Tensor) -> Groups:
    codes = _bits(data[..., 8:], 4, 16) | _fifth_bits(data[..., 4:8])
    return Groups(codes, _fp16(data, 0), _fp16(data, 2))


def _q2_k(data: Tensor) -> Groups:
    packed, scale, least = data[..., :16], _fp16(data, 80).float(), _fp16(data, 82).float()
    return Groups(_bits(data[..., 16:80], 2, 32), scale * (packed & 15), -least * (packed >> 4))


def _q3_k(data: Tensor) -> Groups:
    codes = _bits(data[..., 32:96], 2, 32) | _bits(data[..., :32], 1, 32) << 2  # the value plus 4
    scales = _bits(data[..., 96:104], 4, 8) | _bits(data[..., 104:108], 2, 4) << 4
    return Groups(codes + 4, _fp16(data, 108).float() * (scales.view(torch.int8) - 32))


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 offsets of 6 bits in 12 bytes, and their factors in the 4 bytes before; both fp32."""
    low, high, mixed = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scales = torch.cat([low & 63, (mixed & 15) | (low >> 6 << 4)], -1)
    least = torch.cat([high & 63, (mixed >> 4) | (high >> 6 << 4)], -1)
    return _fp16(data, 0).float() * scales, -_fp16(data, 2).float() * least


def _q4_k(data: Tensor) -> Groups:
    return Groups(_bits(data[..., 16:], 4, 32), *_k_scales(data))


def _q5_k(data: Tensor) -> Groups:
    codes = _bits(data[..., 48:], 4, 32) | _bits(data[..., 16:48], 1, 32) << 4
    return Groups(codes, *_k_scales(data))


def _q6_k(data: Tensor) -> Groups:
    codes = _bits(data[..., :128], 4, 64) | _bits(data[..., 128:192], 2, 32) << 4
    return Groups(codes.view(torch.int8) - 32, _fp16(data, 208).float() * data[..., 192:208].view(torch.int8))


def _iq4_xs(data: Tensor) -> Groups:
    low = (data[..., 4:8].unsqueeze(-1) >> torch.tensor([0, 4], dtype=torch.uint8)).flatten(-2) & 15
    high = (data[..., 2:4].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8)).flatten(-2) & 3
    scales = (low | high << 4).view(torch.int8) - 32
    return Groups(_bits(data[..., 8:], 4, 16), _fp16(data, 0).float() * scales)


LAYOUTS = {
    "Q8_0": Layout(32, 34, 32, _q8_0),
    "Q4_0": Layout(32, 18, 32, _q4_0, INT4),
    "Q4_1": Layout(32, 20, 32, _q4_1, UINT4, offsets=True),
    "Q5_0": Layout(32, 22, 32, _q5_0),
    "Q5_1": Layout(32, 24, 32, _q5_1, offsets=True),
    "Q2_K": Layout(256, 84, 16, _q2_k, UINT4, offsets=True, wide=True),
    "Q3_K": Layout(256, 110, 16, _q3_k, INT4, wide=True),
    "Q4_K": Layout(256, 144, 32, _q4_k, UINT4, offsets=True, wide=True),
    "Q5_K": Layout(256, 176, 32, _q5_k, offsets=True, wide=True),
    "Q6_K": Layout(256, 210, 16, _q6_k, wide=True),
    "IQ4_NL": Layout(32, 18, 32, _q4_0, IQ4),
    "IQ4_XS": Layout(256, 136, 32, _iq4_xs, IQ4, wide=True),
}


def read(reader: ConfigReader) -> GgufFormat:
    """The format of a `quantization_config` with quant_method "gguf", which engine/checkpoint/gguf_config.py makes."""
    types = reader.object("types").raw
    if unknown := [kind for kind in types.values() if not isinstance(kind, str) or kind not in LAYOUTS]:
        raise ModelError(f"{reader.where}: types holds {short(unknown[0])}; known are {', '.join(LAYOUTS)}.")
    return GgufFormat(tuple(types.items()))
