"""Turns of very many parts: each text is joined once, for all other large bodies wait for this one."""

import time
from collections.abc import Callable

import pytest

from server.protocol import ChatCompletionRequest, parse_request
from server.protocol.anthropic.request import MessagesRequest
from server.protocol.responses.items import read_items
from server.tools.custom_input import InputReader
from server.tools.rendering import mended
from tests.server.tools.rendered import prompt_of
from tests.server.tools.templates import PLAIN

PART = "a" * 180
COUNT = 60_000
CPU_SECONDS = 4.0  # of this thread: 0.8 at most, and 8 or more where each part copies the text before it
USER = {"role": "user", "content": "Weather?"}
TURN_OF_USER = {"role": "user", "content": PART}
RESULT = {"role": "tool", "tool_call_id": "x", "content": PART}
CALL = {"type": "function_call", "call_id": "x", "name": "get", "arguments": "{}"}


def turns(*messages: dict) -> list[dict]:
    return parse_request(MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [*messages]}).history.messages


def blocks(kind: str, count: int) -> list[dict]:
    return turns(USER, {"role": "assistant", "content": [{"type": kind, kind: PART}] * count})


def reasoning(count: int) -> list[dict]:
    return items(CALL, *[{"type": "reasoning", "summary": [{"type": "summary_text", "text": PART}]}] * count)


def chat(*messages: dict) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, {"model": "m", "messages": [*messages]})


def items(*items: dict) -> list[dict]:
    return read_items(list(items)).messages


JOINED: dict[str, tuple[Callable[[int], str], str]] = {
    "turns of the user": (lambda n: turns(*[TURN_OF_USER] * n)[0]["content"], "\n"),
    "turns of the assistant": (lambda n: turns(USER, *[{**TURN_OF_USER, "role": "assistant"}] * n)[1]["content"], "\n"),
    "blocks of text": (lambda n: blocks("text", n)[1]["content"], "\n"),
    "blocks of thinking": (lambda n: blocks("thinking", n)[1]["reasoning_content"], ""),
    "items behind a call": (lambda n: items(CALL, *[{**TURN_OF_USER, "role": "assistant"}] * n)[0]["content"], "\n"),
    "items of reasoning": (lambda n: reasoning(n)[0]["reasoning_content"], "\n"),
    "a mended history": (lambda n: mended(chat(*[TURN_OF_USER] * n).messages)[0].content, "\n"),
}


@pytest.mark.parametrize("name", JOINED)
def test_the_parts_of_a_text_are_joined_once(name):
    read, separator = JOINED[name]
    assert read(3) == separator.join([PART] * 3)
    start = time.thread_time()
    text = read(COUNT)
    assert time.thread_time() - start < CPU_SECONDS
    assert len(text) == COUNT * len(PART) + (COUNT - 1) * len(separator)


@pytest.mark.parametrize("call", [(), (USER, {"role": "assistant", "content": "a"})], ids=["first", "later"])
def test_the_results_of_tools_in_a_row_are_joined_once(call):
    shown = f"<tool_response>\n{PART}\n</tool_response>"
    assert "\n".join([shown] * 3) in prompt_of(PLAIN, chat(*call, *[RESULT] * 3))
    start = time.thread_time()
    prompt = prompt_of(PLAIN, chat(*call, *[RESULT] * COUNT))
    assert time.thread_time() - start < CPU_SECONDS
    assert prompt.count(shown) == COUNT


def test_the_escapes_of_an_input_are_read_once():
    start = time.thread_time()
    text = InputReader(quoted=False).feed('{"input": "' + r"\n" * 600_000)
    assert time.thread_time() - start < CPU_SECONDS
    assert text == "\n" * 600_000


def test_empty_parts_at_the_beginning_of_a_text_leave_no_line_break():
    texts = [{"type": "text", "text": text} for text in ("", "", "a", "", "b")]
    assert turns(USER, {"role": "assistant", "content": texts})[1]["content"] == "a\n\nb"
    assert turns(USER, {"role": "assistant", "content": texts[:2]})[1]["content"] == ""
    assert turns(*[{"role": "user", "content": [text]} for text in texts])[0]["content"] == "\n\na\n\nb"
    said = [{"role": "assistant", "content": text["text"]} for text in texts]
    assert items(CALL, *said)[0]["content"] == "a\n\nb"
    assert items(CALL, *said[:2])[0]["content"] == "" == items(said[0])[0]["content"]
    assert "content" not in items(CALL)[0]
