"""shard_model: the ModelConfig of one rank; split_of: which rows or columns of a parameter that rank holds.

Shoeybi et al. 2019 (Megatron-LM), section 3. The matrices that read the hidden states (q, k, v, gate, up, the experts'
first matrix) are split by rows, those that write to them (attention's output, down, the experts' second matrix) by
columns, so a layer needs one sum over the ranks after attention and one after the MLP. Embedding and lm_head are split
by the vocabulary. Norms, routers and learned positions are on every rank. With fewer KV heads than ranks, several ranks
hold the same KV head. The first rank adds the biases of the matrices that are split by columns.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.errors import ModelError
from engine.models.config import ModelConfig, Shard

LAYER = re.compile(r"layers\.\d+\.")
VOCABULARY = ("embedding", "lm_head")
ON_EVERY_RANK = (
    "attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "embedding_norm", "final_norm", "position_embedding",
    "project_in", "project_out", "router", "correction", "shared_gate", "xielu",
)  # fmt: skip
MAX_RANKS = 16  # ranks that a message proposes


@dataclass(frozen=True, slots=True)
class Split:
    """The rows and columns (None: all) of a whole parameter that a rank holds; it holds a part of every expert."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None


def _qkv(config: ModelConfig) -> tuple[int, ...]:
    return config.q_size, config.kv_size, config.kv_size


def _mlp(config: ModelConfig) -> tuple[int, ...]:
    return (config.intermediate_size,) * (2 if config.gated_mlp else 1)


def _expert(config: ModelConfig) -> tuple[int, ...]:
    return (0, 0) if config.moe is None else (config.moe.intermediate_size,) * 2


def _shared(config: ModelConfig) -> tuple[int, ...]:
    return (0, 0) if config.moe is None else (config.moe.shared_size,) * 2


Sections = Callable[[ModelConfig], tuple[int, ...]]  # sizes of the parts of an axis; each part is divided by itself
ROWS: dict[str, Sections] = {
    "qkv": _qkv,
    "mlp_in": _mlp,
    "experts_in": _expert,
    "shared.mlp_in": _shared,
    "sinks": lambda config: (config.num_heads,),
}
COLUMNS: dict[str, Sections] = {
    "attn_out": lambda config: (config.q_size,),
    "mlp_out": lambda config: (config.intermediate_size,),
    "experts_out": lambda config: _expert(config)[:1],
    "shared.mlp_out": lambda config: _shared(config)[:1],
}
HEAD_NORMS: dict[str, Sections] = {
    "q_norm": lambda config: (config.num_heads,),
    "k_norm": lambda config: (config.num_kv_heads,),
}


def shard_model(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """The config of one rank of `size`: the same layers with fewer heads and narrower MLPs; `config` itself for a group
    of one. ModelError names the field that cannot be divided."""
    if size == 1:
        return config
    if not config.causal:
        raise ModelError("tensor_parallel_size: an encoder runs on one device; use --tensor-parallel-size 1.")
    if config.qk_norm == "all":
        raise ModelError(
            "tensor_parallel_size: this model normalises q and k over all heads at once, which no rank has; use "
            "--tensor-parallel-size 1."
        )
    if config.full_heads or config.num_kv_shared_layers or config.values_from_keys or config.has_extended_layers:
        raise ModelError(
            "tensor_parallel_size: a model whose layers differ in heads, share KV or get inputs by token (Gemma 4) "
            "runs on one device; use --tensor-parallel-size 1."
        )
    heads, kv_heads, moe = config.num_heads, config.num_kv_heads, config.moe
    _check(heads, "num_attention_heads", size)
    if kv_heads % size and size % kv_heads:
        fitting = [n for n in range(1, MAX_RANKS + 1) if not (heads % n or (kv_heads % n and n % kv_heads))]
        raise ModelError(_no_split(f"num_key_value_heads {kv_heads}", size, fitting))
    if moe is None or moe.dense_layers:
        _check(config.intermediate_size, "intermediate_size", size)
    if moe is not None:
        _check(moe.intermediate_size, "the width of an expert,", size)
        _check(moe.shared_size, "the width of the shared experts,", size)
        moe = replace(moe, intermediate_size=moe.intermediate_size // size, shared_size=moe.shared_size // size)
    shard = replace(
        config,
        num_heads=heads // size,
        num_kv_heads=max(1, kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        moe=moe,
        shard=Shard(rank, size, config),
    )
    for name in shard.parameter_shapes():
        split_of(shard, name)
    return shard


def _check(number: int, name: str, size: int) -> None:
    if number % size:
        fitting = [n for n in range(1, MAX_RANKS + 1) if number % n == 0]
        raise ModelError(_no_split(f"{name} {number}", size, fitting))


def _no_split(what: str, size: int, fitting: list[int]) -> str:
    sizes = ", ".join(map(str, fitting))
    return f"tensor_parallel_size: {size} ranks cannot share {what} evenly; use --tensor-parallel-size with {sizes}."


def split_of(model: ModelConfig, parameter: str) -> Split:
    """The part of a parameter that the rank of `model` (made by shard_model) holds. ModelError for a parameter that has
    no rule here."""
    assert model.shard is not None, "shard_model made it"
    module, _, kind = LAYER.sub("", parameter, count=1).rpartition(".")
    if module in VOCABULARY:
        return Split(rows=(model.vocab_part,))
    if module in ON_EVERY_RANK or (module in HEAD_NORMS and model.qk_norm == "head"):
        return Split()
    if module in COLUMNS:
        return Split(columns=_ranges(model, COLUMNS[module], parameter, -1)[0]) if kind == "weight" else Split()
    sections = ROWS.get(module) or (HEAD_NORMS.get(module) if model.qk_norm == "per_head" else None)
    if sections is None:
        raise ModelError(f"tensor_parallel_size: {parameter} cannot be divided; use --tensor-parallel-size 1.")
    axis = -2 if kind == "weight" and module != "sinks" else -1
    return Split(rows=_ranges(model, sections, parameter, axis))


def _ranges(model: ModelConfig, sections: Sections, parameter: str, axis: int) -> tuple[range, ...]:
    """The rank's range of each section. A section that has fewer units than ranks is on several ranks."""
    assert model.shard is not None, "shard_model made it"
    rank, size, whole = model.shard.rank, model.shard.size, model.shard.whole
    ranges, first = [], 0
    for all_of_it, own in zip(sections(whole), sections(model), strict=True):
        start = first + rank * all_of_it // size // own * own
        ranges.append(range(start, start + own))
        first += all_of_it
    if whole.parameter_shapes()[parameter][axis] != first:  # a mechanism that these sections do not know
        raise ModelError(f"tensor_parallel_size: {parameter} cannot be divided; use --tensor-parallel-size 1.")
    return tuple(ranges)


def summed_biases(model: ModelConfig) -> list[str]:
    """The biases that every rank's share of a sum would add again: the first rank alone has them."""
    endings = tuple(f"{module}.bias" for module in COLUMNS)
    return [name for name in model.parameter_shapes() if LAYER.sub("", name, count=1) in endings]
