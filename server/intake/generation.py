"""Generation: the engine's requests behind one HTTP request, queued together and read side by side."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import anyio
import msgspec

from engine.errors import UnavailableError
from engine.outputs import FinishReason, OutputSink, PromptLogprobs, RequestOutput
from engine.replicas.engine import Engine
from engine.request import Request
from server.http.rate_limits import RateLimiter

T = TypeVar("T")
OutputHandler = Callable[[int, RequestOutput], Awaitable[None]]
PromptLogprobsHandler = Callable[[int, PromptLogprobs], Awaitable[None]]


class OutputStream(Protocol):
    """The part of engine.driver's RequestStream that the server uses."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_generated_tokens(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def group(self, num_tokens: int) -> None: ...
    def give_to(self, sink: OutputSink) -> None: ...
    def close(self) -> None: ...


class Generation:
    """One engine request per prompt, each with n samples. The owner must `close` the generation."""

    def __init__(
        self,
        streams: list[OutputStream],
        n: int,
        limiter: RateLimiter,
        num_truncated: int | None = None,
        predicted: bool = False,
    ) -> None:
        """`num_truncated`: prompt tokens that truncation cut off; None where the client asked for no truncation.
        `predicted`: the client predicted the output."""
        self.n = n
        self._streams = streams
        self._limiter: RateLimiter | None = limiter
        self._num_truncated = num_truncated
        self._predicted = predicted
        self._latest: list[RequestOutput | None] = [None] * len(streams)

    @classmethod
    def admit(
        cls, driver: Engine, requests: list[Request], limiter: RateLimiter, num_truncated: int | None = None
    ) -> "Generation":
        """Queue all requests or none. Raises what Driver.generate raises.

        `limiter` is charged for the prompts now and for the generated tokens at the end.
        """
        streams: list[OutputStream] = []
        try:
            for request in requests:
                streams.append(driver.generate(request))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        limiter.use_tokens(sum(len(request.prompt_token_ids) for request in requests))
        return cls(streams, requests[0].params.n, limiter, num_truncated, bool(requests[0].prediction))

    @property
    def num_prompts(self) -> int:
        return len(self._streams)

    def close(self) -> None:
        """Abort the requests that have not finished; idempotent."""
        for stream in self._streams:
            stream.close()
        if self._limiter is not None:
            self._limiter.use_tokens(sum(stream.num_generated_tokens for stream in self._streams))
            self._limiter = None

    def group(self, num_tokens: int) -> None:
        """Let outputs wait for `num_tokens` new tokens, as RequestStream.group says."""
        for stream in self._streams:
            stream.group(num_tokens)

    def give_to(self, sink: OutputSink) -> None:
        """Let `sink` take outputs of a single prompt, as RequestStream.give_to says; the others go to `read`."""
        if self.num_prompts == 1:
            self._streams[0].give_to(sink)

    def note(self, i: int, output: RequestOutput) -> None:
        """Count an output of prompt `i` in `usage`. `read` does so by itself."""
        self._latest[i] = output

    async def read(self, on_output: OutputHandler, on_prompt_logprobs: PromptLogprobsHandler | None = None) -> None:
        """Pass every output, with the index of its prompt, to `on_output` until all requests have finished.

        The first error ends the rest and is raised. Prompts are read side by side, so their outputs interleave.
        `on_prompt_logprobs` gets the logprobs of a prompt before `on_output` gets its first output.
        """
        if self.num_prompts == 1:
            return await self._read_one(0, on_output, on_prompt_logprobs)
        failures: list[Exception] = []

        async def read_guarded(i: int) -> None:
            try:
                await self._read_one(i, on_output, on_prompt_logprobs)
            except Exception as error:  # a task group would wrap the error
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for i in range(self.num_prompts):
                group.start_soon(read_guarded, i)
        if failures:
            raise_only(failures)

    async def _read_one(
        self, i: int, on_output: OutputHandler, on_prompt_logprobs: PromptLogprobsHandler | None
    ) -> None:
        early = (FinishReason.ABORT, FinishReason.ERROR)
        ended_early = False
        async for output in self._streams[i]:
            self.note(i, output)
            if output.prompt_logprobs is not None and on_prompt_logprobs is not None:
                await on_prompt_logprobs(i, output.prompt_logprobs)
            if any(sample.finish_reason in early for sample in output.outputs):
                ended_early = True  # if the stream has a cause, it raises the cause next
                output = _without_reasons(output)
            await on_output(i, output)
        if ended_early:
            raise UnavailableError("The server ended this request before it was finished.")

    def usage(self, num_reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Token counts over all prompts and samples; a prompt counts once, however many samples it has.

        `num_reasoning_tokens`: None where the server does not tell reasoning from the rest.
        """
        latest = [output for output in self._latest if output is not None]
        prompt = sum(stream.num_prompt_tokens for stream in self._streams)
        completion = sum(output.num_generated_tokens for output in latest)
        prompt_details = {"cached_tokens": sum(output.num_cached_tokens for output in latest)}
        if self._num_truncated is not None:
            prompt_details["truncated_tokens"] = self._num_truncated
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": prompt_details,
        }
        details = {} if num_reasoning_tokens is None else {"reasoning_tokens": num_reasoning_tokens}
        if self._predicted:
            details["accepted_prediction_tokens"] = sum(output.num_accepted_prediction_tokens for output in latest)
            details["rejected_prediction_tokens"] = sum(output.num_rejected_prediction_tokens for output in latest)
        if details:
            usage["completion_tokens_details"] = details
        return usage


def _without_reasons(output: RequestOutput) -> RequestOutput:
    """The tokens of an output whose samples ended early: clients see an error in place of these reasons."""
    samples = [msgspec.structs.replace(sample, finish_reason=None) for sample in output.outputs]
    return msgspec.structs.replace(output, outputs=samples)


def raise_only(failures: list[Exception]) -> NoReturn:
    """Raise the first failure and drop all references to the others.

    An exception refers to the frames that it passes. If a list in such a frame kept the exception, all objects of these
    frames would stay in memory until the garbage collector's next full collection.
    """
    error = failures[0]
    failures.clear()
    try:
        raise error
    finally:
        del error
