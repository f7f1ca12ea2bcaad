"""FairSlots: a semaphore whose waiters take turns by tenant."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Waiters get free slots in turn: round-robin across tenants, first come first served within one.

    No tenant holds more than `per_tenant` slots at a time, so that one alone cannot take them all.
    """

    def __init__(self, num_slots: int, per_tenant: int | None = None) -> None:
        self._num_free = num_slots
        self._per_tenant = num_slots if per_tenant is None else per_tenant
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next in turn comes first

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(tenant)

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot. The caller must `release` it once; where this is cancelled, nothing is held."""
        if self._num_free and self._held[tenant] < self._per_tenant:  # every waiter is at its tenant's limit
            self._grant(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot had just been handed over
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        """Give a slot of `tenant` back: to the next in turn that still waits and may have it."""
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

    def _next_of(self, tenant: str) -> "asyncio.Future[None] | None":
        """The first of a tenant's waiters that has not left; the tenant goes behind all others."""
        turns = self._waiting.pop(tenant)
        while turns:
            turn = turns.popleft()
            if not turn.done():
                if turns:
                    self._waiting[tenant] = turns
                return turn
        return None
