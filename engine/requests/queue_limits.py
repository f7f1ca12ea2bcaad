"""QueueLimits: how much may wait, and when a client that is turned away should come again."""

import math

from engine.errors import QueueFullError

RATE_SECONDS = 10.0  # what the measured rate looks back on; idle time does not count
MIN_RETRY, MAX_RETRY = 1.0, 60.0  # seconds
FIRST_RATE = 1000.0  # tokens per second, before anything was measured
FIRST_OUTPUT = 100.0  # tokens generated for a request, likewise


class QueueLimits:
    """Bounds the requests that wait, and their prompts in tokens (None: not bounded).

    Retry-After is the work that waits over the rate at which the engine was seen to work: both in tokens, those of the
    prompts and those that are yet to be generated, which is taken to be what recent requests generated.
    """

    def __init__(self, max_requests: int, max_tokens: int | None = None) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._tokens = self._seconds = 0.0  # of recent steps; the older, the less they count
        self._output = FIRST_OUTPUT
        self._busy_since: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else FIRST_RATE

    def check(self, num_requests: int, num_tokens: int, num_new_tokens: int) -> None:
        """QueueFullError unless a request of `num_new_tokens` may wait, too.

        One that is longer than `max_tokens` may wait alone: what can be served at all must be served at some time.
        """
        if num_requests >= self.max_requests:
            limit, message = "requests", f"{num_requests} requests are waiting already. Try again later."
        elif self.max_tokens is not None and num_tokens and num_tokens + num_new_tokens > self.max_tokens:
            limit, message = "tokens", f"Prompts of {num_tokens} tokens are waiting already. Try again later."
        else:
            return
        raise QueueFullError(message, self.retry_after(num_requests, num_tokens), limit)

    def retry_after(self, num_requests: int, num_tokens: int) -> float:
        """Seconds until what waits is worked off."""
        work = num_tokens + num_requests * self._output
        return min(MAX_RETRY, max(MIN_RETRY, work / max(self.tokens_per_second, 1e-3)))

    def step_sent(self, now: float) -> None:
        if self._busy_since is None:
            self._busy_since = now

    def step_done(self, num_tokens: int, now: float, more_in_flight: bool) -> None:
        """A step of `num_tokens` came back; the time since the one before, or since it was sent, was its own."""
        seconds = now - self._busy_since if self._busy_since is not None else 0.0
        self._busy_since = now if more_in_flight else None
        keep = math.exp(-seconds / RATE_SECONDS)
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + seconds

    def request_done(self, num_generated: int) -> None:
        self._output += 0.1 * (num_generated - self._output)
