import asyncio

import pytest

from engine.executor.timeouts import with_timeout


async def after(turns, outcome):
    """Return `outcome`, or raise it, after so many turns of the event loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def test_a_result_and_an_error_come_through():
    assert await with_timeout(10, after(0, "text")) == "text"
    assert await with_timeout(10, after(3, "text")) == "text"
    with pytest.raises(ValueError, match="wrong"):
        await with_timeout(10, after(3, ValueError("wrong")))


@pytest.mark.parametrize("seconds", [-1, 0, 0.01])
async def test_what_takes_longer_is_cancelled_and_put_in_order_first(seconds):
    ended = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        await with_timeout(seconds, slow())
    assert ended or seconds <= 0  # then it may not have begun


async def test_what_is_there_at_once_needs_no_time():
    assert await with_timeout(0, after(0, "text")) == "text"


@pytest.mark.parametrize("outcome", ["text", ValueError("wrong")])
@pytest.mark.parametrize("turn", range(1, 12))
async def test_a_cancellation_is_never_lost(turn, outcome):
    """In whichever turn of the loop it comes: before, in and after the one in which the coroutine ends."""
    task = asyncio.create_task(with_timeout(10, after(5, outcome)))
    for _ in range(turn):
        await asyncio.sleep(0)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert turn > 6
