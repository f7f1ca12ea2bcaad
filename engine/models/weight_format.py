"""WeightFormat: how the quantised matrices of a checkpoint are stored. engine/models/formats has one file for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # ModelConfig is read without torch
    from torch import Tensor

    from kernels.quantized.weight import QuantizedWeight

FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the checkpoint that a format may hold in quantised form."""

    module: str  # in the checkpoint, such as "model.layers.0.self_attn.q_proj"
    parameter: str  # in the model, such as "layers.0.qkv.weight", which may hold several matrices
    shape: tuple[int, ...]  # [out, in], or [experts, out, in] where one tensor holds all experts


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint that holds a part of a quantised matrix."""

    shape: tuple[int, ...] | None  # None: any shape, the format checks it
    dtypes: tuple[str, ...]  # names as in safetensors headers
    optional: bool = False


class WeightFormat(Protocol):
    """A format of quantised weights with the settings of one checkpoint: hashable and picklable.

    `reads_plain`: the checkpoint is plain, and its matrices are quantised as they are loaded (`--quantization`).
    """

    @property
    def name(self) -> str:
        """The format's name for messages, such as "gptq"."""

    @property
    def reads_plain(self) -> bool: ...

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        """The tensors of a quantised matrix by the ending of their names, such as ".qweight"; None: it is plain.

        The loader reads a matrix as plain, too, if the checkpoint has its plain tensor in a floating-point type in
        place of these. Not asked if reads_plain, apart from None or not None.
        """

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The matrix made from its tensors, in host memory; with reads_plain from one tensor ".weight" [out, in].

        ModelError if the values of the tensors are not served.
        """

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """Bytes of the quantised matrix in memory, scales included, in a model of dtype_bytes."""


@runtime_checkable
class InputFormat(Protocol):
    """A WeightFormat that may round the inputs of its matrices to int8, too (W8A8)."""

    @property
    def int8_inputs(self) -> bool:
        """True if it does so for any matrix."""


@runtime_checkable
class PackedFormat(Protocol):
    """A WeightFormat whose matrices take less memory where a CPU packs their codes (kernels/cpu/quantized)."""

    def packed_bytes(self, matrix: Matrix) -> int:
        """Bytes of the packed matrix, scales included."""
