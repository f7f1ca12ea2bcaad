"""x @ weight.T for at most 8 rows of x on a GPU: a matrix times a few vectors, bound by reading the weight once.

One or two rows are multiplied in registers and added up over K at the end. More rows go through the tensor cores, with
the weight as the left operand, so that its 16 or 32 rows fill the instruction and the rows of x are its 8 columns. One
program adds up all of K for its outputs: no atomics, no workspace, and the same bits in every run. Few outputs per
program make enough programs (2048 for 4096 outputs of one row) without a split of K. On an H100 it reads the layers of
Llama-3-8B at 75 to 101 % of the read bandwidth, the small ones slowest: 4096 x 4096 takes 14.2 us, cuBLAS 16.9. To
read the first weights before the kernel before it is done (see kernels/dependent_launch.py) gained nothing there.
kernels/linear/choice.py uses it where it is the fastest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import TRITON_VERSION, device_sizes, tl, triton

ALIGNMENT = 16  # bytes; the compiler relies on it
LEAST_COLUMNS = 16 if TRITON_VERSION < (3, 5) else 8  # the fewest that tl.dot accepts; more rows of x repeat the last


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tile of one program: `rows` rows of x, block_n outputs, block_k numbers of K at a time."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    by_dot: bool


# The fastest of eleven and of six tiles for one and two rows of Llama-3-8B's layers on an H100 (2026-11-26)
TILES = (
    GemvTile(1, 2, 1024, num_warps=4, num_stages=1, by_dot=False),
    GemvTile(2, 2, 1024, num_warps=4, num_stages=1, by_dot=False),
    GemvTile(8, 32, 128, num_warps=4, num_stages=5, by_dot=True),
)


def tiles_for(capability: int) -> tuple[GemvTile, ...]:
    """The tiles by ascending rows. Triton multiplies without tensor cores on Turing: there, only in registers."""
    return TILES if capability >= 80 else tuple(tile for tile in TILES if not tile.by_dot)


def supports_gemv(weight: Tensor, num_rows: int) -> bool:
    """True if gemv computes products of num_rows rows with this weight: 16-bit floats, aligned rows without gaps."""
    in_features = weight.shape[1]
    return (
        1 <= num_rows <= tiles_for(device_sizes(weight.device)[0])[-1].rows
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and in_features % (ALIGNMENT // weight.element_size()) == 0
        and weight.data_ptr() % ALIGNMENT == 0
    )


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in_features] @ weight.T + bias, weight [out_features, in_features] -> [rows, out_features].

    See supports_gemv. Products are added up in fp32 and rounded once, after the bias.
    """
    num_rows, in_features = x.shape
    out_features = len(weight)
    tile = next(tile for tile in TILES if tile.rows >= num_rows)
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    gemv_kernel[(-(-out_features // tile.block_n),)](
        x, weight, bias, out, num_rows, out_features, in_features, **_constants(tile, in_features),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(x.device),
    )  # fmt: skip
    return out


def _constants(tile: GemvTile, in_features: int) -> dict[str, int]:
    """Compile-time arguments. Sizes are not among them: a start with an empty cache compiles 3 to 6 variants."""
    return {
        "ROWS": max(tile.rows, LEAST_COLUMNS) if tile.by_dot else tile.rows,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BY_DOT": tile.by_dot,
        "MASK_K": in_features % tile.block_k != 0,
    }


@triton.jit(do_not_specialize=["num_rows", "out_features"])
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_features,
    in_features,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_DOT: tl.constexpr,
    MASK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (out_features / BLOCK_N). Rows and outputs past the end repeat the last one and are not stored."""
    wait_for_inputs(PDL)
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    some_columns = tl.minimum(columns, out_features - 1)
    rows, offs = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    some_rows = tl.minimum(rows, num_rows - 1)
    weight_ptrs = weight_ptr + some_columns[:, None] * in_features + offs[None, :]
    if BY_DOT:
        x_ptrs = x_ptr + some_rows[None, :] * in_features + offs[:, None]
        total = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for k in range(0, in_features, BLOCK_K):
            if MASK_K:
                inside = offs < in_features - k
                weight = tl.load(weight_ptrs + k, mask=inside[None, :], other=0.0)
                x = tl.load(x_ptrs + k, mask=inside[:, None], other=0.0)
            else:
                weight, x = tl.load(weight_ptrs + k), tl.load(x_ptrs + k)
            total = tl.dot(weight, x, total, input_precision="ieee")
        found = tl.trans(total)
    else:
        x_ptrs = x_ptr + some_rows[:, None, None] * in_features + offs[None, None, :]
        sums = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        whole = in_features // BLOCK_K * BLOCK_K if MASK_K else in_features
        for k in range(0, whole, BLOCK_K):
            weight, x = tl.load(weight_ptrs[None, :, :] + k), tl.load(x_ptrs + k)
            sums += weight.to(tl.float32) * x.to(tl.float32)
        if MASK_K:
            inside = offs[None, None, :] < in_features - whole
            weight = tl.load(weight_ptrs[None, :, :] + whole, mask=inside, other=0.0)
            x = tl.load(x_ptrs + whole, mask=inside, other=0.0)
            sums += weight.to(tl.float32) * x.to(tl.float32)
        found = tl.sum(sums, 2)
    if bias_ptr is not None:
        found += tl.load(bias_ptr + some_columns).to(tl.float32)[None, :]
    inside_tile = (rows < num_rows)[:, None] & (columns < out_features)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(out_ptrs, found.to(out_ptr.dtype.element_ty), mask=inside_tile)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields every tile, for a K in whole blocks and one that leaves a rest, with and without a bias."""
    for dtype in ("bf16", "fp16"):
        if dtype == "bf16" and capability < 80:
            continue
        for tile in tiles_for(capability):
            for in_features, has_bias in ((4096, False), (4096, True), (4864, False), (11008, True)):
                if in_features == 11008 and in_features % tile.block_k == 0:
                    continue
                constants = (
                    _constants(tile, in_features) | pdl_constants(capability) | ({} if has_bias else {"bias_ptr": None})
                )
                # ptxas may keep the address of the bias on the stack during the loop, to fit another program on the SM
                rest = " with a rest" if constants["MASK_K"] else ""
                yield AotConfiguration(
                    gemv_kernel, f"{tile.rows} rows{rest}{' with bias' if has_bias else ''}", dtype, constants,
                    tile.num_warps, tile.num_stages, multiples_of_16=("in_features",), needs=("wide",), max_spill=8,
                    quick=dtype == "bf16" and in_features == 4096,
                )  # fmt: skip
