"""Grouped LoRA on a GPU: y += (x @ A.T) @ B.T with the A and B of each row's adapter, for all adapters in two kernels.

Rows stand in groups by slot (kernels/lora/rows.py), as in SGMV (Punica: Chen et al. 2023), so a program multiplies rows
of one adapter with tensor cores. The grids follow from shapes alone: a program whose slot has fewer rows, or no factors
for its part of the output, ends at once. So a CUDA graph serves whatever the slots hold at its replay. Ranks are padded
to the largest rank that is served. Not measured yet.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, matrix_needs
from kernels.card import BF16_CAPABILITY, CARDS
from kernels.dispatch import device_sizes, tl, triton

FEW_ROWS = 256  # up to so many rows, a group is assumed to be small
MAX_PARTS = 3
Factors = list[tuple[int, tuple[Tensor, Tensor] | None]]  # by part: the rows of its output, A and B


def shrink_expand(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    order: Tensor,
    starts: Tensor,
    parts: tuple[int, ...],
) -> None:
    """out[order[i]] += x[order[i]] @ A.T @ B.T for the rows i from starts[slot] to starts[slot + 1] of each slot.

    x [num_rows, in_features]; out [num_rows, sum(parts)], contiguous. a [slots, parts, R, in_features] and b [slots,
    sum(parts), R] hold zeros behind the rank of an adapter; R is a power of two from 16 on. ranks int32 [slots, parts],
    0 for a part without factors. order int64 [num_rows] or longer, starts int64 [slots + 1].
    """
    num_rows, in_features = x.shape
    num_slots, num_parts, padded, _ = a.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    inner = torch.empty((num_rows, num_parts, padded), dtype=x.dtype, device=x.device)
    tile = _tile(num_rows, padded, device_sizes(x.device)[0])
    row_blocks = triton.cdiv(num_rows, tile["BLOCK_M"])
    shrink_kernel[(row_blocks, num_parts, num_slots)](
        x, a, ranks, order, starts, inner, x.stride(0), in_features, num_parts,
        RANK=padded, BLOCK_M=tile["BLOCK_M"], BLOCK_K=tile["BLOCK_K"], num_warps=4, num_stages=3,
    )  # fmt: skip
    sizes = (*parts, *(0,) * (MAX_PARTS - num_parts))
    column_blocks = sum(triton.cdiv(size, tile["BLOCK_N"]) for size in parts)
    expand_kernel[(row_blocks, column_blocks, num_slots)](
        inner, b, ranks, order, starts, out, sum(parts), num_parts, *sizes,
        RANK=padded, BLOCK_M=tile["BLOCK_M"], BLOCK_N=tile["BLOCK_N"], BLOCK_R=tile["BLOCK_R"],
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _tile(num_rows: int, padded: int, capability: int) -> dict[str, int]:
    """Tiles that leave room for several programs on an SM at every rank; small ones where Triton multiplies without
    tensor cores."""
    if capability < BF16_CAPABILITY:
        return {"BLOCK_M": 16, "BLOCK_K": 16, "BLOCK_N": 32, "BLOCK_R": 16}
    return {
        "BLOCK_M": 16 if num_rows <= FEW_ROWS else 64,
        "BLOCK_K": 64 if padded <= 64 else 32,
        "BLOCK_N": 64 if padded <= 128 else 32,
        "BLOCK_R": min(padded, 64),
    }


def shrink_expand_reference(out: Tensor, x: Tensor, factors: dict[int, Factors], order: Tensor, starts: Tensor) -> None:
    """The same as the kernels in torch: `factors` by slot, each part (A [rank, in], B [rows, rank]) or None."""
    begin = starts.tolist()
    for slot, parts in factors.items():
        rows = order[begin[slot] : begin[slot + 1]]
        if not len(rows):
            continue
        some, first = x.index_select(0, rows), 0
        for size, factor in parts:
            if factor is not None:
                a, b = factor
                added = torch.mm(torch.mm(some, a.T), b.T)
                out[:, first : first + size].index_add_(0, rows, added)
            first += size


@triton.jit(do_not_specialize=["num_parts"])
def shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, order_ptr, starts_ptr, inner_ptr, x_stride, in_features, num_parts,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, parts, slots): inner[i, part, :] = x[order[i]] @ A[slot, part].T."""
    part, slot = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + slot) + tl.program_id(0) * BLOCK_M
    end = tl.load(starts_ptr + slot + 1)
    if first >= end:
        return
    if tl.load(ranks_ptr + slot * num_parts + part) == 0:
        return
    places = first + tl.arange(0, BLOCK_M)
    inside = places < end
    rows = tl.load(order_ptr + places, mask=inside, other=0)
    ranks, offs = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * x_stride + offs[None, :]
    a_ptrs = a_ptr + ((slot * num_parts + part).to(tl.int64) * RANK + ranks[:, None]) * in_features + offs[None, :]
    total = tl.zeros((BLOCK_M, RANK), tl.float32)
    for k in range(0, in_features, BLOCK_K):
        columns = (offs < in_features - k)[None, :]
        x = tl.load(x_ptrs + k, mask=inside[:, None] & columns, other=0.0)
        a = tl.load(a_ptrs + k, mask=columns, other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    inner_ptrs = inner_ptr + (places[:, None] * num_parts + part) * RANK + ranks[None, :]
    tl.store(inner_ptrs, total.to(inner_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_parts", "size0", "size1", "size2"])
def expand_kernel(
    inner_ptr, b_ptr, ranks_ptr, order_ptr, starts_ptr, out_ptr, out_features, num_parts, size0, size1, size2,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, blocks of each part's outputs, slots): out[order[i]] += inner[i, part] @ B[slot].T."""
    block, slot = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + slot) + tl.program_id(0) * BLOCK_M
    end = tl.load(starts_ptr + slot + 1)
    if first >= end:
        return
    blocks0, blocks1 = tl.cdiv(size0, BLOCK_N), tl.cdiv(size1, BLOCK_N)
    part = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    if tl.load(ranks_ptr + slot * num_parts + part) == 0:
        return
    block -= tl.where(part > 0, blocks0, 0) + tl.where(part > 1, blocks1, 0)
    begin = tl.where(part > 0, size0, 0) + tl.where(part > 1, size1, 0)
    size = tl.where(part == 0, size0, tl.where(part == 1, size1, size2))
    places = first + tl.arange(0, BLOCK_M)
    inside = places < end
    rows = tl.load(order_ptr + places, mask=inside, other=0)
    ranks, columns = tl.arange(0, BLOCK_R), block * BLOCK_N + tl.arange(0, BLOCK_N)
    some = tl.minimum(columns, size - 1) + begin
    inner_ptrs = inner_ptr + (places[:, None] * num_parts + part) * RANK + ranks[None, :]
    b_ptrs = b_ptr + (slot.to(tl.int64) * out_features + some[:, None]) * RANK + ranks[None, :]
    added = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_rank in range(0, RANK, BLOCK_R):
        inner = tl.load(inner_ptrs + first_rank, mask=inside[:, None], other=0.0)
        added = tl.dot(inner, tl.trans(tl.load(b_ptrs + first_rank)), added, input_precision="ieee")
    out_ptrs = out_ptr + rows[:, None] * out_features + (begin + columns)[None, :]
    mask = inside[:, None] & (columns < size)[None, :]
    total = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields ranks 16, 64 and 256, for few rows and for many."""
    card = CARDS[capability]
    types = {"ranks_ptr": "*i32", "order_ptr": "*i64", "starts_ptr": "*i64"}
    for dtype in ("bf16", "fp16"):
        if dtype == "bf16" and capability < BF16_CAPABILITY:
            continue
        for padded in (16, 64, 256):
            for num_rows in (1,) if capability < BF16_CAPABILITY else (1, FEW_ROWS + 1):
                tile = _tile(num_rows, padded, capability)
                rows = tile["BLOCK_M"]
                label, quick = f"rank {padded}, {rows} rows", dtype == "bf16" and padded == 16
                needs = matrix_needs(card, rows)
                shape = {"RANK": padded, "BLOCK_M": rows}
                yield AotConfiguration(
                    shrink_kernel, label, dtype, shape | {"BLOCK_K": tile["BLOCK_K"]}, 4, 3, types=types,
                    multiples_of_16=("x_stride", "in_features"), quick=quick, needs=needs,
                )  # fmt: skip
                shape |= {"BLOCK_N": tile["BLOCK_N"], "BLOCK_R": tile["BLOCK_R"]}
                yield AotConfiguration(
                    expand_kernel, label, dtype, shape, 4, 1, types=types,
                    multiples_of_16=("out_features",), quick=quick, needs=needs,
                )  # fmt: skip
