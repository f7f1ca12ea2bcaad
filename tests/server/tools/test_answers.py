"""Streams of calls and reasoning, frame by frame, and that they add up to what is answered without streaming."""

import json
import random
from types import SimpleNamespace

import pytest
import tokenizers
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from tokenizers import AddedToken

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from engine.text.tokenizer import Tokenizer
from server.config import ServerConfig
from server.intake.answer_form import AnswerForm
from server.intake.form_finder import find_answer_form
from server.output.chat_messages import MessageChunks, message_choices
from server.protocol import ChatCompletionRequest, parse_request
from server.protocol import answers as described
from server.tools.formats import HERMES

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(resolve_model(EngineConfig()))
    yield tokenizer
    tokenizer.close()


def run(tokenizer, texts, opened, reason=FinishReason.STOP, seed=None):
    """(chunks, whole messages, finish reasons) of `texts`, one per sample, in pieces that `seed` cuts."""
    request = parse_request(
        ChatCompletionRequest,
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "n": len(texts), "stream": True},
    )
    form = AnswerForm(HERMES, request.tools, opened=opened)
    stream, choices = MessageChunks(request, HEAD, tokenizer, [1], form), message_choices(request, tokenizer, form)
    rng, frames, left = random.Random(seed), b"", dict(enumerate(texts))
    while left:
        i = rng.choice(list(left))
        length = len(left[i]) if seed is None else rng.randint(0, 6)
        piece, left[i] = left[i][:length], left[i][length:]
        ended = None if left[i] else reason
        output = CompletionOutput(i, piece, (1,), None, ended, None)
        frames += stream.encode(0, RequestOutput("r", [output], False, 1))
        choices[i].add(output)
        if ended:
            del left[i]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames.decode().split("\n\n")[:-1]]
    for chunk in chunks:
        described.ChatCompletionChunk.model_validate(chunk)
    return chunks, [choice.message() for choice in choices], [choice.finished_by for choice in choices]


TEXTS = [
    CALL,
    f"I look.\n{CALL}\n{CALL}",
    "<think>Hm, {x}.\n</think>\n\nYes.",
    f"<think>\nA call.</think>\n{CALL}",
    "Only text <tool_ and <tool_call>no</tool_call>.",
    "",
    "<think>no end",
]


@pytest.mark.parametrize("opened", [None, False])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_stream_adds_up_to_the_whole_message(tokenizer, seed, opened):
    chunks, messages, reasons = run(tokenizer, TEXTS, opened, seed=seed)
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    streamed = sorted(state.current_completion_snapshot.choices, key=lambda choice: choice.index)
    for choice, message, reason in zip(streamed, messages, reasons, strict=True):
        assert choice.finish_reason == reason
        got = choice.message.model_dump(exclude_none=True)
        calls = [{k: v for k, v in call.items() if k != "index"} for call in got.get("tool_calls", [])]
        wanted = [dict(call) for call in message.get("tool_calls", [])]
        for call in [*calls, *wanted]:
            call.pop("id")  # made up on each side
            call["function"].pop("parsed_arguments", None)
        assert calls == wanted
        assert got.get("content") == message["content"]
        assert got.get("reasoning_content") == message.get("reasoning_content")
    assert reasons[:2] == ["tool_calls", "tool_calls"] and reasons[4:6] == ["stop", "stop"]


def test_the_deltas_of_a_call(tokenizer):
    chunks, _, _ = run(tokenizer, [f"Well.\n{CALL}{CALL}"], None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    ids = [call["id"] for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]
    assert len(set(ids)) == 2
    expected = [{"role": "assistant", "content": "", "refusal": None}, {"content": "Well."}]
    for i, call_id in enumerate(ids):
        start = {"index": i, "id": call_id, "type": "function", "function": {"name": "f", "arguments": ""}}
        expected += [{"tool_calls": [start]}, {"tool_calls": [{"index": i, "function": {"arguments": '{"a": "b"}'}}]}]
    assert deltas == [*expected, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["tool_calls"]


def test_content_is_null_where_a_message_begins_with_a_call_or_a_thought(tokenizer):
    for text in (CALL, "<think>Hm</think>"):
        chunks, (message,), _ = run(tokenizer, [text], False)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None, "refusal": None}
        assert message["content"] is None


def test_a_cut_call_ends_with_length(tokenizer):
    chunks, (message,), (reason,) = run(tokenizer, [CALL[:50]], None, FinishReason.LENGTH, seed=1)
    assert reason == chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert CALL.find(message["tool_calls"][0]["function"]["arguments"]) > 0


def test_the_markers_inside_a_call_are_shown_where_they_are_special(tokenizer, tmp_path):
    """Text without [ARGS] would still be read, but logprobs and stop strings are of the text as the model writes it."""
    source = tokenizers.Tokenizer.from_file(str(resolve_model(EngineConfig()) / "tokenizer.json"))
    source.add_tokens([AddedToken(marker, special=True) for marker in ("[TOOL_CALLS]", "[ARGS]")])
    source.save(str(tmp_path / "tokenizer.json"))
    marked = Tokenizer(tmp_path, tokenizer.template().source)
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    request = parse_request(ChatCompletionRequest, fields)
    config = ServerConfig(tool_call_format="mistral_v11")
    forms = [
        find_answer_form(SimpleNamespace(driver=SimpleNamespace(tokenizer=each), config=config), request, [1])
        for each in (marked, tokenizer)
    ]
    assert [marked.token_text(token_id) for token_id in forms[0].visible_token_ids] == ["[TOOL_CALLS]", "[ARGS]"]
    assert forms[0].hidden == ("[TOOL_CALLS]", "[ARGS]") and forms[1].visible_token_ids == ()
    marked.close()
