"""Mixture of experts (Shazeer et al. 2017): a token's MLP is the weighted sum of a few experts out of many.

On a GPU the experts of a step are two grouped GEMMs, one launch each: gate|up with the gated activation, and down. The
kernels visit rows in the order of `sort_by_expert`, read them in place and write results where the sum reads them, so
nothing is copied. The sum adds a token's experts in the order of their rank, in fp32 and without atomics.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import ELEMENT_SIZES, AotConfiguration, matrix_needs, power_of_2
from kernels.card import Card, known_card, read_card
from kernels.dispatch import tl, triton, use_triton
from kernels.elementwise.activation import activate, gated_activation, gated_activation_reference, kernel_name
from kernels.linear.moe_routing import Order, Routing, route, sort_by_expert
from kernels.linear.packed import PackedLinear

SUM_BLOCK = 1024


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
# Without tensor cores (fp32, and Turing: see Card.matrix_instruction): correct, not fast.
TILE_FP32 = Tile(16, 32, 32, 32, 4, 2)
TILES_FMA = ((16, TILE_FP32), (None, Tile(64, 32, 64, 32, 8, 2)))
TILES_PER_GROUP = 8  # row tiles that visit a column together, so that they share weights in L2


class Experts:
    """The experts of one layer, packed for their device.

    gate_up [num_experts, 2 * inner, hidden] = [gate | up], down [num_experts, hidden, inner]; `activation` is a name of
    kernels.elementwise.activation. On a CPU every expert is a PackedLinear.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, activation: str) -> None:
        self.num_experts, self.hidden_size, self.inner_size = down.shape
        self.activation = activation
        self.gate_up, self.down = gate_up, down
        self.packed: list[tuple[PackedLinear, PackedLinear]] = []
        if not use_triton(gate_up):
            self.packed = [(PackedLinear(a), PackedLinear(b)) for a, b in zip(gate_up, down, strict=True)]
            del self.gate_up, self.down  # drop the plain copies of packed weights

    def __call__(self, x: Tensor, logits: Tensor, top_k: int, normalize: bool) -> Tensor:
        """x [num_tokens, hidden] and the router's logits [num_tokens, num_experts] -> [num_tokens, hidden].

        top_k and normalize: see `route`. A row's result does not depend on other rows, except that on a GPU the number
        of tokens chooses the tile, and with the tile the matrix instruction.
        """
        routing = route(logits, top_k, normalize)
        if self.packed:
            return self._one_by_one(x, routing)
        tile = choose_tile(x.dtype, read_card(x.device), x.shape[0] * top_k, self.num_experts)
        return self._grouped(x, routing, tile) if x.shape[0] else torch.empty_like(x)

    def warm_up(self, top_k: int, normalize: bool) -> None:
        """Compile every variant that a later call can launch."""
        x = torch.zeros((1, self.hidden_size), dtype=self.down.dtype, device=self.down.device)
        routing = route(x.new_zeros((1, self.num_experts)), top_k, normalize)
        for _, tile in tile_table(x.dtype.itemsize, read_card(x.device)):
            self._grouped(x, routing, tile)

    def _one_by_one(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute each expert that has tokens. A row is summed in the order of its experts' numbers, in fp32."""
        order = routing.experts.flatten().argsort(stable=True)
        counts = routing.experts.flatten().bincount(minlength=self.num_experts).tolist()
        weights, top_k = routing.weights.flatten(), routing.experts.shape[1]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for (gate_up, down), pairs in zip(self.packed, order.split(counts), strict=True):
            if not len(pairs):
                continue
            rows = pairs // top_k
            result = down(gated_activation(gate_up(x.index_select(0, rows)), self.activation))
            out.index_add_(0, rows, result.float() * weights[pairs, None])
        return out.to(x.dtype)

    def _grouped(self, x: Tensor, routing: Routing, tile: Tile) -> Tensor:
        order = sort_by_expert(routing, tile.block_m)
        inner = self._gate_up(x, order, routing.experts.shape[1], tile)
        return _weighted_sum(self._down(inner, order, tile), routing.weights)

    def _gate_up(self, x: Tensor, order: Order, top_k: int, tile: Tile) -> Tensor:
        """x [num_tokens, hidden] -> activation(gate) * up of every pair [num_pairs, inner], in sorted order."""
        x = x.contiguous()
        out = torch.empty((len(order.pairs), self.inner_size), dtype=x.dtype, device=x.device)
        constants = _gate_up_constants(self.hidden_size, self.inner_size, top_k, self.activation, tile)
        num_tiles = order.tiles.shape[1]
        gate_up_kernel[(num_tiles * -(-self.inner_size // tile.block_n),)](
            x, self.gate_up, order.pairs, order.tiles, out, num_tiles, **constants,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return out

    def _down(self, inner: Tensor, order: Order, tile: Tile) -> Tensor:
        """[num_pairs, inner] in sorted order -> [num_pairs, hidden] in the order of the pairs' numbers."""
        out = torch.empty((len(inner), self.hidden_size), dtype=inner.dtype, device=inner.device)
        num_tiles = order.tiles.shape[1]
        down_kernel[(num_tiles * -(-self.hidden_size // tile.down_n),)](
            inner, self.down, order.pairs, order.tiles, out, num_tiles,
            **_down_constants(self.hidden_size, self.inner_size, tile),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return out


def experts_reference(x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, activation: str = "silu") -> Tensor:
    """The formula in fp32, token by token, rounded once."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token in range(len(x)):
        for weight, expert in zip(routing.weights[token], routing.experts[token].tolist(), strict=True):
            wide = gate_up[expert].float() @ x[token].float()
            out[token] += weight * (down[expert].float() @ gated_activation_reference(wide[None], activation)[0])
    return out.to(x.dtype)


def tile_table(element_size: int, card: Card) -> tuple[tuple[int | None, Tile], ...]:
    """(largest average number of rows per expert, tile) of all launches with elements of that many bytes."""
    if element_size == 4:
        return ((None, TILE_FP32),)
    return TILES_FMA if card.matrix_instruction() == "fma" else TILES


def choose_tile(dtype: torch.dtype, card: Card, num_pairs: int, num_experts: int) -> Tile:
    """The tile for the average number of rows per expert, which the host knows without asking the device."""
    table = tile_table(dtype.itemsize, card)
    return next(tile for limit, tile in table if limit is None or num_pairs <= limit * num_experts)


def _gate_up_constants(hidden, inner, top_k, activation, tile):
    return {"HIDDEN": hidden, "INNER": inner, "TOP_K": top_k, "ACTIVATION": kernel_name(activation),
            **_block_constants(hidden, tile.block_n, tile)}  # fmt: skip


def _down_constants(hidden, inner, tile):
    return {"HIDDEN": hidden, "INNER": inner, **_block_constants(inner, tile.down_n, tile)}


def _block_constants(depth, columns, tile):
    return {"BLOCK_M": tile.block_m, "BLOCK_N": columns, "BLOCK_K": tile.block_k, "GROUP": TILES_PER_GROUP,
            "WHOLE": depth % tile.block_k == 0}  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    tokens = tl.load(pairs_ptr + rows, mask=inside, other=0) // TOP_K
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + offs_k[None, :]
    # columns past the end read the last column; their results are not stored
    gate_rows = tl.minimum(columns, INNER - 1)[:, None] * HIDDEN + offs_k[None, :]
    gate_ptrs = weight_ptr + expert.to(tl.int64) * (2 * INNER * HIDDEN) + gate_rows
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        x = _load(x_ptrs + start, offs_k + start, HIDDEN, WHOLE)
        gate_weight = _load(gate_ptrs + start, offs_k + start, HIDDEN, WHOLE)
        up_weight = _load(gate_ptrs + (INNER * HIDDEN + start), offs_k + start, HIDDEN, WHOLE)
        gate = tl.dot(x, tl.trans(gate_weight), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(up_weight), up, input_precision="ieee")
    result = (activate(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(out_ptrs, result, mask=inside[:, None] & (columns < INNER)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    inner_ptr,
    weight_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
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
    inner_ptrs = inner_ptr + present.to(tl.int64)[:, None] * INNER + offs_k[None, :]
    weight_rows = tl.minimum(columns, HIDDEN - 1)[:, None] * INNER + offs_k[None, :]
    weight_ptrs = weight_ptr + expert.to(tl.int64) * (HIDDEN * INNER) + weight_rows
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        inner = _load(inner_ptrs + start, offs_k + start, INNER, WHOLE)
        weight = _load(weight_ptrs + start, offs_k + start, INNER, WHOLE)
        acc = tl.dot(inner, tl.trans(weight), acc, input_precision="ieee")
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < HIDDEN)[None, :])


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
        return tl.load(ptrs, mask=(offs_k < DEPTH)[None, :], other=0.0)


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """results [num_tokens * top_k, hidden], weights fp32 [num_tokens, top_k] -> [num_tokens, hidden]"""
    (num_tokens, top_k), hidden = weights.shape, results.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=results.dtype, device=results.device)
    block = min(SUM_BLOCK, power_of_2(hidden))
    weighted_sum_kernel[(num_tokens, -(-hidden // block))](
        results, weights, out, HIDDEN=hidden, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def weighted_sum_kernel(
    results_ptr, weights_ptr, out_ptr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (num_tokens, ceil(HIDDEN / BLOCK)): sums a part of one token over its experts, in the order of their
    rank."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + slot)
        result = tl.load(results_ptr + (token * TOP_K + slot) * HIDDEN + offs, mask=mask, other=0.0)
        acc += weight * result.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields Qwen3-30B-A3B and Mixtral-8x7B with every tile, and sizes that no block divides."""
    shapes = (("Qwen3-30B-A3B", 2048, 768, 8), ("Mixtral-8x7B", 4096, 14336, 2), ("odd sizes", 1000, 328, 3))
    for dtype in ("bf16", "fp16", "fp32"):
        for name, hidden, inner, top_k in shapes if dtype == "bf16" else shapes[:1]:
            for _, tile in tile_table(ELEMENT_SIZES[dtype], known_card(capability)):
                yield from _grouped_configurations(
                    name=name, hidden=hidden, inner=inner, top_k=top_k, tile=tile, dtype=dtype, capability=capability
                )
            yield AotConfiguration(
                weighted_sum_kernel, f"{name}", dtype, {"HIDDEN": hidden, "TOP_K": top_k, "BLOCK": SUM_BLOCK},
                num_warps=4, types={"weights_ptr": "*fp32"}, quick=dtype == "bf16" and top_k == 8,
            )  # fmt: skip


def _grouped_configurations(name, hidden, inner, top_k, tile, dtype, capability):
    needs = "async_copies", *matrix_needs(known_card(capability), tile.block_m)
    for kernel, constants in ((gate_up_kernel, _gate_up_constants(hidden, inner, top_k, "silu", tile)),
                              (down_kernel, _down_constants(hidden, inner, tile))):  # fmt: skip
        yield AotConfiguration(
            kernel, f"{name}, {tile.block_m} rows", dtype, constants, num_warps=tile.num_warps,
            num_stages=tile.num_stages, types={"pairs_ptr": "*i32", "tiles_ptr": "*i32"},
            quick=dtype == "bf16" and name == "Qwen3-30B-A3B" and tile.block_m != 64,
            needs=() if dtype == "fp32" else needs,
        )  # fmt: skip
