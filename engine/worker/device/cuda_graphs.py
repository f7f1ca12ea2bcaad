"""GraphRunner: replays decode steps as recorded CUDA graphs, one graph for each of a few numbers of rows.

A decode step launches hundreds of small kernels, and the host takes longer to launch them than the device to run them.
A graph launches them as one. A graph has a fixed number of rows, so a step is padded to the next of `bucket_sizes`.

Recording all graphs takes seconds, and the server should be ready soon. So start-up records the largest graph (whose
temporary memory all others then share) and the graphs of a few rows only. The others are recorded while the Worker is
idle, one size at a time, so that an arriving plan waits for one at most. A size that is needed earlier runs kernel by
kernel once, which must happen before a recording anyway, and is recorded then.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.worker.device.queue import DeviceQueue  # imports torch, which `pageserve plan` must not

logger = logging.getLogger(__name__)

FINE_STEP, FINE_UP_TO, COARSE_STEP = 8, 256, 16
AT_START = 4  # start-up records sizes up to this one, and the largest

Work = Callable[[int], None]  # runs the work of a step with this number of rows


def bucket_sizes(largest: int) -> list[int]:
    """The sizes of graphs: 1, 2, 4, multiples of 8 up to 256 and of 16 beyond; `largest` is always the last."""
    fine, coarse = range(FINE_STEP, FINE_UP_TO, FINE_STEP), range(FINE_UP_TO, largest, COARSE_STEP)
    return [*[size for size in (1, 2, 4, *fine, *coarse) if size < largest], largest]


class GraphRunner:
    """Runs pieces of `work` by name and number of rows, from graphs if `enabled`.

    Each piece must read and write tensors that never move, and must compute each row independently of the others.
    """

    def __init__(self, queue: "DeviceQueue", work: Mapping[str, Work], sizes: list[int], enabled: bool = True) -> None:
        self.enabled = enabled
        self.sizes = sizes
        self._queue = queue
        self._work = work
        self._graphs: dict[tuple[str, int], Callable[[], None]] = {}
        self._missing = list(reversed(sizes))  # largest first: its memory suffices for all later ones

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def padded(self, num_rows: int) -> int:
        """The number of rows that a step of num_rows rows is padded to."""
        return self.sizes[bisect_left(self.sizes, num_rows)] if self.enabled else num_rows

    def run(self, name: str, num_rows: int) -> None:
        """Queue a piece of work for a padded number of rows."""
        graph = self._graphs.get((name, num_rows))
        if graph is not None:
            graph()
            return
        self._queue.run(lambda: self._work[name](num_rows))
        if self.enabled:
            self._record(name, num_rows)

    def record_first(self, prepare: Work) -> None:
        """Record the graphs of start-up. `prepare` makes the inputs of a number of rows harmless."""
        for size in [size for size in self._missing if size == self.sizes[-1] or size <= AT_START]:
            self._record_all(size, prepare)

    def record_next(self, prepare: Work) -> bool:
        """Record the graphs of one more size; False if none is left."""
        if not self.enabled or not self._missing:
            return False
        self._record_all(self._missing[0], prepare)
        return True

    def _record_all(self, size: int, prepare: Work) -> None:
        if self.enabled:
            prepare(size)
        for name in self._work:
            if self.enabled and (name, size) not in self._graphs:
                self.run(name, size)
        if size in self._missing:
            self._missing.remove(size)

    def _record(self, name: str, size: int) -> None:
        """Record one graph. If that fails, run without graphs from here on: slower, with the same results."""
        try:
            self._graphs[name, size] = self._queue.capture(lambda: self._work[name](size))
        except Exception as error:
            logger.error(
                "CUDA graphs are off from here on, and decode steps slower: %s of %d rows could not be recorded "
                "(%s: %s). --no-cuda-graphs starts without them.",
                name, size, type(error).__name__, error,
            )  # fmt: skip
            self.enabled = False
            self._graphs.clear()
