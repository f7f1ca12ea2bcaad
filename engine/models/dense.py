"""Linear layers behind the pooling of an embedding model: the Dense modules of sentence-transformers, in fp32 on the
host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.json_files import read_json_object
from engine.checkpoint.links import path_inside
from engine.errors import ModelError
from engine.models.reader import ConfigReader

# By the last part of the class that a module names.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}
DEFAULT = "torch.nn.modules.activation.Tanh"


@dataclass(frozen=True, slots=True)
class Dense:
    """x -> activation(x @ weight.T + bias); weight fp32 [out, in], bias fp32 [out]."""

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, vectors: Tensor) -> Tensor:
        """fp32 [sequences, in] -> [sequences, out]"""
        return self.activation(F.linear(vectors, self.weight, self.bias))


def load_dense(model_dir: Path, folders: Sequence[str], hidden_size: int) -> tuple[Dense, ...]:
    """The layers in some folders of a checkpoint, in order; the first takes vectors of `hidden_size` numbers. Raises
    ModelError."""
    layers: list[Dense] = []
    for folder in folders:
        layers.append(_load(model_dir, folder, len(layers[-1].weight) if layers else hidden_size))
    return tuple(layers)


def _load(model_dir: Path, folder: str, size: int) -> Dense:
    where = f"{folder}/config.json"
    reader = ConfigReader(read_json_object(path_inside(model_dir, where)), where)
    name = str(reader.raw.get("activation_function") or DEFAULT)
    activation = ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"{where}: activation_function {name[:200]!r} is not served; known are {known}.")
    shape = reader.size("out_features"), reader.size("in_features")
    if shape[1] != size:
        raise ModelError(f"{where}: in_features is {shape[1]}, but the module before it gives {size} numbers.")
    tensors = _read_tensors(model_dir, folder)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or tuple(weight.shape) != shape or (bias is not None and tuple(bias.shape) != shape[:1]):
        shapes = f"linear.weight must be {list(shape)} and linear.bias, if there is one, {[shape[0]]}"
        raise ModelError(f"{folder}: {shapes}.")
    return Dense(weight.float(), None if bias is None else bias.float(), activation)


def _read_tensors(model_dir: Path, folder: str) -> dict[str, Tensor]:
    name = f"{folder}/model.safetensors"
    path = path_inside(model_dir, name)
    if path.is_file():
        try:
            return safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{name} is damaged: {error}") from None
    pickle = path_inside(model_dir, f"{folder}/pytorch_model.bin")
    if not pickle.is_file():
        raise ModelError(f"{model_dir} lacks {name}: the download or copy is incomplete.")
    try:
        tensors = torch.load(pickle, map_location="cpu", weights_only=True)
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    except Exception as error:  # torch raises many kinds for a damaged or a hostile file
        raise ModelError(f"{folder}/pytorch_model.bin cannot be read: {error!r:.300}") from None
