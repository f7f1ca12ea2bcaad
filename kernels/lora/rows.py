"""RowGroups: the rows of a step in the order of their adapters' slots."""

import torch
from torch import Tensor

RECORDED_ROWS = 256  # steps of up to so many rows find order and starts at fixed addresses on a CPU


class RowGroups:
    """order int64 [num_rows]: the rows sorted by slot, those of the base first. The rows of slot s are order[starts[s]]
    to order[starts[s + 1] - 1]; starts int64 [max_loras + 1].

    On a CPU the tensors of steps of up to RECORDED_ROWS rows never move, as recorded programs need it. `active` False:
    no row has an adapter, so nothing need be added.
    """

    def __init__(self, max_loras: int, device: torch.device) -> None:
        self.active = False
        self._slots = torch.arange(max_loras + 1, device=device)
        self.order = self._fixed_order = torch.zeros(RECORDED_ROWS, dtype=torch.int64, device=device)
        self.starts = self._fixed_starts = torch.zeros(max_loras + 1, dtype=torch.int64, device=device)

    def forget(self) -> None:
        """No row has an adapter until the next call of `set`. Lets go of the memory of a recorded graph."""
        self.active, self.order, self.starts = False, self._fixed_order, self._fixed_starts

    def set(self, slots: Tensor, active: bool) -> None:
        """Group the rows by their slots, int64 [num_rows], -1 for the base. A CUDA graph may record this: it runs on
        the device and has fixed shapes."""
        self.active = active
        if not active:
            return
        ordered, order = torch.sort(slots, stable=True)
        starts = torch.searchsorted(ordered, self._slots)
        if slots.is_cuda:
            self.order, self.starts = order, starts
            return
        self.starts.copy_(starts)
        self.order = order
        if len(order) <= RECORDED_ROWS:
            self.order = self._fixed_order
            self.order[: len(order)] = order
