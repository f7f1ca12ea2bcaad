"""FairSlots: a semaphore whose waiters take turns by tenant."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Who finds no slot free waits for one: tenants in turn (round robin), those of one tenant as they came."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next in turn comes first

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot."""
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:  # then nobody waits
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot had just been handed over
                self._release()
            raise

    def _release(self) -> None:
        """To the next in turn who has not left."""
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind all others
            if not turn.done():
                return turn.set_result(None)
        self._num_free += 1
