"""x @ weight.T on a GPU for a weight in 4-bit or 8-bit codes, which are read packed and decoded in registers.

A program multiplies block_n outputs with block_m rows of x. The decoded weights are the left operand of the product:
tensor cores take that from registers, so they never pass through shared memory. Weights are computed in fp32 and
rounded once to the type of x. Bytes read per weight: half of one (4 bits) or one, and the scales. Not measured yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import ELEMENT_SIZES, AotConfiguration, matrix_needs
from kernels.card import known_card
from kernels.dispatch import device_sizes, tl, triton
from kernels.quantized.weight import INT4, QuantizedWeight

# Kinds of codes: signed integers of 4 bits, a codebook of 16 values, int8, e4m3.
INT4_CODES, CODEBOOK, INT8_CODES, FP8_CODES = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class CodeTile:
    """The tile of one program: block_m rows of x, block_n outputs, block_k columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def code_tile(element_bits: int, capability: int, num_rows: int) -> CodeTile:
    """The tile for a launch. Few rows take few outputs per program, so that enough programs share the reading."""
    if element_bits == 32 or capability < 80:
        return CodeTile(16, 32, 32, num_warps=4, num_stages=2)
    if num_rows <= 16:
        return CodeTile(16, 64, 128, num_warps=4, num_stages=4)
    # With 4 warps, the compiler for B200 spills registers; so it does for RTX 50 with 3 stages and 64 rows.
    num_warps = 8 if 100 <= capability < 120 else 4
    if num_rows <= 64:
        return CodeTile(64, 64, 64, num_warps, num_stages=2 if capability >= 120 else 3)
    return CodeTile(128, 64, 64, num_warps, num_stages=3)


def code_kind(weight: QuantizedWeight) -> int:
    """The kind of codes of a weight."""
    if weight.codebook is not None:
        return INT4_CODES if weight.codebook == INT4 else CODEBOOK
    return INT8_CODES if weight.codes.dtype == torch.int8 else FP8_CODES


def supports_code_matmul(weight: QuantizedWeight) -> bool:
    """True for a matrix whose groups are a power of two of at least 16 columns, or a whole row."""
    group = weight.group_size
    return len(weight.shape) == 2 and (group == weight.in_features or (group >= 16 and group & (group - 1) == 0))


class CodeMatmul:
    """A quantised matrix [out_features, in_features] and its launches."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """weight: see supports_code_matmul; its `permutation` is left to the caller."""
        self.kind = code_kind(weight)
        self.out_features, self.in_features = weight.shape
        self.codes = weight.codes.contiguous().view(torch.uint8)
        self.scales = weight.scales.contiguous()
        self.offsets = None if weight.offsets is None else weight.offsets.contiguous()
        values = weight.codebook if self.kind == CODEBOOK else None
        self.table = None if values is None else torch.tensor(values, device=self.codes.device)
        self.group_size = weight.group_size

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_rows, in_features], whose rows may be strided -> [num_rows, out_features] in the dtype of x."""
        x = x if x.stride(1) == 1 else x.contiguous()
        num_rows = len(x)
        out = torch.empty((num_rows, self.out_features), dtype=x.dtype, device=x.device)
        if num_rows:
            tile = code_tile(8 * x.element_size(), device_sizes(x.device)[0], num_rows)
            grid = (-(-self.out_features // tile.block_n), -(-num_rows // tile.block_m))
            code_matmul_kernel[grid](
                x, self.codes, self.scales, self.offsets, self.table, bias, out, num_rows, x.stride(0),
                **self._constants(tile), num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
        return out

    def _constants(self, tile: CodeTile) -> dict[str, int]:
        return constants(tile, self.kind, self.out_features, self.in_features, self.group_size)


def constants(tile: CodeTile, kind: int, out_features: int, in_features: int, group_size: int) -> dict[str, int]:
    """Compile-time arguments. The sizes of a layer are among them, because a model has only four or five kinds."""
    return {
        "OUT_FEATURES": out_features,
        "IN_FEATURES": in_features,
        "GROUP": group_size,
        "KIND": kind,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }


@triton.jit(do_not_specialize=["num_rows"])
def code_matmul_kernel(
    x_ptr, codes_ptr, scales_ptr, offsets_ptr, table_ptr, bias_ptr, out_ptr, num_rows, x_stride,
    OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (output tiles, row tiles). Rows and outputs past the end repeat the last one and are not stored."""
    outputs = (tl.program_id(0) * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    rows = (tl.program_id(1) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    some_outputs, some_rows = tl.minimum(outputs, OUT_FEATURES - 1), tl.minimum(rows, num_rows - 1)
    NUM_GROUPS: tl.constexpr = IN_FEATURES // GROUP
    x_at = x_ptr + some_rows[:, None] * x_stride
    scales_at, offsets_at = scales_ptr + some_outputs[:, None] * NUM_GROUPS, offsets_ptr
    if offsets_ptr is not None:
        offsets_at = offsets_ptr + some_outputs[:, None] * NUM_GROUPS
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, IN_FEATURES, BLOCK_K):
        x_columns = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_at + x_columns[None, :], mask=(x_columns < IN_FEATURES)[None, :], other=0.0)
        if KIND < 2:  # a byte holds an even column and the odd one behind it
            half: tl.constexpr = BLOCK_K // 2
            columns = k // 2 + tl.arange(0, half)
            inside = (columns < IN_FEATURES // 2)[None, :]
            codes = tl.load(codes_ptr + some_outputs[:, None] * (IN_FEATURES // 2) + columns[None, :], mask=inside,
                            other=0)  # fmt: skip
            scale = _spread(scales_at, k, NUM_GROUPS, GROUP, half, BLOCK_N, BLOCK_K)
            even, odd = _meaning4(codes & 15, table_ptr, KIND) * scale, _meaning4(codes >> 4, table_ptr, KIND) * scale
            if offsets_ptr is not None:
                offset = _spread(offsets_at, k, NUM_GROUPS, GROUP, half, BLOCK_N, BLOCK_K)
                even += offset
                odd += offset
            x_even, x_odd = tl.split(tl.reshape(x, (BLOCK_M, half, 2)))
            total = tl.dot(even.to(x.dtype), tl.trans(x_even), total, input_precision="ieee")
            total = tl.dot(odd.to(x.dtype), tl.trans(x_odd), total, input_precision="ieee")
        else:
            inside = (x_columns < IN_FEATURES)[None, :]
            codes = tl.load(codes_ptr + some_outputs[:, None] * IN_FEATURES + x_columns[None, :], mask=inside, other=0)
            weight = _meaning8(codes, KIND) * _spread(scales_at, k, NUM_GROUPS, GROUP, BLOCK_K, BLOCK_N, BLOCK_K)
            if offsets_ptr is not None:
                weight += _spread(offsets_at, k, NUM_GROUPS, GROUP, BLOCK_K, BLOCK_N, BLOCK_K)
            total = tl.dot(weight.to(x.dtype), tl.trans(x), total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + some_outputs).to(tl.float32)[:, None]
    kept = (outputs < OUT_FEATURES)[:, None] & (rows < num_rows)[None, :]
    out_at = out_ptr + rows[None, :] * OUT_FEATURES + outputs[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _spread(
    at, k, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales or offsets of columns k to k + BLOCK_K - 1, fp32, for WIDTH entries that hold them: [BLOCK_N, WIDTH], or
    [BLOCK_N, 1] where they share a group."""
    if GROUP >= BLOCK_K:
        found = tl.load(at + k // GROUP).to(tl.float32)
    else:
        PARTS: tl.constexpr = BLOCK_K // GROUP
        groups = k // GROUP + tl.arange(0, PARTS)
        each = tl.load(at + groups[None, :], mask=(groups < NUM_GROUPS)[None, :], other=0.0).to(tl.float32)
        found = tl.reshape(tl.broadcast_to(each[:, :, None], (BLOCK_N, PARTS, WIDTH // PARTS)), (BLOCK_N, WIDTH))
    return found


@triton.jit
def _meaning4(codes, table_ptr, KIND: tl.constexpr):
    """Codes 0 to 15 -> fp32."""
    if KIND == 0:
        return codes.to(tl.float32) - 8.0
    else:
        return tl.load(table_ptr + codes.to(tl.int32))


@triton.jit
def _meaning8(codes, KIND: tl.constexpr):
    """Bytes of int8 or e4m3 -> fp32. e4m3 in the upper bits of fp16 is 2^-8 of its value, subnormal numbers too."""
    if KIND == 2:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields a layer of Llama-3-8B in each kind of codes, with scales per group of 32 and 128 columns and per row."""
    cases = [("int4 g32", INT4_CODES, 32, False), ("int4 g128", INT4_CODES, 128, True),
             ("codebook g32", CODEBOOK, 32, False), ("codebook g16", CODEBOOK, 16, False),
             ("int8", INT8_CODES, 4096, False), ("int8 g32", INT8_CODES, 32, True), ("fp8", FP8_CODES, 4096, False),
             ("fp8 g128", FP8_CODES, 128, False)]  # fmt: skip
    for dtype in ("bf16", "fp16", "fp32"):
        bits = 8 * ELEMENT_SIZES[dtype]
        for name, kind, group_size, has_offsets in cases if dtype != "fp16" else cases[:1]:
            for num_rows in (1, 64, 4096):
                tile = code_tile(bits, capability, num_rows)
                absent = {"bias_ptr": None} | ({} if has_offsets else {"offsets_ptr": None})
                absent |= {} if kind == CODEBOOK else {"table_ptr": None}
                yield AotConfiguration(
                    code_matmul_kernel, f"{name} {num_rows} rows", dtype,
                    constants(tile, kind, 6144, 4096, group_size) | absent, tile.num_warps, tile.num_stages,
                    types={"codes_ptr": "*u8", "scales_ptr": "*fp32", "offsets_ptr": "*fp32", "table_ptr": "*fp32"},
                    multiples_of_16=("x_stride",),
                    needs=() if bits == 32 else matrix_needs(known_card(capability), tile.block_n),
                    quick=(dtype, name, num_rows) in (("bf16", "int4 g32", 1), ("bf16", "fp8", 4096)),
                )  # fmt: skip
                if bits == 32 or capability < 80:
                    break  # one tile for any number of rows
