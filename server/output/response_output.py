"""The output items of an answer of /v1/responses while they grow, and the events of a stream."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from server.errors import new_id
from server.http.body import encode_json
from server.output.logprobs import Entry, TokenNames, chat_content
from server.protocol.responses.encrypted_reasoning import encode_reasoning
from server.protocol.responses.response_tools import Offered
from server.tools.events import Arguments, CallStart, Content, Event, Input, Reasoning


class EventWriter:
    """Numbers the events of a stream, from 0, and keeps their frames until `flush`. Without `on` it does nothing."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._number = 0
        self._frames: list[bytes] = []

    def write(self, kind: str, **fields: Any) -> None:
        if self.on:
            self.write_raw(kind.encode(), encode_json(fields)[1:])

    def write_raw(self, kind: bytes, rest: bytes) -> None:
        """Write an event. `rest`: the JSON of all fields but the first two, without its opening brace."""
        frame = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (kind, kind, self._number, rest)
        self._frames.append(frame)
        self._number += 1

    def flush(self) -> bytes:
        """The frames since the last flush."""
        frames, self._frames = self._frames, []
        return b"".join(frames)


@dataclass(frozen=True)
class Kind:
    """A kind of item: the prefix of its id, the event for more text, and the field of the text or the type of the part
    that holds the text."""

    type: str
    id_prefix: str
    text_event: str
    field: str = "text"
    part_type: str | None = None


MESSAGE = Kind("message", "msg_", "response.output_text", part_type="output_text")
REASONING = Kind("reasoning", "rs_", "response.reasoning_text", part_type="reasoning_text")
CALL = Kind("function_call", "fc_", "response.function_call_arguments", "arguments")
CUSTOM_CALL = Kind("custom_tool_call", "ctc_", "response.custom_tool_call_input", "input")
CALLS = (CALL, CUSTOM_CALL)


class OpenItem:
    """An item that still grows. `close` writes its last events."""

    def __init__(self, kind: Kind, index: int, events: EventWriter, names: TokenNames, **fields: str) -> None:
        self._kind, self._index, self._events, self._names, self._fields = kind, index, events, names, fields
        self._id = new_id(kind.id_prefix)
        self._texts: list[str] = []
        self._entries: list[Entry] = []
        self._logprobs: msgspec.Raw | list[Any] = []  # the JSON of all entries, once the item is closed
        self._place: dict[str, Any] = {"item_id": self._id, "output_index": index}
        if kind.part_type is not None:
            self._place["content_index"] = 0
        self._delta_kind = f"{kind.text_event}.delta".encode()
        self._delta_start = encode_json(self._place)[1:-1] + b',"delta":'
        events.write("response.output_item.added", output_index=index, item=self._item("in_progress"))
        if kind.part_type is not None:
            events.write("response.content_part.added", **self._place, part=self._part())

    encrypts = False  # an item of reasoning also holds its text in the form that some clients keep

    @property
    def kind(self) -> Kind:
        return self._kind

    def extend(self, text: str, entries: list[Entry]) -> None:
        self._texts.append(text)
        self._entries += entries
        if self._events.on:
            rest = self._delta_start + encode_json(text)
            if self._kind is MESSAGE:
                rest += b',"logprobs":' + (bytes(chat_content(entries, self._names)) if entries else b"[]")
            self._events.write_raw(self._delta_kind, rest + b"}")

    def close(self, status: str) -> dict[str, Any]:
        """The whole item; `status` is completed or incomplete."""
        done: dict[str, Any] = {self._kind.field: "".join(self._texts)}
        if self._kind is MESSAGE:
            if self._entries:
                self._logprobs = chat_content(self._entries, self._names)
            done["logprobs"] = self._logprobs
        elif self._kind is CALL:
            done["name"] = self._fields["name"]
        self._events.write(f"{self._kind.text_event}.done", **self._place, **done)
        if self._kind.part_type is not None:
            self._events.write("response.content_part.done", **self._place, part=self._part())
        item = self._item(status)
        self._events.write("response.output_item.done", output_index=self._index, item=item)
        return item

    def _item(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "type": self._kind.type, "status": status, **self._fields}
        if self._kind in CALLS:
            return item | {self._kind.field: "".join(self._texts)}
        if self._kind is REASONING:
            item["summary"] = []
            if self.encrypts and status != "in_progress":
                item["encrypted_content"] = encode_reasoning("".join(self._texts))
        else:
            item["role"] = "assistant"
        return item | {"content": [] if status == "in_progress" else [self._part()]}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._kind.part_type, "text": "".join(self._texts)}
        if self._kind is MESSAGE:
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part


class ClientCall:
    """A call of a tool that the client runs. Its item holds an object, not a text, so the item comes when it is whole.

    A call that was cut cannot be read as the object: it becomes the call of a function.
    """

    def __init__(self, offered: Offered, call_id: str) -> None:
        self.kind, self.call_id = offered.kind, call_id
        self._texts: list[str] = []

    def extend(self, text: str) -> None:
        self._texts.append(text)

    @property
    def arguments(self) -> str:
        return "".join(self._texts)

    def item(self) -> dict[str, Any] | None:
        try:
            asked = json.loads(self.arguments)
            about, prefix = ITEMS[self.kind](asked), PREFIXES[self.kind]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        head = {"id": new_id(prefix), "type": f"{self.kind}_call", "status": "completed", "call_id": self.call_id}
        return head | about


def _local_shell(asked: dict[str, Any]) -> dict[str, Any]:
    more = {name: asked[name] for name in ("timeout_ms", "working_directory") if name in asked}
    return {"action": {"type": "exec", "command": asked["command"], "env": asked.get("env", {}), **more}}


def _shell(asked: dict[str, Any]) -> dict[str, Any]:
    more = {name: asked.get(name) for name in ("max_output_length", "timeout_ms")}
    return {"action": {"commands": asked["commands"], **more}}


def _apply_patch(asked: dict[str, Any]) -> dict[str, Any]:
    names = ("type", "path") if asked["type"] == "delete_file" else ("type", "path", "diff")
    return {"operation": {name: asked[name] for name in names}}


ITEMS = {"local_shell": _local_shell, "shell": _shell, "apply_patch": _apply_patch}
PREFIXES = {"local_shell": "lsh_", "shell": "sh_", "apply_patch": "apc_"}


class ResponseOutput:
    """Reads the parts of an answer into items, in their order. An answer has at least one item, if only a message
    without text."""

    def __init__(
        self,
        events: EventWriter,
        names: TokenNames,
        tools: Mapping[str, Offered] | None = None,
        encrypts_reasoning: bool = False,
    ) -> None:
        """`tools`: the offered tools, by the names that the model knows."""
        self.items: list[dict[str, Any]] = []
        self._events, self._names = events, names
        self._tools, self._encrypts = tools or {}, encrypts_reasoning
        self._open: OpenItem | None = None
        self._client_call: ClientCall | None = None

    def feed(self, part: Event, entries: list[Entry]) -> None:
        """Add a part. `entries`: the logprobs of its tokens, for text of a message."""
        if isinstance(part, CallStart):
            self._begin_call(part)
        elif isinstance(part, Arguments) and self._client_call is not None:
            self._client_call.extend(part.text)
        elif isinstance(part, Arguments):
            self._of(CALL).extend(part.text, [])
        elif isinstance(part, Input):
            self._of(CUSTOM_CALL).extend(part.text, [])
        elif isinstance(part, Reasoning):
            self._of(REASONING).extend(part.text, [])
        elif isinstance(part, Content):
            self._of(MESSAGE).extend(part.text, entries)

    def finish(self, status: str, entries: list[Entry]) -> None:
        """Close the last item with `status`: completed or incomplete. `entries`: logprobs of last tokens without
        text."""
        if self._client_call is None:
            last = self._open or self._begin(MESSAGE)
            if entries and last.kind is MESSAGE:
                last.extend("", entries)
        self._close(status)

    def _of(self, kind: Kind) -> OpenItem:
        if self._open is None or self._open.kind is not kind:
            return self._begin(kind)
        return self._open

    def _begin_call(self, part: CallStart) -> None:
        offered = self._tools.get(part.name)
        if offered is None:
            self._begin(CALL, call_id=part.id, name=part.name)
        elif offered.kind in ITEMS:
            self._close("completed")
            self._client_call = ClientCall(offered, part.id)
        else:
            namespace = {} if offered.namespace is None else {"namespace": offered.namespace}
            self._begin(CUSTOM_CALL if part.custom else CALL, call_id=part.id, name=offered.name, **namespace)

    def _begin(self, kind: Kind, **fields: str) -> OpenItem:
        self._close("completed")
        self._open = OpenItem(kind, len(self.items), self._events, self._names, **fields)
        self._open.encrypts = self._encrypts
        return self._open

    def _close_client_call(self, call: ClientCall) -> None:
        self._client_call = None
        item = call.item()
        if item is None:
            self._begin(CALL, call_id=call.call_id, name=call.kind).extend(call.arguments, [])
            return
        for kind in ("added", "done"):
            self._events.write(f"response.output_item.{kind}", output_index=len(self.items), item=item)
        self.items.append(item)

    def _close(self, status: str) -> None:
        if self._client_call is not None:
            self._close_client_call(self._client_call)
        if self._open is not None:
            self.items.append(self._open.close(status))
            self._open = None
