"""Limits of one API key: requests and tokens per minute (token buckets), and requests at a time."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from server.errors import ApiError

Clock = Callable[[], float]


@dataclass(frozen=True)
class Limits:
    """None: no limit. Tokens are prompt tokens, cached or not, and generated tokens."""

    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


class TokenBucket:
    """A token bucket that holds at most the amount of a minute and fills evenly. It may be overdrawn; then it must fill
    up before it allows more."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._at = float(per_minute), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now
        return self._level

    def resize(self, per_minute: int) -> None:
        """Changes the rate. The amount used so far stays used."""
        used = self.per_minute - self.level
        self.per_minute, self._level = per_minute, per_minute - used

    def consume(self, amount: float) -> None:
        self._level = self.level - amount

    def seconds_until(self, amount: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if it can never hold as much; 0 if it holds it now."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60.0 / self.per_minute)


class RateLimiter:
    """Counts the use of one key against its limits. Runs on the event loop only, so it needs no locks."""

    def __init__(self, limits: Limits, clock: Clock = time.monotonic, whose: str = "this API key") -> None:
        self._clock = clock
        self._whose = whose
        self.num_running = 0
        self._seconds = 1.0  # moving average of the duration of a request, for Retry-After
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.set(limits)

    def set(self, limits: Limits) -> None:
        """Replaces the limits. The amounts used so far stay used."""
        self.limits = limits
        self._requests = self._resized(self._requests, limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, limits.tokens_per_minute)

    def begin(self) -> float:
        """Counts a request; returns its start time, which the caller passes to `end`. ApiError 429 over a limit."""
        most = self.limits.max_concurrent_requests
        if most is not None and self.num_running >= most:
            # On average, one of the running requests ends after this time.
            raise self._too_many("concurrent", f"{most} requests at a time", self._seconds / most)
        if self._tokens is not None and self._tokens.level < 1.0:
            self.check_tokens(1)
        if self._requests is not None:
            if (seconds := self._requests.seconds_until(1.0)) > 0.0:
                raise self._too_many("requests", f"{self._requests.per_minute} requests per minute", seconds)
            self._requests.consume(1.0)
        self.num_running += 1
        return self._clock()

    def end(self, begun: float) -> None:
        self.num_running -= 1
        self._seconds += 0.1 * (self._clock() - begun - self._seconds)

    def check_tokens(self, amount: int) -> None:
        """Raises ApiError 429 unless `amount` tokens may be used now. An amount over a minute's needs a full bucket."""
        if self._tokens is not None and (seconds := self._tokens.seconds_until(amount)) > 0.0:
            raise self._too_many("tokens", f"{self._tokens.per_minute} tokens per minute", seconds)

    def use_tokens(self, amount: int) -> None:
        """Counts tokens after they were used. May overdraw: the length of an answer is not known in advance."""
        if self._tokens is not None and amount:
            self._tokens.consume(amount)

    @property
    def shown(self) -> bool:
        """True if `headers` is not empty."""
        return self._requests is not None or self._tokens is not None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers for the limits that are set."""
        found = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                reset = duration(bucket.seconds_until(bucket.per_minute))
                found.append((b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute))
                found.append((b"x-ratelimit-remaining-" + name, b"%d" % max(0, int(bucket.level))))
                found.append((b"x-ratelimit-reset-" + name, reset.encode()))
        return found

    def _too_many(self, reason: str, limit: str, seconds: float) -> ApiError:
        return ApiError.retry(429, f"The limit of {self._whose} is {limit}.", seconds, reason="key_" + reason)

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if bucket is None or per_minute is None:
            return None if per_minute is None else TokenBucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket


def duration(seconds: float) -> str:
    """A duration in OpenAI's notation: 0s, 120ms, 1.5s, 6m0s."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
