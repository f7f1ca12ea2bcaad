"""A limit on the thinking over HTTP: the bundled model behind a template that opens <think>, in a pool that is too
small for all, whose Worker is killed meanwhile."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.errors import InvalidRequestError
from engine.text.tokenizer import Tokenizer
from server.config import ServerConfig
from server.intake.form_finder import find_answer_form
from server.protocol import ChatCompletionRequest, parse_request
from server.protocol.anthropic.request import MessagesRequest
from server.protocol.responses.request import ResponseRequest
from server.routes.messages import limit_thinking
from tests.server.metrics import value
from tests.server.serving import serving_process
from tests.server.tools.templates import THINKING

ASKED = {"model": "pageserve", "messages": [{"role": "user", "content": "6 times 7?"}], "temperature": 1.0}
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def server():
    with serving_process("--chat-template", THINKING, "--num-blocks", "48", "--max-num-seqs", "40") as (url, process):
        with httpx.Client(base_url=url, timeout=60) as client:
            yield SimpleNamespace(client=client, url=url, pid=process.pid)


def worker_of(pid):
    """The process that `python -m engine.worker.worker` runs in, among the children of the server."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = file.read().split()
    for child in children:
        with open(f"/proc/{child}/cmdline") as file:
            if "engine.worker.worker" in file.read():
                return int(child)
    raise AssertionError("there is no Worker")


def test_200_seeds_in_a_small_pool_with_a_worker_that_is_killed(server):
    """Streams of 25 samples each: never more thinking than asked for, one closing tag, then content."""

    def ask(budget):
        body = ASKED | {"seed": budget, "n": 25, "max_tokens": NUM_TOKENS, "thinking_token_budget": budget}
        body |= {
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        thoughts, said, tokens = [[""] * 25 for _ in range(3)]
        tokens = [[] for _ in range(25)]
        with server.client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            for chunk in map(json.loads, (line.removeprefix("data: ") for line in lines)):
                for choice in chunk["choices"]:
                    i, delta = choice["index"], choice["delta"]
                    thoughts[i] += delta.get("reasoning_content") or ""
                    said[i] += delta.get("content") or ""
                    tokens[i] += choice.get("token_ids") or []
                if chunk.get("usage"):
                    usage = chunk["usage"]
        return budget, thoughts, said, tokens, usage["completion_tokens_details"]["reasoning_tokens"]

    tokenizer = Tokenizer(BUNDLED_MODEL, THINKING)
    closing = tokenizer.thinking_tags.closing[0]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, range(8))
        while not value(server.client, "vllm:generation_tokens"):
            pass
        os.kill(worker_of(server.pid), signal.SIGKILL)
        answers = list(answers)
    for budget, thoughts, said, tokens, num_reasoning in answers:
        assert num_reasoning == 25 * budget
        for thought, text, ids in zip(thoughts, said, tokens, strict=True):
            assert ids[budget : budget + len(closing)] == closing and len(ids) == NUM_TOKENS
            content = tokenizer.decode(ids[budget + len(closing) :])
            assert tokenizer.decode(ids[:budget]).strip() == thought.strip() and content.strip() == text.strip()
            assert "</think>" not in thought + text
    assert value(server.client, "pageserve:worker_restarts") == 1
    assert value(server.client, "vllm:num_preemptions") > 0
    tokenizer.close()


def test_a_schema_begins_behind_the_tag(server):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    body = ASKED | {"reasoning": {"max_tokens": 3}, "response_format": form, "n": 8, "max_tokens": 60, "seed": 1}
    answer = server.client.post(CHAT, json=body).json()
    for choice in answer["choices"]:
        assert json.loads(choice["message"]["content"])["x"] in (1, 2)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 24


def test_a_continued_thought_is_limited_too(server):
    template = THINKING.replace("(m.content.split('</think>') | last)", "m.content")
    tokenizer = Tokenizer(BUNDLED_MODEL, template)
    served = SimpleNamespace(driver=SimpleNamespace(tokenizer=tokenizer), config=ServerConfig())
    for content, opened in (("<think>\nI do", True), ("<think>\nI do.\n</think>\nSo", False)):
        messages = [*ASKED["messages"], {"role": "assistant", "content": content}]
        fields = {"continue_final_message": True, "thinking_token_budget": 4}
        request = parse_request(ChatCompletionRequest, ASKED | {"messages": messages} | fields)
        params = find_answer_form(served, request, tokenizer.encode(content)).apply(request.sampling_params(9, None))
        assert (params.thinking_token_budget, params.thinking_opened) == (4, opened)
    tokenizer.close()


def test_responses(server):
    body = {"model": "pageserve", "input": "6 times 7?", "reasoning": {"max_tokens": 5}, "max_output_tokens": 30}
    answer = server.client.post("/v1/responses", json=body | {"ignore_eos": True, "temperature": 0}).json()
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["reasoning"] == {"effort": None, "summary": None, "max_tokens": 5}


@pytest.mark.parametrize(("template", "limit"), [(THINKING, 2048), (None, None)])
def test_messages_limit_it_where_the_model_thinks(template, limit):
    """Clients send a budget to every model: for one that does not think, it is a wish."""
    tokenizer = Tokenizer(BUNDLED_MODEL, template)
    served = SimpleNamespace(driver=SimpleNamespace(tokenizer=tokenizer), config=ServerConfig())
    fields = {"model": "pageserve", "messages": ASKED["messages"], "max_tokens": 4096}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 2048}
    request = parse_request(MessagesRequest, fields)
    assert limit_thinking(served, request.to_chat(), request).thinking_budget == limit
    tokenizer.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "thinking_token_budget"),
        ({"allowed_token_ids": [5, 6]}, "allowed_token_ids"),
        ({"bad_words": ["</"]}, "bad_words"),
        ({"use_beam_search": True, "n": 2}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": 7}}, "reasoning.max_tokens"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
    ],
)
def test_what_cannot_be_honoured_is_refused(server, fields, param):
    response = server.client.post(CHAT, json=ASKED | {"thinking_token_budget": 5} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_model_without_thinking_refuses_a_limit_and_takes_anthropics_as_a_wish():
    tokenizer = Tokenizer(BUNDLED_MODEL)
    served = SimpleNamespace(driver=SimpleNamespace(tokenizer=tokenizer), config=ServerConfig())
    for fields, name in (
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    ):
        with pytest.raises(InvalidRequestError, match="this model's thinking from its answer: leave") as caught:
            find_answer_form(served, parse_request(ChatCompletionRequest, ASKED | fields), [1])
        assert caught.value.param == name
    body = {"model": "pageserve", "input": "Hi", "reasoning": {"max_tokens": 5, "effort": "low"}}
    chat = parse_request(ResponseRequest, body).to_chat()
    assert (chat.thinking_budget, chat.effort) == (5, "low")
    tokenizer.close()
