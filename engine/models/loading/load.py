"""load_model: a checkpoint folder (or random numbers) -> a Decoder or an Encoder."""

from collections.abc import Callable
from math import prod
from pathlib import Path

import torch

from engine.checkpoint.pooling import dense_folders
from engine.checkpoint.weight_files import has_all_weights
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.dense import load_dense
from engine.models.encoder import Encoder
from engine.models.families import family_of
from engine.models.layers.adapted import AdapterLayers, adaptable, in_features, parts_of
from engine.models.layers.operators import operators_for
from engine.models.loading.dummy import dummy_weights
from engine.models.loading.loader import check_headers, load_weights
from engine.models.loading.pieces import checkpoint_pieces, matrix_of
from engine.models.parallel.ranks import Ranks
from engine.models.weight_format import PackedFormat
from kernels.lora.weights import lora_bytes


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
    ranks: Ranks | None = None,
    lora: tuple[int, int] | None = None,
    compresses: bool = False,
    pooling: str | None = None,
) -> Decoder | Encoder:
    """A model with its weights in `dtype` on `device`, or quantised as config.quantization says. load_format "dummy"
    draws random weights from `seed`; the other formats read the checkpoint.

    `progress` gets the phase, such as "loading weights 40%". max_model_len bounds tables that grow with position.
    batch_invariant chooses linear layers and activations (engine/models/layers/operators.py); ConfigError if the device
    cannot keep the promise. `ranks` computes the model with other processes; config is then the rank's part of it
    (engine/models/parallel/shard.py). `lora`: (slots, largest rank) for adapters beside the linear layers. compresses:
    keep linear layers in 12 bits, too (kernels/linear/packed.py). `pooling`, of embeddings: as in EngineConfig; with
    "auto", linear layers behind it are loaded, too.
    ModelError names the tensor and the file if the checkpoint does not fit config.json.
    """
    adapters = None if lora is None else AdapterLayers(config, *lora, dtype, device)
    operators = operators_for(config, dtype, device, batch_invariant, ranks, adapters, compresses)
    if load_format == "dummy":
        weights = dummy_weights(config, dtype, device, seed)
    else:
        weights = load_weights(model_dir, config, dtype, device, progress)
    model: Decoder | Encoder
    if config.causal:
        model = decoder = Decoder(config, weights, device, max_model_len, operators)
    else:
        model = Encoder(config, weights, device, max_model_len, operators)
        decoder = model.decoder
    if pooling is not None and load_format != "dummy":
        decoder.dense = load_dense(model_dir, dense_folders(model_dir, pooling), config.hidden_size)
    return model


def check_checkpoint(model_dir: Path, config: ModelConfig) -> None:
    """ModelError if a tensor of the checkpoint does not fit; reads headers only. Does nothing if a weight file is not
    there: a plan needs config.json alone."""
    if has_all_weights(model_dir):
        check_headers(model_dir, config)


def weight_bytes(config: ModelConfig, dtype_bytes: int, packed: bool = False) -> int:
    """Bytes of the weights, quantised or not. A device that packs a tied lm_head separately holds more. packed: the
    device packs codes, see PackedFormat."""
    total, quantization = config.weight_bytes(dtype_bytes), config.quantization
    if quantization is None:
        return total
    for name, piece in checkpoint_pieces(config, family_of(config)).items():
        matrix = matrix_of(name, piece)
        if matrix is not None and quantization.tensors(matrix) is not None:
            total -= prod(matrix.shape) * dtype_bytes
            if packed and isinstance(quantization, PackedFormat):
                total += quantization.packed_bytes(matrix)
            else:
                total += quantization.num_bytes(matrix, dtype_bytes)
    return total


def slot_bytes(config: ModelConfig, lora: tuple[int, int] | None, dtype_bytes: int) -> int:
    """Bytes of the slots for adapters on a GPU; see load_model. On a CPU an adapter takes what its factors take."""
    if lora is None:
        return 0
    return sum(
        lora_bytes(in_features(config, name), parts_of(config, name), *lora, dtype_bytes) for name in adaptable(config)
    )
