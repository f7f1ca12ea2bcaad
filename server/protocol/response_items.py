"""The `input` of /v1/responses as messages of a chat.

A turn of the assistant is spread over items there (reasoning, message, function calls); a chat has one message for it.
"""

from collections.abc import Callable
from typing import Any

from server.protocol.strict import field_error

MAX_ITEMS = 1 << 16
MAX_NAME = 256  # characters of the name or id of a call
# Type of a part -> the field with its text. Each is allowed to every role: clients send back what they got.
TEXT_OF_PART = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# `parsed` is what openai-python adds to an answer, as it adds `parsed_arguments` to a call.
PART_FIELDS = frozenset({"type", "text", "refusal", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
ITEM_FIELDS = frozenset({"type", "id", "status"})  # `id` and `status` are those of the answer that it came with
STATUSES = ("completed", "incomplete", "in_progress")
PHASES = ("commentary", "final_answer")
DIRECT = {"type": "direct"}  # the caller of what no program called
ROLES = ("user", "assistant", "system", "developer")

ChatMessage = dict[str, Any]


def chat_messages(items: Any) -> list[ChatMessage]:
    """Messages as the body of a chat request has them; a string is one of the user. Errors name the item."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise field_error("invalid_type", "must be a string or a list of items")
    if not 1 <= len(items) <= MAX_ITEMS:
        raise field_error("invalid_value", f"must hold 1 to {MAX_ITEMS} items")
    messages: list[ChatMessage] = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise field_error("invalid_type", "must be an object", i)
        fields = {name: value for name, value in item.items() if value is not None}
        kind = fields.get("type", "message" if "role" in fields else None)
        read = READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise _unknown_kind(kind, i)
        _check_head(fields, i)
        read(messages, fields, i)
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # of an answer that ended with its reasoning
    return messages


def with_instructions(instructions: str | None, messages: list[ChatMessage]) -> list[ChatMessage]:
    """The instructions before everything. Those of the system or developer that follow at once go into the same
    message, after a blank line: many templates know one such message only."""
    if instructions is None:
        return messages
    first = messages[0] if messages else {"role": ""}
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def turns(messages: list[ChatMessage]) -> list[int]:
    """Where each turn starts: at a message of the user that follows one of another role, or nothing."""
    roles = ["", *[message["role"] for message in messages]]
    return [i for i, role in enumerate(roles[1:]) if role == "user" and roles[i] != "user"]


def _unknown_kind(kind: Any, i: int) -> Exception:
    if kind is None:
        return field_error("missing_required_parameter", "is required", i, "type")
    if kind == "item_reference":
        text = "may not be 'item_reference': this server stores nothing, so send the item itself"
    else:
        text = "must be 'message', 'function_call', 'function_call_output' or 'reasoning'"
    return field_error("unsupported_value", text, i, "type")


def _check_head(fields: dict[str, Any], i: int) -> None:
    """What items of answers carry and a prompt does not need."""
    if not isinstance(fields.get("id", ""), str):
        raise field_error("invalid_type", "must be a string", i, "id")
    if fields.get("status", STATUSES[0]) not in STATUSES:
        raise field_error("invalid_value", f"must be one of {', '.join(STATUSES)}", i, "status")


def _read_message(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    _nothing_but(fields, ("role", "content", "phase"), i)
    role = fields.get("role")
    if role not in ROLES:
        raise field_error("invalid_value", f"must be one of {', '.join(ROLES)}", i, "role")
    if fields.get("phase", PHASES[0]) not in PHASES:
        raise field_error("invalid_value", f"must be one of {', '.join(PHASES)}", i, "phase")
    text = _text(_required(fields, "content", i), i, "content")
    last = messages[-1] if messages else {}
    if role == "assistant" == last.get("role") and ("content" not in last or "tool_calls" in last):
        _extend(last, "content", text)  # of the reasoning or the calls before it
    else:
        messages.append({"role": role, "content": text})


def _read_function_call(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    _nothing_but(fields, ("call_id", "name", "arguments", "caller", "parsed_arguments"), i)
    _check_caller(fields, i)
    call_id, name = (_name(fields, field, i) for field in ("call_id", "name"))
    arguments = _string(fields, "arguments", i)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    messages[-1].setdefault("tool_calls", []).append(call)


def _read_function_call_output(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    _nothing_but(fields, ("call_id", "output", "name", "caller"), i)
    _check_caller(fields, i)
    text, call_id = _text(_required(fields, "output", i), i, "output"), _string(fields, "call_id", i)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _read_reasoning(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    """Its text, or where it has none the summary. What another server has encrypted cannot be read here."""
    _nothing_but(fields, ("summary", "content", "encrypted_content"), i)
    texts = [
        _parts_text(fields.get(name, []), kind, i, name)
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
    ]
    text = texts[0] or texts[1]
    if text and messages and "tool_calls" in messages[-1]:
        _extend(messages[-1], "reasoning_content", text)
    elif text:
        messages.append({"role": "assistant", "reasoning_content": text})
    elif "encrypted_content" in fields:
        reason = "cannot be read by this server: leave the item out"
        raise field_error("unsupported_value", reason, i, "encrypted_content")


def _extend(message: ChatMessage, name: str, text: str) -> None:
    message[name] = f"{message[name]}\n{text}" if message.get(name) else text


Reader = Callable[[list[ChatMessage], dict[str, Any], int], None]
READERS: dict[str, Reader] = {
    "message": _read_message,
    "function_call": _read_function_call,
    "function_call_output": _read_function_call_output,
    "reasoning": _read_reasoning,
}


def _check_caller(fields: dict[str, Any], i: int) -> None:
    if fields.get("caller", DIRECT) != DIRECT:
        raise field_error("unsupported_value", "must be of type 'direct': no program runs on this server", i, "caller")


def _nothing_but(fields: dict[str, Any], known: tuple[str, ...], i: int) -> None:
    for name in fields:
        if name not in known and name not in ITEM_FIELDS:
            raise field_error("unknown_parameter", "is not a field of this item", i, name)


def _required(fields: dict[str, Any], name: str, i: int) -> Any:
    if name not in fields:
        raise field_error("missing_required_parameter", "is required", i, name)
    return fields[name]


def _string(fields: dict[str, Any], name: str, i: int) -> str:
    value = _required(fields, name, i)
    if not isinstance(value, str):
        raise field_error("invalid_type", "must be a string", i, name)
    return value


def _name(fields: dict[str, Any], name: str, i: int) -> str:
    value = _string(fields, name, i)
    if not 1 <= len(value) <= MAX_NAME:
        raise field_error("invalid_value", f"must have 1 to {MAX_NAME} characters", i, name)
    return value


def _text(value: Any, i: int, name: str) -> str:
    """A text, or the texts of its parts joined by newlines, as in a chat."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise field_error("invalid_type", "must be a string or a list of parts", i, name)
    return "\n".join(_part_text(part, i, name, j) for j, part in enumerate(value))


def _part_text(part: Any, *path: str | int) -> str:
    if not isinstance(part, dict):
        raise field_error("invalid_type", "must be an object", *path)
    kind = part.get("type")
    field = TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    if field is None:
        text = "must be 'input_text', 'output_text' or 'refusal': this server takes text only"
        raise field_error("unsupported_value", text, *path, "type")
    for name, value in part.items():
        if name not in PART_FIELDS and value is not None:
            raise field_error("unknown_parameter", f"is not a field of a part of type {kind}", *path, name)
    if not isinstance(part.get(field), str):
        raise field_error("invalid_type", "must be a string", *path, field)
    text = part[field]
    return str(text)


def _parts_text(parts: Any, kind: str, *path: str | int) -> str:
    if not isinstance(parts, list):
        raise field_error("invalid_type", "must be a list", *path)
    for j, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != kind or not isinstance(part.get("text"), str):
            raise field_error("invalid_value", f"must be an object with type '{kind}' and a text", *path, j)
    return "\n".join(part["text"] for part in parts)
