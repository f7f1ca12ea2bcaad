"""QueueLimits: bounds the queue, and estimates when a refused client should try again."""

import math

from engine.errors import QueueFullError

RATE_SECONDS = 10.0  # the measured rate covers about so much busy time
MIN_RETRY, MAX_RETRY = 1.0, 60.0  # seconds
FIRST_RATE = 1000.0  # tokens per second, assumed before any step was measured
FIRST_OUTPUT = 100.0  # generated tokens per request, assumed before any request has ended


class QueueLimits:
    """Bounds the number of waiting requests, and the sum of their prompt tokens (None: not bounded).

    Retry-After is the waiting work divided by the measured rate of the engine, in tokens. The work of a request is its
    prompt and as many generated tokens as recent requests had on average.
    """

    def __init__(self, max_requests: int, max_tokens: int | None = None) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._tokens = self._seconds = 0.0  # sums over recent steps, which decay with time
        self._output = FIRST_OUTPUT
        self._busy_since: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else FIRST_RATE

    def check(self, num_requests: int, num_tokens: int, num_new_tokens: int) -> None:
        """Raise QueueFullError unless a request with a prompt of `num_new_tokens` may join the queue.

        A prompt longer than `max_tokens` may wait alone: a request that fits the model must be served at some time.
        """
        if num_requests >= self.max_requests:
            limit, message = "requests", f"{num_requests} requests are waiting already. Try again later."
        elif self.max_tokens is not None and num_tokens and num_tokens + num_new_tokens > self.max_tokens:
            limit, message = "tokens", f"Prompts of {num_tokens} tokens are waiting already. Try again later."
        else:
            return
        raise QueueFullError(message, self.retry_after(num_requests, num_tokens), limit)

    def retry_after(self, num_requests: int, num_tokens: int) -> float:
        """Estimated seconds until the waiting requests are done."""
        work = num_tokens + num_requests * self._output
        return min(MAX_RETRY, max(MIN_RETRY, work / max(self.tokens_per_second, 1e-3)))

    def step_sent(self, now: float) -> None:
        """A plan was sent to the Worker; `now` is in monotonic seconds."""
        if self._busy_since is None:
            self._busy_since = now

    def step_done(self, num_tokens: int, now: float, more_in_flight: bool) -> None:
        """The result of a step of `num_tokens` is back. The step took the time since the result before, or since it was
        sent."""
        seconds = now - self._busy_since if self._busy_since is not None else 0.0
        self._busy_since = now if more_in_flight else None
        keep = math.exp(-seconds / RATE_SECONDS)
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + seconds

    def request_done(self, num_generated: int) -> None:
        """A request has ended: its tokens update the average."""
        self._output += 0.1 * (num_generated - self._output)
