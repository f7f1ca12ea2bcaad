"""Prefetcher: keeps a request waiting while its prefix moves from the disk tier to host memory."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile

from engine.errors import WorkerDiedError
from engine.executor.step import FetchBlocks, FetchedBlocks
from engine.memory.host_tier import HostTier
from engine.memory.sequence import BlockKey, Sequence
from engine.scheduling.scheduler import Scheduler

FETCH_SECONDS = 2.0  # a sequence waits no longer for the disk


@dataclass(slots=True, eq=False)
class _Fetch:
    seq: Sequence
    forks: list[Sequence]
    keys: list[BlockKey]
    slots: list[int]
    timer: asyncio.TimerHandle | None = None


class Prefetcher:
    """Holds a sequence until its blocks are read, then hands it to the scheduler. It keeps its place in the order of
    arrival; other sequences do not wait for it."""

    patience = FETCH_SECONDS

    def __init__(self, scheduler: Scheduler, send: Callable[[FetchBlocks], None], wake: Callable[[], None]) -> None:
        """`wake` is called when a sequence was handed to the scheduler by itself, not by `release` or `close`."""
        self._scheduler = scheduler
        self._send = send
        self._wake = wake
        self._fetches: dict[int, _Fetch] = {}
        self._by_seq: dict[Sequence, _Fetch] = {}
        self._counter = itertools.count()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._by_seq)

    @property
    def has_fetches(self) -> bool:
        """True while the Worker has not answered every FetchBlocks."""
        return bool(self._fetches)

    def fetch_for(self, seq: Sequence, forks: list[Sequence]) -> bool:
        """Fetch the blocks of a new sequence that the disk holds. Returns False if there are none to fetch: then the
        caller schedules the sequence."""
        tier = self._scheduler.block_manager.host_tier
        keys = [] if self._closed or tier is None or tier.on_disk is None else self._wanted(seq, tier, tier.on_disk)
        slots = tier.reserve(len(keys)) if tier is not None else []
        if not slots:
            return False
        self._by_seq[seq] = fetch = self._send_fetch(_Fetch(seq, forks, keys[: len(slots)], slots))
        fetch.timer = asyncio.get_running_loop().call_later(FETCH_SECONDS, self._give_up, seq)
        return True

    def fetch_again(self, seqs: Iterable[Sequence]) -> bool:
        """Fetch the blocks of sequences that the scheduler has: a new Worker lacks them. Returns True if any is on the
        disk; then `has_fetches` tells when all have come."""
        tier = self._scheduler.block_manager.host_tier
        if tier is None or tier.on_disk is None:
            return False
        for seq in seqs:
            keys = self._wanted(seq, tier, tier.on_disk)
            if slots := tier.reserve(len(keys)):
                self._send_fetch(_Fetch(seq, [], keys[: len(slots)], slots))
        return self.has_fetches

    def _send_fetch(self, fetch: _Fetch) -> _Fetch:
        fetch_id = next(self._counter)
        self._fetches[fetch_id] = fetch
        self._send(FetchBlocks(fetch_id, [key.digest for key in fetch.keys], fetch.slots))
        return fetch

    def fetched(self, message: FetchedBlocks) -> None:
        """The Worker has read the blocks that it could. Raises WorkerDiedError for an unknown fetch."""
        fetch = self._fetches.pop(message.fetch_id, None)
        if fetch is None:
            raise WorkerDiedError(f"the Worker answered fetch {message.fetch_id}, which is not under way")
        tier = self._scheduler.block_manager.host_tier
        assert tier is not None and tier.on_disk is not None
        tier.fill(fetch.keys[: message.num_blocks], fetch.slots)
        if message.num_blocks < len(fetch.keys):  # damaged, or overwritten since
            tier.on_disk.pop(fetch.keys[message.num_blocks].digest, None)
        self._give_up(fetch.seq)

    def release(self, seq: Sequence) -> None:
        """Hands `seq` to the scheduler now, so that it can be ended; a no-op if it does not wait here."""
        fetch = self._by_seq.pop(seq, None)
        if fetch is not None:
            assert fetch.timer is not None
            fetch.timer.cancel()
            self._scheduler.add(fetch.seq, fetch.forks)

    def close(self) -> None:
        """The Worker is gone: sequences that wait are scheduled without their blocks, new ones do not wait."""
        self._closed = True
        for seq in list(self._by_seq):
            self.release(seq)

    def reopen(self) -> None:
        """A new Worker runs: forget the fetches that the old one did not answer."""
        self._fetches.clear()
        self._closed = False

    def _give_up(self, seq: Sequence) -> None:
        if seq in self._by_seq:
            self.release(seq)
            self._wake()

    def _wanted(self, seq: Sequence, tier: HostTier, on_disk: Collection[bytes]) -> list[BlockKey]:
        """Returns the blocks to read: those on the disk from the first missing one on, if loading them pays."""
        blocks = self._scheduler.block_manager
        missing = blocks.missing_keys(seq)
        keys = list(takewhile(lambda key: key.digest in on_disk, missing))[: tier.num_slots // 2]
        num_tokens = len(keys) * blocks.block_size
        num_before = seq.block_keys.index(missing[0]) * blocks.block_size if keys else 0
        return keys if keys and tier.worth_loading(num_tokens, num_before, num_tokens) else []
