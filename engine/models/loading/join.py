"""join_pieces: the matrices that a checkpoint stores apart -> one weight of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from engine.errors import ModelError
from kernels.quantized.weight import Part, QuantizedWeight, Weight, concatenate_rows, stack_experts

Place = tuple[int | None, int]  # number of the expert, None for a tensor without or with all experts; first row


def join_pieces(parameter: str, pieces: Mapping[Place, Part]) -> Weight:
    """One weight with the rows of all pieces, in the order of their places.

    Pieces of different kinds stay a tuple of parts. Experts must be of one kind, and the parts of an expert in one
    order of columns: ModelError otherwise.
    """
    experts: dict[int, list[Part]] = {}
    for expert, start in sorted(pieces, key=lambda place: (place[0] or 0, place[1])):
        experts.setdefault(expert or 0, []).append(pieces[expert, start])
    weights = [_join_rows(parts) for parts in experts.values()]
    if next(iter(pieces))[0] is None:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    stacked = stack_experts(quantized) if len(quantized) == len(weights) else None
    if stacked is None:
        raise ModelError(
            f"{parameter}: the experts of a layer differ in bits or group size, or gate and up of an expert in their "
            "g_idx, which is not served. Quantise all experts with the same settings."
        )
    return stacked


def _join_rows(parts: Sequence[Part]) -> Weight:
    """Neighbours of the same kind become one part."""
    joined: list[Part] = [parts[0]]
    for part in parts[1:]:
        last = joined[-1]
        both = None
        if isinstance(last, QuantizedWeight) and isinstance(part, QuantizedWeight):
            both = concatenate_rows([last, part])
        joined[-1:] = [last, part] if both is None else [both]
    return joined[0] if len(joined) == 1 else tuple(joined)


def reorder_rows(weight: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    """The rows `order` (int64 [out]) of a weight [..., out, in]."""
    offsets = None if weight.offsets is None else weight.offsets.index_select(-2, order)
    scales = weight.scales.index_select(-2, order)
    return replace(weight, codes=weight.codes.index_select(-2, order), scales=scales, offsets=offsets)
