"""FairSlots: a semaphore whose waiters take turns by tenant."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """A semaphore: round-robin across tenants, first come first served within a tenant.

    A tenant holds at most `per_tenant` slots at a time, so a single tenant cannot hold all of them.
    """

    def __init__(self, num_slots: int, per_tenant: int | None = None) -> None:
        self._num_free = num_slots
        self._per_tenant = num_slots if per_tenant is None else per_tenant
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot for the time of a `with` block."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(tenant)

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot. The caller must `release` it once; a cancelled call holds none."""
        if self._num_free and self._held[tenant] < self._per_tenant:  # the tenants of all waiters are at their limit
            self._grant(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot was granted just before
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        """Give a slot back. The next waiter in turn whose tenant is below its limit gets it."""
        self._num_free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        for waiting in list(self._waiting):
            if not self._num_free:
                return
            if self._held[waiting] < self._per_tenant and (turn := self._next_of(waiting)) is not None:
                self._grant(waiting)
                turn.set_result(None)

    def _grant(self, tenant: str) -> None:
        self._num_free -= 1
        self._held[tenant] += 1

    def _next_of(self, tenant: str) -> asyncio.Future[None] | None:
        """Pop the first waiter of a tenant that was not cancelled, and put the tenant behind all others."""
        turns = self._waiting.pop(tenant)
        while turns:
            turn = turns.popleft()
            if not turn.done():
                if turns:
                    self._waiting[tenant] = turns
                return turn
        return None
