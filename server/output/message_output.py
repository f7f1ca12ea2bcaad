"""The answer of /v1/messages: content blocks while they grow, and the events of a stream."""

from typing import Any

from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from server.errors import ApiError, anthropic_error
from server.http.body import encode_json
from server.intake.conversation import Conversation
from server.output.timings import Timings
from server.protocol.anthropic.request import MessagesRequest
from server.protocol.anthropic.signatures import signature_of
from server.protocol.tools import parse_arguments
from server.tools.events import Arguments, CallStart, Content, Event, Input, Reasoning

START, DELTA, STOP = b"content_block_start", b"content_block_delta", b"content_block_stop"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
# Type of a block -> (type of a delta, its field).
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def frame(kind: bytes, **fields: Any) -> bytes:
    """The SSE frame of one event."""
    return b'event: %b\ndata: {"type":"%b"%b\n\n' % (kind, kind, b"," * bool(fields) + encode_json(fields)[1:])


class MessageOutput:
    """Reads the parts of an answer into blocks, in their order; an answer without text has no block.

    With `streamed` each part yields the bytes of its events, else none. Hidden thinking goes into the signature of its
    block, so the next request brings the thinking back with the block.
    """

    def __init__(self, streamed: bool, shows_thinking: bool = True) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._streamed, self._shows_thinking = streamed, shows_thinking
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._delta_start = b""

    def feed(self, part: Event) -> bytes:
        """Add a part; returns the bytes of its events."""
        if isinstance(part, CallStart):
            call_id = "toolu_" + part.id.removeprefix("call_")
            return self._begin({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
        if isinstance(part, Arguments | Input):
            return self._extend(part.text)
        block = {"type": "text", "text": ""} if isinstance(part, Content) else {"type": "thinking", "thinking": ""}
        if isinstance(part, Reasoning):
            block["signature"] = ""  # shown thinking needs no signature
        same = self._open is not None and self._open["type"] == block["type"]
        return (b"" if same else self._begin(block)) + self._extend(part.text)

    def finish(self) -> bytes:
        """Close the last block; returns the bytes of its events."""
        if self._open is None:
            return b""
        block, text, events = self._open, "".join(self._texts), b""
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        elif self._hides(block):
            block["signature"] = signature_of(text)
            events = frame(
                DELTA, index=len(self.blocks), delta={"type": "signature_delta", "signature": block["signature"]}
            )
        else:
            block[block["type"]] = text
        self.blocks.append(block)
        self._open, self._texts = None, []
        return events + frame(STOP, index=len(self.blocks) - 1) if self._streamed else b""

    def _hides(self, block: dict[str, Any]) -> bool:
        return block["type"] == "thinking" and not self._shows_thinking

    def _begin(self, block: dict[str, Any]) -> bytes:
        events = self.finish()
        self._open, index = block, len(self.blocks)
        if not self._streamed:
            return b""
        kind, field = DELTAS[block["type"]]
        self._delta_start = b'event: %b\ndata: {"type":"%b","index":%d,"delta":{"type":"%b","%b":' % (
            (DELTA, DELTA, index, kind.encode(), field.encode())
        )
        events += frame(START, index=index, content_block=block)
        return events if index else events + PING  # Anthropic sends its first ping here

    def _extend(self, text: str) -> bytes:
        self._texts.append(text)
        if not self._streamed or (self._open is not None and self._hides(self._open)):
            return b""
        return self._delta_start + encode_json(text) + b"}}\n\n"


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; empty for a call that max_tokens cut: only a stream can show its beginning."""
    return parse_arguments(text) or {}


class MessageAnswer:
    """Reads the outputs of one sample into `result`, or into the events of a stream."""

    def __init__(
        self,
        request: MessagesRequest,
        message_id: str,
        conversation: Conversation,
        timings: Timings,
        applied_edits: list[dict[str, Any]] | None,
    ) -> None:
        self._generation, self._reader, self._timings = conversation.generation, conversation.reader(), timings
        self._return_timings = request.return_timings
        self._output = MessageOutput(request.stream, request.shows_thinking)
        self._applied_edits = applied_edits
        self._started = False
        self._finish_reason: FinishReason | None = None
        self._stop_sequence: str | None = None
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": request.model}

    def add(self, sample: CompletionOutput) -> None:
        """Read an output of the sample, for a whole answer."""
        self._read_sample(sample)

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The bytes of one output. The first event waits for the first token, which tells how much was cached."""
        events = b"" if self._started else frame(b"message_start", message=self._message())
        self._started = True
        return events + b"".join(self._read_sample(sample) for sample in output.outputs)

    def _read_sample(self, sample: CompletionOutput) -> bytes:
        events = b"".join(self._output.feed(part) for part in self._reader.feed(sample))
        if sample.finish_reason is None:
            return events
        self._finish_reason = sample.finish_reason
        self._stop_sequence = sample.stop_reason if isinstance(sample.stop_reason, str) else None
        return events + self._output.finish()

    def ending(self) -> bytes:
        """The events after the last output."""
        whole = self.result()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        rest = {name: whole[name] for name in ("usage", "context_management", "timings") if name in whole}
        return frame(b"message_delta", delta=delta, **rest) + frame(b"message_stop")

    def result(self) -> dict[str, Any]:
        """The whole message, once the generation has ended."""
        message = self._message()
        if self._applied_edits is not None:
            message["context_management"] = {"applied_edits": self._applied_edits}
        return message | {"timings": self._timings()} if self._return_timings else message

    def _message(self) -> dict[str, Any]:
        """The message so far."""
        end = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return {**self._head, "content": self._output.blocks, **end, "usage": self._usage()}

    @property
    def _stop_reason(self) -> str | None:
        if self._finish_reason is None:
            return None
        if self._finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.finish_reason == "tool_calls" else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Token counts. In Anthropic's API input_tokens leave out the cached tokens."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reader.num_reasoning_tokens},
        }


def error_event(error: ApiError) -> bytes:
    """The event of an error after the headers."""
    return frame(b"error", error=anthropic_error(error))
