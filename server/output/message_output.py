"""The content blocks of an answer of /v1/messages, as they grow, and the events that tell of it."""

from typing import Any

from server.http.body import encode_json
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
    return b'event: %b\ndata: {"type":"%b"%b\n\n' % (kind, kind, b"," * bool(fields) + encode_json(fields)[1:])


class MessageOutput:
    """Reads the parts of an answer into blocks, in their order; an answer without text has none.

    With `streamed` each part gives the bytes of its events, else none. Thinking that is not shown goes into the
    signature of its block, so that it is there when the block comes back in the next request.
    """

    def __init__(self, streamed: bool, shows_thinking: bool = True) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._streamed, self._shows_thinking = streamed, shows_thinking
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._delta_start = b""

    def take(self, part: Event) -> bytes:
        if isinstance(part, CallStart):
            call_id = "toolu_" + part.id.removeprefix("call_")
            return self._begin({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
        if isinstance(part, Arguments | Input):
            return self._extend(part.text)
        block = {"type": "text", "text": ""} if isinstance(part, Content) else {"type": "thinking", "thinking": ""}
        if isinstance(part, Reasoning):
            block["signature"] = ""  # of what is shown
        same = self._open is not None and self._open["type"] == block["type"]
        return (b"" if same else self._begin(block)) + self._extend(part.text)

    def finish(self) -> bytes:
        """Close the last block."""
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
        return events if index else events + PING  # where Anthropic sends its first one

    def _extend(self, text: str) -> bytes:
        self._texts.append(text)
        if not self._streamed or (self._open is not None and self._hides(self._open)):
            return b""
        return self._delta_start + encode_json(text) + b"}}\n\n"


def _arguments(text: str) -> dict[str, Any]:
    """Of a call; nothing of one that max_tokens cut, whose beginning only a stream can tell."""
    return parse_arguments(text) or {}
