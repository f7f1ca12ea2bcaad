"""Shared by the generation endpoints: tokenise, admit, read the engine's outputs, notice a client that leaves."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import anyio

from engine.driver import Driver
from engine.errors import UnavailableError
from engine.outputs import FinishReason, PromptLogprobs, RequestOutput
from engine.request import Request
from server.http.api_keys import Account
from server.http.tracing import with_trace_parent

T = TypeVar("T")
PromptHandler = Callable[[int, PromptLogprobs], Awaitable[None]]
OutputHandler = Callable[[int, RequestOutput], Awaitable[None]]


class OutputStream(Protocol):
    """The part of engine.driver's RequestStream that the server uses."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_generated_tokens(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def close(self) -> None: ...


class Generation:
    """The engine requests behind one HTTP request: one per prompt, each with n samples. The owner must `close` it."""

    def __init__(self, streams: list[OutputStream], n: int, account: Account | None = None) -> None:
        self.n = n
        self.num_truncated: int | None = None  # prompt tokens, where truncation was asked for
        self._streams = streams
        self._account = account
        self.on_prompt_logprobs: PromptHandler | None = None
        self.num_reasoning_tokens: Callable[[], int] | None = None  # where reasoning is told from the rest
        self._latest: list[RequestOutput | None] = [None] * len(streams)

    @classmethod
    def admit(
        cls, driver: Driver, requests: list[Request], account: Account | None = None, timeout: float | None = None
    ) -> "Generation":
        """Queue all of them or none; none lives longer than `timeout` seconds.

        `account` is charged for the prompts now, for what is generated at the end.
        """
        streams: list[OutputStream] = []
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        if account is not None:
            account.limiter.check_tokens(num_tokens)
        try:
            for request in requests:
                request = request if account is None else account.sign(request)
                request = request if timeout is None else dataclasses.replace(request, timeout=timeout)
                streams.append(driver.generate(with_trace_parent(request)))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        if account is not None:
            account.limiter.use_tokens(num_tokens)
        return cls(streams, requests[0].params.n, account)

    def close(self) -> None:
        """Abort whatever has not finished; idempotent."""
        for stream in self._streams:
            stream.close()
        if self._account is not None:
            self._account.limiter.use_tokens(sum(stream.num_generated_tokens for stream in self._streams))
            self._account = None

    async def read(self, on_output: OutputHandler) -> None:
        """Hand over every output with the index of its prompt until all have finished.

        The first error ends the rest and is raised. Prompts are read side by side, so their outputs interleave.
        """
        if len(self._streams) == 1:
            return await self._read_one(0, on_output)
        failures: list[Exception] = []

        async def read_guarded(i: int) -> None:
            try:
                await self._read_one(i, on_output)
            except Exception as error:  # a task group would wrap it
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for i in range(len(self._streams)):
                group.start_soon(read_guarded, i)
        if failures:
            raise_only(failures)

    async def _read_one(self, i: int, on_output: OutputHandler) -> None:
        early = (FinishReason.ABORT, FinishReason.ERROR)
        ended_early = False
        async for output in self._streams[i]:
            self._latest[i] = output
            if output.prompt_logprobs is not None and self.on_prompt_logprobs is not None:
                await self.on_prompt_logprobs(i, output.prompt_logprobs)
            if any(sample.finish_reason in early for sample in output.outputs):
                ended_early = True  # the stream raises the cause next, if it has one; a client never sees such a reason
            else:
                await on_output(i, output)
        if ended_early:
            raise UnavailableError("The server ended this request before it was finished.")

    def usage(self) -> dict[str, Any]:
        """Token counts over all prompts and samples; a prompt counts once, however many samples it has."""
        latest = [output for output in self._latest if output is not None]
        prompt = sum(stream.num_prompt_tokens for stream in self._streams)
        completion = sum(output.num_generated_tokens for output in latest)
        reasoning = self.num_reasoning_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in latest)}
            | ({} if self.num_truncated is None else {"truncated_tokens": self.num_truncated}),
            **({} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning()}}),
        }


def raise_only(failures: list[Exception]) -> NoReturn:
    """Raise the first of them and let go of all. An exception refers to the frames that it passes: were it still in a
    list of one of them, all that they hold would stay until the garbage collector's next long round."""
    error = failures[0]
    failures.clear()
    try:
        raise error
    finally:
        del error
