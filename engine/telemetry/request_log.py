"""RequestLog: reports of where the time of a request went, for the last requests that ended."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request

MAX_FINISHED = 1024
MAX_CHUNKS = 64  # in one report: a prompt of 128k tokens in steps of 2,048


class StepMeter:
    """Counts steps and their rows. The differences between two moments give the mean batch size in between."""

    __slots__ = ("num_rows", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_rows = 0

    def count(self, num_rows: int) -> None:
        self.num_steps += 1
        self.num_rows += num_rows


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens of a prompt, or recomputed tokens, in one step; `batch_size` counts the sequences of the step."""

    tokens: int
    batch_size: int


@dataclass(frozen=True)
class RequestReport:
    """The report of one request. Times are in seconds; None if the request has not reached that phase.

    queue_seconds ends with the first step, prefill_seconds with the first token, decode_seconds with the last.
    prefill_chunks holds the first MAX_CHUNKS chunks. steps and mean_batch_size describe the engine between the first
    step of this request and its end.
    """

    id: str
    state: str  # waiting, running, finished
    finish_reason: str | None
    arrived_at: float  # Unix time
    queue_seconds: float
    prefill_seconds: float | None
    decode_seconds: float | None
    total_seconds: float
    time_to_first_token_seconds: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_chunks: tuple[PrefillChunk, ...]
    num_prefill_chunks: int
    preemptions: int
    worker_restarts: int
    draft_tokens: int  # guessed ahead by speculation
    accepted_draft_tokens: int
    steps: int
    mean_batch_size: float | None


class RequestLog:
    """Reports of the last MAX_FINISHED requests that ended, each for its own tenant only.

    `listeners` are called with each request when it ends; they must not raise and must return at once.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[Request, RequestReport], None]] = []
        self._finished: OrderedDict[str, tuple[str, RequestReport]] = OrderedDict()

    def add(self, request: Request, report: RequestReport) -> None:
        """Keep the report of a request that has ended, and call the listeners."""
        self._finished[report.id] = request.tenant, report
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)
        for listener in self.listeners:
            listener(request, report)

    def find(self, request_id: str, tenant: str) -> RequestReport | None:
        """The report of a request; None if it is unknown or another tenant's."""
        owner, report = self._finished.get(request_id, ("", None))
        return report if owner == tenant else None
