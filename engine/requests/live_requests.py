"""LiveRequests: registers every accepted request, hands its outputs to its stream, and ends it."""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from engine.errors import DeadlineError, InvalidRequestError, PageserveError, UnavailableError
from engine.executor.recovery import Recovery
from engine.executor.step import StepPlan, StepResult
from engine.outputs import FinishReason
from engine.request import Adapter, Request
from engine.requests.deadlines import Deadlines
from engine.requests.delivery import Delivery, FreshTokens, Vectors, give_soon
from engine.requests.live_request import Departure, LiveRequest, new_sequences
from engine.requests.queue_limits import QueueLimits
from engine.requests.stream import RequestStream
from engine.scheduling.prefetch import Prefetcher
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.request_log import RequestLog, StepMeter
from engine.telemetry.stats import EngineStats
from engine.text.tokenizer import Tokenizer

NOT_BEGUN = "The engine ended before this request began. Send it again."


class LiveRequests:
    """All requests that were accepted and have not ended, by id.

    Every way in which a request ends leads through `_retire`. Requests survive the death of a Worker, so an instance
    serves for as long as its scheduler.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prefetcher: Prefetcher | None,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        *,
        queue_limits: tuple[int, int | None],
        recovery: Recovery,
        stats: EngineStats,
        log: RequestLog,
        wake: Callable[[], None],
        hold_adapter: Callable[[str], Adapter],
        release_adapter: Callable[[Adapter], None],
    ) -> None:
        """`queue_limits` are the requests and the prompt tokens that may wait. `recovery` is told of each request that
        got a token or ended. `wake` is called when there may be something new to schedule."""
        self._scheduler = scheduler
        self._prefetcher = prefetcher
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._queue_limits = QueueLimits(*queue_limits)
        self._recovery = recovery
        self._stats = stats
        self._log = log
        self._wake = wake
        self._hold_adapter, self._release_adapter = hold_adapter, release_adapter
        self._by_id: dict[str, LiveRequest] = {}
        self._deadlines = Deadlines(self._expire)
        self._delivery = Delivery(scheduler, stats)
        self._owners = self._delivery.owners
        self._meter = StepMeter()
        self._numbers = itertools.count()  # sequence ids, which are also the order of arrival
        self._idle = asyncio.Event()
        self._idle.set()
        self.idle_since = time.monotonic()  # when the last request ended

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        """A snapshot: requests may end in the meantime."""
        return iter(list(self._by_id.values()))

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self._by_id[request_id]

    def get(self, request_id: str) -> LiveRequest | None:
        """The live request of an id; None for any other id."""
        return self._by_id.get(request_id)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be scheduled, those that wait for the disk included."""
        return self._scheduler.num_waiting + (0 if self._prefetcher is None else self._prefetcher.num_waiting)

    async def wait_until_none(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()

    def owner_of(self, seq_id: int) -> tuple[str, int]:
        """The request id of a running sequence, and the first sample that it computes."""
        live, indices = self._owners[seq_id]
        return live.request.request_id, indices[0]

    def owners_of(self, seq_ids: Iterable[int]) -> dict[str, LiveRequest]:
        """The live requests of some sequences, by id, in order; sequences that have ended are left out."""
        owners = [self._owners[seq_id][0] for seq_id in seq_ids if seq_id in self._owners]
        return {live.request.request_id: live for live in owners}

    def check_invariants(self) -> None:
        """Assert that the books hold live requests only. For tests and simulation."""
        owned = {live.request.request_id: live for live, _ in self._owners.values()}
        assert owned == self._by_id, "every live request owns a sequence, and no other request does"
        assert self._deadlines.request_ids <= self._by_id.keys() and self._idle.is_set() == (not self._by_id)

    # Arrival.

    def check_room(self, request: Request) -> None:
        """Raise QueueFullError if the queue takes no more, InvalidRequestError if the id is in use."""
        num_waiting_tokens = self._scheduler.num_waiting_tokens
        self._queue_limits.check(self.num_waiting, num_waiting_tokens, len(request.prompt_token_ids))
        if request.request_id in self._by_id:
            raise InvalidRequestError(f"A request with id {request.request_id!r} is running already.", "request_id")

    def register(self, request: Request, max_num_tokens: int) -> RequestStream:
        """Queue a request that was checked; none of its samples grows past `max_num_tokens`, prompt included. Raises
        InvalidRequestError if there is no adapter of the name that it gives."""
        adapter = self._hold_adapter(request.adapter) if request.adapter else None
        sequences = new_sequences(request, max_num_tokens, self._numbers, adapter)
        abort = partial(self.abort, request.request_id)
        live = LiveRequest(request, sequences, self._tokenizer, abort, self._stats, self._meter)
        self._by_id[request.request_id] = live
        self._idle.clear()
        if request.timeout is not None:
            self._deadlines.start(request.request_id, request.timeout)
        for number, seq in enumerate(sequences):
            self._owners[seq.seq_id] = live, live.samples_of(number)
        first, forks = live.begin(self._eos_token_ids)
        if self._prefetcher is None or not self._prefetcher.fetch_for(first, forks):
            self._scheduler.add(first, forks)
        self._wake()
        return live.stream

    # Steps.

    def plan_sent(self, plan: StepPlan, now: float) -> None:
        """Note for each request which tokens of its prompt a plan on its way to the Worker computes."""
        self._queue_limits.step_sent(now)
        num_rows = len(plan.decodes) + len(plan.chunks)
        self._meter.count(num_rows)
        for chunk in plan.chunks:
            if not chunk.num_tokens or chunk.seq_id not in self._owners:  # a fork computes no token
                continue
            live, _ = self._owners[chunk.seq_id]
            computes_prompt = live.search is None or not live.stream.num_generated_tokens  # else it is a hypothesis
            if computes_prompt:
                live.timings.observe_chunk(chunk.num_tokens, num_rows)

    def step_done(self, plan: StepPlan, now: float, more_in_flight: bool) -> None:
        """The result of a plan is back; `more_in_flight`: the Worker has another one to compute."""
        self._queue_limits.step_done(plan.num_tokens, now, more_in_flight)

    def deliver(self, result: StepResult, fresh: FreshTokens, vectors: Vectors, now: float) -> None:
        """Hand over what a result brought: the fresh tokens and vectors that the scheduler took from it."""
        plain = self._recovery.suspects_nobody
        to_give = []
        for live in self._delivery.deliver(result, fresh, vectors, now, plain=plain):
            self._recovery.clear(live.request.request_id)
            if live.num_unfinished == 0:
                self._retire(live, live.stream.finish_reason)
            if live.stream.show():
                to_give.append(live.stream)
        give_soon(to_give)

    def end_searches(self, now: float) -> bool:
        """Hand over the hypotheses of beam searches that have ended, or their error. Returns True if any has ended."""
        groups, self._scheduler.ended_groups = self._scheduler.ended_groups, []
        for group in groups:
            live, _ = self._owners[group.members[0].seq_id]
            if group.error:
                self.fail(live, InvalidRequestError(group.error, "n"))
                continue
            self._delivery.deliver_hypotheses(live, now)
            self._retire(live, live.stream.finish_reason)
            live.stream.show()
        return bool(groups)

    # From one replica to another.

    def may_leave(self, live: LiveRequest) -> bool:
        """False for a beam search, and for a request that may have killed Workers: it would kill others' Workers."""
        return live.search is None and not self._recovery.is_suspect(live.request.request_id)

    def leave(self, live: LiveRequest) -> Departure:
        """Forget a request that `may_leave`, and with which another replica goes on: its stream stays open."""
        request_id = live.request.request_id
        forks = [seq for seq in live.sequences if seq.fork_of is not None]
        head = forks[0].fork_of if forks else None
        left = [seq for seq in live.sequences if self._owners.pop(seq.seq_id, None) is not None]
        for seq in left:
            self._scheduler.finish(seq, FinishReason.ERROR)
        strikes, end = self._recovery.strikes(request_id), self._deadlines.end_of(request_id)
        self._forget(live)
        return Departure(live, [seq for seq in left if seq not in forks], head, forks, strikes, end)

    def arrive(self, departure: Departure, adapter: Adapter | None) -> None:
        """Go on with a request of another replica from its tokens."""
        live = departure.live
        request = live.request
        self._by_id[request.request_id] = live
        self._idle.clear()
        if request.timeout is not None:
            self._deadlines.start(request.request_id, request.timeout, departure.end)
        self._recovery.take_over(request.request_id, departure.strikes)
        live.stream.move(partial(self.abort, request.request_id))
        live.timings.move(self._stats, self._meter)
        waiting = {*departure.sequences, *departure.forks}
        for number, seq in enumerate(live.sequences):
            seq.adapter, seq.seq_id = adapter, next(self._numbers)  # ids of the other replica may be in use here
            if seq in waiting:
                seq.move()
                self._owners[seq.seq_id] = live, live.samples_of(number)
        for seq in departure.sequences:
            self._scheduler.add(seq, departure.forks if seq is departure.head else ())
        self._wake()

    # Early ends.

    def abort(self, request_id: str) -> None:
        """End a request in any state; its blocks are free at once. Ids of no live request are ignored."""
        live = self._by_id.get(request_id)
        if live is not None:
            self._end_early(live, FinishReason.ABORT)
            live.stream.show()
            self._wake()  # another request may get its blocks

    def fail(self, live: LiveRequest, error: PageserveError) -> None:
        """End a request with an error, which its reader gets after the outputs."""
        self._end_early(live, FinishReason.ERROR)
        live.stream.fail(error)

    def fail_all(self, error: PageserveError, *, send_again: bool) -> None:
        """The engine ends: end every request with this error. With `send_again`, those that no step has begun get an
        UnavailableError: another server may compute them."""
        for live in self:
            begun = any(seq.first_scheduled_time is not None for seq in live.sequences)
            self.fail(live, error if begun or not send_again else UnavailableError(NOT_BEGUN))

    def fail_sequences(self, errors: Mapping[int, PageserveError]) -> None:
        """End the requests of some sequences, each with its error; sequences that have ended are left out."""
        for seq_id, error in errors.items():
            if seq_id in self._owners:
                self.fail(self._owners[seq_id][0], error)

    def _expire(self, request_id: str, error: DeadlineError) -> None:
        live = self._by_id[request_id]
        waited = live.sequences[0].first_scheduled_time is None
        self._stats.requests_expired.add(1.0, ("waiting" if waited else "running",))
        self._end_early(live, FinishReason.ABORT)  # not ERROR: the computed blocks are right, others may share them
        live.stream.fail(error)
        self._wake()

    def _end_early(self, live: LiveRequest, reason: FinishReason) -> None:
        for seq in live.sequences:
            _, indices = self._owners.pop(seq.seq_id, (live, ()))  # () for a sequence that has ended
            if indices:
                if self._prefetcher is not None:
                    self._prefetcher.release(seq)
                self._scheduler.finish(seq, reason)
                seq.finish_reason = seq.finish_reason or reason  # a slot without a hypothesis has none yet
            for index in indices:
                live.stream.finish(index, "")
        self._retire(live, reason)

    def _retire(self, live: LiveRequest, reason: FinishReason) -> None:
        """Forget a request that has ended, and record how it went."""
        self._log.add(live.request, live.report(reason))
        live.timings.observe_end(reason, live.request.params, live.stream.sequences())
        self._queue_limits.request_done(live.stream.num_generated_tokens)
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        request_id = live.request.request_id
        del self._by_id[request_id]
        if (adapter := live.sequences[0].adapter) is not None:
            self._release_adapter(adapter)
        self._recovery.clear(request_id)
        self._deadlines.clear(request_id)
        if not self._by_id:
            self.idle_since = time.monotonic()
            self._idle.set()
