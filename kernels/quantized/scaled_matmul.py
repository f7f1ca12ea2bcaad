"""Products of weights in 8 bits with inputs that are rounded to 8 bits, too: twice the rate of 16 bits. e4m3 with e4m3
on cards that multiply it, int8 with int8 (W8A8) on every card.

A row of the inputs has one scale (kernels/elementwise/quantized_rows.py) and so has a row of the weights: both multiply
a sum once, in the kernel that computes it. Sums of int8 are exact, so a row has the same bits in any batch of more than
FEW_ROWS rows (kernels/quantized/linear.py).

Times of Llama-3-8B's layers on an H100 (gate_up, down, qkv, out; us): int8 with 64 rows 47, 27, 14, 10, with 1024 rows
196, 89, 59, 30. cuBLASLt's e4m3 (torch._scaled_mm) takes 50, 38, 15, 14 and 204, 90, 45, 30, and its int8, which leaves
the sums in int32 (torch._int_mm), 51, 35, 13, 12 and 279, 136, 76, 52. In another call, e4m3 with 64 rows took 55, 32,
15, 11 here and 53, 41, 18, 14 there.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, matrix_needs
from kernels.card import E4M3_CAPABILITY, INT8_CAPABILITY, KB, Card, known_card, read_card
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import tl, triton, use_triton
from kernels.elementwise.quantized_rows import QuantizedRows, quantize_rows
from kernels.linear.matmul import GROUP_M, first_of_tile
from kernels.quantized.weight import QuantizedWeight

logger = logging.getLogger(__name__)

CAPABILITIES = {torch.int8: INT8_CAPABILITY, torch.float8_e4m3fn: E4M3_CAPABILITY}
MULTIPLE = 16  # bytes: rows start at addresses that are multiples of it, and cuBLASLt takes no other sizes
MOST_INPUTS = (1 << 31) // 128**2 - 1  # int32 has room for their sum
MOST_E4M3_ROWS = 64  # more are multiplied by cuBLASLt, where it takes them
# Rows that need every variant of the kernel between them: a width serves at least twice the row tiles of the next one
WARM_UP_ROWS = tuple(1 << i for i in range(5, 17))
FULL = 0.7  # the share of SMs with a program that a tile must give: wider tiles leave more of them idle


@dataclass(frozen=True, slots=True)
class ScaledTile:
    """The tile of one program: block_m rows of block_n outputs, block_k inputs at a time. tma: the card's copy engine
    fetches them."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False

    @property
    def stage_bytes(self) -> int:
        """Shared memory of the inputs and weights of one step."""
        return (self.block_m + self.block_n) * self.block_k


# The widest first. On an H100 these were the fastest of 19 in int8, or within 6 % of it (Llama-3-8B's layers, 32 to
# 8192 rows); the 19 differed in sizes, TMA or none, and one tile or several per program.
FEW = (ScaledTile(64, 128, 256, 4, 4), ScaledTile(64, 64, 256, 4, 4), ScaledTile(64, 32, 256, 4, 6))
MANY = (ScaledTile(128, 256, 128, 8, 4), ScaledTile(128, 128, 128, 4, 4), ScaledTile(128, 64, 256, 4, 4))


def scaled_tile(num_rows: int, out_features: int, card: Card) -> ScaledTile:
    """The tile for a launch: the widest that gives most SMs a program."""
    tiles = FEW if num_rows <= FEW[0].block_m else MANY
    instruction = card.matrix_instruction()
    if instruction == "mma":
        tiles = tuple(tile for tile in tiles if tile.block_n < 256)  # sums take more registers
    for tile in tiles:
        if -(-num_rows // tile.block_m) * -(-out_features // tile.block_n) >= FULL * card.num_sms:
            break
    if card.shared_memory < 128 * KB:
        tile = replace(tile, block_k=128)
    if instruction == "mma" and tile.block_m * tile.block_n >= 8192:
        tile = replace(tile, num_warps=8)
    room = (card.shared_memory - 2 * KB) // tile.stage_bytes + (instruction == "mma")  # which holds one in registers
    return replace(tile, num_stages=min(tile.num_stages, room), tma=instruction == "wgmma")


def multiplies_in_8_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """True for a GPU with matrix instructions for this type of codes."""
    return device.type == "cuda" and read_card(device).capability >= CAPABILITIES.get(dtype, 1 << 30)


@cache
def library_multiplies(device: torch.device) -> bool:
    """True if torch multiplies rows of e4m3 with a scale each on this device. On sm_120, torch for CUDA 13 asks
    cuBLASLt, which refuses (pytorch/pytorch, issue 192707)."""
    codes = torch.zeros((256, 256), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones((256, 1), device=device)
    try:
        torch._scaled_mm(codes, codes.T, scales, scales.view(1, -1), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError) as error:
        logger.warning("torch does not multiply e4m3 on this GPU: our kernel multiplies all rows (%s)", error)
        return False
    return True


def supports_scaled_matmul(weight: QuantizedWeight) -> bool:
    """True for a matrix with one scale per row, in e4m3, or in int8 whose inputs are to be rounded."""
    return (
        (weight.codes.dtype == torch.float8_e4m3fn or (weight.codes.dtype == torch.int8 and weight.int8_inputs))
        and len(weight.shape) == 2
        and weight.group_size == weight.in_features <= MOST_INPUTS
        and weight.offsets is None
        and weight.permutation is None
        and not any(size % MULTIPLE for size in weight.shape)
    )


class ScaledMatmul:
    """A matrix [out_features, in_features] of int8 or e4m3 codes with a scale per row."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """weight: see supports_scaled_matmul."""
        self.codes = weight.codes.contiguous()
        self.scales = weight.scales.float().view(1, -1)
        is_int8 = self.codes.dtype == torch.int8
        self._uses_library = not is_int8 and use_triton(self.codes) and library_multiplies(self.codes.device)

    def __call__(self, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
        """x [num_rows, in_features] in bf16 or fp16, or rounded from it -> [num_rows, out_features] in that dtype."""
        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.codes.dtype)
        if not use_triton(self.codes):
            return scaled_matmul_reference(rows, self.codes, self.scales, bias)
        if self._uses_library and len(rows) > MOST_E4M3_ROWS:
            if bias is None and rows.dtype == torch.float16:
                # without a bias, torch's kernel for all cards but sm_90 writes bf16 into an fp16 result
                # (pytorch/pytorch, pull request 187569)
                bias = self.scales.new_zeros(len(self.codes), dtype=torch.float16)
            return torch._scaled_mm(rows.codes, self.codes.T, rows.scales, self.scales, bias=bias, out_dtype=rows.dtype)
        out = torch.empty((len(rows), len(self.codes)), dtype=rows.dtype, device=self.codes.device)
        if len(rows):
            self.launch(rows, bias, out, scaled_tile(*out.shape, read_card(out.device)))
        return out

    def launch(self, rows: QuantizedRows, bias: Tensor | None, out: Tensor, tile: ScaledTile) -> None:
        """Write the product to out [num_rows, out_features], at least one row, with this tile."""
        num_rows, out_features = out.shape
        scaled_matmul_kernel[(-(-num_rows // tile.block_m) * -(-out_features // tile.block_n),)](
            as_copied(rows.codes, tile.block_m, tile), rows.scales, as_copied(self.codes, tile.block_n, tile),
            self.scales, bias, out, num_rows, **constants(tile, self.codes.dtype, *self.codes.shape),
            num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(out.device),
        )  # fmt: skip

    def warm_up(self, dtype: torch.dtype, bias: Tensor | None) -> None:
        """Compile every variant that products of inputs of this type can need."""
        (out_features, in_features), codes, card = self.codes.shape, self.codes.dtype, read_card(self.codes.device)
        rows = quantize_rows(torch.zeros((1, in_features), dtype=dtype, device=self.codes.device), codes)
        out = torch.empty((1, out_features), dtype=dtype, device=self.codes.device)
        counts = [n for n in WARM_UP_ROWS if not self._uses_library or n <= MOST_E4M3_ROWS]
        for tile in {scaled_tile(n, out_features, card) for n in counts}:
            self.launch(rows, bias, out, tile)


def as_copied(codes: Tensor, num_rows: int, tile: ScaledTile) -> Any:
    """Codes [n, in_features] as the kernel takes them: themselves, or for TMA the description of tiles of num_rows."""
    if not tile.tma:
        return codes
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(codes, list(codes.shape), [codes.shape[1], 1], [num_rows, tile.block_k])


def constants(tile: ScaledTile, dtype: torch.dtype, out_features: int, in_features: int) -> dict[str, int | bool]:
    """Compile-time arguments. The sizes of a layer are among them, because a model has only four or five kinds."""
    return {
        "OUT_FEATURES": out_features,
        "IN_FEATURES": in_features,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": GROUP_M,
        "TMA": tile.tma,
        "IS_INT8": dtype == torch.int8,
    }


@triton.jit(do_not_specialize=["num_rows"])
def scaled_matmul_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, num_rows,
    OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, IS_INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles * column tiles), in the order of first_of_tile.

    Rows and columns past the end repeat the last one, or with TMA are zeros, and are not stored.
    """
    wait_for_inputs(PDL)
    SUM: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    first_row, first_column = first_of_tile(num_rows, OUT_FEATURES, BLOCK_M, BLOCK_N, GROUP)
    rows, columns = first_row.to(tl.int64) + tl.arange(0, BLOCK_M), first_column.to(tl.int64) + tl.arange(0, BLOCK_N)
    some_rows, some_columns = tl.minimum(rows, num_rows - 1), tl.minimum(columns, OUT_FEATURES - 1)
    offs = tl.arange(0, BLOCK_K)
    x_at, weight_at = x_ptr, weight_ptr
    if not TMA:
        x_at = x_ptr + some_rows[:, None] * IN_FEATURES + offs[None, :]
        weight_at = weight_ptr + some_columns[None, :] * IN_FEATURES + offs[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for k in range(0, IN_FEATURES, BLOCK_K):
        if TMA:
            x, weight = x_ptr.load([first_row, k]), weight_ptr.load([first_column, k]).T
        elif IN_FEATURES % BLOCK_K == 0:
            x, weight = tl.load(x_at + k), tl.load(weight_at + k)
        else:
            inside = offs < IN_FEATURES - k
            x = tl.load(x_at + k, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_at + k, mask=inside[:, None], other=0.0)
        # Hopper adds e4m3 in fewer bits than fp32 has: sums of 128 products are added in fp32
        total = tl.dot(x, weight, total, max_num_imprecise_acc=128, out_dtype=SUM)
    scales = tl.load(x_scales_ptr + some_rows)[:, None] * tl.load(scales_ptr + some_columns)[None, :]
    result = total.to(tl.float32) * scales
    if bias_ptr is not None:
        result += tl.load(bias_ptr + some_columns).to(tl.float32)[None, :]
    kept = (rows < num_rows)[:, None] & (columns < OUT_FEATURES)[None, :]
    tl.store(out_ptr + rows[:, None] * OUT_FEATURES + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=kept)


def scaled_matmul_reference(rows: QuantizedRows, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The product in torch: sums in fp64, which are exact for int8. scales fp32 [1, out_features]."""
    result = (rows.codes.double() @ codes.double().T).float() * (rows.scales * scales)
    return (result if bias is None else result + bias.float()).to(rows.dtype)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields layers of Llama-3-8B with each tile, one with a bias, and a K that no tile divides."""
    card, types = known_card(capability), {"x_scales_ptr": "*fp32", "scales_ptr": "*fp32"}
    for dtype, code in ((torch.int8, "i8"), (torch.float8_e4m3fn, "fp8e4nv")):
        if capability < CAPABILITIES[dtype]:
            continue
        shapes = [(28672, 4096, 32), (4096, 14336, 32), (28672, 4096, 256), (4096, 4096, 256), (6144, 4096, 200)]
        for out_features, in_features, num_rows in [*shapes, (2304, 784, 20)]:
            if dtype != torch.int8 and num_rows > MOST_E4M3_ROWS and capability < 120:  # see library_multiplies
                continue
            tile = scaled_tile(num_rows, out_features, card)
            pointers = {"x_ptr": f"*{code}", "weight_ptr": f"*{code}"}
            if tile.tma:
                sizes = {"x_ptr": tile.block_m, "weight_ptr": tile.block_n}
                pointers = {name: f"tensordesc<{code}[{rows}, {tile.block_k}]>" for name, rows in sizes.items()}
            absent = {} if in_features == 784 else {"bias_ptr": None}
            yield AotConfiguration(
                scaled_matmul_kernel, f"{code} {num_rows} rows, {out_features} x {in_features}", "bf16",
                constants(tile, dtype, out_features, in_features) | pdl_constants(capability) | absent,
                tile.num_warps, tile.num_stages, types=types | pointers, max_shared_memory=card.shared_memory,
                needs=(*matrix_needs(card, tile.block_m), *(("tma",) if tile.tma else ())),
                quick=(num_rows, out_features) == (256 if dtype == torch.int8 else 32, 28672),
            )  # fmt: skip
