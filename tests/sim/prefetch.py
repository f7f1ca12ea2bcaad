"""The Prefetcher with hooks: what waits for the disk, and for how long."""

import asyncio
from typing import TYPE_CHECKING, Any

from engine.executor.step import FetchedBlocks
from engine.memory.sequence import Sequence
from engine.scheduling.prefetch import FETCH_SECONDS, Prefetcher
from tests.sim.violation import require

if TYPE_CHECKING:
    from tests.sim.monitor import Monitor


class WatchedPrefetcher(Prefetcher):
    def __init__(self, monitor: "Monitor", *args: Any) -> None:
        super().__init__(*args)
        self.monitor = monitor
        self._gives_up = False

    def fetch_for(self, seq: Sequence, forks: list[Sequence]) -> bool:
        with self.monitor.checking():
            fetches = super().fetch_for(seq, forks)
        if fetches:
            self.monitor.saw("request waits for the disk")
            self.monitor.waits_for_disk[seq] = asyncio.get_running_loop().time()
        return fetches

    def fetched(self, message: FetchedBlocks) -> None:
        fetch = self._fetches[message.fetch_id]
        if fetch.seq not in self._by_seq:
            self.monitor.saw("fetch answered after its request went on")
        tier = self._scheduler.block_manager.host_tier
        if any(key in (tier or ()) for key in fetch.keys[: message.num_blocks]):
            self.monitor.saw("blocks fetched that came to be there meanwhile")
        with self.monitor.checking():
            super().fetched(message)

    def _give_up(self, seq: Sequence) -> None:
        self._gives_up = True
        super()._give_up(seq)
        self._gives_up = False

    def release(self, seq: Sequence) -> None:
        if (since := self.monitor.waits_for_disk.pop(seq, None)) is not None:
            seconds = asyncio.get_running_loop().time() - since
            require(seconds <= FETCH_SECONDS, "fetch", f"{seq} waited {seconds} s for the disk")
            if not self._gives_up and not self._closed:
                self.monitor.saw("request ended while it waits for the disk")
            if seconds == FETCH_SECONDS:
                self.monitor.saw("disk too slow, the request goes on without")
        super().release(seq)
