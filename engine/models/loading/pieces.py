"""Piece: which rows of which parameter a tensor of the checkpoint holds, and in which layout."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.weight_format import Matrix

ROWS_AT_A_TIME = 4096  # normalised in fp32
LINEARS = ("qkv", "attn_out", "mlp_in", "mlp_out")  # the linear layers inside a decoder layer
NO_MATRICES = ("norm", "position_embedding", "token_type_embedding")  # parameters that no format quantises


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

    def copy(self, tensor: Tensor, parameter: Tensor) -> None:
        """Copy the checkpoint's tensor into its rows of the parameter."""
        rows = parameter if self.expert is None else parameter[self.expert]
        target = rows[self.start : self.start + self.rows]
        target.copy_(self.arrange(tensor))
        if self.normalized:
            for part in torch.split(target, ROWS_AT_A_TIME):
                part.copy_(F.normalize(part.float(), dim=-1))

    def arrange(self, tensor: Tensor) -> Tensor:
        """The checkpoint's tensor -> [rows, ...] in the model's layout; a view where that is possible."""
        tensor = tensor.T if self.transposed else tensor
        order = self.row_order()
        return tensor if order is None else tensor.index_select(0, order)

    def row_order(self) -> Tensor | None:
        """int64 [rows]: the checkpoint's row for each of our rows; None if the rows have our order."""
        return None if self.qkv_heads is None else grouped_rows(*self.qkv_heads, self.rows)


def grouped_rows(num_kv_heads: int, group: int, num_rows: int) -> Tensor:
    """int64 [num_rows]: for each row of q|k|v its row in a matrix that holds, for each KV head, `group` query heads, a
    key and a value."""
    rows = torch.arange(num_rows).view(num_kv_heads, group + 2, -1)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])


def matrix_of(name: str, piece: Piece) -> Matrix | None:
    """The matrix that a piece called `name` in the checkpoint holds; None for biases, norms and positions, and for a
    head that is normalised as it is read."""
    module, _, kind = name.rpartition(".")
    if (
        piece.normalized
        or kind != "weight"
        or len(piece.shape) < 2
        or any(part in piece.parameter for part in NO_MATRICES)
    ):
        return None
    shape = piece.shape[::-1] if piece.transposed else piece.shape
    return Matrix(module, piece.parameter, shape)


def checkpoint_pieces(config: ModelConfig, family: Family) -> dict[str, Piece]:
    """Every tensor that a plain checkpoint must hold, by its name in the checkpoint."""
    shapes = config.parameter_shapes()
    parts = _part_rows(config)
    pieces: dict[str, Piece] = {}
    for theirs, ours in family.weights.items():
        for layer in range(config.num_layers if "{}" in ours else 1):
            bare = ours.endswith(".weight")
            for kind in ("weight",) if bare else ("weight", "bias"):
                module = ours.format(layer).removesuffix(".weight")
                piece = _piece(module, kind, shapes, parts, family.transposed)
                if piece is not None and family.qkv_grouped and ours.endswith(".qkv"):
                    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
                    piece = replace(piece, qkv_heads=heads)
                if piece is not None and config.normalized_head and ours == "lm_head":
                    piece = replace(piece, normalized=True)
                if piece is not None:
                    pieces |= _pieces_by_name(config, theirs if bare else f"{theirs}.{kind}", layer, piece)
    return pieces


def _pieces_by_name(config: ModelConfig, name: str, layer: int, piece: Piece) -> dict[str, Piece]:
    """The piece by name: one tensor, one per head, or one per expert with the same rows of the expert's part."""
    if "{head}" in name:
        one = replace(piece, rows=1, shape=piece.shape[1:])
        return {name.format(layer, head=i): replace(one, start=i) for i in range(piece.rows)}
    if config.moe is None or "{expert}" not in name:
        return {name.format(layer): piece}
    return {name.format(layer, expert=i): replace(piece, expert=i) for i in range(config.moe.num_experts)}


def _piece(
    module: str,
    kind: str,
    shapes: dict[str, tuple[int, ...]],
    parts: dict[str, tuple[int, int]],
    transposed_linears: bool,
) -> Piece | None:
    """The piece for one tensor of `module` ("layers.0.qkv.q"); None if config has no such parameter."""
    part = ".".join(module.split(".")[-2:])
    name = module.rpartition(".")[0] if part in parts else module
    shape = shapes.get(f"{name}.{kind}")
    if shape is None:
        return None
    shape = shape[1:] if len(shape) == 3 else shape  # without the axis of experts
    start, rows = parts.get(part, (0, shape[0]))
    transposed = transposed_linears and len(shape) == 2 and name.rpartition(".")[2] in LINEARS
    stored = (rows, *shape[1:])
    return Piece(f"{name}.{kind}", start, rows, stored[::-1] if transposed else stored, transposed)


def _part_rows(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """First row and number of rows of the parts of fused matrices."""
    q, kv, inner = config.q_size, config.kv_size, config.intermediate_size
    expert = 0 if config.moe is None else config.moe.intermediate_size
    return {
        "qkv.q": (0, q),
        "qkv.k": (q, kv),
        "qkv.v": (q + kv, kv),
        "mlp_in.gate": (0, inner),
        "mlp_in.up": (inner, inner),
        "xielu.alpha_p": (0, 1),
        "xielu.alpha_n": (1, 1),
        "experts_in.gate": (0, expert),
        "experts_in.up": (expert, expert),
    }
