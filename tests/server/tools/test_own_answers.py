"""The server accepts its own answers: a thousand of them, forced, free and cut off, through each API's models.

Random walks over the grammars of calls, cut anywhere, become answers as the routes make them, and then requests that
hold them as history, up to the prompt in a template of the format's style. `make own-answers` does it over HTTP.
"""

import json
import random

import numpy as np
import pytest

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.grammars.compiler import Compiler, fill_mask
from engine.outputs import CompletionOutput, FinishReason
from engine.structured_output import Vocabulary
from engine.text.tokenizer import Tokenizer
from server.http.body import encode_json, parse_json
from server.http.json_bounds import body_bounds
from server.output.chat_messages import MessageChoice
from server.output.message_output import MessageOutput
from server.output.response_output import EventWriter, ResponseOutput
from server.protocol import ChatCompletionRequest, parse_request
from server.protocol.anthropic.request import MessagesRequest
from server.protocol.responses.request import ResponseRequest
from server.protocol.tools import Tool
from server.tools.call_reader import CallReader
from server.tools.formats import FORMATS
from server.tools.grammar import CallGrammar
from server.tools.message_reader import MessageReader
from tests.server.tools.rendered import prompt_of
from tests.server.tools.templates import PLAIN, STYLES

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}, "about": {}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "days"],
}
TOOL = Tool.model_validate({"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}})
ANSWERS = 57  # per format and API: six formats, three APIs, 1,026 answers
QUESTION = {"role": "user", "content": "Weather?"}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(resolve_model(EngineConfig()))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def compiler(tokenizer):
    ends = read_eos_token_ids(resolve_model(EngineConfig()))
    return Compiler(Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, ends))


def texts_of(form, compiler, tokenizer):
    """(a text, whether it was cut) for each answer. Some are not held to the grammar for their last tokens."""
    base = compiler.compile(CallGrammar(form, [TOOL], True, tokenizer).required())
    words = np.zeros(compiler.num_words, np.int32)
    for seed in range(ANSWERS):
        rng = random.Random(seed)
        length = rng.choice((*range(1, 40), 80, 160))
        matcher, ids, cut = base.deep_copy(), [], True
        while cut and len(ids) < length:
            fill_mask(matcher, words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token_id = int(rng.choice(allowed))
            cut = token_id not in compiler.end_token_ids
            ids += [token_id] * cut
            matcher.consume_token(token_id)
        if rng.random() < 0.3:
            ids += rng.sample(range(3, tokenizer.vocab_size), rng.randrange(1, 9))
        yield compiler.text_of(ids), cut, rng.random() < 0.8


def reader_of(form, certain):
    return MessageReader(None, CallReader(form, {"get_weather": SCHEMA}, certain=certain, only_calls=certain))


def sent(answer):
    """As a client has it: through JSON and back."""
    return json.loads(encode_json(answer))


def as_chat(form, text, cut, certain):
    choice = MessageChoice(reader_of(form, certain), None)
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    choice.add(CompletionOutput(index=0, text=text, token_ids=[], finish_reason=reason))
    message = sent(choice.message())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message.get("tool_calls", ())]
    tools = [TOOL.model_dump(exclude_none=True)]
    fields = {"model": "m", "tools": tools, "messages": [QUESTION, message, *results, QUESTION]}
    return parse_request(ChatCompletionRequest, parse_json(encode_json(fields), body_bounds(2048)))


def parts_of(form, text, cut, certain):
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    output = CompletionOutput(index=0, text=text, token_ids=[], finish_reason=reason)
    return reader_of(form, certain).feed(output)


def as_response(form, text, cut, certain):
    output = ResponseOutput(EventWriter(False), None)
    for part in parts_of(form, text, cut, certain):
        output.feed(part, [])
    output.finish("incomplete" if cut else "completed", [])
    items = sent(output.items)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        for item in items
        if item["type"] == "function_call"
    ]
    tools = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    fields = {"model": "m", "tools": tools, "input": [QUESTION, *items, *results, QUESTION]}
    return parse_request(ResponseRequest, parse_json(encode_json(fields), body_bounds(2048))).to_chat()


def as_message(form, text, cut, certain):
    output = MessageOutput(streamed=False)
    for part in parts_of(form, text, cut, certain):
        output.feed(part)
    output.finish()
    blocks = sent(output.blocks)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    last = {"role": "user", "content": [*results, {"type": "text", "text": "Weather?"}]}
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    messages = [QUESTION, {"role": "assistant", "content": blocks}, last]
    fields = {"model": "m", "max_tokens": 9, "tools": tools, "messages": messages}
    return parse_request(MessagesRequest, parse_json(encode_json(fields), body_bounds(2048))).to_chat()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_none_is_refused(form, compiler, tokenizer):
    fed_back, with_calls, cut_calls = 0, 0, 0
    for i, (text, cut, certain) in enumerate(texts_of(form, compiler, tokenizer)):
        for ask in (as_chat, as_response, as_message):
            request = ask(form, text, cut, certain)
            prompt = prompt_of(PLAIN if i % 8 == 7 else STYLES[form.name], request)
            assert prompt.count("Weather?") == 2
            fed_back += 1
            called = any(message.tool_calls for message in request.messages)
            with_calls += called
            cut_calls += called and cut
    assert fed_back == 3 * ANSWERS
    assert with_calls > ANSWERS / 8 and cut_calls > ANSWERS / 16, (with_calls, cut_calls)
