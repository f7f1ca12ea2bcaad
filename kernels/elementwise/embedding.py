"""The input embedding: rows of a table by token id, scaled in some families, plus rows of a table by position."""

import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import cpu_kernels


def embedding(
    ids: Tensor,
    weight: Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_weight: Tensor | None = None,
    position_offset: int = 0,
) -> Tensor:
    """weight[ids] * scale, plus position_weight[positions + position_offset] where there is one: [n, hidden].

    ids, positions int64 [n]; weight [vocab_size, hidden]. Product and sum are rounded to the dtype of the weight. The
    caller has checked the ids.
    """
    cpu = cpu_kernels() if weight.device.type == "cpu" else None
    if cpu and cpu.tokens.supports_embed(ids, weight, scale, positions, position_weight):
        return cpu.tokens.embed(ids, weight, scale, positions, position_weight, position_offset)  # type: ignore[no-any-return]
    hidden = F.embedding(ids, weight)
    if scale != 1.0:
        hidden = hidden * scale
    if position_weight is not None and positions is not None:
        hidden = hidden + F.embedding(positions + position_offset, position_weight)
    return hidden
