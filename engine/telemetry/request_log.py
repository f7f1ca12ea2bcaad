"""RequestLog: why a request took as long as it did, told for every live one and the last that ended."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request

MAX_FINISHED = 1024
MAX_CHUNKS = 64  # of one report: a prompt of 128k tokens in steps of 2,048


class StepMeter:
    """How many steps there were, and rows in them: two counts tell the mean batch size of any stretch of time."""

    __slots__ = ("num_rows", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_rows = 0

    def count(self, num_rows: int) -> None:
        self.num_steps += 1
        self.num_rows += num_rows


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens of a prompt, or of what was computed again, in one step; `batch_size` counts the sequences of the step."""

    tokens: int
    batch_size: int


@dataclass(frozen=True)
class RequestReport:
    """One prompt and its samples. Seconds; None where it did not come to that (yet).

    queue_seconds ends with the first step, prefill_seconds with the first token, decode_seconds with the last.
    prefill_chunks holds the first MAX_CHUNKS. steps and mean_batch_size are of the engine between the first step of
    this request and its end.
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
    steps: int
    mean_batch_size: float | None


class RequestLog:
    """Reports of the last MAX_FINISHED requests that ended, each with its tenant: who else asks gets nothing.

    `listeners` hear of each when it ends; they must neither raise nor take long.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[Request, RequestReport], None]] = []
        self._finished: OrderedDict[str, tuple[str, RequestReport]] = OrderedDict()

    def add(self, request: Request, report: RequestReport) -> None:
        self._finished[report.id] = request.tenant, report
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)
        for listener in self.listeners:
            listener(request, report)

    def find(self, request_id: str, tenant: str) -> RequestReport | None:
        owner, report = self._finished.get(request_id, ("", None))
        return report if owner == tenant else None
