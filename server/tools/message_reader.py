"""MessageReader: the text of one answer as events: what it thinks, what it says, what it calls."""

from engine.outputs import CompletionOutput, FinishReason
from server.tools.call_reader import CallReader
from server.tools.custom_input import InputEvents
from server.tools.events import Content, Event, Reasoning
from server.tools.reasoning import ReasoningSplitter


class MessageReader:
    """`feed` each output of one sample in turn. First the thinking is split off, then calls are looked for."""

    def __init__(
        self, splitter: ReasoningSplitter | None, calls: CallReader | None, inputs: InputEvents | None = None
    ) -> None:
        """`inputs`: where some tools are custom."""
        self._splitter, self._calls, self._inputs = splitter, calls, inputs
        self.finish_reason: str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._splitter is None else self._splitter.num_tokens

    @property
    def unfinished(self) -> bool:
        """Whether it ended within a call."""
        return self._calls is not None and self._calls.unfinished

    @property
    def passes(self) -> bool:
        """Whether whatever comes is content, as it is: the thinking is over, and there are no tools."""
        return self._calls is None and (self._splitter is None or self._splitter.done)

    def feed(self, output: CompletionOutput) -> list[Event]:
        """What is new; `finish_reason` is set with the last."""
        events: list[Event] = []
        text = output.text
        if self._splitter is not None:
            self._splitter.count(output.token_ids)
            if not self._splitter.done:
                text = self._split(*self._splitter.feed(text), events)
        self._read(text, events)
        if output.finish_reason is not None:
            if self._splitter is not None:
                self._read(self._split(*self._splitter.finish(), events), events)
            self._finish(output.finish_reason, events)
        if self._inputs is None:
            return events
        ended = output.finish_reason is not None
        return self._inputs.feed(events) + (self._inputs.finish() if ended else [])

    def _split(self, thought: str, text: str, events: list[Event]) -> str:
        if thought:
            events.append(Reasoning(thought))
        return text

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
