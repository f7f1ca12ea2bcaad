"""RequestTimings: the times of the events of one request, for the histograms of EngineStats and its RequestReport."""

import time

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.telemetry.request_log import MAX_CHUNKS, PrefillChunk, RequestReport, StepMeter
from engine.telemetry.stats import EngineStats


class RequestTimings:
    """Made when the request arrives. Times are monotonic seconds, except for the time of day of the arrival."""

    __slots__ = (
        "_arrival",
        "_arrived_at",
        "_chunks",
        "_first_token",
        "_meter",
        "_num_chunks",
        "_num_restarts",
        "_start",
        "_stats",
        "last_tokens",
    )

    def __init__(self, stats: EngineStats, meter: StepMeter, num_samples: int) -> None:
        self._stats = stats
        self._meter = meter
        self._arrived_at = time.time()
        self._arrival = time.monotonic()
        self._first_token: float | None = None
        self._start: tuple[int, int] | None = None  # steps and rows before the first step that computes for the request
        self._chunks: list[PrefillChunk] = []
        self._num_chunks = 0
        self._num_restarts = stats.worker_restarts.values[()]
        self.last_tokens: list[float | None] = [None] * num_samples

    def move(self, stats: EngineStats, meter: StepMeter) -> None:
        """Another replica goes on with the request: its statistics and steps count from here on."""
        if self._start is not None:
            num_steps, num_rows = self._num_since_start()
            self._start = meter.num_steps - num_steps, meter.num_rows - num_rows
        num_restarts = self._stats.worker_restarts.values[()] - self._num_restarts
        self._num_restarts = stats.worker_restarts.values[()] - num_restarts
        self._stats, self._meter = stats, meter

    def observe_chunk(self, num_tokens: int, num_rows: int) -> None:
        """A step of `num_rows` sequences, which the meter has counted, computes or recomputes tokens of the prompt."""
        if self._start is None:
            self._start = self._meter.num_steps - 1, self._meter.num_rows - num_rows
        self._num_chunks += 1
        if len(self._chunks) < MAX_CHUNKS:
            self._chunks.append(PrefillChunk(num_tokens, num_rows))

    def observe_prompt(self, num_prompt_tokens: int, now: float) -> None:
        """The prompt is computed: its first token, or its embedding, came back."""
        if self._first_token is None:
            self._first_token = now
            self._stats.time_to_first_token.observe(now - self._arrival)
            self._stats.prompt_tokens.add(num_prompt_tokens)

    def observe_token(self, index: int, num_prompt_tokens: int, now: float) -> None:
        """A token of sample `index` came back."""
        stats = self._stats
        stats.generation_tokens.add()
        self.observe_prompt(num_prompt_tokens, now)
        if (last := self.last_tokens[index]) is not None and now > last:  # all tokens of a hypothesis come at once
            stats.inter_token_latency.observe(now - last)
        self.last_tokens[index] = now

    def observe_end(self, reason: FinishReason, params: SamplingParams, samples: list[Sequence]) -> None:
        """The request has ended, for any reason."""
        stats, now, num_generated = self._stats, time.monotonic(), [seq.num_generated_tokens for seq in samples]
        stats.request_success.add(1.0, (reason.value,))
        stats.e2e_latency.observe(now - self._arrival)
        stats.request_prompt_tokens.observe(samples[0].num_prompt_tokens)
        stats.request_generation_tokens.observe(sum(num_generated))
        stats.params_n.observe(params.n)
        if params.max_tokens is not None:
            stats.params_max_tokens.observe(params.max_tokens)
        scheduled = samples[0].first_scheduled_time
        stats.queue_time.observe((now if scheduled is None else scheduled) - self._arrival)
        if scheduled is not None:
            stats.inference_time.observe(now - scheduled)
            if self._first_token is not None:
                stats.prefill_time.observe(self._first_token - scheduled)
        if self._first_token is not None:
            stats.decode_time.observe(now - self._first_token)
            if max(num_generated) > 1:
                stats.time_per_output_token.observe((now - self._first_token) / (max(num_generated) - 1))

    def report(self, request_id: str, samples: list[Sequence], reason: FinishReason | None) -> RequestReport:
        """The report as of now; `reason` is None while the request is live."""
        now, first, scheduled = time.monotonic(), self._first_token, samples[0].first_scheduled_time
        num_steps, num_rows = self._num_since_start()
        return RequestReport(
            id=request_id,
            state="finished" if reason else "waiting" if scheduled is None else "running",
            finish_reason=None if reason is None else reason.value,
            arrived_at=self._arrived_at,
            queue_seconds=(now if scheduled is None else scheduled) - self._arrival,
            prefill_seconds=None if scheduled is None or first is None else first - scheduled,
            decode_seconds=None if first is None else now - first,
            total_seconds=now - self._arrival,
            time_to_first_token_seconds=None if first is None else first - self._arrival,
            prompt_tokens=samples[0].num_prompt_tokens,
            cached_tokens=samples[0].num_cached_tokens or 0,
            completion_tokens=sum(seq.num_generated_tokens for seq in samples),
            prefill_chunks=tuple(self._chunks),
            num_prefill_chunks=self._num_chunks,
            preemptions=sum(seq.num_preemptions for seq in {*samples}),
            worker_restarts=int(self._stats.worker_restarts.values[()] - self._num_restarts),
            draft_tokens=sum(seq.num_drafted_tokens for seq in {*samples}),
            accepted_draft_tokens=sum(seq.num_accepted_tokens for seq in {*samples}),
            steps=num_steps,
            mean_batch_size=num_rows / num_steps if num_steps else None,
        )

    def _num_since_start(self) -> tuple[int, int]:
        if self._start is None:
            return 0, 0
        return self._meter.num_steps - self._start[0], self._meter.num_rows - self._start[1]
