"""read_adapter: a PEFT checkpoint -> the factors of each linear layer, in our layout.

PEFT names a pair of matrices after a module of the base model, so the table of the base model's weights
(engine/models/loading/pieces.py) tells which rows of which fused matrix it changes. A module that covers several parts
of a linear (a fused qkv_proj) gives each part the whole A and its rows of B. B is multiplied by alpha / r.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.adapters.config import CONFIG_FILE, PeftConfig, read_peft_config
from engine.models.config import ModelConfig
from engine.models.families import family_of
from engine.models.layers.adapted import HEAD, LAYER_LINEAR, in_features, out_features, parts_of
from engine.models.loading.pieces import Piece, checkpoint_pieces
from engine.models.loading.tensor_file import TensorFile
from engine.models.loading.weight_files import open_weight_file
from engine.models.parallel.shard import split_of
from kernels.lora.weights import Factor

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
FLOATS = ("F16", "BF16", "F32")
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """The factors by linear layer ("layers.0.qkv"), one for each of its parts. `digest` is that of the files."""

    factors: Mapping[str, Sequence[Factor]]
    digest: bytes


def read_adapter(
    folder: Path, model: ModelConfig, parts: Mapping[str, Sequence[int]], max_rank: int, dtype: torch.dtype
) -> Adapter:
    """Read an adapter of `model`. `parts`: the rows of the parts of each linear that may have one. The factors are in
    `dtype`, in host memory; where `model` is that of a rank, they are the rank's share of them. ModelError names the
    field or the tensor that does not fit or is not served."""
    rank_model = model
    if model.shard is not None:
        model = model.shard.whole
        parts = {linear: parts_of(model, linear) for linear in parts}
    config = read_peft_config(folder, max_rank)
    path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if path is None:
        raise ModelError(f"{folder} holds no {' or '.join(WEIGHT_FILES)}: it is no adapter of PEFT.")
    digest = _digest(folder / CONFIG_FILE, path)
    factors: dict[str, list[Factor]] = {}
    with open_weight_file(path) as file:
        for module, names in _modules(file).items():
            piece = _piece_of(module, model)
            linear = piece.parameter.removesuffix(".weight")
            if linear not in parts:
                raise ModelError(f"{path.name}: {module} is not served as the target of an adapter.")
            pair = _read_pair(file, module, names, model, piece, config, dtype)
            _place(factors.setdefault(linear, [None] * len(parts[linear])), parts[linear], piece, pair, module)
    if not factors:
        raise ModelError(f"{path.name} holds no lora_A and lora_B.")
    if rank_model.shard is not None:
        factors = {linear: _own_share(rank_model, linear, parts[linear], pairs) for linear, pairs in factors.items()}
    return Adapter(factors, digest)


def _own_share(model: ModelConfig, linear: str, parts: Sequence[int], factors: Sequence[Factor]) -> list[Factor]:
    """A rank's share of the factors of a linear, whose parts have so many rows on all ranks together.

    A matrix that is split by rows needs the rank's rows of B; one that is split by columns its columns of A. The
    latter's additions are parts of a sum like the products beside them, and the layer's one sum over the ranks adds
    both up.
    """
    split = split_of(model, f"{linear}.weight")
    if split.columns is not None:
        columns = slice(split.columns.start, split.columns.stop)
        return [pair and (pair[0][:, columns].contiguous(), pair[1]) for pair in factors]
    assert split.rows is not None, "every linear with adapters is split"
    own: list[Factor] = []
    first = 0
    for num_rows, rows, pair in zip(parts, split.rows, factors, strict=True):
        own.append(pair and (pair[0], pair[1][rows.start - first : rows.stop - first].contiguous()))
        first += num_rows
    return own


def _digest(*paths: Path) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            while block := file.read(READ_BYTES):
                digest.update(block)
    return digest.digest()


def _modules(file: TensorFile) -> dict[str, dict[str, str]]:
    """The names of the tensors A and B of each module."""
    found: dict[str, dict[str, str]] = {}
    for name in file.names():
        match = FACTOR.fullmatch(name)
        if match is None:
            raise ModelError(
                f"the adapter holds the tensor {name[:200]!r}: only lora_A and lora_B of matrices are served."
            )
        found.setdefault(match[1], {})[match[2]] = name
    for module, names in found.items():
        if len(names) < 2:
            raise ModelError(f"the adapter lacks lora_{'B' if 'A' in names else 'A'} of {module[:200]!r}.")
    return found


def _piece_of(module: str, model: ModelConfig) -> Piece:
    """The rows that a module of the base model fills. ModelError if the model has no such matrix."""
    family = family_of(model)
    for theirs, ours in family.renames.items():
        module = module.replace(theirs, ours)
    if family.weights.get(module) == HEAD or module == HEAD:
        return Piece(f"{HEAD}.weight", 0, out_features(model, HEAD), (), False)
    pieces = checkpoint_pieces(model, family)
    piece = pieces.get(f"{module}.weight") or pieces.get(f"{family.prefix}{module}.weight")
    if piece is None:
        raise ModelError(f"the adapter changes {module[:200]!r}, which this model does not have.")
    if not LAYER_LINEAR.fullmatch(piece.parameter.removesuffix(".weight")):
        raise ModelError(
            f"the adapter changes {module[:200]!r}: served are the matrices of attention and of a dense MLP, and "
            "lm_head."
        )
    return piece


def _read_pair(
    file: TensorFile,
    module: str,
    names: Mapping[str, str],
    model: ModelConfig,
    piece: Piece,
    config: PeftConfig,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [rows, rank] of a module, B scaled and its rows in our order."""
    rank, columns = config.rank_of(module), in_features(model, piece.parameter.removesuffix(".weight"))
    for name, shape in ((names["A"], (rank, columns)), (names["B"], (piece.rows, rank))):
        header = file.header(name)
        if header.shape != shape or header.dtype not in FLOATS:
            raise ModelError(
                f"the adapter's {name[:200]!r} is {list(header.shape)} in {header.dtype}; expected is {list(shape)} in "
                f"{', '.join(FLOATS)}."
            )
    b = file.tensor(names["B"]).float() * config.scale_of(module)
    order = piece.row_order()
    b = b if order is None else b.index_select(0, order)
    return file.tensor(names["A"]).to(dtype, copy=True).contiguous(), b.to(dtype).contiguous()


def _place(factors: list[Factor], parts: Sequence[int], piece: Piece, pair: tuple[Tensor, Tensor], module: str) -> None:
    """Give each part of a linear that the piece covers its factors."""
    a, b = pair
    first = 0
    for i, rows in enumerate(parts):
        start, end = max(first, piece.start), min(first + rows, piece.start + piece.rows)
        if start < end:
            if end - start != rows or factors[i] is not None:
                raise ModelError(
                    f"the adapter changes {module[:200]!r}, whose rows are not those of q, k, v, gate or up."
                )
            factors[i] = a, b[start - piece.start : end - piece.start].contiguous()
        first += rows
