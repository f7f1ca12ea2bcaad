"""RankPart: the rows and columns of a tensor of the checkpoint that a rank reads."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.parallel.shard import MAX_RANKS, split_of
from kernels.quantized.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class RankPart:
    """Ranges of the `num_all` rows of a tensor, and its columns (None: all). They go to the rows of the rank's own
    parameter from `start` on."""

    start: int
    rows: tuple[range, ...]
    columns: range | None
    num_all: int

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))

    def of(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """The part of a tensor whose rows are `axis` and whose columns are the last axis; a view where possible."""
        found = tensor
        if self.rows != (range(self.num_all),):
            pieces = [tensor.narrow(axis, rows.start, len(rows)) for rows in self.rows]
            found = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return found if self.columns is None else found.narrow(-1, self.columns.start, len(self.columns))

    def of_quantized(self, weight: QuantizedWeight, name: str, size: int) -> QuantizedWeight:
        """The part of a matrix [..., out, in] in codes. ModelError, which names the matrix, if the columns of the
        `size` ranks do not end at groups of the format, or if act-order mixes them."""
        whole, group = range(weight.in_features), weight.group_size
        columns = self.columns or whole
        if columns != whole:
            self._check_columns(weight, name, size)
        per_byte = 8 // weight.bits
        codes = self._cut(weight.codes.view(torch.uint8), range(columns.start // per_byte, columns.stop // per_byte))
        one_group = group == weight.in_features
        groups = range(1) if one_group else range(columns.start // group, columns.stop // group)
        return replace(
            weight,
            codes=codes.view(weight.codes.dtype),
            scales=self._cut(weight.scales, groups),
            group_size=len(columns) if one_group else group,
            offsets=None if weight.offsets is None else self._cut(weight.offsets, groups),
        )

    def _cut(self, table: Tensor, columns: range) -> Tensor:
        return replace(self, columns=columns).of(table, table.dim() - 2).contiguous()

    @staticmethod
    def _check_columns(weight: QuantizedWeight, name: str, size: int) -> None:
        features, group = weight.in_features, weight.group_size
        if weight.permutation is not None:
            raise ModelError(
                f"tensor_parallel_size: {name} is stored in act-order, which mixes the columns of all ranks; use "
                "--tensor-parallel-size 1, or a checkpoint without desc_act."
            )
        unit = 8 // weight.bits if group == features else group
        if features % (unit * size):
            fitting = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if features % (unit * n) == 0)
            raise ModelError(
                f"tensor_parallel_size: {size} ranks cannot share the {features} columns of {name}, which has groups "
                f"of {unit}; use --tensor-parallel-size with {fitting}."
            )


def part_of(model: ModelConfig, parameter: str, start: int, num_rows: int) -> RankPart | None:
    """The part that the rank of `model` reads of a tensor that fills rows start to start + num_rows of a whole
    parameter; None if the rank reads nothing of it."""
    split = split_of(model, parameter)
    everything = range(start, start + num_rows)
    rows = (everything,) if split.rows is None else split.rows
    found = [range(max(r.start, start), min(r.stop, everything.stop)) for r in rows]
    wanted = tuple(range(r.start - start, r.stop - start) for r in found if len(r))
    before = start if split.rows is None else sum(len(range(r.start, min(r.stop, start))) for r in rows)
    return RankPart(before, wanted, split.columns, num_rows) if wanted else None
