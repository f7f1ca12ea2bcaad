"""MessageReader: turns the text of one answer into events of reasoning, content and calls."""

from engine.outputs import CompletionOutput, FinishReason
from server.tools.call_reader import CallReader
from server.tools.custom_input import InputEvents
from server.tools.events import Content, Event, Reasoning
from server.tools.harmony import HarmonySplitter
from server.tools.reasoning import ReasoningSplitter


class MessageReader:
    """Reads the outputs of one sample, in order. It splits off the reasoning first, then reads calls from the rest."""

    def __init__(
        self,
        splitter: ReasoningSplitter | HarmonySplitter | None,
        calls: CallReader | None,
        inputs: InputEvents | None = None,
    ) -> None:
        """`splitter`, `calls`, `inputs`: None if the answer has no reasoning, no calls, no calls of custom tools."""
        self._splitter, self._calls, self._inputs = splitter, calls, inputs
        self.finish_reason: str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._splitter is None else self._splitter.num_tokens

    @property
    def unfinished(self) -> bool:
        """True if the text ended inside a call."""
        return self._calls is not None and self._calls.unfinished

    @property
    def passes(self) -> bool:
        """True if all further text is content: the reasoning is over, and there are no tools."""
        return self._calls is None and (self._splitter is None or self._splitter.done)

    def feed(self, output: CompletionOutput) -> list[Event]:
        """The new events. Sets `finish_reason` with the last output."""
        events: list[Event] = []
        pairs = [("", output.text)]
        if self._splitter is not None:
            self._splitter.count(output.token_ids)
            if not self._splitter.done:
                pairs = self._splitter.feed(output.text)
            if output.finish_reason is not None:
                pairs.append(self._splitter.finish())
        for thought, text in pairs:
            if thought:
                events.append(Reasoning(thought))
            self._read(text, events)
        if output.finish_reason is not None:
            self._finish(output.finish_reason, events)
        if self._inputs is None:
            return events
        ended = output.finish_reason is not None
        return self._inputs.feed(events) + (self._inputs.finish() if ended else [])

    def _read(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._calls is None:
            events.append(Content(text))
        else:
            events += self._calls.feed(text)

    def _finish(self, reason: FinishReason, events: list[Event]) -> None:
        self.finish_reason = reason.value
        if self._calls is None:
            return
        events += self._calls.finish(cut=reason is FinishReason.LENGTH)
        if reason is FinishReason.STOP and self._calls.num_calls and not self.unfinished:
            self.finish_reason = "tool_calls"
