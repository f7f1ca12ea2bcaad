"""Renders conversations with tools for chat templates. A template without support for tools gets a preamble."""

import hashlib
import json
import re
import string
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from engine.errors import InvalidRequestError
from engine.text.chat_template import ChatTemplate
from server.protocol.chat_message import Message
from server.protocol.tools import CustomCallOfHistory, CustomTool, Tool, ToolCallOfHistory
from server.tools.calls.call_body import Written
from server.tools.calls.xml_calls import WHOLE
from server.tools.formats import ToolFormat, ToolUse

# Part of the system message for templates without support for tools. {tools}: one JSON object per line.
PREAMBLE = """\
You can call functions to help with what the user asks. The functions, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, write nothing but its name and {arguments}, in this form:
{example}
What it returns comes back between <tool_response> and </tool_response>."""
EXAMPLE = ("the-name", {"a-parameter": "its value"})
# Templates that may recognise an assistant's calls by content being none. Other templates append to the content or
# search it, also those that ask whether the reasoning_content is none. The pattern starts with a word: that search is
# fast.
CONTENT_IS_NONE = re.compile(r"content(?<!\wcontent)(['\"]\s*\])?\s+is\s+(not\s+)?none")
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
SYSTEM = ("system", "developer")
UNKNOWN_TOOL = "tool"  # name of the tool in a result that refers to no call
LETTERS_AND_DIGITS = string.ascii_letters + string.digits

Rendered = tuple[list[dict[str, Any]], dict[str, Any]]  # messages and variables of a template


def with_tools(
    template: ChatTemplate,
    use: ToolUse,
    messages: Sequence[Message],
    tools: Sequence[Tool | CustomTool],
    has_developer: bool,
    alternate: bool = False,
) -> Rendered:
    """Returns the template's messages and variables for a conversation with tools or with calls of earlier turns.

    `alternate`: results that become messages of the user form one turn with the user's messages next to them.
    """
    messages = _in_order_of_calls(messages)
    if not use.form.several_shown:
        messages = _one_call_each(messages)
    if use.in_template:
        listed = {"tools": [_listed(tool, use.form) for tool in tools]} if tools else {}
        return _in_transformers_form(template, use.form, messages, has_developer), listed
    plain = _joined([_as_text(message, use.form, has_developer) for message in messages], messages, alternate)
    return _with_preamble(template, use.form, plain, tools), {}


def _listed(tool: Tool | CustomTool, form: ToolFormat) -> dict[str, Any]:
    shown = tool.function.for_template()
    if form.needs_description:
        shown["function"]["description"] = shown["function"]["description"] or tool.function.name
    return shown


def mended(messages: Sequence[Message], has_system: bool = True) -> list[Message]:
    """The conversation in the order that strict templates require; unchanged if it already has that order.

    Each call is followed by its result, an empty one if the conversation has none. Results without a call become
    messages of the user, and so do system messages after the first message, or with `has_system` false all of them.
    Empty turns of the assistant are left out. Consecutive messages of the user, which agents send, become one.
    """
    history: list[Message] = []
    waiting: list[str] = []  # ids of calls that have no result yet
    texts: dict[int, list[str]] = {}  # place in the history -> texts that become one message of the user

    def add_user(text: str) -> None:
        if not history or history[-1].role != "user":
            history.append(_of_user(text))
        else:
            texts.setdefault(len(history) - 1, [history[-1].content]).append(text)

    def add_missing_results() -> None:
        for call_id in waiting:
            history.append(Message.model_validate({"role": "tool", "tool_call_id": call_id, "content": ""}))
        waiting.clear()

    for i, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id in waiting:
                waiting.remove(message.tool_call_id)
                history.append(message)
            else:
                add_missing_results()
                add_user(_response(message))
            continue
        add_missing_results()
        is_users = message.role == "user" or (message.role in SYSTEM and (not has_system or history))
        if is_users and (message.role != "user" or (history and history[-1].role == "user")):
            add_user(message.content)
        elif not _is_empty(message) or i == len(messages) - 1:
            history.append(message)
        waiting = [call.id for call in message.tool_calls]
    add_missing_results()
    for i, parts in texts.items():
        history[i] = _of_user("\n".join(parts))
    return history


def _of_user(text: str) -> Message:
    return Message.model_validate({"role": "user", "content": text})


def _is_empty(message: Message) -> bool:
    """True for an assistant's turn without text, calls and reasoning: max_tokens cut it off."""
    thought = message.reasoning_content or message.reasoning
    return message.role == "assistant" and not (message.content or message.tool_calls or thought)


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with consecutive results in the order of their calls: most templates show no ids to the model."""
    ordered: list[Message] = []
    places: dict[str, int] = {}  # id of a call -> its place in its message
    for are_results, run in groupby(messages, key=lambda message: message.role == "tool"):
        if are_results:
            ordered += sorted(run, key=lambda message: places.get(message.tool_call_id or "", len(places)))
            continue
        for message in run:
            ordered.append(message)
            places |= {call.id: i for i, call in enumerate(message.tool_calls or ())}
    return ordered


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The messages with each call in a message of its own, followed by its result. Text and reasoning stand in the
    message of the first call."""
    results = _results_of_several(messages)
    moved = {id(result) for found in results.values() for result in found}
    apart: list[Message] = []
    for at, message in enumerate(messages):
        if id(message) in moved:
            continue
        if len(message.tool_calls) < 2:
            apart.append(message)
            continue
        for i, call in enumerate(message.tool_calls):
            text = {} if i == 0 else {"content": "", "reasoning": None, "reasoning_content": None}
            apart.append(message.model_copy(update={"tool_calls": [call], **text}))
            apart += results.get((at, i), [])
    return apart


def _results_of_several(messages: Sequence[Message]) -> dict[tuple[int, int], list[Message]]:
    """(place of a message with several calls, place of the call in it) -> the results of the call.

    A result belongs to the last calls before it that have its id: clients use an id again in a later turn.
    """
    results: dict[tuple[int, int], list[Message]] = {}
    waiting: dict[str, list[tuple[int, int]]] = {}  # id -> the calls of the last message that has the id
    for at, message in enumerate(messages):
        if message.role == "tool":
            calls = waiting.get(message.tool_call_id or "", [])
            if calls and len(messages[calls[0][0]].tool_calls) > 1:
                results.setdefault(calls.pop(0) if len(calls) > 1 else calls[0], []).append(message)
            continue
        of_this: dict[str, list[tuple[int, int]]] = {}
        for i, call in enumerate(message.tool_calls):
            of_this.setdefault(call.id, []).append((at, i))
        waiting |= of_this
    return results


def _in_transformers_form(
    template: ChatTemplate, form: ToolFormat, messages: Sequence[Message], has_developer: bool
) -> list[dict[str, Any]]:
    """The messages in the form that transformers documents: arguments are objects, a result has the id of its call and
    the name of the function.

    Arguments that are no object are passed as text or, to a template that iterates over arguments, as one argument.
    """
    accepts_text = _accepts_text(template) if any(_has_no_object(message) for message in messages) else True
    asks_for_none = CONTENT_IS_NONE.search(template.source) and any(not m.content for m in messages if m.tool_calls)
    nothing = None if asks_for_none and _accepts_none(template) else ""
    names: dict[str, str] = {}
    rendered = []
    for message in messages:
        fields = message.for_template(has_developer)
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            fields["content"] = message.content or nothing
            if form.thought_or_text and (thought := fields.pop("reasoning_content", None)):
                fields |= {"thinking": "\n".join(filter(None, (thought, message.content))), "content": nothing}
            fields["tool_calls"] = [
                {
                    "id": _template_id(call.id, form),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _as_argument(call, accepts_text)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            fields["tool_call_id"] = _template_id(message.tool_call_id, form)
            fields.setdefault("name", names.get(message.tool_call_id, UNKNOWN_TOOL))
        rendered.append(fields)
    return rendered


def _written(call: ToolCallOfHistory | CustomCallOfHistory) -> Written:
    parsed = call.function.parsed
    return call.function.arguments if parsed is None else parsed


def _has_no_object(message: Message) -> bool:
    return any(call.function.parsed is None for call in message.tool_calls)


def _as_argument(call: ToolCallOfHistory | CustomCallOfHistory, accepts_text: bool) -> Written:
    written = _written(call)
    return {WHOLE: written} if isinstance(written, str) and not accepts_text else written


def _accepts_text(template: ChatTemplate) -> bool:
    """True if the template shows arguments that are a text. A template that iterates over names fails or drops it."""
    return _shows_call(template, "", "{trial")


def _accepts_none(template: ChatTemplate) -> bool:
    """True if the template shows calls beside a content that is none. Some ask for none, then take its length."""
    return _shows_call(template, None, {"{trial": ""})


def _shows_call(template: ChatTemplate, content: str | None, arguments: Written) -> bool:
    """True if the template shows a call with these `arguments`, in which "{trial" occurs, beside `content`."""
    call = {"id": "trial0000", "type": "function", "function": {"name": "trial", "arguments": arguments}}
    trial: list[dict[str, Any]] = [
        {"role": "user", "content": "trial"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "name": "trial", "tool_call_id": "trial0000", "content": "trial"},
    ]
    try:
        return "{trial" in template.render(trial, True, {})
    except InvalidRequestError:
        return False


def _template_id(call_id: str, form: ToolFormat) -> str:
    """The id in the form that the template accepts. Mistral's templates accept only ids of nine letters and digits: for
    other ids nine characters of a hash stand in."""
    if not form.short_ids or SHORT_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
    return "".join(LETTERS_AND_DIGITS[byte % len(LETTERS_AND_DIGITS)] for byte in digest[:9])


def _as_text(message: Message, form: ToolFormat, has_developer: bool) -> dict[str, Any]:
    """The message with its calls written into the content. A tool's result becomes a message of the user."""
    fields = message.for_template(has_developer)
    if message.role == "tool":
        return {"role": "user", "content": _response(message)}
    if message.tool_calls:
        calls = form.write([(call.function.name, _written(call)) for call in message.tool_calls])
        fields["content"] = f"{message.content}\n{calls}" if message.content else calls
    return fields


def _response(message: Message) -> str:
    return f"<tool_response>\n{message.content}\n</tool_response>"


def _joined(plain: list[dict[str, Any]], messages: Sequence[Message], alternate: bool) -> list[dict[str, Any]]:
    """The messages with consecutive tool results joined: many templates require user and assistant to alternate. With
    `alternate` all consecutive messages of the user are joined."""
    joined: list[dict[str, Any]] = []
    parts = [fields["role"] == "user" for fields in plain] if alternate else [m.role == "tool" for m in messages]
    for is_part, run in groupby(zip(plain, parts, strict=True), key=lambda pair: pair[1]):
        turns = [fields for fields, _ in run]
        if is_part:
            turns = [{**turns[0], "content": "\n".join(fields["content"] for fields in turns)}]
        joined += turns
    return joined


def _with_preamble(
    template: ChatTemplate, form: ToolFormat, messages: list[dict[str, Any]], tools: Sequence[Tool | CustomTool]
) -> list[dict[str, Any]]:
    if not tools:
        return messages
    listed = "\n".join(json.dumps(tool.function.for_template()["function"], ensure_ascii=False) for tool in tools)
    preamble = PREAMBLE.format(tools=listed, arguments=form.style.arguments_are, example=form.write([EXAMPLE]))
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{preamble}"}, *messages[1:]]
    if shows_first(template, "system"):
        return [{"role": "system", "content": preamble}, *messages]
    if first["role"] == "user":
        return [{**first, "content": f"{preamble}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "user", "content": preamble}, *messages]


def shows_first(template: ChatTemplate, role: str) -> bool:
    """True if the template shows a first message of this role, system or developer."""
    trial = [{"role": role, "content": "trial"}, {"role": "user", "content": ""}]
    try:
        return "trial" in template.render(trial, True, {})
    except InvalidRequestError:
        return False
