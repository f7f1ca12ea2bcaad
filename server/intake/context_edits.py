"""Context editing on /v1/messages: edits cut older thinking and tool results from a prompt.

These are the edits of Anthropic's `context_management` (server/protocol/anthropic/context_management.py). An edit works
on the messages of the chat and is applied only if the prompt has fewer tokens afterwards; the difference is reported.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from server.context import Served
from server.intake.prompts import tokenize_chat, tokenize_long_chat
from server.protocol import ChatCompletionRequest
from server.protocol.anthropic.context_management import ClearThinking, ClearToolUses, Edit
from server.protocol.anthropic.request import MessagesPrompt

PLACEHOLDER = "[Old tool result cleared]"
ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class EditedPrompt:
    """`applied` is None where the request has no edits; `num_original_tokens` is the length before all edits."""

    chat: ChatCompletionRequest
    token_ids: list[int]
    num_original_tokens: int
    applied: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Cut:
    """The messages after an edit; `count` is the number of cleared turns of thinking, or of cleared tool uses."""

    messages: list[ChatMessage]
    count: int


async def edited_prompt(served: Served, request: MessagesPrompt, tenant: str) -> EditedPrompt:
    """The prompt of a message after its edits. An edit that finds nothing to cut costs no tokenisation.

    Tokens beyond the context count too: agents read in the refusal how much a prompt has to lose.
    """
    chat, messages, ids = await served.convert(tenant, request.to_chat), request.history.messages, None
    num_original, applied = 0, []
    for edit in request.edits:
        cut = cut_by(edit, messages)
        if cut is None:
            continue
        if ids is None:  # the first edit that needs the count; the prompt may fit only after the edits
            ids = await tokenize_long_chat(served, chat, tenant)
            num_original = len(ids)
        if not _is_triggered(edit, len(ids), messages):
            continue
        shorter = await served.convert(tenant, partial(request.to_chat, cut.messages))
        shorter_ids = await tokenize_long_chat(served, shorter, tenant)
        cleared = len(ids) - len(shorter_ids)
        if cleared < _least(edit):
            continue
        chat, ids, messages = shorter, shorter_ids, cut.messages
        applied.append({"type": edit.type, f"cleared_{UNIT[edit.type]}": cut.count, "cleared_input_tokens": cleared})
    if ids is None:
        ids = await tokenize_chat(served, chat, tenant, counts=True)
        num_original = len(ids)
    return EditedPrompt(chat, ids, num_original, None if request.context_management is None else applied)


UNIT = {"clear_thinking_20251015": "thinking_turns", "clear_tool_uses_20250919": "tool_uses"}


def cut_by(edit: Edit, messages: list[ChatMessage]) -> Cut | None:
    """The messages after `edit`; None where the edit finds nothing to cut."""
    cut = _cut_thinking(edit, messages) if isinstance(edit, ClearThinking) else _cut_tool_uses(edit, messages)
    return cut if cut.count else None


def _is_triggered(edit: Edit, num_tokens: int, messages: list[ChatMessage]) -> bool:
    if isinstance(edit, ClearThinking):
        return True
    amount = num_tokens if edit.trigger.type == "input_tokens" else sum(map(_is_result, messages))
    return amount > edit.trigger.value


def _least(edit: Edit) -> int:
    """The number of tokens that the edit must clear to be applied."""
    wanted = edit.clear_at_least if isinstance(edit, ClearToolUses) else None
    return 1 if wanted is None else max(1, wanted.value)


def _is_result(message: ChatMessage) -> bool:
    return bool(message["role"] == "tool")


def _cut_thinking(edit: ClearThinking, messages: list[ChatMessage]) -> Cut:
    """Clear the thinking of all but the last turns. A turn of the assistant ends at the next message of the user."""
    turns: list[list[int]] = [[]]  # for each turn, the indices of the messages with thinking
    for i, message in enumerate(messages):
        if message["role"] == "user":
            turns.append([])
        elif message.get("reasoning_content"):
            turns[-1].append(i)
    thinking = [turn for turn in turns if turn]
    cleared = [] if edit.keep is None else thinking[: -edit.keep]
    places = {i for turn in cleared for i in turn}
    without = [
        {name: value for name, value in message.items() if name != "reasoning_content"} if i in places else message
        for i, message in enumerate(messages)
    ]
    return Cut(without, len(cleared))


def _cut_tool_uses(edit: ClearToolUses, messages: list[ChatMessage]) -> Cut:
    """Clear the results, and with clear_tool_inputs the arguments, of older calls. A result that is not longer than
    the placeholder stays."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    results = [i for i, message in enumerate(messages) if _is_result(message)]
    kept = edit.keep.value
    edited, inputs, count = list(messages), set(), 0
    for i in results[:-kept] if kept else results:
        call_id = messages[i]["tool_call_id"]
        name = names.get(call_id, "")
        if name in edit.exclude_tools:
            continue
        shortens = len(messages[i]["content"]) > len(PLACEHOLDER)
        if shortens:
            edited[i] = {**messages[i], "content": PLACEHOLDER}
        clears_input = edit.clears_input_of(name)
        if clears_input:
            inputs.add(call_id)
        count += shortens or clears_input
    return Cut(_without_inputs(edited, inputs), count)


def _without_inputs(messages: list[ChatMessage], call_ids: set[str]) -> list[ChatMessage]:
    def emptied(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "function": {**call["function"], "arguments": "{}"}} if call["id"] in call_ids else call

    if not call_ids:
        return messages
    return [
        {**message, "tool_calls": [emptied(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
