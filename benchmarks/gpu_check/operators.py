"""The operators of one step of a model: launches, bytes and FLOPs of each, counted from the model's shape. No torch.

Counted are the fewest bytes: each weight, key and value is read once, each activation is written and read once. Scores
of masked positions are not counted. Attention is counted as full attention: a sliding window reads less.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` sequences that each compute `new` tokens, and have `context` tokens afterwards, the new ones included."""

    count: int
    new: int
    context: float

    @property
    def tokens(self) -> int:
        return self.count * self.new

    @property
    def scores(self) -> float:
        """Pairs of query and visible key, of one head in one layer: query i of n sees context - n + i keys."""
        return self.count * self.new * (self.context - (self.new - 1) / 2)


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of call of a step, over all layers.

    kind "gemm", "attention" or "row": norms, activations, cache writes and gathers. weight_bytes is the part of
    num_bytes that does not depend on the batch.
    """

    name: str
    kind: str
    launches: int
    num_bytes: float
    flops: float = 0.0
    weight_bytes: float = 0.0

    def floor(self, bandwidth: float, rate: float) -> float:
        """Seconds at least: it waits for memory or for arithmetic. bandwidth in bytes/s, rate in FLOP/s."""
        return max(self.num_bytes / bandwidth, self.flops / rate)


def step_operators(
    model: ModelConfig,
    step: list[Rows],
    dtype_bytes: int = 2,
    merges: bool = False,
    weight_bytes: float | None = None,
) -> Iterator[Operator]:
    """The operators of one step in their order. Every sequence samples one token greedily.

    merges: attention may be split by length, so another launch merges the parts of each call. The bytes of partial
    results are left out. weight_bytes: of a number in the matrices, where they are quantised.
    """
    layers, hidden, item = model.num_layers, model.hidden_size, dtype_bytes
    tokens, sequences = sum(rows.tokens for rows in step), sum(rows.count for rows in step)
    heads = model.q_size + 2 * model.kv_size
    gemm = _Gemms(tokens, item, weight_bytes)
    yield Operator("embedding, inputs, work map", "row", 5, 2 * tokens * hidden * item)
    narrow = model.embedding_size
    if narrow != hidden:
        yield gemm.of("projection in", 1, narrow, hidden)
    yield Operator("norms", "row", 2 * layers, 2 * layers * 4 * tokens * hidden * item)
    yield gemm.of("qkv", layers, hidden, heads)
    yield Operator("rope and cache write", "row", layers, layers * tokens * 2 * heads * item)
    attention = list(_attention(model, step, item))
    yield from attention
    if merges:
        yield Operator("merge of splits", "row", layers * len(attention), 0.0)
    yield gemm.of("attention out", layers, model.q_size, hidden)
    yield from _mlp(model, tokens, item, gemm)
    yield Operator("final norm", "row", 2, 4 * tokens * hidden * item)
    if narrow != hidden:
        yield _Gemms(sequences, item).of("projection out", 1, hidden, narrow)
    yield _Gemms(sequences, item, weight_bytes).of("head", 1, narrow, model.vocab_size)
    yield Operator("sampling", "row", 5, sequences * model.vocab_size * item)


def _attention(model: ModelConfig, step: list[Rows], item: int) -> Iterator[Operator]:
    """One operator for the sequences that decode and one for those with more rows: each has a kernel of its own."""
    kv = model.kv_bytes_per_token(item)
    flops = 4 * model.num_layers * model.q_size
    for name, part in (("attention decode", [rows for rows in step if rows.new == 1]),
                       ("attention prefill", [rows for rows in step if rows.new > 1])):  # fmt: skip
        if part:
            cached, scores = (sum(values) for values in zip(*((r.count * r.context, r.scores) for r in part),
                                                            strict=True))  # fmt: skip
            queries = 2 * sum(rows.tokens for rows in part) * model.q_size * item * model.num_layers
            yield Operator(name, "attention", model.num_layers, cached * kv + queries, scores * flops)


def _mlp(model: ModelConfig, tokens: int, item: int, gemm: "_Gemms") -> Iterator[Operator]:
    dense = sum(model.experts(layer) is None for layer in range(model.num_layers))
    inner, hidden = model.intermediate_size, model.hidden_size
    wide = inner * (2 if model.gated_mlp else 1)
    if dense:
        yield gemm.of("gate and up" if model.gated_mlp else "up", dense, hidden, wide)
        yield Operator("activation", "row", dense, dense * tokens * (wide + inner) * item)
        yield gemm.of("down", dense, inner, hidden)
    if model.moe is not None:
        sparse, moe = model.num_layers - dense, model.moe
        reached = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)
        expert = 3 * hidden * moe.intermediate_size
        rows = tokens * moe.experts_per_token
        weights = sparse * reached * expert * item
        yield gemm.of("router", sparse, hidden, moe.num_experts)
        yield Operator("experts", "gemm", 4 * sparse, weights + 2 * sparse * rows * hidden * item,
                       2.0 * sparse * rows * expert, weights)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Gemms:
    """Linear layers over a number of rows."""

    rows: int
    item: int
    weight_item: float | None = None

    def of(self, name: str, count: int, n_in: int, n_out: int) -> Operator:
        weights = count * n_in * n_out * (self.weight_item or self.item)
        moved = weights + count * self.rows * (n_in + n_out) * self.item
        return Operator(name, "gemm", count, moved, 2.0 * count * self.rows * n_in * n_out, weights)


def floor_seconds(operators: list[Operator], bandwidth: float, rate: float) -> float:
    """The per-operator floor of a step: the sum of the floors of its products and attention calls.

    Operators run one after the other, so attention, which waits for memory, does not hide in a product that waits for
    arithmetic. Row kernels are left out: a product's prologue or epilogue could take them in.
    """
    return sum(operator.floor(bandwidth, rate) for operator in operators if operator.kind != "row")
