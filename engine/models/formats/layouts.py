"""Steps that the formats of quantised checkpoints share: unpack codes, spread scales, choose modules by name."""

import re
from collections.abc import Iterable
from math import ceil, gcd

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import Matrix
from kernels.quantized.weight import INT4, QuantizedWeight, pack_4bit, unpack_4bit

# The values of E2M1 (OCP Microscaling Formats, version 1.0, table 5), by code.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
PLAIN_PARAMETERS = ("embedding.weight", "lm_head.weight")  # formats keep these plain unless their settings say else
SCALE_DTYPES = ("F32", "F16", "BF16")
EXPONENT_DTYPES = ("F8_E8M0", "U8")  # powers of two: 2 ** (byte - 127)
MAX_PATTERN = 1000  # characters of a regular expression in config.json


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 8 bits, lowest bits first: int32 [..., n] -> uint8 [..., n * 32 / bits]."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else unpack_4bit(octets)


def integer_weight(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    group_size: int,
    zeros: Tensor | None,
    permutation: Tensor | None = None,
    symmetric: bool = True,
) -> QuantizedWeight:
    """The matrix (code - zero) * scale.

    codes: uint8 [..., out, in], 0 to 2 ** bits - 1. scales: [..., out, groups]; a group is group_size columns, the last
    may have fewer. zeros: integers of the shape of `scales`; None: 2 ** (bits - 1). `symmetric`: the settings say that
    zeros are 2 ** (bits - 1); if they are, the matrix has no offsets. Without offsets scales keep their dtype; else
    scales and offsets are fp32, because a product of an fp16 scale and a zero is not exact in fp16.
    """
    middle = 1 << (bits - 1)
    columns = codes.shape[-1]
    offsets = None
    if zeros is not None and not (symmetric and bool((zeros == middle).all())):
        scales = scales.float()
        offsets = scales * (middle - zeros.float())
        offsets, _ = even_groups(offsets, group_size, columns)
    scales, group_size = even_groups(scales, group_size, columns)
    if bits == 4:
        return QuantizedWeight(pack_4bit(codes), scales, group_size, offsets, INT4, permutation)
    signed = (codes ^ 128).view(torch.int8)
    return QuantizedWeight(signed, scales, group_size, offsets, permutation=permutation)


def even_groups(table: Tensor, group_size: int, columns: int) -> tuple[Tensor, int]:
    """A table [..., ceil(columns / group_size)] -> the same values for groups that divide the columns, and their size.

    1 for group_size: one group per row.
    """
    if table.shape[-1] == 1:
        return table.contiguous(), columns
    even = gcd(group_size, columns)
    if even != group_size:
        table = table.repeat_interleave(group_size // even, -1)[..., : columns // even]
    return table.contiguous(), even


def block_scales(scales: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[Tensor, int]:
    """Scales of blocks of rows and columns, [..., blocks down, blocks across] -> [..., out, groups] and the group size.

    A matrix whose shape is no multiple of the block has smaller blocks at its end.
    """
    rows = scales.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return even_groups(rows, block[1], shape[-1])


def spread_scale(scale: Tensor, rows: int) -> Tensor:
    """A scale of the whole matrix ([] or [1]), or one for each row ([out] or [out, 1]) -> [out, 1]."""
    return scale.reshape(-1, 1).expand(rows, 1).contiguous()


def decode_scales(scales: Tensor) -> Tensor:
    """Scales as floating-point numbers. Exponents (uint8, float8_e8m0fnu) become bf16, which holds them exactly."""
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape), scales.int() - 127).bfloat16()
    return scales


def scale_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of block_scales' argument for a matrix of `shape`."""
    return (*shape[:-2], ceil(shape[-2] / block[0]), ceil(shape[-1] / block[1]))


def code_permutation(g_idx: Tensor, group_size: int, matrix: Matrix) -> Tensor | None:
    """GPTQ's act-order: the order of columns that puts each group together, int32 [in]; None if they are in order.

    g_idx: the group of each column. ModelError unless each group but the last has group_size columns.
    """
    columns = torch.arange(len(g_idx))
    ordered = columns // group_size
    if torch.equal(g_idx.long(), ordered):
        return None
    permutation = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[permutation].long(), ordered):
        raise ModelError(
            f"tensor {matrix.module + '.g_idx'!r} does not give {group_size} columns to each group; such a checkpoint "
            "is not served. Quantise again with a group_size that the groups keep to."
        )
    return permutation.int()


def stored_bytes(
    shape: tuple[int, ...], bits: int, group_size: int, scale_bytes: int, offsets: bool = False, permuted: bool = False
) -> int:
    """Bytes of a QuantizedWeight of `shape` with scales of scale_bytes for group_size columns (0: one per row)."""
    rows, columns = 1, shape[-1]
    for size in shape[:-1]:
        rows *= size
    if not 0 < group_size < columns:
        group_size = columns
    groups = columns // gcd(group_size, columns)
    return rows * columns * bits // 8 + rows * groups * scale_bytes * (2 if offsets else 1) + 4 * columns * permuted


def names_module(patterns: Iterable[str], module: str) -> bool:
    """True if a list such as modules_to_not_convert names the module, by the rules of transformers: a regular
    expression that matches from the start up to a dot or the end, or the end of the name."""
    return any(module.endswith(key) or re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", module) for key in patterns)


def spellings(module: str) -> tuple[str, ...]:
    """The names of a module in settings: its own and, for a vision-language checkpoint, those with the name of the text
    model that loading leaves out."""
    inner = module.removeprefix("model.")
    return module, f"model.language_model.{inner}", f"language_model.{module}"


def read_names(reader: ConfigReader, name: str) -> tuple[str, ...]:
    """A list of strings, empty if absent."""
    value = reader.raw.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{reader.where}: {name} must list names of modules, not {short(value)}.")
    return tuple(value)


def read_patterns(reader: ConfigReader, name: str) -> tuple[str, ...]:
    """A list of names or regular expressions, empty if absent. ModelError if one is not a regular expression."""
    names = read_names(reader, name)
    for entry in names:
        check_pattern(reader, name, entry.removeprefix("re:"))
    return names


def check_pattern(reader: ConfigReader, name: str, pattern: str) -> None:
    """ModelError unless the pattern is a regular expression of at most MAX_PATTERN characters."""
    try:
        if len(pattern) > MAX_PATTERN:
            raise re.error("it is too long")
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{reader.where}: {name} holds {short(pattern)}, no regular expression: {error}.") from error
