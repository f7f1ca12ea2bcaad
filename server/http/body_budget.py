"""Limits the bytes of request bodies that the server holds at a time, per API key and in total.

A body counts from its first byte until the request is admitted or refused: while it is read, parsed and tokenized, it
takes several times its size in memory. Requests that then wait for the model count in the queue's limits.
"""

import asyncio
import time

from starlette.types import Message, Receive

from server.errors import ApiError

BYTES_PER_SECOND = 128 << 20  # read rate of all large bodies: a megabyte takes the event loop over a millisecond
BURST_BYTES = 4 << 20
SMALL_BYTES = 64 << 10  # bytes of each body that are always accepted, so a flood of large bodies refuses no small one
RETRY_SECONDS = 1.0


class OverBudgetError(ApiError):
    """Too many bytes of bodies are held: 429 for one API key, 503 for all keys together. A retry soon succeeds."""

    def __init__(self, status: int, whose: str, limit: int, reason: str) -> None:
        message = f"The request bodies of {whose} hold more than {limit} bytes. Try again in {RETRY_SECONDS:g} s."
        kind, code = (
            ("rate_limit_error", "rate_limit_exceeded") if status == 429 else ("server_error", "service_unavailable")
        )
        super().__init__(status, message, type=kind, code=code, headers={"retry-after": f"{RETRY_SECONDS:.0f}"})
        self.reason = reason


class BodyBudget:
    """Counts the bytes held per tenant and in total. A request that is the only one may be as large as any body may
    be."""

    def __init__(self, of_all: int, of_a_key: int) -> None:
        self._of_all, self._of_a_key = of_all, of_a_key
        self._held = 0
        self._read_by = 0.0  # time at which the bytes read so far would be read at BYTES_PER_SECOND
        self._held_by: dict[str, int] = {}

    def seconds_to_wait(self, own: int, more: int) -> float:
        """Seconds to wait before reading more of a body with `own` bytes so far, of which `more` came last."""
        now = time.monotonic()
        self._read_by = max(now, self._read_by + more / BYTES_PER_SECOND)
        return self._read_by - now - BURST_BYTES / BYTES_PER_SECOND if own > SMALL_BYTES else 0.0

    def add(self, tenant: str, own: int, more: int) -> None:
        """Counts `more` bytes of a request that holds `own`. OverBudgetError unless it is small, alone or in budget."""
        of_key = self._held_by.get(tenant, 0)
        if own + more > SMALL_BYTES:
            if tenant and own < of_key and of_key + more > self._of_a_key:
                raise OverBudgetError(429, "this API key", self._of_a_key, "key_bytes")
            if own < self._held and self._held + more > self._of_all:
                raise OverBudgetError(503, "the server", self._of_all, "bytes")
        self._held_by[tenant] = of_key + more
        self._held += more

    def give_back(self, tenant: str, own: int) -> None:
        self._held -= own
        self._held_by[tenant] -= own
        if not self._held_by[tenant]:
            del self._held_by[tenant]


class CountedBody:
    """The `receive` of one request. Counts the bytes that arrive; raises OverBudgetError."""

    def __init__(self, budget: BodyBudget, tenant: str, receive: Receive) -> None:
        """`tenant`: "" for all clients if there are no API keys."""
        self._budget, self._tenant, self._receive = budget, tenant, receive
        self._size = 0  # bytes counted in the budget
        self._num_read = 0
        self._whole = self._refused = False

    async def __call__(self) -> Message:
        if self._whole:  # the handler waits for a disconnect, so the request was tokenized and admitted
            self.give_back()
        message = await self._receive()
        if message["type"] == "http.request" and (more := len(message.get("body", b""))):
            self._num_read += more
            if not self._refused:
                self._count(more)
            if (seconds := self._budget.seconds_to_wait(self._num_read, more)) > 0.0:
                await asyncio.sleep(seconds)
        self._whole = not message.get("more_body", False)
        return message

    def give_back(self) -> None:
        size, self._size = self._size, 0
        if size:
            self._budget.give_back(self._tenant, size)

    def _count(self, more: int) -> None:
        try:
            self._budget.add(self._tenant, self._size, more)
            self._size += more
        except OverBudgetError:
            self._refused = True  # further bytes are read and dropped
            self.give_back()
            raise
