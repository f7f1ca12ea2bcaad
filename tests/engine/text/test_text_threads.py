"""Threads for work on texts: turns by tenant, long work apart from short, and slots that free themselves."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import UnavailableError
from engine.executor.fair_slots import FairSlots
from engine.text import text_threads
from engine.text.text_threads import NUM_LONG, QUICK_CHARS, FairThreads, TextThreads


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_none_holds_more_than_its_share():
    slots, order = FairSlots(3, per_tenant=2), []

    async def hold(tenant: str, number: int) -> None:
        async with slots.hold(tenant):
            order.append(f"{tenant}{number}")
            await asyncio.sleep(0.01)

    await asyncio.gather(*(hold("a", i) for i in range(6)), *(hold("b", i) for i in range(2)), hold("c", 0))
    assert order[:3] == ["a0", "a1", "b0"], "the third slot is not for a"
    assert sorted(order[3:6]) == ["a2", "b1", "c0"]
    assert order[6:] == ["a3", "a4", "a5"]


async def test_waiters_that_leave_hold_nothing():
    slots = FairSlots(1)
    await slots.acquire("a")
    waiting = [asyncio.create_task(slots.acquire(tenant)) for tenant in "abab"]
    await turns()
    waiting[1].cancel()
    slots.release("a")
    waiting[0].cancel()  # it has just been given the slot
    await turns()
    assert waiting[3].done() and not waiting[2].done()
    slots.release("b")
    await turns()
    assert waiting[2].done()


async def test_a_thread_counts_as_taken_until_its_job_has_ended():
    threads, ends = FairThreads(1, "test"), threading.Event()
    job = asyncio.create_task(threads.run("a", ends.wait, 10))
    await asyncio.sleep(0.05)
    job.cancel()
    second = asyncio.create_task(threads.run("b", lambda: "b"))
    with pytest.raises(asyncio.CancelledError):
        await job
    await asyncio.sleep(0.05)
    assert not second.done()
    ends.set()
    assert await second == "b"
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
    assert await threads.run("a", lambda: "a") == "a"
    threads.close()


async def test_work_that_waits_when_the_server_ends_is_refused_and_not_cancelled(monkeypatch):
    """A cancelled job would cancel the task of its request, which then answers 500 in place of 503."""
    ends = threading.Event()

    class BusyPool(ThreadPoolExecutor):  # its thread has not come back from its last job
        def __init__(self, num_threads, **options):
            super().__init__(num_threads, **options)
            self.submit(ends.wait, 10)

    monkeypatch.setattr(text_threads, "ThreadPoolExecutor", BusyPool)
    threads = FairThreads(1, "test")
    waiting = asyncio.create_task(threads.run("a", lambda: "a"))
    await turns()
    threads.close()
    ends.set()
    with pytest.raises(UnavailableError, match="Send the request again"):
        await waiting
    with pytest.raises(UnavailableError):
        await threads.run("a", lambda: "a")


async def test_short_work_never_waits_for_long_work():
    threads, ends = TextThreads(), threading.Event()
    long = [asyncio.create_task(threads.run("a", QUICK_CHARS + 1, ends.wait, 10)) for _ in range(NUM_LONG + 5)]
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(threads.run("a", QUICK_CHARS, lambda: "short"), 5) == "short"
    other = asyncio.create_task(threads.run("b", QUICK_CHARS + 1, lambda: sum(task.done() for task in long)))
    await turns()
    ends.set()
    assert await other <= 2 * NUM_LONG, "a turn of each, then the other tenant's"
    await asyncio.gather(*long)
    threads.close()
