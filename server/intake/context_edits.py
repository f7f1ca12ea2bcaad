"""Context editing on /v1/messages: older thinking and tool results are cut from a prompt before the model sees it.

Anthropic's `context_management`, server/protocol/anthropic/context_management.py. An edit works on the messages of the
chat and is applied only where the prompt has fewer tokens afterwards; what it cleared is the difference.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from server.context import Served
from server.http.body import convert
from server.intake.prompts import tokenize_chat, tokenize_long_chat
from server.protocol import ChatCompletionRequest
from server.protocol.anthropic.context_management import ClearThinking, ClearToolUses, Edit
from server.protocol.anthropic.request import MessagesPrompt

PLACEHOLDER = "[Old tool result cleared]"
ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class EditedPrompt:
    """`applied` is None where no edits were asked for; `num_original_tokens` is the length before them."""

    chat: ChatCompletionRequest
    token_ids: list[int]
    num_original_tokens: int
    applied: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Cut:
    """Messages without what an edit clears; `count` is of turns of thinking, or of tool uses."""

    messages: list[ChatMessage]
    count: int


async def edited_prompt(served: Served, request: MessagesPrompt, tenant: str) -> EditedPrompt:
    """The prompt of a message after its edits. An edit without anything to cut costs nothing.

    Tokens are counted beyond the context, too: agents read in the refusal how much a prompt has to lose.
    """
    chat, messages, ids = await convert(served, tenant, request.to_chat), request.history.messages, None
    num_original, applied = 0, []
    for edit in request.edits:
        cut = cut_by(edit, messages)
        if cut is None:
            continue
        if ids is None:  # the first to need a count: it may be that of a prompt that fits only once it is cut
            ids = await tokenize_long_chat(served, chat, tenant)
            num_original = len(ids)
        if not _is_triggered(edit, len(ids), messages):
            continue
        shorter = await convert(served, tenant, partial(request.to_chat, cut.messages))
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
    """None where there is nothing to cut."""
    cut = _cut_thinking(edit, messages) if isinstance(edit, ClearThinking) else _cut_tool_uses(edit, messages)
    return cut if cut.count else None


def _is_triggered(edit: Edit, num_tokens: int, messages: list[ChatMessage]) -> bool:
    if isinstance(edit, ClearThinking):
        return True
    amount = num_tokens if edit.trigger.type == "input_tokens" else sum(map(_is_result, messages))
    return amount > edit.trigger.value


def _least(edit: Edit) -> int:
    """Fewest tokens that the edit must clear to be applied."""
    wanted = edit.clear_at_least if isinstance(edit, ClearToolUses) else None
    return 1 if wanted is None else max(1, wanted.value)


def _is_result(message: ChatMessage) -> bool:
    return bool(message["role"] == "tool")


def _cut_thinking(edit: ClearThinking, messages: list[ChatMessage]) -> Cut:
    """A turn of the assistant goes on over the results of its tools, until the user says something."""
    turns: list[list[int]] = [[]]  # of each turn the places of the messages that hold thinking
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
    """A result stays that is no longer than what would stand for it."""
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
