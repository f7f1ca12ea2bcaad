"""x @ weight.T on a GPU for a weight in 4-bit or 8-bit codes, which are read packed and decoded in registers.

A program multiplies 64 outputs with up to 128 rows of x. The decoded weights are the left operand of the product, which
tensor cores take from registers, so they never pass through shared memory. Codes of 4 bits are laid out anew at load: a
byte holds two columns that are `half` apart, so that the low halves of neighbours are neighbouring columns, and so are
the high halves, and each of the two products reads a dense tile of x. If a tile lies in one group of columns, its
scale multiplies the sums, not the weights. An offset that is the scale times an integer is added to the codes, any
other multiplies the sums of x, which a product with ones gives. So no weight is rounded (but values of a codebook, to
the type of x). A tile of several small groups multiplies the weights with their scales and rounds them to the type of
x, as decoding does. Bytes read per weight: half of one (4 bits) or one, and the scales.

One program waits in turn for memory, for its decoding and for its products, some 0.75 us for 128 bytes of each output
on an H100. So where outputs alone make too few programs, the columns are divided, too, and a second kernel adds the
parts. Times of Llama-3-8B's layers there (out, qkv, gate_up, down; us): one row of int4 in groups of 128 12, 13, 30, 20
and 16 rows 13, 15, 37, 25; the same layers in bf16 take 16, 20, 78, 46 and 18, 23, 86, 46. In groups of 32, one row
takes 14, 15, 40, 24.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.aot_configuration import ELEMENT_SIZES, AotConfiguration, matrix_needs, power_of_2
from kernels.card import known_card
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import TRITON_VERSION, device_sizes, tl, triton
from kernels.quantized.code_values import (
    CODEBOOK,
    FP8_CODES,
    INT4_CODES,
    INT8_CODES,
    UINT4_CODES,
    byte_values,
    high_values,
    low_values,
    scaled,
)
from kernels.quantized.weight import INT4, UINT4, QuantizedWeight, pack_4bit, table_of, unpack_4bit

FOUR_BITS = (INT4_CODES, UINT4_CODES, CODEBOOK)
BLOCK_N = 64  # outputs of a program: the rows of a warp group's matrix instruction
MOST_HALF = 128  # columns between the two codes of a byte
LEAST_TILE = 16  # the fewest columns that tl.dot multiplies
LEAST_ROWS = 16 if TRITON_VERSION < (3, 5) else 8  # the fewest rows of x, its right operand
MOST_ROWS = 256  # more are multiplied with a decoded copy of the matrix, by the library for 16 bits
PROGRAMS_PER_SM, LEAST_BLOCKS, MOST_SPANS = 4, 4, 8  # see spans
ADD_BLOCK, ADD_WARPS = 512, 4
MOST_ZERO = 8
# Rows that need every variant of the kernels between them: one of each tile, and of few programs and many
WARM_UP_ROWS = (1, 16, 32, 64, 128, 256, MOST_ROWS + 1)


@dataclass(frozen=True, slots=True)
class CodeTile:
    """The tile of one program: block_m rows of x, block_n outputs, block_k bytes of codes of each at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


DECODE_TILE = CodeTile(0, 16, 128, num_warps=4, num_stages=1)


@dataclass(frozen=True, slots=True)
class CodeShape:
    """The facts that launches are compiled for. kind: one of the codes in code_values; offsets: their dtype, int8 for
    zeros, None if there are none."""

    kind: int
    out_features: int
    in_features: int
    group_size: int
    offsets: torch.dtype | None

    @property
    def has_float_offsets(self) -> bool:
        """True if the offsets are no zeros."""
        return self.offsets is not None and self.offsets != torch.int8

    @property
    def scales_weights(self) -> bool:
        """True if tiles may have several groups, and so multiply the weights with their scales; else the scale of the
        one group multiplies the sums, and a tile is as narrow as its group.

        On an H100, gate and up of Llama-3-8B in groups of 32 with 1, 16, 64 rows took, one group -> several: int4 51 ->
        38, 52 -> 58, 97 -> 75 us, with offsets 74 -> 41, 70 -> 48, 153 -> 125, int8 78 -> 55, 86 -> 72, 127 -> 88. With
        zeros it was 64 -> 50, 68 -> 91, 100 -> 100, so they keep one group. Other codebooks were not timed.
        """
        is_small = self.group_size < min(MOST_HALF, self.in_features)
        return is_small and self.kind != CODEBOOK and self.offsets != torch.int8

    @property
    def half(self) -> int:
        """Columns between the two codes of a byte: a power of two; 0 for codes of 8 bits."""
        return self._part(power_of_2(-(-self.in_features // 2))) if self.kind in FOUR_BITS else 0

    def _part(self, most: int) -> int:
        """Columns that a tile may have: at most a group where the scale multiplies the sums of several."""
        if self.group_size < self.in_features and not self.scales_weights:
            most = self.group_size
        return max(LEAST_TILE, min(MOST_HALF, most))

    def tile(self, element_bits: int, capability: int, num_rows: int) -> CodeTile:
        """The tile for a launch: the fastest of some twenty for Llama-3-8B's layers on an H100 (2026-11-26 and 27)."""
        if element_bits == 32 or capability < 80:
            return CodeTile(16, 32, 32, num_warps=4, num_stages=2)
        sums_x = self.has_float_offsets and not (self.scales_weights and self.group_size < 64)
        most = 128 if not sums_x else 64 if capability in (90, 100) else 32  # the sums take registers, too
        block_m = min(most, max(LEAST_ROWS, power_of_2(num_rows)))
        small = capability in (86, 89) or capability >= 120  # 100 KiB of shared memory
        # With fewer warps or wider tiles the compilers for these cards spill registers.
        many = (block_m > 64 and capability != 90) or (block_m > 32 and 100 <= capability < 120)
        narrow = self.has_float_offsets or (self.scales_weights and self.kind not in FOUR_BITS)
        block_k = 128 if block_m <= (64 if capability in (90, 100) and not narrow else 32) else 64
        return CodeTile(block_m, BLOCK_N, block_k, 8 if many else 4, num_stages=2 if small and block_m > 32 else 3)

    def constants(self, tile: CodeTile) -> dict[str, int]:
        """Compile-time arguments of code_matmul_kernel and decode_kernel, without BLOCK_M. The sizes of a layer are
        among them, because a model has only four or five kinds."""
        half = self.half
        return {
            "OUT_FEATURES": self.out_features,
            "IN_FEATURES": self.in_features,
            "ROW_BYTES": -(-self.in_features // (2 * half)) * half if half else self.in_features,
            "GROUP": self.group_size,
            "KIND": self.kind,
            "HALF": half,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": min(tile.block_k, half or self._part(power_of_2(self.in_features))),
        }


def spans(num_programs: int, num_sms: int, row_bytes: int, block_k: int) -> tuple[int, int]:
    """(into how many spans the columns of a product are divided, blocks of columns in each): enough for PROGRAMS_PER_SM
    programs on each SM, because one alone waits in turn for memory, decoding and products."""
    num_blocks = -(-row_bytes // block_k)
    wanted = max(1, min(PROGRAMS_PER_SM * num_sms // num_programs, num_blocks // LEAST_BLOCKS, MOST_SPANS))
    span = -(-num_blocks // wanted)
    return -(-num_blocks // span), span


def code_kind(weight: QuantizedWeight) -> int:
    """The kind of codes of a weight."""
    if weight.codebook is not None:
        return {INT4: INT4_CODES, UINT4: UINT4_CODES}.get(weight.codebook, CODEBOOK)
    return INT8_CODES if weight.codes.dtype == torch.int8 else FP8_CODES


def supports_code_matmul(weight: QuantizedWeight) -> bool:
    """True for a matrix whose groups are a power of two of at least 16 columns, or a whole row."""
    group = weight.group_size
    return len(weight.shape) == 2 and (
        group == weight.in_features or (group >= LEAST_TILE and group & (group - 1) == 0)
    )


def by_halves(codes: Tensor, half: int) -> Tensor:
    """Codes as pack_4bit leaves them, uint8 [rows, n / 2] -> uint8 [rows, bytes], bytes a multiple of half: byte j of
    each `half` bytes holds columns j and half + j of 2 * half columns. Padding is 0."""
    columns = unpack_4bit(codes)
    columns = F.pad(columns, (0, -columns.shape[1] % (2 * half)))
    low, high = columns.unflatten(1, (-1, 2, half)).unbind(2)
    return (low | (high << 4)).flatten(1)


def in_pairs(codes: Tensor, half: int, in_features: int) -> Tensor:
    """The inverse of by_halves."""
    low, high = (part.unflatten(1, (-1, half)) for part in (codes & 15, codes >> 4))
    return pack_4bit(torch.stack((low, high), 2).flatten(1)[:, :in_features])


def by_groups(scales: Tensor) -> Tensor:
    """[rows, groups] -> [groups, rows], so that a program reads those of its outputs in one piece."""
    return scales.t().clone(memory_format=torch.contiguous_format)


def zeros_of(scales: Tensor, offsets: Tensor) -> Tensor | None:
    """int8, where offsets are scales times integers up to MOST_ZERO, as in GPTQ and AWQ; None otherwise.

    value = (code + zero) * scale; the sum of a code and a zero has no rounding in 16 bits.
    """
    scales, offsets = scales.float(), offsets.float()
    zeros = torch.where(scales == 0, 0.0, offsets / scales).round()
    fits = (zeros.abs() <= MOST_ZERO) & (zeros * scales == offsets)
    return zeros.to(torch.int8) if bool(fits.all()) else None


def narrow_scales(scales: Tensor) -> Tensor:
    """The same scales in fp16 where that loses nothing, e.g. those of GPTQ that had offsets beside them."""
    narrow = scales.half()
    return narrow if torch.equal(narrow.to(scales.dtype), scales) else scales


class CodeMatmul:
    """A quantised matrix [out_features, in_features] and its launches."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """weight: see supports_code_matmul; its `permutation` is left to the caller."""
        self.out_features, self.in_features = weight.shape
        kind = code_kind(weight)
        self.scales, self.offsets = narrow_scales(by_groups(weight.scales)), None
        if weight.offsets is not None:
            offsets = by_groups(weight.offsets)
            zeros = zeros_of(self.scales, offsets) if kind == INT4_CODES else None
            self.offsets = offsets if zeros is None else zeros
        dtype = None if self.offsets is None else self.offsets.dtype
        self.shape = CodeShape(kind, *weight.shape, weight.group_size, dtype)
        half = self.shape.half
        codes = by_halves(weight.codes, half) if half else weight.codes.contiguous()
        self.codes = codes.view(torch.uint8)
        codebook = weight.codebook if kind == CODEBOOK else None
        self.table = None if codebook is None else table_of(codebook, weight.device)
        self._no_rows = weight.rows(torch.empty(0, dtype=torch.int64, device=weight.device))  # keeps no code alive

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_rows, in_features], whose rows may be strided -> [num_rows, out_features] in the dtype of x."""
        num_rows = len(x)
        if num_rows > MOST_ROWS:
            return F.linear(x, self.decoded(x.dtype), bias)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((num_rows, self.out_features), dtype=x.dtype, device=x.device)
        if not num_rows:
            return out
        capability, num_sms = device_sizes(x.device)
        tile = self.shape.tile(8 * x.element_size(), capability, num_rows)
        sizes = self.shape.constants(tile)
        grid = (-(-self.out_features // tile.block_n), -(-num_rows // tile.block_m))
        num_spans, span = spans(grid[0] * grid[1], num_sms, sizes["ROW_BYTES"], sizes["BLOCK_K"])
        parts, options = out, launch_options(x.device)
        if num_spans > 1:
            parts = torch.empty((num_spans, *out.shape), dtype=torch.float32, device=x.device)
        code_matmul_kernel[(*grid, num_spans)](
            x, self.codes, self.scales, self.offsets, self.table, bias if parts is out else None, parts, num_rows,
            x.stride(0), span, **sizes, BLOCK_M=tile.block_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
            **options,
        )  # fmt: skip
        if num_spans > 1:
            add_parts_kernel[(-(-out.numel() // ADD_BLOCK),)](
                parts, bias, out, out.numel(), num_spans, OUT_FEATURES=self.out_features, BLOCK=ADD_BLOCK,
                num_warps=ADD_WARPS, **options,
            )  # fmt: skip
        return out

    def warm_up(self, dtype: torch.dtype, bias: Tensor | None, most_rows: int) -> None:
        """Compile every variant that products of up to most_rows rows of this type can need."""
        for num_rows in WARM_UP_ROWS:
            if num_rows <= most_rows:
                self(torch.zeros((num_rows, self.in_features), dtype=dtype, device=self.codes.device), bias)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The matrix: computed in fp32, rounded once to `dtype`."""
        out = torch.empty((self.out_features, self.in_features), dtype=dtype, device=self.codes.device)
        sizes = self.shape.constants(DECODE_TILE)
        grid = (-(-sizes["ROW_BYTES"] // sizes["BLOCK_K"]), -(-self.out_features // sizes["BLOCK_N"]))
        decode_kernel[grid](
            self.codes, self.scales, self.offsets, self.table, out, **sizes, num_warps=DECODE_TILE.num_warps,
            **launch_options(out.device),
        )  # fmt: skip
        return out

    def rows(self, indices: Tensor) -> QuantizedWeight:
        """Rows of the weight as it was given: int64 [n]."""
        codes = self.codes[indices]
        if self.shape.half:
            codes = in_pairs(codes, self.shape.half, self.in_features)
        scales = self.scales[:, indices].T
        offsets = None if self.offsets is None else self.offsets[:, indices].T
        if offsets is not None and offsets.dtype == torch.int8:
            offsets = scales.float() * offsets
        like = self._no_rows
        return replace(like, codes=codes.view(like.codes.dtype), scales=scales.to(like.scales.dtype), offsets=offsets)


@triton.jit(do_not_specialize=["num_rows", "span"])
def code_matmul_kernel(
    x_ptr, codes_ptr, scales_ptr, offsets_ptr, table_ptr, bias_ptr, out_ptr, num_rows, x_stride, span,
    OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, ROW_BYTES: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (output tiles, row tiles, spans of `span` blocks of columns): writes out [spans, rows, outputs].

    Outputs past the end repeat the last one; they and rows past the end are not stored.
    """
    wait_for_inputs(PDL)
    outputs = (tl.program_id(0) * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    rows = (tl.program_id(1) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    some_outputs = tl.minimum(outputs, OUT_FEATURES - 1)
    MASK_K: tl.constexpr = IN_FEATURES % (2 * HALF if HALF else BLOCK_K) != 0  # some columns of a tile do not exist
    SCALE_AT_END: tl.constexpr = IN_FEATURES == GROUP and offsets_ptr is None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    x = x_ptr + rows[:, None] * x_stride, (rows < num_rows)[:, None]
    codes_at = codes_ptr + some_outputs[:, None] * ROW_BYTES + tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scales = scales_ptr, offsets_ptr, some_outputs
    first = tl.program_id(2) * span
    for block in range(first, tl.minimum(first + span, tl.cdiv(ROW_BYTES, BLOCK_K))):
        at = block * BLOCK_K  # so the compiler knows that it is a multiple
        column = at
        if HALF:
            STEPS: tl.constexpr = HALF // BLOCK_K
            column = block // STEPS * (2 * HALF) + block % STEPS * BLOCK_K
        if MASK_K and not HALF:
            codes = tl.load(codes_at + at, mask=(at + tl.arange(0, BLOCK_K) < ROW_BYTES)[None, :], other=0)
        else:
            codes = tl.load(codes_at + at)
        values = low_values(codes, table_ptr, KIND, DTYPE) if HALF else byte_values(codes, KIND, DTYPE)
        total = _add(total, values, x, column, scales, OUT_FEATURES, IN_FEATURES, GROUP, MASK_K, SCALE_AT_END)
        if HALF:
            values, column = high_values(codes, table_ptr, KIND, DTYPE), column + HALF
            total = _add(total, values, x, column, scales, OUT_FEATURES, IN_FEATURES, GROUP, MASK_K, SCALE_AT_END)
    if SCALE_AT_END:
        total *= tl.load(scales_ptr + some_outputs).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + some_outputs).to(tl.float32)[:, None]
    kept = (outputs < OUT_FEATURES)[:, None] & (rows < num_rows)[None, :]
    out_rows = tl.program_id(2).to(tl.int64) * num_rows + rows
    out_at = out_ptr + out_rows[None, :] * OUT_FEATURES + outputs[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _scales(
    scales, column, OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SCALES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """(scales, offsets or zeros) of the BLOCK_K columns from a column; 0 for those that there are not.

    Columns of one group have scales and offsets fp32 [BLOCK_N] and zeros DTYPE. Those of several groups have scales and
    offsets DTYPE [BLOCK_N, groups] (see CodeShape.scales_weights).
    """
    scales_ptr, offsets_ptr, outputs = scales
    LAST: tl.constexpr = IN_FEATURES // GROUP - 1  # padding has no group
    if GROUP < BLOCK_K and GROUP < IN_FEATURES:
        groups = tl.minimum(column // GROUP + tl.arange(0, BLOCK_K // GROUP), LAST)
        at = groups[None, :] * OUT_FEATURES + outputs[:, None]
        scale = tl.load(scales_ptr + at).to(DTYPE)
        offset = tl.zeros(scale.shape, DTYPE)
        if offsets_ptr is not None:
            offset = tl.load(offsets_ptr + at).to(DTYPE)
    else:
        at = tl.minimum(column // GROUP, LAST) * OUT_FEATURES + outputs
        scale = outputs.to(tl.float32) * 0.0
        offset = scale
        if HAS_SCALES:
            scale = tl.load(scales_ptr + at).to(tl.float32)
        if offsets_ptr is not None:
            if offsets_ptr.dtype.element_ty == tl.int8:
                offset = tl.load(offsets_ptr + at).to(DTYPE)
            else:
                offset = tl.load(offsets_ptr + at).to(tl.float32)
    return scale, offset


@triton.jit
def _add(
    total, weight, x, column, scales, OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, GROUP: tl.constexpr,
    MASK_K: tl.constexpr, SCALE_AT_END: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_N, BLOCK_M] + weight [BLOCK_N, BLOCK_K], which stands for the columns from `column`, times x. x:
    (pointers to its rows [BLOCK_M, 1], which of them exist). scales: see _scales."""
    x_at, exist = x
    offsets_ptr = scales[1]
    BLOCK_K: tl.constexpr = weight.shape[1]
    HAS_ZEROS: tl.constexpr = offsets_ptr is not None and offsets_ptr.dtype.element_ty == tl.int8
    SEVERAL: tl.constexpr = GROUP < BLOCK_K and GROUP < IN_FEATURES
    scale, offset = _scales(scales, column, OUT_FEATURES, IN_FEATURES, GROUP, BLOCK_K, not SCALE_AT_END, weight.dtype)
    columns = column + tl.arange(0, BLOCK_K)[None, :]
    if MASK_K:
        exist = exist & (columns < IN_FEATURES)
    tile = tl.trans(tl.load(x_at + columns, mask=exist, other=0.0))
    if SEVERAL:
        weight = _scaled(weight, scale, offset)
    elif HAS_ZEROS:
        weight += offset[:, None]
    if SEVERAL or SCALE_AT_END:
        total = tl.dot(weight, tile, total, input_precision="ieee")
    else:
        total += tl.dot(weight, tile, input_precision="ieee") * scale[:, None]
        if offsets_ptr is not None and not HAS_ZEROS:
            ones = tl.full(weight.shape, 1.0, weight.dtype)
            total += tl.dot(ones, tile, input_precision="ieee") * offset[:, None]
    return total


@triton.jit
def _scaled(weight, scale, offset):
    """weight [BLOCK_N, BLOCK_K] with the scales and offsets [BLOCK_N, groups] of its columns, rounded to its type."""
    GROUPS: tl.constexpr = scale.shape[1]
    parts = tl.reshape(weight, (weight.shape[0], GROUPS, weight.shape[1] // GROUPS))
    scale, offset = tl.broadcast_to(scale[:, :, None], parts.shape), tl.broadcast_to(offset[:, :, None], parts.shape)
    return tl.reshape(scaled(parts, scale, offset, weight.dtype), weight.shape)


@triton.jit(do_not_specialize=["num_sums", "num_parts"])
def add_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, num_sums, num_parts, OUT_FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of sums): adds the spans of a product in their order."""
    wait_for_inputs(PDL)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = offs < num_sums
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts_ptr + part * num_sums.to(tl.int64) + offs, mask=kept, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs % OUT_FEATURES, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def decode_kernel(
    codes_ptr, scales_ptr, offsets_ptr, table_ptr, out_ptr, OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of bytes, output tiles): writes the matrix [OUT_FEATURES, IN_FEATURES]."""
    wait_for_inputs(PDL)
    at = tl.program_id(0) * BLOCK_K
    outputs = (tl.program_id(1) * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    places = at + tl.arange(0, BLOCK_K)[None, :]
    kept = (outputs < OUT_FEATURES)[:, None] & (places < ROW_BYTES)
    codes = tl.load(codes_ptr + outputs[:, None] * ROW_BYTES + places, mask=kept, other=0)
    scales = scales_ptr, offsets_ptr, tl.minimum(outputs, OUT_FEATURES - 1)
    if HALF:
        column = tl.multiple_of(at // HALF * (2 * HALF) + at % HALF, BLOCK_K)
        low, high = low_values(codes, table_ptr, KIND, tl.float32), high_values(codes, table_ptr, KIND, tl.float32)
        _store(low, scales, offsets_ptr, out_ptr, outputs, column, OUT_FEATURES, IN_FEATURES, GROUP, BLOCK_K)
        _store(high, scales, offsets_ptr, out_ptr, outputs, column + HALF, OUT_FEATURES, IN_FEATURES, GROUP, BLOCK_K)
    else:
        values = byte_values(codes, KIND, tl.float32)
        _store(values, scales, offsets_ptr, out_ptr, outputs, at, OUT_FEATURES, IN_FEATURES, GROUP, BLOCK_K)


@triton.jit
def _store(
    values, scales, offsets_ptr, out_ptr, outputs, column, OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scale the values of the columns from `column`, which are in one group, and write those that exist."""
    HAS_ZEROS: tl.constexpr = offsets_ptr is not None and offsets_ptr.dtype.element_ty == tl.int8
    scale, offset = _scales(scales, column, OUT_FEATURES, IN_FEATURES, GROUP, BLOCK_K, True, tl.float32)
    if len(scale.shape) == 2:
        values = _scaled(values, scale, offset)
    elif HAS_ZEROS:
        values = (values + offset[:, None]) * scale[:, None]
    else:
        values = values * scale[:, None] + offset[:, None]
    columns = column + tl.arange(0, BLOCK_K)[None, :]
    kept = (outputs < OUT_FEATURES)[:, None] & (columns < IN_FEATURES)
    tl.store(out_ptr + outputs[:, None] * IN_FEATURES + columns, values.to(out_ptr.dtype.element_ty), mask=kept)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields a layer of Llama-3-8B in each kind of codes, with scales per group of 32 and 128 columns and per row."""
    zeros, offsets = "*i8", "*fp32"
    cases = [("int4 g32", INT4_CODES, 32, ""), ("int4 g128 zeros", INT4_CODES, 128, zeros),
             ("int4 g128 offsets", INT4_CODES, 128, offsets), ("uint4 g32", UINT4_CODES, 32, offsets),
             ("int4 g32 zeros", INT4_CODES, 32, zeros), ("codebook g32", CODEBOOK, 32, ""),
             ("codebook g16", CODEBOOK, 16, ""), ("int8", INT8_CODES, 4096, ""), ("int8 g32", INT8_CODES, 32, offsets),
             ("fp8", FP8_CODES, 4096, ""), ("fp8 g128", FP8_CODES, 128, "")]  # fmt: skip
    for dtype in ("bf16", "fp16", "fp32"):
        bits = 8 * ELEMENT_SIZES[dtype]
        sizes = {"OUT_FEATURES": 6144, "BLOCK": ADD_BLOCK} | pdl_constants(capability)
        yield AotConfiguration(add_parts_kernel, "", dtype, sizes, ADD_WARPS, types={"parts_ptr": "*fp32"})
        for name, kind, group_size, offset_type in cases if dtype != "fp16" else cases[:2]:
            absent: dict[str, None] = {} if offset_type else {"offsets_ptr": None}
            absent |= {} if kind == CODEBOOK else {"table_ptr": None}
            types = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "offsets_ptr": offset_type, "table_ptr": "*fp32"}
            offsets_dtype = {zeros: torch.int8, offsets: torch.float32}.get(offset_type)
            shape = CodeShape(kind, 6144, 4096, group_size, offsets_dtype)
            sizes = shape.constants(DECODE_TILE) | pdl_constants(capability) | absent
            yield AotConfiguration(decode_kernel, name, dtype, sizes, DECODE_TILE.num_warps, types=types)
            spill = {CODEBOOK: 16}.get(kind, 56 if offset_type == zeros else 8)  # in the largest tiles
            for num_rows in (1, 32, 64, 256):
                tile = shape.tile(bits, capability, num_rows)
                sizes = shape.constants(tile) | pdl_constants(capability) | absent
                yield AotConfiguration(
                    code_matmul_kernel, f"{name} {num_rows} rows", dtype,
                    sizes | {"BLOCK_M": tile.block_m, "bias_ptr": None}, tile.num_warps, tile.num_stages, types=types,
                    multiples_of_16=("x_stride",), max_spill=spill,
                    needs=() if bits == 32 else matrix_needs(known_card(capability), tile.block_n),
                    quick=(dtype, name, num_rows) in (("bf16", "int4 g32", 1), ("bf16", "fp8", 256)),
                )  # fmt: skip
                if bits == 32 or capability < 80:
                    break  # one tile for any number of rows
