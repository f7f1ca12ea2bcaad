"""TileChoice: the tiles that a kind of launch may use. The card's first refusal of one moves on to the next."""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from kernels.dispatch import OutOfResources

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TileChoice(Generic[T]):
    """Tiles in order of preference, at least one; `tile` is the one in use.

    Compilers differ in what a tile takes, and cards in what they have. A kernel that needs more than the card has fails
    before it starts, at its first launch: the warm-up.
    """

    def __init__(self, name: str, tiles: Sequence[T]) -> None:
        self.name = name
        self.tile, *self._others = tiles

    def launch(self, start: Callable[[T], None]) -> None:
        """Call start(tile). If the card lacks shared memory, tensor memory or threads for the tile, drop the tile for
        good and try the next one.

        Raises Triton's OutOfResources from the last tile, and while a CUDA graph is captured: steps before the graph
        must not have used another tile than steps in it.
        """
        while True:
            try:
                return start(self.tile)
            except OutOfResources as error:
                if not self._others or _is_capturing():
                    raise
                dropped, self.tile = self.tile, self._others.pop(0)
                logger.warning("%s: the GPU has no room for %s (%s); using %s", self.name, dropped, error, self.tile)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
