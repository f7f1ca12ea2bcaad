"""Piece: which rows of which parameter a tensor of the checkpoint holds, and in which layout."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.family import ExpertTensor, Family
from engine.models.parallel.part import RankPart
from engine.models.weight_format import Matrix

ROWS_AT_A_TIME = 4096  # normalised in fp32
LINEARS = ("qkv", "attn_out", "mlp_in", "mlp_out")  # the linear layers inside a decoder layer
EXPERTS = (".experts_in", ".experts_out")  # parameters with an axis of experts
HALVES = ("_in.gate", "_in.up")  # the halves of a matrix [gate | up]
# parameters that no format quantises
NO_MATRICES = ("norm", "position_embedding", "token_type_embedding", "layer_embedding")


@dataclass(frozen=True, slots=True)
class Piece:
    """The target of a tensor of the checkpoint: rows start to start + rows of a parameter, or of one expert's part."""

    parameter: str
    start: int
    rows: int
    shape: tuple[int, ...]  # in the checkpoint
    transposed: bool
    expert: int | None = None
    # (KV heads, query heads of each): the rows are, for each KV head, its query heads, its key and its value
    qkv_heads: tuple[int, int] | None = None
    normalized: bool = False  # every row is divided by its L2 norm
    viewed: tuple[int, ...] | None = None  # the shape to see the tensor in; None: `shape`
    all_experts: bool = False  # the tensor holds all experts: rows are its second axis
    interleaved: bool = False  # rows of two halves in turn

    def copy(self, tensor: Tensor, parameter: Tensor, part: RankPart | None = None) -> None:
        """Copy the checkpoint's tensor, or the `part` of it that a rank holds, into its rows of the parameter."""
        axis, arranged = int(self.all_experts), self.arrange(tensor)
        rows = parameter if self.expert is None else parameter[self.expert]
        start, num_rows = (self.start, self.rows) if part is None else (part.start, part.num_rows)
        target = rows.narrow(axis, start, num_rows)
        target.copy_(arranged if part is None else part.of(arranged, axis))
        if self.normalized:
            for some in torch.split(target, ROWS_AT_A_TIME):
                some.copy_(F.normalize(some.float(), dim=-1))

    def arrange(self, tensor: Tensor) -> Tensor:
        """The checkpoint's tensor -> [rows, ...] in the model's layout; a view where that is possible."""
        tensor = tensor if self.viewed is None else tensor.view(self.viewed)
        tensor = tensor.mT if self.transposed else tensor
        order = self.row_order()
        return tensor if order is None else tensor.index_select(int(self.all_experts), order)

    def stored_as(self, shape: tuple[int, ...]) -> "Piece":
        """The piece of a tensor of all experts that has `shape`. transformers 5 writes [experts, out, in] where the
        published checkpoint has [experts, in, out]; another shape changes nothing."""
        if shape == self.shape or not (self.transposed and self.all_experts and self.viewed == self.shape):
            return self
        turned = (self.shape[0], self.shape[2], self.shape[1])
        return replace(self, shape=turned, viewed=turned, transposed=False) if shape == turned else self

    def row_order(self) -> Tensor | None:
        """int64 [rows]: the checkpoint's row for each of our rows; None if the rows have our order."""
        if self.interleaved:
            return torch.arange(self.rows).view(-1, 2).T.flatten()
        return None if self.qkv_heads is None else grouped_rows(*self.qkv_heads, self.rows)


def grouped_rows(num_kv_heads: int, group: int, num_rows: int) -> Tensor:
    """int64 [num_rows]: for each row of q|k|v its row in a matrix that holds, for each KV head, `group` query heads, a
    key and a value."""
    rows = torch.arange(num_rows).view(num_kv_heads, group + 2, -1)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])


def is_matrix(parameter: str) -> bool:
    """False for parameters of two axes that are no factors of a product."""
    return not any(part in parameter for part in NO_MATRICES)


def matrix_of(name: str, piece: Piece) -> Matrix | None:
    """The matrix that a piece called `name` in the checkpoint holds; None for biases, norms and positions, and for a
    head that is normalised as it is read."""
    plain = piece.normalized or len(piece.shape) < 2 or not is_matrix(piece.parameter)
    if plain or not piece.parameter.endswith(".weight"):
        return None
    shape = piece.viewed or piece.shape
    shape = (*shape[:-2], shape[-1], shape[-2]) if piece.transposed else shape
    return Matrix(name.removesuffix(".weight"), piece.parameter, shape)


def checkpoint_pieces(config: ModelConfig, family: Family, found: Collection[str] = ()) -> dict[str, Piece]:
    """Every tensor that a plain checkpoint must hold, by its name in the checkpoint. Names in `found` choose between
    one tensor for each expert and one for all."""
    pieces = _module_pieces(config, family)
    split = {piece.parameter for piece in pieces.values()}
    stacked = {n: p for n, p in expert_pieces(config, family).items() if n in found or p.parameter not in split}
    replaced = {piece.parameter for piece in stacked.values()}
    return {name: piece for name, piece in pieces.items() if piece.parameter not in replaced} | stacked


def unused_tensors(config: ModelConfig, family: Family) -> set[str]:
    """Names of the keys' and values' tensors that checkpoints may hold for layers that read those of another layer."""
    shared = [layer for layer in range(config.num_layers) if config.kv_source(layer) != layer]
    parts = (".qkv.k.", ".qkv.v.", ".k_norm.")
    names = [theirs for theirs, ours in _tensors(family) if any(part in ours for part in parts)] if shared else []
    return {name.format(layer) for name in names for layer in shared}


def _module_pieces(config: ModelConfig, family: Family) -> dict[str, Piece]:
    shapes = config.parameter_shapes()
    parts = [_part_rows(config, layer) for layer in range(config.num_layers)]
    pieces: dict[str, Piece] = {}
    for theirs, ours in _tensors(family):
        for layer in range(config.num_layers if "{}" in ours else 1):
            piece = _piece(ours.format(layer), shapes, parts[layer], family.transposed)
            if piece is None:
                continue
            if family.qkv_grouped and ours.endswith((".qkv.weight", ".qkv.bias")):
                heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
                piece = replace(piece, qkv_heads=heads)
            if config.normalized_head and ours == "lm_head.weight":
                piece = replace(piece, normalized=True)
            pieces |= _pieces_by_name(config, theirs, layer, piece)
    return pieces


def _tensors(family: Family) -> Iterator[tuple[str, str]]:
    """Full names of tensors, theirs and ours."""
    for theirs, ours in family.weights.items():
        if ours.endswith((".weight", ".bias")):
            yield theirs, ours
        else:
            yield f"{theirs}.weight", f"{ours}.weight"
            yield f"{theirs}.bias", f"{ours}.bias"


def expert_pieces(config: ModelConfig, family: Family) -> dict[str, Piece]:
    """The tensors that hold all experts of a layer, by their names in the checkpoint."""
    shapes, parts = config.parameter_shapes(), _part_rows(config, 0)
    pieces: dict[str, Piece] = {}
    for theirs, stored in family.expert_tensors.items():
        for layer in range(config.num_layers):
            piece = _piece(stored.parameter.format(layer), shapes, parts, False)
            if piece is not None:
                pieces[theirs.format(layer)] = _stacked(piece, shapes[piece.parameter], stored)
    return pieces


def _stacked(piece: Piece, parameter: tuple[int, ...], stored: ExpertTensor) -> Piece:
    """The piece of one expert, or of a vector with a number per expert, as a piece of all experts."""
    if len(parameter) == 1:
        return replace(piece, shape=(1, *parameter) if stored.single else parameter, viewed=parameter)
    shape = piece.shape[::-1] if stored.transposed else piece.shape
    viewed = (parameter[0], *shape)
    return replace(
        piece,
        shape=(viewed[0] * viewed[1], *viewed[2:]) if stored.flat else viewed,
        transposed=stored.transposed,
        viewed=viewed,
        all_experts=True,
        interleaved=stored.interleaved,
    )


def _pieces_by_name(config: ModelConfig, name: str, layer: int, piece: Piece) -> dict[str, Piece]:
    """The piece by name: one tensor, one per head, or one per expert with the same rows of the expert's part."""
    if "{head}" in name:
        one = replace(piece, rows=1, shape=piece.shape[1:])
        return {name.format(layer, head=i): replace(one, start=i) for i in range(piece.rows)}
    if config.moe is None or "{expert}" not in name:
        return {name.format(layer): piece}
    return {name.format(layer, expert=i): replace(piece, expert=i) for i in range(config.moe.num_experts)}


def _piece(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    parts: dict[str, tuple[int, int]],
    transposed_linears: bool,
) -> Piece | None:
    """The piece for one tensor of our `name` ("layers.0.qkv.q.weight"); None if config has no such parameter."""
    module, _, kind = name.rpartition(".")
    part = ".".join(module.split(".")[-2:])
    half = module.rpartition(".")[2] if module.endswith(HALVES) else ""
    module = module.rpartition(".")[0] if half or part in parts else module
    shape = shapes.get(f"{module}.{kind}")
    if shape is None:
        return None
    # without the axis of experts
    shape = shape[1:] if module.endswith(EXPERTS) else shape
    start, rows = (0, shape[0]) if not half else (shape[0] // 2 * (half == "up"), shape[0] // 2)
    start, rows = parts.get(part, (start, rows))
    if not rows:
        return None
    transposed = transposed_linears and len(shape) == 2 and module.rpartition(".")[2] in LINEARS
    stored = (rows, *shape[1:])
    return Piece(f"{module}.{kind}", start, rows, stored[::-1] if transposed else stored, transposed)


def _part_rows(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """First row and number of rows of the parts of a layer's fused parameters; HALVES are not among them."""
    q, k, v = config.qkv_rows(layer)
    return {
        "qkv.q": (0, q),
        "qkv.k": (q, k),
        "qkv.v": (q + k, v),
        "xielu.alpha_p": (0, 1),
        "xielu.alpha_n": (1, 1),
    }
