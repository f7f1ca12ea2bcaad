"""Adapters (LoRA: Hu et al. 2021) beside the linear layers of a decoder: y = W x + B (A x), by row of the batch.

AdapterLayers holds a few adapters at a time, in slots; RowGroups say which rows of the step use which slot. The Worker
fills both before a forward pass. A model without adapters has none of these objects.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from kernels.lora.rows import RowGroups
from kernels.lora.weights import Factor, LoraWeights, make_lora_weights

LAYER_LINEAR = re.compile(r"layers\.(\d+)\.(qkv|attn_out|mlp_in|mlp_out)")
HEAD = "lm_head"

Apply = Callable[[Tensor], Tensor]
Layer = TypeVar("Layer", bound=Apply)


class AdaptedLinear:
    """A linear layer, quantised or not, with the additions of adapters: [num_tokens, in] -> [num_tokens, out]."""

    __slots__ = ("base", "groups", "weights")

    def __init__(self, base: Apply, weights: LoraWeights, groups: RowGroups) -> None:
        self.base, self.weights, self.groups = base, weights, groups

    def __call__(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self.groups.active:
            self.weights.add(out, x, self.groups)
        return out


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory: by linear layer what LoraWeights.pack made of its factors. `digest` is that of its
    files, num_bytes the size of its factors."""

    linears: Mapping[str, Any]
    digest: bytes
    num_bytes: int


class AdapterLayers:
    """The slots of all linear layers that adapters may change, and the rows that use them.

    tokens: the rows of a forward pass. outputs: its output rows, which the last layer computes behind its attention;
    all rows if a step wants every row. logits: the rows of the next compute_logits.
    """

    def __init__(
        self, config: ModelConfig, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.max_loras, self.max_rank, self.dtype, self.device = (
            config, max_loras, max_rank, dtype, device
        )  # fmt: skip
        self.tokens, self.outputs, self.logits = (RowGroups(max_loras, device) for _ in range(3))
        self.parts = {name: parts_of(config, name) for name in adaptable(config)}
        self._weights: dict[str, LoraWeights] = {}
        self._heads: set[int] = set()  # slots whose adapters change lm_head

    def wrap(self, name: str, linear: Layer) -> Layer | AdaptedLinear:
        """The layer with slots for adapters; the layer itself if no adapter may change it."""
        if name not in self.parts:
            return linear
        weights = self._weights[name] = make_lora_weights(
            in_features(self.config, name), self.parts[name], self.max_loras, self.max_rank, self.dtype, self.device
        )
        return AdaptedLinear(linear, weights, self._groups(name))

    def pack(self, factors: Mapping[str, Sequence[Factor]], digest: bytes = b"") -> PackedAdapter:
        """An adapter, given by the factors of the parts of each linear, as `fill` takes it. Any thread may call it."""
        tensors = {t.data_ptr(): t.nbytes for parts in factors.values() for pair in parts if pair for t in pair}
        packed = {name: self._weights[name].pack(parts) for name, parts in factors.items()}
        return PackedAdapter(packed, digest, sum(tensors.values()))

    def fill(self, slot: int, adapter: PackedAdapter) -> None:
        """Put an adapter in the place of the one in the slot."""
        for name, weights in self._weights.items():
            weights.set(slot, adapter.linears.get(name))
        self._heads.discard(slot)
        if HEAD in adapter.linears:
            self._heads.add(slot)

    def forget_rows(self) -> None:
        """Forget the rows of all earlier steps. Those of a recorded graph lie in memory that is reused once the graph
        is gone, and a forward pass that sets no rows would read them."""
        for groups in (self.tokens, self.outputs, self.logits):
            groups.forget()

    def set_rows(self, slots: Tensor, outputs: Tensor | None, active: bool) -> None:
        """The slots of a forward pass, int64 [num_tokens], -1 for the base; outputs: the indices of its output rows,
        None for all. `active` False: no row has an adapter."""
        self.tokens.set(slots, active)
        self.outputs.set(slots if outputs is None or not active else slots.index_select(0, outputs), active)

    def set_logits_rows(self, slots: Tensor, active: bool) -> None:
        """The slots of the rows of the next compute_logits, int64 [num_rows]."""
        self.logits.set(slots, active and (bool(self._heads) or slots.is_cuda))

    def _groups(self, name: str) -> RowGroups:
        if name == HEAD:
            return self.logits
        last = name.startswith(f"layers.{self.config.num_layers - 1}.")
        return self.outputs if last and not name.endswith(".qkv") else self.tokens


def adaptable(config: ModelConfig) -> list[str]:
    """The names of the linear layers that adapters may change."""
    modules = [name.removesuffix(".weight") for name in config.parameter_shapes() if name.endswith(".weight")]
    return [*(name for name in modules if LAYER_LINEAR.fullmatch(name)), HEAD]


def parts_of(config: ModelConfig, name: str) -> tuple[int, ...]:
    """The rows of the parts of a linear's output that have factors of their own: q, k and v; gate and up; else one."""
    rows = out_features(config, name)
    if name.endswith(".qkv"):
        parts = tuple(size for size in config.qkv_rows(_layer(name)) if size)
    elif name.endswith(".mlp_in") and config.gated_mlp:
        parts = rows // 2, rows // 2
    else:
        parts = (rows,)
    if sum(parts) != rows:
        raise ModelError(f"lora: {name} has {rows} rows, not those of {len(parts)} parts: leave adapters out.")
    return parts


def out_features(config: ModelConfig, name: str) -> int:
    """Rows of a linear's weight, of a rank's share of it where `config` is that of a rank."""
    return len(config.vocab_part) if name == HEAD else config.parameter_shapes()[f"{name}.weight"][0]


def in_features(config: ModelConfig, name: str) -> int:
    """Columns of a linear's weight."""
    return config.embedding_size if name == HEAD else config.parameter_shapes()[f"{name}.weight"][1]


def _layer(name: str) -> int:
    found = LAYER_LINEAR.fullmatch(name)
    assert found is not None, "qkv is a linear of a layer"
    return int(found[1])
