"""Linear layers for `--batch-invariant`: the bits of a row's result do not depend on the other rows.

A GPU uses kernels/linear/matmul.py. A CPU uses the same library as other layers (PackedLinear), but only with numbers
of rows for which measurements on this machine show that every row is added up in the same order. MKL uses other kernels
for one to three rows, and for a few more rows with two threads; oneDNN's bf16 does so for one row of a long sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import use_triton
from kernels.linear.matmul import matmul
from kernels.linear.packed import PackedLinear

# Candidates for the numbers of rows of a call: a batch in between is padded, a larger batch is cut.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PROBE_ROWS = 256  # distinct rows of the weights that measure_row_counts makes
ALIGNMENT = 64  # bytes; MKL promises equal bits only for arrays that start at a cache line


class RowCounts:
    """The safe row counts of each kind of layer of one model: those that give a row the same bits. Measured once per
    kind."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype, bool], tuple[int, ...]] = {}

    def of(self, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
        """The safe row counts of a kind of layer (shape, dtype, bias or not), ascending."""
        kind = (weight.shape, weight.dtype, bias is not None)
        if kind not in self._known:
            self._known[kind] = measure_row_counts(*kind)
        return self._known[kind]


class InvariantLinear:
    """y = x @ weight.T + bias. weight [out_features, in_features]; x [num_tokens, in_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, row_counts: RowCounts) -> None:
        self._weight: Tensor | None = None
        self._bias = bias
        if use_triton(weight):
            self._weight = weight.contiguous()
        else:
            self._row_counts = row_counts.of(weight, bias)
            self._packed = PackedLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]"""
        if self._weight is not None:
            return matmul(x, self._weight, self._bias)
        blocks = [self._block(block) for block in x.split(self._row_counts[-1])]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _block(self, x: Tensor) -> Tensor:
        """The product for at most as many rows as the largest row count, padded with zeros to the next row count."""
        num_rows = len(x)
        padding = next(count for count in self._row_counts if count >= num_rows) - num_rows
        if padding:
            return self._packed(F.pad(x, (0, 0, 0, padding)))[:num_rows]
        return self._packed(x if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 else x.clone())


def measure_row_counts(shape: torch.Size, dtype: torch.dtype, has_bias: bool) -> tuple[int, ...]:
    """The counts of ROW_COUNTS with which a layer of this kind gives a row the same bits at every place in the call.

    There is always at least one: in a call of one row nothing can differ. The weights and the row are chosen so that
    the exact result is 0. The actual result is then the rounding error of the sum, which reveals the order of
    additions; an ordinary result, rounded to 16 bits, would nearly always hide it.
    """
    weight, row = _cancelling(shape, dtype)
    layer = PackedLinear(weight, torch.zeros(shape[0], dtype=dtype) if has_bias else None)
    results = {count: layer(row.repeat(count, 1)) for count in ROW_COUNTS}
    for reference in reversed(ROW_COUNTS):
        bits = results[reference][:1]
        if torch.equal(results[reference], bits.expand(reference, -1)):
            break
    return tuple(count for count, found in results.items() if torch.equal(found, bits.expand(count, -1)))


def _cancelling(shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weight, row [1, in_features]) with weight @ row == 0: every product has its negative elsewhere in the sum."""
    out_features, in_features = shape
    half = in_features // 2
    generator = torch.Generator().manual_seed(0)
    permutation = torch.randperm(half, generator=generator)
    row = torch.randn(1, half, generator=generator).to(dtype)
    weight = torch.randn(min(out_features, PROBE_ROWS), half, generator=generator).to(dtype)
    row, weight = (
        torch.cat([row, row[:, permutation], row.new_zeros(1, in_features % 2)], 1),
        torch.cat([weight, -weight[:, permutation], weight.new_zeros(len(weight), in_features % 2)], 1),
    )
    return weight.repeat(-(-out_features // len(weight)), 1)[:out_features].contiguous(), row
