"""The grouped GEMMs of kernels/linear/moe.py as Triton kernels, over plain or quantised weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import ELEMENT_SIZES, AotConfiguration, matrix_needs, power_of_2
from kernels.card import Card, known_card
from kernels.dispatch import tl, triton
from kernels.elementwise.activation import activate, kernel_name
from kernels.linear.moe_routing import Routing, sort_by_expert
from kernels.quantized.weight import QuantizedWeight

SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertFormula:
    """The computation of an expert between its two matrices.

    activation(gate) * up, with a name of kernels.elementwise.activation; with clamp_limit L > 0 instead
    g * sigmoid(clamp_alpha * g) * (u + 1), where g = min(gate, L) and u = up limited to -L .. L (gpt-oss).
    """

    activation: str
    clamp_limit: float = 0.0
    clamp_alpha: float = 1.702
    weights_on_input: bool = False  # a token's weight multiplies the expert's input, not its output (Llama 4)


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program of a grouped GEMM: block_m rows, and block_n columns of the gate and as many of up, or
    down_n columns of down."""

    block_m: int
    block_n: int
    down_n: int
    block_k: int
    num_warps: int
    num_stages: int


# (largest average number of rows per expert, tile). With few rows, reading the weights takes the time, and more than 16
# rows would be padding; with many rows, large tiles read each weight less often. Not measured yet.
TILES = (
    (16, Tile(16, 32, 64, 128, 4, 3)),
    (64, Tile(64, 64, 128, 64, 4, 3)),
    (None, Tile(128, 64, 128, 64, 8, 3)),
)
# Over quantised weights: smaller, because codes, scales and values of a tile take registers. Not measured yet.
TILES_QUANTIZED = ((16, Tile(16, 16, 32, 64, 4, 2)), (None, Tile(64, 32, 32, 64, 8, 2)))
# With an order of columns for each expert: the places of a row's columns take registers, too.
TILES_ORDERED = ((16, TILES_QUANTIZED[0][1]), (None, Tile(32, 32, 32, 32, 4, 2)))
# Without tensor cores (fp32, and Turing: see Card.matrix_instruction): correct, not fast.
TILE_FP32 = Tile(16, 32, 32, 32, 4, 2)
TILES_FMA = ((16, TILE_FP32), (None, Tile(64, 32, 64, 32, 8, 2)))
TILES_PER_GROUP = 8  # row tiles that visit a column together, so that they share weights in L2


@dataclass(frozen=True, slots=True)
class Matrices:
    """One matrix per expert [num_experts, out, in] as the kernels read it, and the biases [num_experts, out]."""

    shape: tuple[int, ...]
    codes: Tensor  # the plain weights, or codes; fp8 codes as uint8
    bias: Tensor | None
    kind: str = "plain"  # "plain", "int8", "bytes" (a code is an index of the table), "nibbles" (two such codes a byte)
    scales: Tensor | None = None
    offsets: Tensor | None = None
    table: Tensor | None = None  # fp32 [256] or [16]: the meaning of each code
    group_size: int = 1
    permutation: Tensor | None = None  # int64 [in], of all experts
    permutations: Tensor | None = None  # int32 [num_experts, in]: each expert's own

    @classmethod
    def of(cls, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> "Matrices":
        """Views of a weight and its bias."""
        if isinstance(weight, Tensor):
            return cls(tuple(weight.shape), weight, bias)
        codes, device = weight.codes, weight.codes.device
        kind, table = "int8", None
        if weight.codebook is not None:
            kind, table = "nibbles", torch.tensor(weight.codebook, dtype=torch.float32, device=device)
        elif codes.dtype != torch.int8:
            kind, table = "bytes", torch.arange(256, dtype=torch.uint8, device=device).view(codes.dtype).float()
            codes = codes.view(torch.uint8)
        permutation, permutations = weight.permutation, None
        if permutation is not None and permutation.dim() == 2:
            permutation, permutations = None, permutation.contiguous()
        return cls(weight.shape, codes.contiguous(), bias, kind, weight.scales.contiguous(), weight.offsets, table,
                   weight.group_size, None if permutation is None else permutation.long(), permutations)  # fmt: skip

    @property
    def tiles(self) -> str:
        """The kind of tile_table: "ordered" where each expert has its own permutation."""
        return self.kind if self.permutations is None else "ordered"

    def arguments(self) -> tuple[Tensor | None, ...]:
        """codes, scales, offsets, table, bias and permutations: in the order of the kernels' pointers."""
        return self.codes, self.scales, self.offsets, self.table, self.bias, self.permutations

    def arrange(self, x: Tensor) -> Tensor:
        """x [num_rows, in] with its columns in the order of the codes, where all experts share it."""
        return x.contiguous() if self.permutation is None else x.index_select(1, self.permutation)


def grouped_experts(
    x: Tensor, gate_up: Matrices, down: Matrices, routing: Routing, formula: ExpertFormula, tile: Tile
) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]; num_tokens is at least 1, and routing was made on a GPU."""
    order = sort_by_expert(routing, tile.block_m)
    inner = _gate_up(x, gate_up, order, routing, formula, tile)
    return _weighted_sum(_down(inner, down, order, tile), routing.weights, not formula.weights_on_input)


def _gate_up(x, matrices, order, routing, formula, tile):
    """x [num_tokens, hidden] -> the formula of gate and up for every pair [num_pairs, inner], in sorted order."""
    _, double, hidden = matrices.shape
    out = torch.empty((len(order.pairs), double // 2), dtype=x.dtype, device=x.device)
    num_tiles = order.tiles.shape[1]
    constants = _gate_up_constants(hidden, double // 2, routing.experts.shape[1], formula, matrices, tile)
    gate_up_kernel[(num_tiles * -(-(double // 2) // tile.block_n),)](
        matrices.arrange(x), *matrices.arguments(), routing.weights, order.pairs, order.tiles, out, num_tiles,
        **constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _down(inner, matrices, order, tile):
    """[num_pairs, inner] in sorted order -> [num_pairs, hidden] in the order of the pairs' numbers."""
    _, hidden, inner_size = matrices.shape
    out = torch.empty((len(inner), hidden), dtype=inner.dtype, device=inner.device)
    num_tiles = order.tiles.shape[1]
    down_kernel[(num_tiles * -(-hidden // tile.down_n),)](
        matrices.arrange(inner), *matrices.arguments(), order.pairs, order.tiles, out, num_tiles,
        **_down_constants(hidden, inner_size, matrices, tile),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def tile_table(element_size: int, card: Card, kind: str = "plain") -> tuple[tuple[int | None, Tile], ...]:
    """(largest average number of rows per expert, tile) of all launches with elements of that many bytes and weights
    of that kind, see Matrices.tiles."""
    if element_size == 4:
        return ((None, TILE_FP32),)
    if card.matrix_instruction() == "fma":
        return TILES_FMA if kind == "plain" else ((None, TILE_FP32),)
    return {"plain": TILES, "ordered": TILES_ORDERED}.get(kind, TILES_QUANTIZED)


def choose_tile(dtype: torch.dtype, card: Card, num_pairs: int, num_experts: int, kind: str = "plain") -> Tile:
    """The tile for the average number of rows per expert, which the host knows without asking the device."""
    table = tile_table(dtype.itemsize, card, kind)
    return next(tile for limit, tile in table if limit is None or num_pairs <= limit * num_experts)


def _gate_up_constants(hidden, inner, top_k, formula, matrices, tile):
    return {"HIDDEN": hidden, "INNER": inner, "TOP_K": top_k, "ACTIVATION": kernel_name(formula.activation),
            "LIMIT": formula.clamp_limit, "ALPHA": formula.clamp_alpha, "WEIGHTED": formula.weights_on_input,
            **_block_constants(hidden, tile.block_n, matrices, tile)}  # fmt: skip


def _down_constants(hidden, inner, matrices, tile):
    return {"HIDDEN": hidden, "INNER": inner, **_block_constants(inner, tile.down_n, matrices, tile)}


def _block_constants(depth, columns, matrices, tile):
    return {"KIND": matrices.kind, "GROUP_SIZE": matrices.group_size, "BLOCK_M": tile.block_m, "BLOCK_N": columns,
            "BLOCK_K": tile.block_k, "GROUP": TILES_PER_GROUP, "WHOLE": depth % tile.block_k == 0}  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    bias_ptr,
    permutations_ptr,
    weights_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WEIGHTED: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Grid (num_tiles * ceil(INNER / BLOCK_N),). Gathers rows of x: pair p is of token p // TOP_K."""
    tile, column = _tile_and_column(num_tiles, INNER, BLOCK_N, GROUP)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    rows, inside = _rows(tiles_ptr, tile, num_tiles, BLOCK_M)
    pairs = tl.load(pairs_ptr + rows, mask=inside, other=0)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * HIDDEN
    # columns past the end read the last column; their results are not stored
    gate_rows = expert.to(tl.int64) * (2 * INNER) + tl.minimum(columns, INNER - 1)
    up_rows = gate_rows + INNER
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    factor = tl.load(weights_ptr + pairs)[:, None] if WEIGHTED else 1.0
    for start in range(0, HIDDEN, BLOCK_K):
        x = _load_input(x_rows, permutations_ptr, expert, offs_k + start, HIDDEN, WHOLE)
        if WEIGHTED:
            x = (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty)
        gate_weight = _load_weight(codes_ptr, scales_ptr, offsets_ptr, table_ptr, gate_rows, offs_k + start, HIDDEN,
                                   KIND, GROUP_SIZE, WHOLE, x_ptr.dtype.element_ty)  # fmt: skip
        up_weight = _load_weight(codes_ptr, scales_ptr, offsets_ptr, table_ptr, up_rows, offs_k + start, HIDDEN,
                                 KIND, GROUP_SIZE, WHOLE, x_ptr.dtype.element_ty)  # fmt: skip
        gate = tl.dot(x, tl.trans(gate_weight), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(up_weight), up, input_precision="ieee")
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + gate_rows).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + up_rows).to(tl.float32)[None, :]
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    else:
        result = activate(gate, ACTIVATION) * up
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < INNER)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    inner_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    bias_ptr,
    permutations_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Grid (num_tiles * ceil(HIDDEN / BLOCK_N),). Rows of inner are in sorted order; rows of out are scattered to the
    pairs' numbers."""
    tile, column = _tile_and_column(num_tiles, HIDDEN, BLOCK_N, GROUP)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    rows, inside = _rows(tiles_ptr, tile, num_tiles, BLOCK_M)
    pairs = tl.load(pairs_ptr + rows, mask=inside, other=0)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    present = tl.where(inside, rows, tl.load(tiles_ptr + num_tiles + tile))  # rows past the end are not read
    inner_rows = inner_ptr + present.to(tl.int64)[:, None] * INNER
    weight_rows = expert.to(tl.int64) * HIDDEN + tl.minimum(columns, HIDDEN - 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        inner = _load_input(inner_rows, permutations_ptr, expert, offs_k + start, INNER, WHOLE)
        weight = _load_weight(codes_ptr, scales_ptr, offsets_ptr, table_ptr, weight_rows, offs_k + start, INNER,
                              KIND, GROUP_SIZE, WHOLE, inner_ptr.dtype.element_ty)  # fmt: skip
        acc = tl.dot(inner, tl.trans(weight), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_rows).to(tl.float32)[None, :]
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < HIDDEN)[None, :])


@triton.jit
def _load_input(row_ptrs, permutations_ptr, expert, ks, DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    """Columns `ks` of rows [BLOCK_M, 1] in the order of the expert's codes."""
    columns = ks
    if permutations_ptr is not None:
        order_ptrs = permutations_ptr + expert.to(tl.int64) * DEPTH + ks
        columns = tl.load(order_ptrs) if WHOLE else tl.load(order_ptrs, mask=ks < DEPTH, other=0)
    return _load(row_ptrs + columns[None, :], ks, DEPTH, WHOLE)


@triton.jit
def _load_weight(
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    rows,
    ks,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Rows `rows` and columns `ks` of the matrices of all experts, dequantised in fp32 and rounded to `dtype`."""
    if KIND == "plain":
        return _load(codes_ptr + rows[:, None] * DEPTH + ks[None, :], ks, DEPTH, WHOLE)
    else:
        if KIND == "nibbles":
            pairs = _load(codes_ptr + rows[:, None] * (DEPTH // 2) + (ks // 2)[None, :], ks, DEPTH, WHOLE)
            codes = (pairs.to(tl.int32) >> ((ks % 2) * 4)[None, :]) & 15
        else:
            codes = _load(codes_ptr + rows[:, None] * DEPTH + ks[None, :], ks, DEPTH, WHOLE).to(tl.int32)
        values = codes.to(tl.float32) if KIND == "int8" else tl.load(table_ptr + codes)
        groups = rows[:, None] * (DEPTH // GROUP_SIZE) + (ks // GROUP_SIZE)[None, :]
        values *= _load(scales_ptr + groups, ks, DEPTH, WHOLE).to(tl.float32)
        if offsets_ptr is not None:
            values += _load(offsets_ptr + groups, ks, DEPTH, WHOLE).to(tl.float32)
        return values.to(dtype)


@triton.jit
def _tile_and_column(num_tiles, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column) of a program. GROUP row tiles visit a column before the next column, and so share weights."""
    num_columns: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = program // (GROUP * num_columns) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = program % (GROUP * num_columns)
    return first + within % size, within // size


@triton.jit
def _rows(tiles_ptr, tile, num_tiles, BLOCK_M: tl.constexpr):
    """(rows of a tile in sorted order [BLOCK_M], mask of the rows that exist)."""
    rows = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BLOCK_M)
    return rows, rows < tl.load(tiles_ptr + 2 * num_tiles + tile)


@triton.jit
def _load(ptrs, offs_k, DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    """A tile with columns offs_k; columns from DEPTH on are zeros. WHOLE promises that there are none."""
    if WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(offs_k < DEPTH)[None, :], other=0)


def _weighted_sum(results: Tensor, weights: Tensor, weighted: bool) -> Tensor:
    """results [num_tokens * top_k, hidden], weights fp32 [num_tokens, top_k] -> [num_tokens, hidden]; the plain sum
    unless `weighted`."""
    (num_tokens, top_k), hidden = weights.shape, results.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=results.dtype, device=results.device)
    block = min(SUM_BLOCK, power_of_2(hidden))
    weighted_sum_kernel[(num_tokens, -(-hidden // block))](
        results, weights, out, HIDDEN=hidden, TOP_K=top_k, WEIGHTED=weighted, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def weighted_sum_kernel(
    results_ptr,
    weights_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_tokens, ceil(HIDDEN / BLOCK)): sums a part of one token over its experts, in the order of their
    rank."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        result = tl.load(results_ptr + (token * TOP_K + slot) * HIDDEN + offs, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(weights_ptr + token * TOP_K + slot) * result if WEIGHTED else result
    tl.store(out_ptr + token * HIDDEN + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class AotShape:
    """A mixture of experts that `python -m kernels.aot` compiles."""

    name: str
    hidden: int
    inner: int
    top_k: int
    formula: ExpertFormula = ExpertFormula("silu")
    bias: bool = False
    kind: str = "plain"
    group_size: int = 1
    scales: str = "*bf16"
    offsets: bool = False
    permuted: bool = False  # each expert in its own order

    def matrices(self) -> Matrices:
        """The weights, as far as constants depend on them."""
        return Matrices((), torch.empty(0), None, self.kind, group_size=self.group_size)

    def absent(self) -> dict[str, None]:
        """Pointers that are not passed."""
        absent = {} if self.bias else {"bias_ptr": None}
        absent |= {} if self.offsets else {"offsets_ptr": None}
        absent |= {} if self.permuted else {"permutations_ptr": None}
        absent |= {"scales_ptr": None} if self.kind == "plain" else {}
        return absent | ({"table_ptr": None} if self.kind in ("plain", "int8") else {})

    def types(self) -> dict[str, str]:
        """Triton's types of the pointers that do not point to the activations' dtype."""
        codes = {"plain": {}, "int8": {"codes_ptr": "*i8"}}.get(self.kind, {"codes_ptr": "*u8"})
        return {"pairs_ptr": "*i32", "tiles_ptr": "*i32", "weights_ptr": "*fp32", "table_ptr": "*fp32",
                "scales_ptr": self.scales, "offsets_ptr": self.scales, "permutations_ptr": "*i32", **codes}  # fmt: skip


QWEN3 = AotShape("Qwen3-30B-A3B", 2048, 768, 8)
MXFP4 = AotShape("gpt-oss mxfp4", 2880, 2880, 4, ExpertFormula("silu", clamp_limit=7.0), True, "nibbles", 32)
AOT_SHAPES = (
    QWEN3,
    AotShape("Mixtral-8x7B", 4096, 14336, 2),
    AotShape("odd sizes", 1000, 328, 3),
    AotShape("gpt-oss", 2880, 2880, 4, ExpertFormula("silu", clamp_limit=7.0), bias=True),
    MXFP4,
    AotShape("Llama 4", 5120, 8192, 1, ExpertFormula("silu", weights_on_input=True)),
    AotShape("Qwen3-30B-A3B fp8", 2048, 768, 8, kind="bytes", group_size=128, scales="*fp32"),
    AotShape("Mixtral-8x7B int8", 4096, 14336, 2, kind="int8", group_size=4096),
    AotShape("Mixtral-8x7B AWQ", 4096, 14336, 2, kind="nibbles", group_size=128, scales="*fp16", offsets=True),
    AotShape("Mixtral-8x7B act-order", 4096, 14336, 2, kind="nibbles", group_size=128, scales="*fp32", permuted=True),
)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields every tile for plain and quantised weights, each formula, and sizes that no block divides."""
    for dtype in ("bf16", "fp16", "fp32"):
        for shape in AOT_SHAPES if dtype == "bf16" else AOT_SHAPES[:1]:
            for _, tile in tile_table(
                ELEMENT_SIZES[dtype], known_card(capability), "ordered" if shape.permuted else shape.kind
            ):
                yield from _grouped_configurations(shape, tile, dtype, capability)
            yield AotConfiguration(
                weighted_sum_kernel, shape.name, dtype, {"HIDDEN": shape.hidden, "TOP_K": shape.top_k,
                "WEIGHTED": not shape.formula.weights_on_input, "BLOCK": SUM_BLOCK},
                num_warps=4, types={"weights_ptr": "*fp32"}, quick=dtype == "bf16" and shape is QWEN3,
            )  # fmt: skip


def _grouped_configurations(shape, tile, dtype, capability):
    needs = matrix_needs(known_card(capability), tile.block_m)
    if shape.kind == "plain" and not shape.formula.weights_on_input:
        needs = "async_copies", *needs
    matrices = shape.matrices()
    gate_up = _gate_up_constants(shape.hidden, shape.inner, shape.top_k, shape.formula, matrices, tile)
    down = _down_constants(shape.hidden, shape.inner, matrices, tile)
    quick = tile.block_m in {QWEN3: (16, 128), MXFP4: (16,)}.get(shape, ())
    for kernel, constants in ((gate_up_kernel, gate_up), (down_kernel, down)):
        yield AotConfiguration(
            kernel, f"{shape.name}, {tile.block_m} rows", dtype, constants | shape.absent(), num_warps=tile.num_warps,
            num_stages=tile.num_stages, types=shape.types(), quick=dtype == "bf16" and quick,
            needs=() if dtype == "fp32" else needs,
        )  # fmt: skip
