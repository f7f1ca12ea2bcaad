"""One request begins in each turn of the event loop, however many arrive at once."""

import asyncio
import itertools

from server.http.middleware import Turns


async def test_one_begins_in_each_turn_of_the_loop_in_the_order_of_arrival():
    turns, begun = Turns(), []

    async def request(number):
        await turns.wait()
        begun.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(20)]
    await asyncio.sleep(0)
    tasks[5].cancel()  # its client leaves
    counts = [len(begun)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert begun == [number for number in range(20) if number != 5]
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(counts))


async def test_a_request_alone_begins_at_once():
    turns = Turns()
    for _ in range(3):
        waiting = turns.wait()
        try:
            waiting.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
