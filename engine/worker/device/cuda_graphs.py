"""GraphRunner: decode steps from recorded graphs, one for each of a few numbers of rows.

A decode step launches hundreds of small kernels, which takes the host longer than the device needs for them; a graph
launches them as one. A graph is for a fixed number of rows, so a step is padded to the next of `bucket_sizes`.

When graphs are recorded. The server should be ready soon, and recording all of them takes seconds, so only the largest
(whose temporary memory all others then share) and those of single streams are recorded at the start. The others come
while the Worker is idle, one at a time, so that a plan that arrives waits for one at most; and a size that is needed
before that runs kernel by kernel once, as it must before it can be recorded, and is recorded then.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.worker.device.queue import DeviceQueue  # with torch, which `pageserve plan` does without

logger = logging.getLogger(__name__)

FINE_STEP, FINE_UP_TO, COARSE_STEP = 8, 256, 16
AT_START = 4  # sizes up to here, and the largest

Work = Callable[[int], None]  # what a step of so many rows does


def bucket_sizes(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 256 and of 16 beyond; `largest` is always the last."""
    fine, coarse = range(FINE_STEP, FINE_UP_TO, FINE_STEP), range(FINE_UP_TO, largest, COARSE_STEP)
    return [*[size for size in (1, 2, 4, *fine, *coarse) if size < largest], largest]


class GraphRunner:
    """Runs pieces of `work`, by name and number of rows; `enabled` says whether from graphs.

    Each piece reads and writes tensors that stay where they are, and computes rows apart from each other.
    """

    def __init__(self, queue: "DeviceQueue", work: Mapping[str, Work], sizes: list[int], enabled: bool = True) -> None:
        self.enabled = enabled
        self.sizes = sizes
        self._queue = queue
        self._work = work
        self._graphs: dict[tuple[str, int], Callable[[], None]] = {}
        self._missing = list(reversed(sizes))  # largest first: the memory of one suffices for all after it

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def padded(self, num_rows: int) -> int:
        """How many rows a step of num_rows is run with."""
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
        """At the start. `prepare` makes the inputs of so many rows harmless."""
        for size in [size for size in self._missing if size == self.sizes[-1] or size <= AT_START]:
            self._record_all(size, prepare)

    def record_next(self, prepare: Work) -> bool:
        """One more size, while there is nothing else to do; False when none is left."""
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
        """Without graphs from here on where that fails: slower, and nothing else."""
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
