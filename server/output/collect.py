"""Whole answers: outputs of a generation, collected while the client is connected."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from server.intake.generation import Generation, PromptLogprobsHandler, T
from server.output.logprobs import LogprobAligner, PackedEntries

# Numbers in an output: one for each new token and one for each alternative to it. An output costs time, and no client
# waits for the parts of a whole answer. But large parts hold up the streams of others, and their logprobs leave memory
# in pieces too small to be returned to the system: 58 MB after parts of 256 tokens with twenty alternatives each.
PART_SIZE = 256


class Collector(Protocol):
    """Collects the outputs of one sample."""

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
        """Mean over the generated tokens, with those of a stop; 0 where the engine reports no logprobs."""
        return self._cumulative_logprob / max(1, self._num_logprobs)

    @property
    def finished_by(self) -> str | None:
        """The finish_reason of a chat."""
        return self.finish_reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Thinking tokens so far; plain text has none."""
        return 0

    def message(self) -> dict[str, Any]:
        """The message of a chat answer."""
        return {"role": "assistant", "content": self.text, "refusal": None}

    def add(self, output: CompletionOutput) -> None:
        self._texts.append(output.text)
        self.token_ids += output.token_ids
        if self._aligner is not None:
            self.entries.extend(self._aligner.align(output))
        if output.logprobs is not None:
            self._cumulative_logprob += output.cumulative_logprob or 0.0
            self._num_logprobs += len(output.logprobs)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


async def collect(
    generation: Generation,
    receive: Receive,
    choices: Sequence[Collector],
    on_prompt_logprobs: PromptLogprobsHandler | None = None,
    num_logprobs: int = 0,
) -> None:
    """Read a generation to its end into `choices`; raises ClientDisconnect once the client is gone. `num_logprobs`:
    alternatives that are reported beside each token."""

    async def add(prompt_index: int, output: RequestOutput) -> None:
        for sample in output.outputs:
            choices[prompt_index * generation.n + sample.index].add(sample)

    generation.group(max(1, PART_SIZE // (1 + num_logprobs)))
    try:
        await while_connected(receive, lambda: generation.read(add, on_prompt_logprobs))
    finally:
        generation.close()


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect once the client is gone.

    Two plain tasks: a task group of anyio takes ten times as long for each request, and leaves its objects in reference
    cycles, which the garbage collector stops all streams to find.
    """
    working, leaving = asyncio.ensure_future(work()), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
        del working  # its exception refers to this frame


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
