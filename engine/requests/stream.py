"""RequestStream: holds the outputs of one request until its reader takes them."""

import asyncio
from collections.abc import Callable

from engine.errors import PageserveError
from engine.memory.sequence import Sequence
from engine.outputs import (
    CompletionOutput,
    FinishReason,
    OutputSink,
    PromptLogprobs,
    PromptScores,
    RequestOutput,
    TokenLogprobs,
)
from engine.request import Request
from engine.text.detokenizer import Detokenizer


class _Sample:
    """One sample: the tokens and the text that the reader has not got yet."""

    __slots__ = (
        "detokenizer",
        "embedding",
        "finish_reason",
        "logprobs",
        "sequence",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer) -> None:
        self.sequence = sequence
        self.detokenizer = detokenizer
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.embedding = b""

    def pop_output(self, index: int) -> CompletionOutput | None:
        """Return the new part of the sample and forget it; None if there is nothing new."""
        if not (self.token_ids or self.text or self.finish_reason):
            return None
        wants_logprobs = self.sequence.params.logprobs is not None
        output = CompletionOutput(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            embedding=self.embedding,
        )
        self.text, self.token_ids, self.logprobs, self.finish_reason = [], [], [], None
        return output


class RequestStream:
    """Async iterator over the outputs of one request, from one reader.

    A reader that is slower than the engine gets several tokens in one output, as does one that asks for that (`group`).
    So the memory is bounded by the request's own max_tokens, and a step wakes the reader once. Call `close` in a
    `finally`: it aborts a request that still runs.
    """

    def __init__(
        self, request: Request, samples: list[tuple[Sequence, Detokenizer]], abort: Callable[[], None]
    ) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._samples = [_Sample(*sample) for sample in samples]
        self._first = self._samples[0]
        self._num_unfinished = len(samples)
        self._abort = abort
        self._error: PageserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: OutputSink | None = None
        self._gives_text = False
        self._unread = False
        self._was_read = False  # the reader has had an output
        self._exhausted = False
        self._group_size = 1  # new tokens of a sample that make an output
        self._enough = 1  # and those that make the next output
        wants_scores = request.params.prompt_logprobs is not None
        self._scores = PromptLogprobs(request.prompt_token_ids) if wants_scores else None
        self._scores_read = False

    @property
    def num_generated_tokens(self) -> int:
        if len(self._samples) == 1:  # nearly always, and for every chunk
            return self._first.sequence.num_generated_tokens
        return sum(sample.sequence.num_generated_tokens for sample in self._samples)

    @property
    def finished(self) -> bool:
        """True once the engine is done with the request; outputs may still wait to be read."""
        return self._error is not None or self._num_unfinished == 0

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises the error of a failed request after its outputs were read."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._exhausted:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pop_output()

    def group(self, num_tokens: int) -> None:
        """Let each output wait until a sample has `num_tokens` new tokens, or an end. The first output does not wait.
        To hand over an output costs several times as much as a token."""
        self._group_size = num_tokens

    def give_to(self, sink: OutputSink) -> None:
        """Let `sink` take outputs between the first and the last while the reader waits. To wake a task for each of
        hundreds of streams costs more than all else that a token costs here."""
        self._sink = sink
        single = self.plain and len(self._samples) == 1
        self._gives_text = sink.takes_text and single and self._scores is None and not self.request.prediction

    def give(self) -> None:
        """Give the unread output to the sink, or to the reader where the sink cannot take it. Harmless without an
        unread output."""
        waiter, sink = self._waiter, self._sink
        if not self._unread or waiter is None or waiter.done():  # the reader has the output, or will get it
            return
        if sink is None or not sink.ready:
            return waiter.set_result(None)
        try:
            if self._gives_text and self._num_unfinished:
                sink.take_text(self._pop_text())
            else:
                sink.take(self._pop_output())
        except Exception as error:  # as if the reader had taken it
            waiter.set_exception(error)

    def _pop_text(self) -> str:
        """The new text of the only sample, which is forgotten. An output takes 3 us more to make."""
        self._unread, self._enough = False, self._group_size
        sample = self._first
        text = sample.text
        sample.text, sample.token_ids = [], []
        return text[0] if len(text) == 1 else "".join(text)

    def _pop_output(self) -> RequestOutput:
        self._unread, self._was_read, self._enough = False, True, self._group_size
        self._exhausted = self.finished and self._error is None
        accepted, rejected = self._count_predicted() if self.request.prediction else (0, 0)
        outputs = [output for i, sample in enumerate(self._samples) if (output := sample.pop_output(i)) is not None]
        return RequestOutput(
            request_id=self.request.request_id,
            outputs=outputs,
            finished=self._exhausted,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=self._samples[0].sequence.num_cached_tokens or 0,
            prompt_logprobs=None if self._scores is None else self._pop_scores(),
            num_accepted_prediction_tokens=accepted,
            num_rejected_prediction_tokens=rejected,
        )

    def _count_predicted(self) -> tuple[int, int]:
        """Return the tokens of the prediction that were accepted and rejected; samples that share a sequence count
        once. Those behind the end of a sample are in no output, and count as rejected."""
        accepted = rejected = 0
        for seq in {sample.sequence for sample in self._samples}:
            num_behind = max(0, seq.prediction_end - seq.num_tokens)
            accepted += seq.num_accepted_prediction_tokens - num_behind
            rejected += seq.num_rejected_prediction_tokens + num_behind
        return accepted, rejected

    def _pop_scores(self) -> PromptLogprobs | None:
        """Return the logprobs of the prompt once, when they are complete: after an early end they never are."""
        if self._scores_read or self._scores is None or not self._scores.complete:
            return None
        self._scores_read = True
        return self._scores

    def close(self) -> None:
        """Abort the request if it still runs; harmless when called again."""
        if not self.finished:
            self._abort()
        self._sink = None  # it refers to this object

    # The Driver's side.

    def move(self, abort: Callable[[], None]) -> None:
        """Another replica goes on with the request, and `abort` ends it."""
        self._abort = abort

    @property
    def plain(self) -> bool:
        """True if a token that does not end a sample needs nothing but its text: no stop strings, no logprobs."""
        return self._first.sequence.params.logprobs is None and not self._first.detokenizer.has_stops

    def put_plain(self, index: int, token_id: int) -> bool:
        """Detokenize and add one token to a sample of a `plain` stream, and wake the reader: `put` and `show` in one
        call. Returns True if `give` is to be called, too."""
        sample = self._samples[index]
        sample.token_ids.append(token_id)
        detokenizer = sample.detokenizer
        text = None if detokenizer.mid_character else detokenizer.whole_texts.get(token_id)
        if text is None:
            text = detokenizer.text(token_id)
        sample.text.append(text)
        if len(sample.token_ids) < self._enough:
            return False
        self._unread = True
        if (waiter := self._waiter) is None:
            return False
        if self._sink is not None:
            return True
        if not waiter.done():  # done: the reader was cancelled
            self._waiter = None
            waiter.set_result(None)
        return False

    def detokenizer(self, index: int) -> Detokenizer:
        return self._samples[index].detokenizer

    def sequences(self) -> list[Sequence]:
        return [sample.sequence for sample in self._samples]

    @property
    def finish_reason(self) -> FinishReason:
        """The reason for the whole request, once all samples have ended: LENGTH if any of them was cut."""
        reasons = {sample.sequence.finish_reason for sample in self._samples}
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP

    def put(self, index: int, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None:
        """Add one token to a sample; `show` makes it visible."""
        sample = self._samples[index]
        sample.token_ids.append(token_id)
        if text:
            sample.text.append(text)
        if logprobs is not None:
            sample.logprobs.append(logprobs)

    def put_embedding(self, vector: bytes) -> None:
        """Add the vector of a request to embed; the reader gets it with the end of the sample."""
        self._first.embedding = vector

    def add_scores(self, scores: PromptScores) -> None:
        """Add logprobs of prompt tokens; the reader gets all of them with the first output."""
        assert self._scores is not None, "the Worker scores only prompts that ask for it"
        self._scores.add(scores)

    def finish(self, index: int, text: str) -> None:
        """End a sample whose sequence has ended; `text` is the rest that was held back."""
        sample = self._samples[index]
        if text:
            sample.text.append(text)
        self._num_unfinished -= 1
        sample.finish_reason = sample.sequence.finish_reason
        sample.stop_reason = sample.sequence.stop_reason

    def fail(self, error: PageserveError) -> None:
        """End the whole request with an error, which the reader gets after the tokens so far."""
        self._error = error
        self._wake(unread=any(sample.token_ids for sample in self._samples))

    def show(self) -> bool:
        """Wake the reader, unless the next output waits for more tokens. Returns True where `give` is to be called:
        it is neither the first nor the last output, and a sink may take it."""
        if not any(sample.finish_reason or len(sample.token_ids) >= self._enough for sample in self._samples):
            return False
        if self._sink is not None and self._was_read and not self.finished:
            self._unread = True
            return True
        self._wake(unread=True)
        return False

    def _wake(self, unread: bool) -> None:
        """Wake the reader. `unread` says whether there is an output for it, or only an error."""
        self._unread = unread
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
