"""Translates the `input` of /v1/responses into the messages of a chat request.

The API spreads a turn of the assistant over several items (reasoning, message, calls); a chat has one message for the
turn. Calls of every kind become calls of functions or custom tools, under the names that response_tools.py offers to
the model.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.protocol.field_checks import field_error, fields_of, known_fields
from server.protocol.responses.encrypted_reasoning import decode_reasoning
from server.protocol.responses.response_tools import NamespaceTool, Tool, chat_name, parse_tool
from server.protocol.tools import MAX_TOOLS, listed
from server.protocol.translated import add_text, below, join_texts

MAX_ITEMS = 1 << 16
MAX_ADDED_TOOLS = 1024  # tools that items add, including those that later ones replace
MAX_NAME = 256  # characters of the name or id of a call
# Type of a part -> the field with its text. Every role may have each: clients send back the parts of an answer.
TEXT_OF_PART = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# `parsed` is what openai-python adds to an answer, as it adds `parsed_arguments` to a call.
PART_FIELDS = frozenset({"type", "text", "refusal", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
ITEM_FIELDS = frozenset({"type", "id", "status"})  # `id` and `status` come from the answer that had the item
STATUSES = ("completed", "incomplete", "in_progress")
CALL_STATUSES = (*STATUSES, "failed")
PHASES = ("commentary", "partial_answer", "final_answer")
DIRECT = {"type": "direct"}  # `caller` of a call that the model made itself, not a program
ROLES = ("user", "assistant", "system", "developer")
SYSTEM_ROLES = ("system", "developer")
SEPARATORS = {"content": "\n", "reasoning_content": "\n"}  # between the parts of a turn's texts

ChatMessage = dict[str, Any]


# Items of tools that only other servers run. A client that changed servers still sends them; prompts omit them.
FOREIGN_ITEMS = frozenset(
    "code_interpreter_call compaction compaction_trigger computer_call computer_call_output context_compaction "
    "file_search_call image_generation_call mcp_approval_request mcp_approval_response mcp_call mcp_list_tools "
    "program program_output tool_search_call web_search_call".split()
)


@dataclass(frozen=True)
class Items:
    """The input of a request. `messages`: in the form of a chat request's body. `tools`: (path in the request, tool) of
    each tool that an item adds. `left_out`: types of the items that the prompt omits."""

    messages: list[ChatMessage]
    tools: list[tuple[str, Tool]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_items(items: Any) -> Items:
    """Reads the input; a string is a message of the user. Field errors name the item."""
    if isinstance(items, str):
        return Items([{"role": "user", "content": items}])
    if not isinstance(items, list):
        raise field_error("invalid_type", "must be a string or a list of items")
    if not 1 <= len(items) <= MAX_ITEMS:
        raise field_error("invalid_value", f"must hold 1 to {MAX_ITEMS} items")
    messages: list[ChatMessage] = []
    found = Items(messages)
    for i, item in enumerate(items):
        fields = fields_of(item, i)
        kind = fields.get("type", "message" if "role" in fields else None)
        if kind is None:
            raise field_error("missing_required_parameter", "is required", i, "type")
        if not isinstance(kind, str):
            raise field_error("invalid_type", "must be a string", i, "type")
        if kind in BRING_TOOLS:
            _read_tools(found.tools, fields, i)
            continue
        read = READERS.get(kind)
        if read is None and kind not in FOREIGN_ITEMS:
            raise _unknown_kind(kind, i)
        if read is None or _is_foreign_reasoning(fields):
            found.left_out.extend([kind] if kind not in found.left_out else [])
            continue
        _check_head(fields, i)
        read(messages, fields, i)
    join_texts(messages, SEPARATORS)
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # the answer may have ended with its reasoning
    return found


def with_instructions(instructions: str | None, messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages with the instructions in front. Leading messages of the system or developer join the instructions in
    one message, separated by blank lines: many templates accept only one such message."""
    count = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    texts = [message["content"] for message in messages[:count]]
    if instructions is None and count <= 1:
        return messages
    role = messages[0]["role"] if instructions is None or count else "system"
    texts = texts if instructions is None else [instructions, *texts]
    return [{"role": role, "content": "\n\n".join(texts)}, *messages[count:]]


def without_earlier_thoughts(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages without the reasoning that precedes the last message of the user."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    return [
        {name: part for name, part in message.items() if name != "reasoning_content" or i > last}
        for i, message in enumerate(messages)
    ]


def turns(messages: list[ChatMessage]) -> list[int]:
    """Index of the first message of each turn: a user message after one of another role, or at the start."""
    roles = ["", *[message["role"] for message in messages]]
    return [i for i, role in enumerate(roles[1:]) if role == "user" and roles[i] != "user"]


def _unknown_kind(kind: str, i: int) -> Exception:
    if kind == "item_reference":
        text = "may not be 'item_reference': this server stores nothing, so send the item itself"
    else:
        text = f"must be {listed((*READERS, *BRING_TOOLS))}"
    return field_error("unsupported_value", text, i, "type")


def _check_head(fields: dict[str, Any], i: int) -> None:
    """Checks the id and status, which items of answers have. The prompt does not use them."""
    if not isinstance(fields.get("id", ""), str):
        raise field_error("invalid_type", "must be a string", i, "id")
    if fields.get("status", STATUSES[0]) not in CALL_STATUSES:
        raise field_error("invalid_value", f"must be one of {', '.join(CALL_STATUSES)}", i, "status")


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
        add_text(last, "content", text)  # joins the reasoning or the calls before the text
    else:
        messages.append({"role": role})
        add_text(messages[-1], "content", text)


def _read_function_call(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    _nothing_but(fields, ("call_id", "name", "namespace", "arguments", "async", "caller", "parsed_arguments"), i)
    _check_caller(fields, i)
    call_id, name = _name(fields, "call_id", i), _called_name(fields, i)
    arguments = _string(fields, "arguments", i)
    _call(messages, {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _read_custom_call(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    _nothing_but(fields, ("call_id", "name", "namespace", "input", "async", "caller"), i)
    _check_caller(fields, i)
    call_id, name = _name(fields, "call_id", i), _called_name(fields, i)
    _call(messages, {"id": call_id, "type": "custom", "custom": {"name": name, "input": _string(fields, "input", i)}})


def _read_local_shell_call(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    """Older items have no call_id; their output refers to the id."""
    _nothing_but(fields, ("call_id", "action"), i)
    action = _object(fields, "action", i)
    arguments = {name: action[name] for name in LOCAL_SHELL_FIELDS if action.get(name) is not None}
    _call_of_client_tool(messages, fields, "local_shell", arguments, i)


def _read_shell_call(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    _nothing_but(fields, ("call_id", "action", "environment", "caller", "created_by"), i)
    action = _object(fields, "action", i)
    arguments = {name: action[name] for name in SHELL_FIELDS if action.get(name) is not None}
    _call_of_client_tool(messages, fields, "shell", arguments, i)


def _read_apply_patch_call(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    _nothing_but(fields, ("call_id", "operation", "caller", "created_by"), i)
    operation = _object(fields, "operation", i)
    arguments = {name: operation.get(name, "") for name in ("type", "path", "diff")}
    _call_of_client_tool(messages, fields, "apply_patch", arguments, i)


def _call_of_client_tool(
    messages: list[ChatMessage], fields: dict[str, Any], name: str, arguments: dict[str, Any], i: int
) -> None:
    call_id = _name(fields, "call_id" if "call_id" in fields else "id", i)
    text = json.dumps(arguments, ensure_ascii=False)
    _call(messages, {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})


def _call(messages: list[ChatMessage], call: dict[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    messages[-1].setdefault("tool_calls", []).append(call)


def _called_name(fields: dict[str, Any], i: int) -> str:
    name = _name(fields, "name", i)
    return chat_name(_name(fields, "namespace", i), name) if "namespace" in fields else name


def _read_call_output(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    """Reads the output of a function or a custom tool."""
    _nothing_but(fields, ("call_id", "output", "name", "namespace", "caller"), i)
    _check_caller(fields, i)
    text, call_id = _text(_required(fields, "output", i), i, "output"), _string(fields, "call_id", i)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _read_client_tool_output(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    """Reads the output of a tool that the client ran: a text, or a list with an entry per command, kept as JSON."""
    _nothing_but(fields, ("call_id", "output", "max_output_length", "caller", "created_by"), i)
    call_id = _name(fields, "call_id" if "call_id" in fields else "id", i)
    output = fields.get("output", "")
    if isinstance(output, list):
        output = json.dumps(output, ensure_ascii=False)
    if not isinstance(output, str):
        raise field_error("invalid_type", "must be a string or a list", i, "output")
    if fields["type"] == "apply_patch_call_output":
        output = f"{fields.get('status', STATUSES[0])}\n{output}".strip()
    messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _read_tools(tools: list[tuple[str, Tool]], fields: dict[str, Any], i: int) -> None:
    """Reads tools that the client adds during a conversation."""
    _nothing_but(fields, ("role", "tools", "call_id", "execution", "created_by"), i)
    if not isinstance(fields.get("tools"), list) or len(fields["tools"]) > MAX_TOOLS:
        raise field_error("invalid_type", f"must be a list of at most {MAX_TOOLS} tools", i, "tools")
    if not fields["tools"]:
        return
    count = sum(len(tool.tools) if isinstance(tool, NamespaceTool) else 1 for _, tool in tools)
    for j, tool in enumerate(fields["tools"]):
        inner = tool.get("tools") if isinstance(tool, dict) else None
        count += len(inner) if isinstance(inner, list) else 1
        if count > MAX_ADDED_TOOLS:
            raise field_error("invalid_value", f"is one too many: items may add {MAX_ADDED_TOOLS} tools", i, "tools", j)
        tools.append((f"input[{i}].tools[{j}]", below(parse_tool, tool, i, "tools", j)))


def _is_foreign_reasoning(fields: dict[str, Any]) -> bool:
    """True for reasoning that cannot be read here: another server's encrypted content, without text or summary."""
    content = fields.get("encrypted_content")
    if fields.get("type") != "reasoning" or fields.get("content") or fields.get("summary"):
        return False
    return isinstance(content, str) and decode_reasoning(content) is None


def _read_reasoning(messages: list[ChatMessage], fields: dict[str, Any], i: int) -> None:
    """Reads the reasoning: its text, else the encrypted content that this server made, else the summary."""
    _nothing_but(fields, ("summary", "content", "encrypted_content"), i)
    texts = [
        _parts_text(fields.get(name, []), kind, i, name)
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
    ]
    encrypted = fields.get("encrypted_content", "")
    if not isinstance(encrypted, str):
        raise field_error("invalid_type", "must be a string", i, "encrypted_content")
    text = texts[0] or decode_reasoning(encrypted) or texts[1]
    if not text:
        return
    if not messages or "tool_calls" not in messages[-1]:
        messages.append({"role": "assistant"})
    add_text(messages[-1], "reasoning_content", text)


Reader = Callable[[list[ChatMessage], dict[str, Any], int], None]
READERS: dict[str, Reader] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_function_call,
    "function_call_output": _read_call_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_call_output,
    "local_shell_call": _read_local_shell_call,
    "local_shell_call_output": _read_client_tool_output,
    "shell_call": _read_shell_call,
    "shell_call_output": _read_client_tool_output,
    "apply_patch_call": _read_apply_patch_call,
    "apply_patch_call_output": _read_client_tool_output,
}
BRING_TOOLS = ("additional_tools", "tool_search_output")
LOCAL_SHELL_FIELDS = ("command", "working_directory", "timeout_ms", "env")
SHELL_FIELDS = ("commands", "timeout_ms", "max_output_length")


def _check_caller(fields: dict[str, Any], i: int) -> None:
    if fields.get("caller", DIRECT) != DIRECT:
        raise field_error("unsupported_value", "must be of type 'direct': no program runs on this server", i, "caller")


def _nothing_but(fields: dict[str, Any], known: tuple[str, ...], i: int) -> None:
    known_fields(fields, {*known, *ITEM_FIELDS}, i, text="is not a field of this item")


def _required(fields: dict[str, Any], name: str, i: int) -> Any:
    if name not in fields:
        raise field_error("missing_required_parameter", "is required", i, name)
    return fields[name]


def _string(fields: dict[str, Any], name: str, i: int) -> str:
    value = _required(fields, name, i)
    if not isinstance(value, str):
        raise field_error("invalid_type", "must be a string", i, name)
    return value


def _object(fields: dict[str, Any], name: str, i: int) -> dict[str, Any]:
    value = _required(fields, name, i)
    if not isinstance(value, dict):
        raise field_error("invalid_type", "must be an object", i, name)
    return value


def _name(fields: dict[str, Any], name: str, i: int) -> str:
    value = _string(fields, name, i)
    if not 1 <= len(value) <= MAX_NAME:
        raise field_error("invalid_value", f"must have 1 to {MAX_NAME} characters", i, name)
    return value


def _text(value: Any, i: int, name: str) -> str:
    """The text `value`, or the texts of its parts joined by newlines, as in a chat."""
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
    known_fields(part, PART_FIELDS, *path, text=f"is not a field of a part of type {kind}")
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
