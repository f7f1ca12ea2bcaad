"""load_model: a checkpoint folder (or random numbers) -> a Decoder or an Encoder. All families share one loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.encoder import Encoder
from engine.models.families import family_of
from engine.models.family import Family
from engine.models.layers.operators import operators_for
from engine.models.shard_files import find_shard_files

FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")
LINEARS = ("qkv", "attn_out", "mlp_in", "mlp_out")  # the linear layers inside a decoder layer
DUMMY_POOL = 1_048_573  # a prime: rows of a matrix filled from the pool do not repeat
NAMES_SHOWN = 6
FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # names of transformers 5 in memory


def load_model(
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    progress: Callable[[str], None] = lambda phase: None,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
) -> Decoder | Encoder:
    """A model with its weights in `dtype` on `device`. load_format "dummy" draws random weights from `seed`; the other
    formats read safetensors.

    `progress` gets the phase, such as "loading weights 40%". max_model_len bounds tables that grow with position.
    batch_invariant chooses linear layers and activations (engine/models/layers/operators.py); ConfigError if the device
    cannot keep the promise. ModelError names the tensor and the file if the checkpoint does not fit config.json.
    """
    operators = operators_for(config, dtype, device, batch_invariant)
    if load_format == "dummy":
        weights = dummy_weights(config, dtype, device, seed)
    else:
        weights = load_weights(model_dir, config, dtype, device, progress)
    if not config.causal:
        return Encoder(config, weights, operators)
    return Decoder(config, weights, device, max_model_len, operators)


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Uniform weights of variance 1 / in_features, norms 1, biases 0. A seed gives the same weights on every device.

    One pool of random numbers is repeated over all matrices, because copying is much faster than drawing.
    """
    pool = torch.rand(DUMMY_POOL, generator=torch.Generator().manual_seed(seed)).mul_(2).sub_(1).to(device)
    weights, offset = allocate(config, dtype, device), 0
    for name, weight in weights.items():
        if weight.dim() == 1:
            weight.fill_(1 - config.norm_weight_offset if name.endswith("weight") else 0)
            continue
        _fill(weight.view(-1), pool * sqrt(3 / weight.shape[-1]), offset)
        offset = (offset + weight.numel()) % DUMMY_POOL
    return weights


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Every parameter of the model, uninitialised. ModelError if the device has no room."""
    try:
        return {
            name: torch.empty(shape, dtype=dtype, device=device) for name, shape in config.parameter_shapes().items()
        }
    except (RuntimeError, MemoryError) as error:
        gib = config.weight_bytes(dtype.itemsize) / 2**30
        raise ModelError(f"no room on {device} for {gib:.1f} GiB of weights in {dtype}: {error}") from error


def _fill(flat: Tensor, pool: Tensor, offset: int) -> None:
    start = 0
    while start < len(flat):
        part = pool[offset : offset + len(flat) - start]
        flat[start : start + len(part)] = part
        start, offset = start + len(part), 0


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
        if self.qkv_heads is not None:
            tensor = tensor[grouped_rows(*self.qkv_heads, self.rows)]
        if self.normalized:
            tensor = F.normalize(tensor.float(), dim=-1)
        target.copy_(tensor.T if self.transposed else tensor)


def grouped_rows(num_kv_heads: int, group: int, num_rows: int) -> Tensor:
    """int64 [num_rows]: for each row of q|k|v its row in a matrix that holds, for each KV head, `group` query heads, a
    key and a value."""
    rows = torch.arange(num_rows).view(num_kv_heads, group + 2, -1)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])


def checkpoint_pieces(config: ModelConfig, family: Family) -> dict[str, Piece]:
    """Every tensor that the checkpoint must hold, by its name in the checkpoint."""
    shapes = config.parameter_shapes()
    parts = _part_rows(config)
    pieces: dict[str, Piece] = {}
    for theirs, ours in family.weights.items():
        for layer in range(config.num_layers if "{}" in ours else 1):
            for kind in ("weight", "bias"):
                piece = _piece(ours.format(layer), kind, shapes, parts, family.transposed)
                if piece is not None and family.qkv_grouped and ours.endswith(".qkv"):
                    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
                    piece = replace(piece, qkv_heads=heads)
                if piece is not None and config.normalized_head and ours == "lm_head":
                    piece = replace(piece, normalized=True)
                if piece is not None:
                    pieces |= _pieces_by_name(config, f"{theirs}.{kind}", layer, piece)
    return pieces


def _pieces_by_name(config: ModelConfig, name: str, layer: int, piece: Piece) -> dict[str, Piece]:
    """The piece by name: one tensor, or one per expert with the same rows of the expert's part."""
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
        "experts_in.gate": (0, expert),
        "experts_in.up": (expert, expert),
    }


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None] = lambda phase: None,
) -> dict[str, Tensor]:
    """Copy tensor by tensor into preallocated parameters, so peak memory is the model plus one tensor."""
    return _Loader(model_dir, config, dtype, device, progress).load()


class _Loader:
    """The state of one load: missing and unexpected tensors, and progress."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        self.config = config
        self.family = family_of(config)
        self.files = find_shard_files(model_dir)
        self.missing = checkpoint_pieces(config, self.family)
        self.loaded: dict[str, Path] = {}
        self.unexpected: list[str] = []
        self.head = next((f"{theirs}.weight" for theirs, ours in self.family.weights.items() if ours == "lm_head"), "")
        self.tied_head: tuple[Path, str] | None = None
        self.progress = progress
        self.total, self.done, self.reported = config.num_parameters(), 0, -1
        self.weights = allocate(config, dtype, device)

    def load(self) -> dict[str, Tensor]:
        for path in self.files:
            self._load_file(path)
        self._check_complete()
        self._check_tied_head()
        return self.weights

    def _load_file(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():
                    self._load_tensor(path, file, name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} is damaged or incomplete: {error}") from error

    def _load_tensor(self, path: Path, file: Any, name: str) -> None:
        full_name = self._full_name(name)
        if full_name in self.loaded:
            raise ModelError(f"tensor {name!r} is in {self.loaded[full_name].name} and again in {path.name}.")
        piece = self.missing.pop(full_name, None)
        if piece is None:
            self._note_other(path, name, full_name)
            return
        self.loaded[full_name] = path
        self._check_header(path, file, name, piece)
        tensor = file.get_tensor(name)
        piece.copy(tensor, self.weights[piece.parameter])
        self._report(tensor.numel())

    def _full_name(self, name: str) -> str:
        """The name in the family's weights: renamed, and with the base model's prefix, which some checkpoints lack."""
        for theirs, ours in self.family.renames.items():
            name = name.replace(theirs, ours)
        with_prefix = self.family.prefix + name
        return with_prefix if with_prefix in self.missing or with_prefix in self.loaded else name

    def _note_other(self, path: Path, name: str, full_name: str) -> None:
        if self.config.moe is not None and name.endswith(FUSED_EXPERTS):
            raise ModelError(
                f"{path.name}: {name!r} holds all experts in one tensor, which is not served. Save the checkpoint "
                "again with transformers' save_pretrained and save_original_format=True: one tensor for each expert."
            )
        if full_name == self.head and self.config.tie_embeddings:
            self.tied_head = (path, name)
        elif not name.endswith(self.family.buffers) and not name.startswith(self.family.heads):
            self.unexpected.append(name)

    def _check_header(self, path: Path, file: Any, name: str, piece: Piece) -> None:
        header = file.get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != piece.shape:
            raise ModelError(
                f"{path.name}: tensor {name!r} has shape {list(shape)}; config.json asks for {list(piece.shape)}."
            )
        if dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{path.name}: tensor {name!r} is of type {dtype}; expected one of {', '.join(FLOAT_DTYPES)} "
                "(quantised checkpoints are not served)."
            )

    def _check_complete(self) -> None:
        files = ", ".join(path.name for path in self.files[:NAMES_SHOWN])
        if self.missing:
            raise ModelError(f"the checkpoint ({files}) lacks {_some(sorted(self.missing))}.")
        if self.unexpected:
            raise ModelError(
                f"the checkpoint ({files}) holds {_some(self.unexpected)}, which config.json gives no place to."
            )

    def _check_tied_head(self) -> None:
        """ModelError if the checkpoint has a head that differs from the embedding it is tied to."""
        if self.tied_head is None:
            return
        path, name = self.tied_head
        embedding = self.weights["embedding.weight"]
        with safe_open(path, framework="pt", device="cpu") as file:
            head = file.get_tensor(name)
        if head.shape != embedding.shape or not torch.equal(head.to(embedding.device, embedding.dtype), embedding):
            raise ModelError(
                f"{path.name}: {name!r} differs from the embedding, but config.json says tie_word_embeddings. "
                'If the head is meant, set "tie_word_embeddings": false there.'
            )

    def _report(self, num_elements: int) -> None:
        self.done += num_elements
        tenth = self.done * 10 // self.total
        if tenth != self.reported:
            self.reported = tenth
            self.progress(f"loading weights {tenth * 10}%")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{len(names)} tensors ({shown}, ...)" if len(names) > NAMES_SHOWN else shown
