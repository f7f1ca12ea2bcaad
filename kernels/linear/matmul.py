"""x @ weight.T with a fixed order of additions: the linear layers of `--batch-invariant` on a GPU.

A vendor's library chooses tiles by the number of rows, and also whether several programs share the sum over K. So a
row's bits change with the batch (He, "Defeating Nondeterminism in LLM Inference", 2025, section "batch-invariant
matmul"). Here every product has one tile, and one program adds up all of K, in the same steps for every row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import ELEMENT_SIZES, AotConfiguration, matrix_needs
from kernels.card import known_card
from kernels.dispatch import device_sizes, tl, triton

GROUP_M = 8  # row tiles whose programs start together, so that they share weights in L2
ALIGNMENT = 16  # bytes; the compiler relies on it


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """The tile of one program: block_m rows of block_n columns, block_k numbers of K at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def matmul_tile(element_bits: int, capability: int) -> MatmulTile:
    """The only tile for numbers of this size on that kind of device (75: T4, 80: A100, 90: H100). Not
    measured yet.

    64 rows are the minimum of Hopper's wgmma, and few enough that a decode step is still bound by reading the weights.
    The tile has few columns because, without a split of K, only column tiles can fill the device in decode.
    """
    if capability < 80:  # no tensor cores
        return MatmulTile(64, 64, 16, num_warps=8, num_stages=2)
    if element_bits == 32:
        return MatmulTile(32, 64, 16, num_warps=8, num_stages=3)
    return MatmulTile(64, 64, 64, num_warps=4, num_stages=4 if capability < 90 else 5)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in_features] @ weight.T + bias, weight [out_features, in_features] without gaps -> [..., out_features].

    All tensors have one float dtype. Products are added up in fp32 (without TF32) and rounded once, after the bias.
    A row's result has the same bits alone, in any batch and at any place in it.
    """
    out_features, in_features = weight.shape
    rows = x.reshape(-1, in_features).contiguous()
    if rows.data_ptr() % ALIGNMENT:
        rows = rows.clone()
    num_rows = len(rows)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows:
        tile = matmul_tile(8 * x.element_size(), device_sizes(x.device)[0])
        grid = (-(-num_rows // tile.block_m) * -(-out_features // tile.block_n),)
        matmul_kernel[grid](
            rows, weight, bias, out, num_rows, **_constants(tile, out_features, in_features),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], out_features)


def _constants(tile: MatmulTile, out_features: int, in_features: int) -> dict[str, int]:
    """Compile-time arguments. The sizes of a layer are among them, because a model has only four or five kinds."""
    return {
        "OUT_FEATURES": out_features,
        "IN_FEATURES": in_features,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": GROUP_M,
    }


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid (row tiles * column tiles), in the order of first_of_tile.

    Rows and columns past the end repeat the last one and are not stored, so that every tile runs the same code.
    """
    first_row, first_column = first_of_tile(num_rows, OUT_FEATURES, BLOCK_M, BLOCK_N, GROUP)
    rows, columns = first_row.to(tl.int64) + tl.arange(0, BLOCK_M), first_column.to(tl.int64) + tl.arange(0, BLOCK_N)
    some_rows, some_columns = tl.minimum(rows, num_rows - 1), tl.minimum(columns, OUT_FEATURES - 1)
    offs = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + some_rows[:, None] * IN_FEATURES + offs[None, :]
    weight_ptrs = weight_ptr + some_columns[None, :] * IN_FEATURES + offs[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, IN_FEATURES, BLOCK_K):
        if IN_FEATURES % BLOCK_K == 0:
            x, weight = tl.load(x_ptrs + k), tl.load(weight_ptrs + k)
        else:
            inside = offs < IN_FEATURES - k
            x = tl.load(x_ptrs + k, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + k, mask=inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + some_columns).to(tl.float32)[None, :]
    inside_tile = (rows < num_rows)[:, None] & (columns < OUT_FEATURES)[None, :]
    out_ptrs = out_ptr + rows[:, None] * OUT_FEATURES + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside_tile)


@triton.jit
def first_of_tile(
    num_rows, OUT_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):
    """(first row, first column) of this program's tile: GROUP row tiles compute one column tile before the next column
    tile starts."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    in_group: tl.constexpr = GROUP * ((OUT_FEATURES + BLOCK_N - 1) // BLOCK_N)
    first = tl.program_id(0) // in_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return (first + tl.program_id(0) % in_group % size) * BLOCK_M, tl.program_id(0) % in_group // size * BLOCK_N


def matmul_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """matmul in fp32, rounded once."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the layers of Llama-3-8B and its head, one layer with a bias, and a K that no tile divides."""
    shapes = [(6144, 4096, False), (28672, 4096, False), (4096, 14336, False), (128256, 4096, False),
              (2304, 768, True), (5000, 5003, False)]  # fmt: skip
    for dtype in ("bf16", "fp16", "fp32"):
        bits = 8 * ELEMENT_SIZES[dtype]
        tile = matmul_tile(bits, capability)
        needs = () if bits == 32 else matrix_needs(known_card(capability), tile.block_m)
        for out_features, in_features, has_bias in shapes:
            yield AotConfiguration(
                matmul_kernel, f"{out_features} x {in_features}{' with bias' if has_bias else ''}", dtype,
                _constants(tile, out_features, in_features) | ({} if has_bias else {"bias_ptr": None}),
                tile.num_warps, tile.num_stages, needs=needs, quick=(out_features, dtype) == (6144, "bf16"),
            )  # fmt: skip
