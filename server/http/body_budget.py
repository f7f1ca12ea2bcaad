"""The bytes of request bodies that the server holds at a time, of one API key and of all.

A body counts from its first byte to where the request is admitted, or refused: from reading over parsing to tokens,
which is where memory is taken several times over. What waits for the model after that counts in the queue's limits.
"""

import asyncio
import time

from starlette.types import Message, Receive

from server.errors import ApiError

BYTES_PER_SECOND = 128 << 20  # of all large bodies: reading a megabyte takes the event loop over a millisecond
BURST_BYTES = 4 << 20
SMALL_BYTES = 64 << 10  # of each body are always taken, so that a flood of large ones refuses no small one
RETRY_SECONDS = 1.0


class OverBudgetError(ApiError):
    """429 where the key has too much under way, 503 where all keys together have. It passes soon."""

    def __init__(self, status: int, whose: str, limit: int, reason: str) -> None:
        message = (
            f"The bodies that {whose} has under way hold more than {limit} bytes. Try again in {RETRY_SECONDS:g} s."
        )
        kind, code = (
            ("rate_limit_error", "rate_limit_exceeded") if status == 429 else ("server_error", "service_unavailable")
        )
        super().__init__(status, message, type=kind, code=code, headers={"retry-after": f"{RETRY_SECONDS:.0f}"})
        self.reason = reason


class BodyBudget:
    """Who holds how much. A request that is alone, of its key and of all, may be as large as a body may be."""

    def __init__(self, of_all: int, of_a_key: int) -> None:
        self._of_all, self._of_a_key = of_all, of_a_key
        self._held = 0
        self._read_by = 0.0  # when what was read would have been, at that rate
        self._held_by: dict[str, int] = {}

    def seconds_to_wait(self, own: int, more: int) -> float:
        """Before more of a body is read that has had `own` bytes, of which `more` came last."""
        now = time.monotonic()
        self._read_by = max(now, self._read_by + more / BYTES_PER_SECOND)
        return self._read_by - now - BURST_BYTES / BYTES_PER_SECOND if own > SMALL_BYTES else 0.0

    def add(self, tenant: str, own: int, more: int) -> None:
        """Count `more` bytes of a request that holds `own`; OverBudgetError unless it is small or alone."""
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
    """The `receive` of one request, which counts what comes. OverBudgetError comes out of it."""

    def __init__(self, budget: BodyBudget, tenant: str, receive: Receive) -> None:
        """`tenant` "" is everybody, where there are no keys."""
        self._budget, self._tenant, self._receive = budget, tenant, receive
        self._size = 0  # that counts
        self._num_read = 0
        self._whole = self._refused = False

    async def __call__(self) -> Message:
        if self._whole:  # whoever waits for what comes after the body has made tokens of it, and they are admitted
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
            self._refused = True  # what else comes is read and dropped
            self.give_back()
            raise
