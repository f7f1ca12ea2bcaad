"""Clients of the Driver level: they read their streams, slowly some of them, and compare with the oracle."""

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path

from engine.driver import Driver
from engine.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    PageserveError,
    QueueFullError,
    UnavailableError,
)
from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from engine.request import Request
from engine.requests.stream import RequestStream
from tests.sim.model import EOS_TOKEN_ID, Reference, mix
from tests.sim.monitor import Monitor
from tests.sim.swarm import Arrival
from tests.sim.violation import Violation, fail, require

TIMEOUT_EVERY, LONGEST_TIMEOUT = 12, 60  # one request in so many has a timeout, of up to so many seconds
GROUP_EVERY, GROUP_SIZES = 6, (2, 5, 1 << 30)  # and one in so many wants several tokens at a time


@dataclass
class Received:
    """All that one sample has sent."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, part: CompletionOutput) -> None:
        require(self.finish_reason is None, "outcome", "a sample sent something after its end")
        self.token_ids += part.token_ids
        self.text += part.text
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason

    def check(self, expected: Reference, name: str) -> None:
        """So far a prefix of what the oracle has; all of it where the sample ended by itself."""
        found = self.token_ids, self.text
        if self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            wanted = expected.token_ids, expected.text, expected.finish_reason, expected.stop_reason
            ended = (*found, self.finish_reason, self.stop_reason)
            require(ended == wanted, "outcome", f"{name} ended as {ended}, the oracle as {wanted}")
        elif expected.token_ids[: len(self.token_ids)] != self.token_ids or not expected.text.startswith(self.text):
            fail("outcome", f"{name} has sent {found}, the oracle {expected.token_ids}, {expected.text!r}")


@dataclass(eq=False)
class Client:
    arrival: Arrival
    stream: RequestStream
    samples: list[Received]
    limit: int  # tokens that it may have, when it was accepted
    deadline: float = math.inf
    aborted: bool = False
    left: bool = False
    last: RequestOutput | None = None


class Clients:
    def __init__(self, driver: Driver, monitor: Monitor) -> None:
        self.driver, self.monitor = driver, monitor
        self.by_name: dict[str, Client] = {}  # those that were accepted
        self.draining = False
        self.drain_timed_out = False

    def arrive(self, arrival: Arrival) -> list[asyncio.Task[None]]:
        """Ask for a request; the task of its reader, if it was accepted."""
        name = f"request-{arrival.index}"
        arrival = self._with_present_weights(arrival)
        drawn = mix(self.monitor.config.seed, 7 + arrival.index)
        timeout = None if drawn % TIMEOUT_EVERY else 0.5 + (drawn >> 8) % LONGEST_TIMEOUT
        request = Request(
            name,
            arrival.prompt,
            arrival.params,
            arrival.priority,
            arrival.salt,
            beam_search=arrival.beam,
            tenant=arrival.tenant,
            weight=arrival.weight,
            adapter=arrival.adapter,
            timeout=timeout,
        )
        try:
            stream = self.driver.generate(request)
        except UnavailableError as error:
            self._check_refusal(error)
            self.monitor.record(name, type(error).__name__, error.retry_after)
            return []
        except ContextLengthError as error:
            self._check_too_long(arrival, error)
            return []
        except InvalidRequestError as error:
            unknown = arrival.adapter and arrival.adapter not in self.driver.adapters
            require(bool(unknown), "refusal", f"refused without a reason: {error}")
            self.monitor.saw("refused: no such adapter")
            return []
        require(not self.draining, "refusal", "a draining engine accepted a request")
        if not self.monitor.executor.ready:
            self.monitor.saw("request sent while the Worker is started again")
        if arrival.params.max_tokens is None:
            self.monitor.max_num_tokens[arrival.index] = self.monitor.limit
        client = Client(arrival, stream, [Received() for _ in range(arrival.params.n)], self._limit_of(arrival))
        self.by_name[name] = client
        if timeout is not None:
            client.deadline = asyncio.get_running_loop().time() + timeout
        if (drawn >> 16) % GROUP_EVERY == 0:
            stream.group(GROUP_SIZES[(drawn >> 24) % len(GROUP_SIZES)])
        if arrival.params.greedy and arrival.params.n > 1 and arrival.beam is None:
            self.monitor.saw("equal greedy samples computed once")
        if arrival.index % 7 == 3 and stream.sequences()[0] in self.monitor.waits_for_disk:
            client.aborted = True
            self.driver.abort(name)
        if arrival.index % 5 == 0 and not client.aborted:
            self._ask_for_the_impossible(request)
        return [asyncio.create_task(self._read(name, client))]

    def _with_present_weights(self, arrival: Arrival) -> Arrival:
        """The request as it is answered now: the adapter of its name may have been loaded again."""
        weights = Path(self.driver.adapters.get(arrival.adapter, "")).name
        if not weights or weights == arrival.weights:
            return arrival
        self.monitor.saw("request names an adapter that was loaded again")
        arrival = arrival.with_adapter(self.monitor.config, arrival.adapter, weights)
        self.monitor.expect_instead(arrival)
        return arrival

    def _check_refusal(self, error: UnavailableError) -> None:
        if isinstance(error, QueueFullError):
            self.driver.stats_snapshot()
            waiting, limit = self.driver.stats.num_requests_waiting.value, self.monitor.config.max_queued_requests
            require(waiting >= limit, "refusal", f"the queue is full with {waiting} of {limit}")
            require(1 <= error.retry_after <= 60, "refusal", f"Retry-After: {error.retry_after}")
            self.monitor.saw("refused: queue full")
        else:
            require(self.draining, "refusal", f"refused without a reason: {error}")
            self.monitor.saw("refused: draining")

    def _check_too_long(self, arrival: Arrival, error: ContextLengthError) -> None:
        needed, limit = len(arrival.prompt) + (arrival.params.max_tokens or 1), self.monitor.limit
        require(needed > limit, "refusal", f"{needed} tokens of {limit}: {error}")
        self.monitor.saw("refused: longer than a smaller pool holds")

    def _limit_of(self, arrival: Arrival) -> int:
        return self.monitor.max_num_tokens.get(arrival.index, arrival.max_num_tokens)

    def _ask_for_the_impossible(self, request: Request) -> None:
        """An id in use, and a prompt that no pool can hold: refused at once, and nobody else notices."""
        too_long = [97] * self.monitor.config.max_model_len
        for state, attempt, error_class in (
            ("refused: id in use", request, InvalidRequestError),
            ("refused: longer than the context", Request("too-long", too_long, request.params), ContextLengthError),
        ):
            try:
                self.driver.generate(attempt)
            except QueueFullError:
                continue
            except error_class:
                self.monitor.saw(state)
            else:
                fail("refusal", f"accepted what must be {state}")

    async def _read(self, name: str, client: Client) -> None:
        try:
            await self._read_to_the_end(name, client)
        except Violation as violation:
            self.monitor.violation = self.monitor.violation or violation

    async def _read_to_the_end(self, name: str, client: Client) -> None:
        failure: PageserveError | None = None
        try:
            await self._read_outputs(name, client)
        except PageserveError as error:
            failure = error
        finally:
            if client.stream.finished:
                self.monitor.saw("client closed after the end")
            client.stream.close()
        self._check_end(name, client, failure)

    async def _read_outputs(self, name: str, client: Client) -> None:
        leave_after = client.arrival.leave_after
        async for output in client.stream:
            client.last = output
            late = asyncio.get_running_loop().time() > client.deadline
            require(client.stream.finished or not late, "deadline", f"{name} outlives its deadline")
            for part in output.outputs:
                self._take(f"{name}[{part.index}]", client, part)
            if leave_after is not None and sum(len(s.token_ids) for s in client.samples) >= leave_after:
                if not client.stream.finished:
                    client.left = True
                    self.monitor.saw("client left with tokens to come")
                return
            await asyncio.sleep(client.arrival.read_every)

    def _take(self, name: str, client: Client, part: CompletionOutput) -> None:
        sample = client.samples[part.index]
        sample.add(part)
        sample.check(self._references(client)[part.index], name)
        if len(part.token_ids) > 1:
            self.monitor.saw("slow reader got several tokens in one output")
        num_letters = sum(token_id != EOS_TOKEN_ID for token_id in sample.token_ids)
        if part.finish_reason is None and len(sample.text) < num_letters:
            self.monitor.saw("stop string held back text")

    def _references(self, client: Client) -> tuple[Reference, ...]:
        """The oracle's tokens, cut to the room that is left: a smaller pool may have taken some of it."""
        arrival = client.arrival
        limit = client.limit if arrival.beam is not None else self._limit_of(arrival)
        return arrival.references_at(self.monitor.config, limit)

    def _check_end(self, name: str, client: Client, failure: PageserveError | None) -> None:
        reasons = [sample.finish_reason for sample in client.samples]
        self.monitor.record(name, reasons, str(failure), [sample.token_ids for sample in client.samples])
        if client.left:
            return
        if isinstance(failure, DeadlineError):
            is_late = asyncio.get_running_loop().time() >= client.deadline
            require(is_late and not self.driver.is_live(name), "deadline", f"{name} ended early, or goes on: {failure}")
            self.monitor.saw("request ended at its deadline")
            return
        if failure is not None:
            index = client.arrival.index
            should = any(expected.finish_reason is FinishReason.ERROR for expected in self._references(client))
            should = should or index in self.monitor.doomed or index in self.monitor.too_large
            if client.arrival.deadly:
                self.monitor.saw("deadly request ended alone")
            require(
                should or client.arrival.deadly or self.drain_timed_out,
                "outcome",
                f"{name} failed without a reason: {failure}",
            )
            if any(sample.token_ids for sample in client.samples):
                self.monitor.saw("request failed after tokens were sent")
            return
        if client.arrival.leave_after is not None:
            return
        require(client.aborted or client.arrival.index not in self.monitor.doomed, "outcome", f"{name} did not fail")
        ended = all(reasons) and (FinishReason.ABORT in reasons) <= client.aborted
        require(ended and FinishReason.ERROR not in reasons, "outcome", f"{name} ended as {reasons}")
        if client.arrival.beam is None or not client.aborted:  # else its hypotheses count, though none was sent
            self._check_usage(name, client)

    def _check_usage(self, name: str, client: Client) -> None:
        last, num_prompt = client.last, len(client.arrival.prompt)
        assert last is not None
        found = last.finished, last.num_prompt_tokens, last.num_generated_tokens
        wanted = True, num_prompt, sum(len(sample.token_ids) for sample in client.samples)
        require(found == wanted, "usage", f"{name}: {found}, sent {wanted}")
        require(0 <= last.num_cached_tokens < num_prompt, "usage", f"{name}: {last.num_cached_tokens} tokens cached")
