"""GraphRunner: replays steps as recorded CUDA graphs, each for a fixed number of tokens and sequences (a bucket).

A step launches hundreds of small kernels. The host needs some 4 to 6 ms for them (an estimate: 9 to 12 launches a
layer, 32 layers), more than the device computes in a decode step or a short prompt. A graph launches them as one. A
graph has a fixed size, so a step is padded to the next bucket.

Decode steps have buckets of their own (decode_sizes): one token a sequence, attention by the decode kernel alone. Steps
with prompt chunks have mixed_buckets, up to MAX_MIXED_TOKENS tokens: beyond them even a model of 0.5 billion parameters
computes longer than the host launches, so a graph gains nothing.

Start-up records as many graphs as START_SECONDS and the memory budget allow, in the order of `keys`. The others are
recorded while the Worker is idle, one at a time, so that an arriving plan waits for one at most. No graph is recorded
while the Worker serves: a missing one is run kernel by kernel, and comes next in idle time.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.models.parallel.ranks import Ranks
    from engine.worker.device.queue import DeviceQueue  # imports torch, which `pageserve plan` must not

logger = logging.getLogger(__name__)

FINE_STEP, FINE_UP_TO, COARSE_STEP = 8, 256, 16
MIXED_STEP, MIXED_FINE_UP_TO = 16, 64
MAX_MIXED_TOKENS = 2048
MAX_DRAFT_ROWS = 16  # a longer pass of a draft model runs without a graph
MIXED_SEQS = (16, 64)  # padding sequences cost little: empty programs, and rows of the last layer
START_SECONDS = 10.0
GRAPH_SHARE = 1 / 32  # share of the card's memory: the most for graphs, beside the temporary memory that they share


class Bucket(NamedTuple):
    """The size of a step that runs as a graph: numbers of tokens and of sequences, padding included."""

    tokens: int
    seqs: int


Key = tuple[str, Bucket]  # a piece of work, and the size it is done for
Work = Callable[[Bucket], None]


def decode_sizes(largest: int) -> list[int]:
    """The sizes of decode graphs: 1, 2, 4, multiples of 8 up to 256 and of 16 beyond; `largest` is always the last."""
    fine, coarse = range(FINE_STEP, FINE_UP_TO, FINE_STEP), range(FINE_UP_TO, largest, COARSE_STEP)
    return [*[size for size in (1, 2, 4, *fine, *coarse) if size < largest], largest]


def mixed_token_sizes(largest: int) -> list[int]:
    """Multiples of 16 up to 64, then four sizes from each power of two to the next: padding is less than a fifth of a
    step beyond 64 tokens. `largest`, or MAX_MIXED_TOKENS if that is less, is the last."""
    last = min(largest, MAX_MIXED_TOKENS)
    sizes = [*range(MIXED_STEP, MIXED_FINE_UP_TO, MIXED_STEP)]
    power = MIXED_FINE_UP_TO
    while power < last:
        sizes += range(power, 2 * power, power // 4)
        power *= 2
    return [*[size for size in sizes if size < last], last]


def mixed_seq_sizes(largest: int) -> list[int]:
    """MIXED_SEQS below `largest`, then `largest`."""
    return [*[size for size in MIXED_SEQS if size < largest], largest]


def mixed_buckets(max_tokens: int, max_seqs: int) -> list[Bucket]:
    """All buckets of mixed steps, smallest first: each number of tokens with the numbers of sequences that a step of
    so many tokens can need."""
    seq_sizes = mixed_seq_sizes(max_seqs)
    needed = zip(seq_sizes, [0, *seq_sizes], strict=False)  # with the size below, which smaller steps use
    pairs = list(needed)
    return [Bucket(t, s) for t in mixed_token_sizes(max_tokens) for s, below in pairs if t > below]


def next_size(sizes: Sequence[int], number: int) -> int | None:
    """The least of `sizes` (ascending) that holds `number`; None beyond the largest."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None


class GraphRunner:
    """Runs pieces of `work` by name and bucket, from graphs if `enabled`.

    Each piece must read and write tensors that never move, and must compute each row independently of the others.
    prepare: makes the inputs of a bucket harmless, before it is recorded. keys: all graphs to record, the most memory
    first, because all graphs share the temporary memory of the first. max_bytes: recording stops where graphs take
    more device memory; None: no limit.
    """

    def __init__(
        self,
        queue: "DeviceQueue",
        work: Mapping[str, Work],
        prepare: Callable[[Key], None],
        keys: Sequence[Key],
        *,
        enabled: bool = True,
        max_bytes: int | None = None,
    ) -> None:
        self.enabled = enabled
        self.num_added = 0  # keys that `add` brought
        self._queue = queue
        self._work = dict(work)
        self._prepare = dict.fromkeys(work, prepare)
        self._graphs: dict[Key, Callable[[], None]] = {}
        self._keys = list(keys)
        self._missing = list(keys)
        self._max_bytes = max_bytes
        self._most_graphs = len(keys)

    def add(self, name: str, work: Work, prepare: Callable[[Key], None], keys: Sequence[Key]) -> None:
        """One more piece of work; its graphs are recorded after the first of the others. Before any is recorded."""
        self._work[name], self._prepare[name] = work, prepare
        self._keys[1:1] = keys
        self.num_added += len(keys)
        self._missing = list(self._keys)
        self._most_graphs = len(self._keys)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_keys(self) -> int:
        """Graphs there are once all are recorded."""
        return len(self._keys)

    def run(self, key: Key) -> None:
        """Queue a piece of work for a bucket: as its graph, or kernel by kernel if there is none."""
        if (graph := self._graphs.get(key)) is not None:
            graph()
            return
        self.want(key)
        self._queue.run(lambda: self._work[key[0]](key[1]))

    def has(self, key: Key) -> bool:
        """True if the graph is recorded; otherwise it is the next to be recorded."""
        if key in self._graphs:
            return True
        self.want(key)
        return False

    def want(self, key: Key) -> None:
        """Record this graph before the other missing ones."""
        if self.enabled and key in self._missing:
            self._missing.remove(key)
            self._missing.insert(0, key)

    def record_first(self, ranks: "Ranks | None" = None) -> None:
        """Record the graphs of start-up, for START_SECONDS or up to max_bytes, and log what they took. The ranks of a
        group record all of them now, because they are idle at different moments later."""
        if not self.enabled:
            return
        if ranks is not None:
            return self._record_together(ranks)
        self._missing = list(self._keys)  # in their order, whatever ran before
        started, total, free = time.perf_counter(), len(self._keys), self._queue.free_bytes()
        used = first = 0
        while self._missing and time.perf_counter() - started < START_SECONDS:
            if not self.record_next():
                break
            used = free - self._queue.free_bytes()
            first = first or used  # with the temporary memory that all share
            if self._max_bytes is not None and used >= self._max_bytes:
                break
        if self._max_bytes is not None and len(self._graphs) > 1 and used > first:
            each = (used - first) / (len(self._graphs) - 1)
            self._most_graphs = 1 + max(0, int((self._max_bytes - first) / each))
        if self.enabled:
            left = max(0, min(self._most_graphs, total) - len(self._graphs))
            logger.info(
                "CUDA graphs: %d in %.1f s, %d MiB; %s",
                len(self._graphs), time.perf_counter() - started, used >> 20, self._describe_left(left),
            )  # fmt: skip

    def _record_together(self, ranks: "Ranks") -> None:
        """Record graphs until all are recorded or a rank has no memory for more. Then no rank records any other: ranks
        that run a step in different ways would not make the same calls."""
        self._missing, free = list(self._keys), self._queue.free_bytes()
        while True:
            has_room = self._max_bytes is None or free - self._queue.free_bytes() < self._max_bytes
            if not ranks.least([int(self.enabled and bool(self._missing) and has_room)])[0]:
                break
            self.record_next()
        self._missing = []
        self.enabled = bool(ranks.least([int(self.enabled)])[0])
        if not self.enabled:
            self._graphs.clear()
        logger.info("CUDA graphs: %d of %d", len(self._graphs), len(self._keys))

    def record_next(self) -> bool:
        """Record one more graph; False if none is left, or no memory for it."""
        if not self.enabled or not self._missing or len(self._graphs) >= self._most_graphs:
            return False
        key = self._missing.pop(0)
        name, bucket = key
        self._prepare[name](key)
        self._queue.run(lambda: self._work[name](bucket))  # a recording runs nothing, so no kernel may be new to it
        try:
            self._graphs[key] = self._queue.capture(lambda: self._work[name](bucket))
        except Exception as error:  # the results are the same without graphs, and slower
            logger.error(
                "CUDA graphs are off from here on, and steps slower: %s of %d tokens and %d sequences could not be "
                "recorded (%s: %s). --no-cuda-graphs starts without them.",
                name, *bucket, type(error).__name__, error,
            )  # fmt: skip
            self.enabled = False
            self._graphs.clear()
        return True

    def _describe_left(self, num_left: int) -> str:
        """The sizes that idle time will record, and those without memory, for the log."""
        if not self._missing:
            return "none is left for idle time"
        sizes: dict[str, list[int]] = {}
        for name, bucket in self._missing:
            sizes.setdefault(name, []).append(bucket.tokens)
        ranges = ", ".join(f"{name} of {min(of)} to {max(of)} tokens" for name, of in sizes.items())
        without = len(self._missing) - num_left
        return f"{num_left} left for idle time, {without} without memory ({ranges})"
