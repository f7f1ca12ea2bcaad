"""load_weights: copies every tensor of a checkpoint to its place in the model. All families and formats share it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import family_of
from engine.models.loading.allocation import allocate
from engine.models.loading.join import Place, join_pieces, reorder_rows
from engine.models.loading.pieces import Piece, checkpoint_pieces, expert_pieces, matrix_of, unused_tensors
from engine.models.loading.progress import LoadingProgress
from engine.models.loading.tensor_file import ELEMENT_BYTES, Header
from engine.models.loading.weight_files import find_weight_files, open_weight_file
from engine.models.parallel.part import RankPart, part_of
from engine.models.parallel.shard import summed_biases
from engine.models.weight_format import FLOAT_DTYPES, Matrix, Stored
from kernels.quantized.weight import Part, Weight

logger = logging.getLogger(__name__)

NAMES_SHOWN = 6
# not used: the cache has scales of its own
KV_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None] = lambda phase: None,
) -> dict[str, Weight]:
    """Every parameter of the model. All headers are checked before the first tensor is read.

    Peak host memory is the model plus one file, of which the system can drop all but one tensor.
    """
    return _Loader(model_dir, config, dtype, device, progress).load()


def check_headers(model_dir: Path, config: ModelConfig) -> None:
    """ModelError if a tensor of the checkpoint is missing, misshaped or of no use. No tensor is read."""
    _Loader(model_dir, config, torch.float32, torch.device("cpu"), lambda phase: None).check()


class _Found(NamedTuple):
    """A tensor of the checkpoint."""

    path: Path
    name: str  # in the file, perhaps without the base model's prefix
    header: Header


@dataclass(slots=True)
class _Module:
    """A matrix that the checkpoint holds in quantised form, and those of its tensors that are read so far."""

    matrix: Matrix
    piece: Piece
    missing: set[str]  # endings
    tensors: dict[str, Tensor] = field(default_factory=dict)


class _Loader:
    """The state of one load."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        self.shard, self.dtype, self.device, self.progress = config, dtype, device, progress
        self.config = config if config.shard is None else config.shard.whole  # describes the checkpoint
        self.family = family_of(self.config)
        self.files = find_weight_files(model_dir)
        if any(path.suffix == ".bin" for path in self.files):
            logger.warning(
                "%s is a pickle: its tensors are read, code in it is refused. safetensors is the safer form.",
                self.files[0].name,
            )
        self.plain = checkpoint_pieces(self.config, self.family)  # by full name; loses the pieces that are quantised
        self.unused = unused_tensors(self.config, self.family)
        self.quantized: dict[str, tuple[_Module, str]] = {}  # full name of a tensor -> its module and ending
        self.parted: dict[str, dict[Place, Part]] = {}  # parameters with quantised pieces, and the pieces made so far
        self.found: dict[str, _Found] = {}
        self.wanted: dict[str, int] = {}  # parameter -> number of its pieces
        self.weights: dict[str, Weight] = {}

    def check(self) -> None:
        """Read all headers; ModelError if they do not fit the config."""
        self._read_headers()
        self._find_quantized()
        self._check_names()
        self._check_tied_head()
        self._check_constants()

    def load(self) -> dict[str, Weight]:
        self.check()
        shapes = self.shard.parameter_shapes()
        plain = {name: shape for name, shape in shapes.items() if name not in self.parted}
        tensors = allocate(plain, self.dtype, self.device, self.config.float32_parameters())
        self.weights = dict(tensors)
        total = sum(_num_bytes(self.found[name].header) for name in (*self.plain, *self.quantized))
        progress = LoadingProgress(total, self.progress)
        try:
            for path in self.files:
                self._load_file(path, tensors, progress)
        finally:
            progress.close()
        if self.shard.shard is not None and self.shard.shard.rank:
            for name in summed_biases(self.shard):
                tensors[name].zero_()
        return {name: self.weights[name] for name in shapes}

    def _read_headers(self) -> None:
        stored = self._names_of_format()
        expected = self.plain.keys() | stored | expert_pieces(self.config, self.family).keys()
        for path in self.files:
            with open_weight_file(path) as file:
                for name in file.names():
                    full_name = self._full_name(name, expected)
                    if full_name in self.found:
                        other = self.found[full_name].path.name
                        raise ModelError(f"tensor {name!r} is in {other} and again in {path.name}.")
                    self.found[full_name] = _Found(path, name, file.header(name))
        self.plain = checkpoint_pieces(self.config, self.family, self.found.keys())
        for name in self.plain.keys() & self.found.keys():
            self.plain[name] = self.plain[name].stored_as(self.found[name].header.shape)

    def _full_name(self, name: str, expected: Set[str]) -> str:
        """The name in the family's weights: renamed, and with the base model's prefix, which some checkpoints lack."""
        for theirs, ours in self.family.renames.items():
            name = name.replace(theirs, ours)
        with_prefix = self.family.prefix + name
        return with_prefix if with_prefix in expected else name

    def _names_of_format(self) -> set[str]:
        """Full names of all tensors that would hold the quantised matrices."""
        return {matrix.module + ending for _, matrix, stored in self._matrices() for ending in stored}

    def _matrices(self) -> Iterator[tuple[str, Matrix, Mapping[str, Stored]]]:
        """Full name, matrix and tensors of each piece that config.json says is quantised."""
        quantization = self.config.quantization
        for name, piece in self.plain.items() if quantization is not None else ():
            matrix = matrix_of(name, piece)
            stored = quantization.tensors(matrix) if quantization is not None and matrix is not None else None
            if matrix is not None and stored is not None:
                yield name, matrix, stored

    def _find_quantized(self) -> None:
        for name, matrix, stored in list(self._matrices()):
            assert self.config.quantization is not None
            if self.config.quantization.reads_plain:
                stored = {name.removeprefix(matrix.module): Stored(self.plain[name].shape, FLOAT_DTYPES)}
            elif name in self.found and not self._holds(matrix, stored):
                continue  # the checkpoint holds this matrix plain, whatever config.json says
            module = _Module(matrix, self.plain.pop(name), set())
            self.parted.setdefault(matrix.parameter, {})
            for ending, tensor in stored.items():
                full_name = matrix.module + ending
                if tensor.optional and full_name not in self.found:
                    continue
                module.missing.add(ending)
                self.quantized[full_name] = (module, ending)
                if full_name in self.found:
                    self._check_header(full_name, tensor.shape, tensor.dtypes)
        for piece in (*self.plain.values(), *{id(m): m.piece for m, _ in self.quantized.values()}.values()):
            self.wanted[piece.parameter] = self.wanted.get(piece.parameter, 0) + 1

    def _holds(self, matrix: Matrix, stored: Mapping[str, Stored]) -> bool:
        """Whether the checkpoint has a tensor of the format for this matrix; its plain name counts by its type."""
        for ending, tensor in stored.items():
            found = self.found.get(matrix.module + ending)
            if found is not None and (ending not in ("", ".weight") or found.header.dtype in tensor.dtypes):
                return True
            if found is not None and found.header.dtype not in FLOAT_DTYPES:
                return True
        return False

    def _check_names(self) -> None:
        """ModelError for missing, misshaped and unexpected tensors."""
        for name in self.found:
            if name in self.plain:
                self._check_header(name, self.plain[name].shape, FLOAT_DTYPES)
        files = ", ".join(path.name for path in self.files[:NAMES_SHOWN])
        missing = sorted((self.plain.keys() | self.quantized.keys()) - self.found.keys())
        if missing:
            raise ModelError(f"the checkpoint ({files}) lacks {_some(missing)}. {self._wanted(missing[0])}")
        self._log_skipped()
        unexpected = [found.name for name, found in self.found.items() if not self._has_place(name)]
        if unexpected:
            raise ModelError(
                f"the checkpoint ({files}) holds {_some(unexpected)}, which config.json gives no place to."
            )

    def _wanted(self, name: str) -> str:
        """The sentence that tells the shape of a tensor that is missing."""
        shape: tuple[int, ...] | None
        if name in self.plain:
            shape = self.plain[name].shape
        else:
            module, ending = self.quantized[name]
            stored = self.config.quantization.tensors(module.matrix) if self.config.quantization else None
            shape = stored[ending].shape if stored and ending in stored else module.piece.shape
        return f"config.json asks for {name} in {'any shape' if shape is None else f'shape {list(shape)}'}."

    def _check_header(self, full_name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...]) -> None:
        path, name, header = self.found[full_name]
        if shape is not None and header.shape != shape:
            raise ModelError(
                f"{path.name}: tensor {name!r} has shape {list(header.shape)}; config.json asks for {list(shape)}."
            )
        if header.dtype not in dtypes:
            plain = self.config.quantization is None
            hint = " (config.json has no quantization_config, so the checkpoint must be plain)" if plain else ""
            raise ModelError(
                f"{path.name}: tensor {name!r} is of type {header.dtype}; expected one of {', '.join(dtypes)}{hint}."
            )

    def _has_place(self, name: str) -> bool:
        if name in self.plain or name in self.quantized:
            return True
        if name in self.unused or (self.config.tie_embeddings and name == self._tensor("lm_head")):
            return True
        if name.endswith(KV_CACHE_SCALES) or (self.config.quantization is not None and self._is_zero_bias(name)):
            return True
        stored = self.found[name].name
        return stored.endswith((*self.family.buffers, *self.family.constants)) or stored.startswith(self.family.heads)

    def _log_skipped(self) -> None:
        names = [found.name for found in self.found.values() if found.name.startswith(self.family.heads)]
        if names:
            heads = ", ".join(head for head in self.family.heads if any(name.startswith(head) for name in names))
            logger.info("skipped %d tensors that text does not need: %s", len(names), heads)

    def _is_zero_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros: AutoGPTQ writes one for every matrix of models without biases."""
        path, stored, header = self.found[name]
        if not name.endswith(".bias") or header.dtype not in FLOAT_DTYPES or len(header.shape) != 1:
            return False
        with open_weight_file(path) as file:
            return not file.tensor(stored).any()

    def _tensor(self, module: str) -> str:
        """The checkpoint's name of the weight of one of our modules; "" if the family has none."""
        return next((f"{theirs}.weight" for theirs, ours in self.family.weights.items() if ours == module), "")

    def _check_tied_head(self) -> None:
        """ModelError if the checkpoint has a head that differs from the embedding it is tied to."""
        head, embedding = self.found.get(self._tensor("lm_head")), self.found.get(self._tensor("embedding"))
        if not self.config.tie_embeddings or self.config.embeds_only or head is None or embedding is None:
            return
        if head.header.shape == embedding.header.shape:
            with open_weight_file(head.path) as a, open_weight_file(embedding.path) as b:
                if torch.equal(a.tensor(head.name).to(self.dtype), b.tensor(embedding.name).to(self.dtype)):
                    return
        raise ModelError(
            f"{head.path.name}: {head.name!r} differs from the embedding, but config.json says tie_word_embeddings. "
            'If the head is meant, set "tie_word_embeddings": false there.'
        )

    def _check_constants(self) -> None:
        """ModelError if a constant of the family has another value in the checkpoint."""
        for path, name, _ in self.found.values():
            for ending, expected in self.family.constants.items():
                if not name.endswith(ending):
                    continue
                with open_weight_file(path) as file:
                    value = file.tensor(name).float()
                if value.numel() != 1 or abs(value.item() - expected) > 2e-3 * abs(expected):
                    raise ModelError(f"{path.name}: {name!r} is {value.tolist()}; only {expected} is served.")

    def _load_file(self, path: Path, weights: Mapping[str, Tensor], progress: LoadingProgress) -> None:
        full_names = {found.name: full_name for full_name, found in self.found.items() if found.path == path}
        with open_weight_file(path) as file:
            for name in file.names():
                full_name = full_names[name]
                piece = self.plain.get(full_name)
                if piece is not None:
                    self._load_plain(piece, file.tensor(name), weights)
                elif full_name in self.quantized:
                    self._load_quantized(*self.quantized[full_name], file.tensor(name))
                else:
                    continue
                progress.add(_num_bytes(self.found[full_name].header))

    def _load_plain(self, piece: Piece, tensor: Tensor, weights: Mapping[str, Tensor]) -> None:
        part = None
        if self.shard.shard is not None and (part := self._part(piece)) is None:
            return  # another rank has it
        if piece.parameter in weights:
            piece.copy(tensor, weights[piece.parameter], part)
        else:
            arranged = piece.arrange(tensor)
            arranged = arranged if part is None else part.of(arranged, int(piece.all_experts))
            self._add_part(piece, arranged.to(self.device, self.dtype, copy=True))

    def _part(self, piece: Piece) -> RankPart | None:
        return part_of(self.shard, piece.parameter, piece.start, piece.rows)

    def _load_quantized(self, module: _Module, ending: str, tensor: Tensor) -> None:
        module.tensors[ending] = tensor
        if len(module.tensors) < len(module.missing):
            return
        quantization, piece = self.config.quantization, module.piece
        assert quantization is not None
        if quantization.reads_plain:
            (plain,) = module.tensors.values()
            weight = quantization.quantized(module.matrix, {".weight": piece.arrange(plain)})
        else:
            weight = quantization.quantized(module.matrix, module.tensors)
            order = piece.row_order()
            weight = weight if order is None else reorder_rows(weight, order)
        module.tensors.clear()
        if self.shard.shard is not None:
            part = self._part(piece)
            assert part is not None, "every rank has rows of every matrix"
            weight = part.of_quantized(weight, module.matrix.module, self.shard.shard.size)
        self._add_part(piece, weight.to(self.device))

    def _add_part(self, piece: Piece, part: Part) -> None:
        parts = self.parted[piece.parameter]
        parts[piece.expert, piece.start] = part
        if len(parts) == self.wanted[piece.parameter]:
            self.weights[piece.parameter] = join_pieces(piece.parameter, parts)
            del self.parted[piece.parameter]


def _num_bytes(header: Header) -> int:
    return prod(header.shape) * ELEMENT_BYTES.get(header.dtype, 1)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{len(names)} tensors ({shown}, ...)" if len(names) > NAMES_SHOWN else shown
