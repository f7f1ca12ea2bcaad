"""The disk tier, seen from the Driver: what it holds comes to host memory first, and nobody else waits for that."""

import asyncio
import random

import pytest

from engine.errors import WorkerDiedError
from engine.executor.step import BlockMove, CacheCosts, FetchedBlocks
from engine.memory.host_tier import HostTier
from engine.memory.sequence import BlockKey, Sequence
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduling import prefetch
from engine.scheduling.prefetch import Prefetcher
from tests.engine.scheduling.loop import Loop, prompt

PROMPT = prompt(random.Random(0), 33)


class DiskLoop(Loop):
    """Fetches are answered when `answer` says so, as the Worker's disk thread does."""

    def __init__(self, disk=None, slots=16, costs=None, **settings):
        self.tier = HostTier(slots, costs, disk or (), num_disk_blocks=64)
        super().__init__(num_blocks=12, max_num_batched_tokens=64, host_tier=self.tier, **settings)
        self.device.disk = disk or {}
        self.sent, self.woken = [], 0
        self.prefetcher = Prefetcher(self.scheduler, self.sent.append, self.wake)

    def wake(self):
        self.woken += 1

    def add_through(self, tokens, max_tokens=4):
        number, self._next_id = self._next_id, self._next_id + 1
        params = SamplingParams(max_tokens=max_tokens)
        limit = len(tokens) + max_tokens
        seq = Sequence(number, tokens, params, seed=number, max_num_tokens=limit, arrival=number)
        if not self.prefetcher.fetch_for(seq, []):
            self.scheduler.add(seq)
        return seq

    def answer(self):
        self.prefetcher.fetched(self.device.fetch(self.sent.pop(0)))

    def flush(self):
        """As at the end of a server's life."""
        self.scheduler.block_manager.offload_all()
        for move in self.tier.pop_moves()[0]:
            self.device.disk[move.digest] = self.device._content(move.block_id)


@pytest.fixture(scope="module")
def disk():
    """Put the blocks of PROMPT on the disk, as an earlier server would have."""
    loop = DiskLoop()
    seq = loop.add(PROMPT, max_tokens=4)
    loop.run()
    loop.check_finished([seq])
    loop.flush()
    assert len(loop.device.disk) == 9, "all full blocks: of 33 tokens, and of what was generated"
    return loop.device.disk


async def test_a_restarted_server_finds_the_prefix_on_the_disk(disk):
    loop = DiskLoop(dict(disk))
    seq = loop.add_through(PROMPT)
    assert not loop.scheduler.has_work, "it waits for the disk"
    loop.answer()
    assert loop.woken == 1
    loop.run()
    loop.check_finished([seq])
    assert seq.num_cached_tokens == 32
    again = loop.add_through(PROMPT)
    assert not loop.sent, "it is in the pool now"
    loop.run()
    loop.check_finished([again])


async def test_others_do_not_wait_and_the_order_of_arrival_stays(disk):
    loop = DiskLoop(dict(disk), max_num_seqs=1, depth=1)
    first = loop.add_through(PROMPT)
    other = loop.add_through(prompt(random.Random(7), 5))
    third = loop.add_through(prompt(random.Random(8), 5))
    loop.step()
    assert loop.scheduler.running == [other]
    loop.answer()
    assert loop.scheduler.waiting == [first, third]
    loop.run()
    loop.check_finished([first, other, third])


async def test_a_missing_or_damaged_block_is_a_miss_from_there_on(disk):
    loop = DiskLoop(dict(disk))
    seq = Sequence(0, PROMPT, SamplingParams(), seed=0, max_num_tokens=40)
    keys = loop.scheduler.block_manager.missing_keys(seq)
    del loop.device.disk[keys[3].digest]
    seq = loop.add_through(PROMPT)
    loop.answer()
    assert keys[3].digest not in loop.tier.on_disk and len(loop.tier) == 3
    loop.tier.check_invariants()
    loop.run()
    loop.check_finished([seq])
    assert seq.num_cached_tokens == 12


async def test_an_answer_that_nobody_asked_for_is_a_broken_worker(disk):
    loop = DiskLoop(dict(disk))
    seq = loop.add_through(PROMPT)
    asked = loop.sent[0].fetch_id
    loop.answer()
    for fetch_id in (asked, asked + 1):  # the second time, and never asked
        with pytest.raises(WorkerDiedError, match=f"answered fetch {fetch_id}, which is not under way"):
            loop.prefetcher.fetched(FetchedBlocks(fetch_id, 1))
    loop.tier.check_invariants()
    loop.run()
    loop.check_finished([seq])


async def test_a_slow_disk_is_not_waited_for(disk, monkeypatch):
    monkeypatch.setattr(prefetch, "FETCH_SECONDS", 0.01)
    loop = DiskLoop(dict(disk))
    seq = loop.add_through(PROMPT)
    await asyncio.sleep(0.05)
    assert loop.woken == 1 and loop.scheduler.waiting == [seq]
    loop.run()
    loop.check_finished([seq])
    loop.answer()  # late, and of use to the next one
    assert len(loop.tier) == 8 and loop.woken == 1
    loop.tier.check_invariants()


async def test_a_request_may_end_while_it_waits(disk):
    loop = DiskLoop(dict(disk))
    seq = loop.add_through(PROMPT)
    loop.prefetcher.release(seq)
    loop.scheduler.finish(seq, FinishReason.ABORT)
    loop.answer()
    loop.prefetcher.release(seq)
    assert not loop.scheduler.has_work and loop.woken == 0
    loop.scheduler.check_invariants()


async def test_what_is_sooner_computed_is_not_fetched(disk):
    loop = DiskLoop(dict(disk), costs=CacheCosts(1e-6, 0.0, 1.0, 0.0))
    loop.add_through(PROMPT)
    assert not loop.sent and loop.scheduler.has_work


async def test_a_small_tier_fetches_what_it_can_hold_beside_others(disk):
    loop = DiskLoop(dict(disk), slots=4)
    seq = loop.add_through(PROMPT)
    assert len(loop.sent[0].slots) == 2
    loop.answer()
    loop.run()
    loop.check_finished([seq])
    assert seq.num_cached_tokens == 8


def test_reserved_slots_are_nobodys_until_they_are_filled():
    keys = [BlockKey(bytes([i]) * 32, (i,)) for i in range(3)]
    tier = HostTier(2, on_disk=[], num_disk_blocks=4)
    tier.offload(keys[0], 5)
    slots = tier.reserve(3)
    assert sorted(slots) == [0, 1] and keys[0] not in tier
    assert tier.pop_moves() == ([], []), "what was to be written to a reserved slot is not"
    tier.offload(keys[1], 6)
    assert keys[1] not in tier and tier.pop_moves() == ([], [])
    tier.check_invariants()
    tier.fill(keys[2:], slots)
    tier.check_invariants()
    assert keys[2] in tier and len(tier) == 1
    tier.offload(keys[1], 6)
    assert tier.pop_moves() == ([BlockMove(6, slots[1], keys[1].digest)], [])


def test_what_the_disk_holds_is_not_written_again(disk):
    loop = DiskLoop(dict(disk))
    loop.device.disk = {}
    seq = loop.add(PROMPT, max_tokens=4)
    loop.run()
    loop.flush()
    assert set(loop.device.disk) == {b""}
    assert len(loop.tier) == 9
    assert seq.num_cached_tokens == 0


async def test_while_the_worker_is_started_again_nobody_asks_its_disk(disk):
    """Those that wait for it go on without it, and so do those that come."""
    loop = DiskLoop(disk)
    waits = loop.add_through(PROMPT)
    assert loop.sent and not loop.scheduler.has_work
    loop.prefetcher.close()
    comes = loop.add_through(PROMPT)
    assert len(loop.sent) == 1 and loop.scheduler.waiting == [waits, comes] and not loop.prefetcher.num_waiting
    loop.run()
    loop.check_finished([waits, comes])
