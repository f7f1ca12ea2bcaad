"""Shared by the generation endpoints: tokenise, admit, read the engine's outputs, notice a client that leaves."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.driver import Driver
from engine.errors import ContextLengthError, PromptSize, UnavailableError
from engine.outputs import CompletionOutput, FinishReason, PromptLogprobs, RequestOutput
from engine.request import Request
from server.errors import invalid
from server.http.api_keys import Account
from server.http.tracing import with_trace_parent
from server.output.logprobs import LogprobAligner, PackedEntries

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


def check_length(driver: Driver, num_chars: int, param: str) -> None:
    """Refuse a text that cannot fit by its characters alone, before any work is done for it."""
    limit = driver.model.max_model_len
    at_least = -(-num_chars // driver.tokenizer.max_chars_per_token)
    if at_least >= limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens; the prompt has {num_chars} characters, so at "
            f"least {at_least} tokens. Shorten it.",
            param,
            PromptSize(at_least, limit - 1, limit),
        )


def check_vocabulary(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """The Driver checks this, too; here the entry of the field `name` can be named."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        at = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise invalid(f"{name}[{at}] must be a token id of this model: 0 to {vocab_size - 1}.", f"{name}[{at}]")


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


class Collector(Protocol):
    def add(self, output: CompletionOutput) -> None: ...


class Choice:
    """One sample, collected for a response without streaming."""

    def __init__(self, text: str, aligner: LogprobAligner | None) -> None:
        self.entries = PackedEntries()
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._cumulative_logprob = 0.0
        self._num_logprobs = 0
        self._texts = [text]
        self._aligner = aligner

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """Per generated token, those of a stop included; 0 where none were asked for."""
        return self._cumulative_logprob / max(1, self._num_logprobs)

    @property
    def finished_by(self) -> str | None:
        """finish_reason as a chat says it."""
        return self.finish_reason

    def message(self) -> dict[str, Any]:
        """The message of a chat answer."""
        return {"role": "assistant", "content": self.text, "refusal": None}

    def add(self, output: CompletionOutput) -> None:
        self._texts.append(output.text)
        self.token_ids += output.token_ids
        if self._aligner is not None:
            self.entries.extend(self._aligner.take(output))
        if output.logprobs is not None:
            self._cumulative_logprob += output.cumulative_logprob or 0.0
            self._num_logprobs += len(output.logprobs)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


async def collect(generation: Generation, receive: Receive, choices: Sequence[Collector]) -> None:
    """Read a generation to its end into `choices`; raises ClientDisconnect once the client is gone."""

    async def add(prompt_index: int, output: RequestOutput) -> None:
        for sample in output.outputs:
            choices[prompt_index * generation.n + sample.index].add(sample)

    try:
        await while_connected(receive, lambda: generation.read(add))
    finally:
        generation.close()


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect once the client is gone."""
    failures: list[Exception] = []
    results: list[T] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_watch_client, receive, failures, group.cancel_scope)
        try:
            results.append(await work())
        except Exception as error:
            failures.insert(0, error)
        group.cancel_scope.cancel()
    if not results:
        raise_only(failures)
    return results[0]


def raise_only(failures: list[Exception]) -> NoReturn:
    """Raise the first of them and let go of all. An exception refers to the frames that it passes: were it still in a
    list of one of them, all that they hold would stay until the garbage collector's next long round."""
    error = failures[0]
    failures.clear()
    try:
        raise error
    finally:
        del error


async def _watch_client(receive: Receive, failures: list[Exception], scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    failures.append(ClientDisconnect())
    scope.cancel()
