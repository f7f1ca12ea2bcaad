"""A model that thinks: the bundled one behind a template that opens <think>, its text forced by a grammar."""

from types import SimpleNamespace

import httpx
import openai
import pytest

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.text.tokenizer import Tokenizer
from server.config import ServerConfig
from server.intake.form_finder import find_answer_form
from server.protocol import ChatCompletionRequest, parse_request
from server.protocol import answers as described
from tests.server.conftest import serving
from tests.server.tools.templates import THINKING

THOUGHT, ANSWER = "Hm, is it 4?", "It is 42."
ASKED = {
    "model": "pageserve",
    "messages": [{"role": "user", "content": "6 times 7?"}],
    "extra_body": {"structured_outputs": {"grammar": f'start: "{THOUGHT}\\n</think>\\n\\n{ANSWER}"'}},
}


@pytest.fixture(scope="module")
def client():
    with serving("--chat-template", THINKING) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_an_answer(client):
    answer = client.chat.completions.create(**ASKED)
    described.ChatCompletion.model_validate(answer.to_dict())
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
    assert answer.choices[0].finish_reason == "stop"
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_a_stream(client):
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        described.ChatCompletionChunk.model_validate(chunk.to_dict())
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None} and deltas[-1] == {}
    thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    said = [delta["content"] for delta in deltas[1:] if "content" in delta]
    assert ("".join(thoughts), "".join(said)) == (THOUGHT, ANSWER) and len(thoughts) > 1 and len(said) > 1
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


def test_a_thought_that_is_cut_is_no_content(client):
    answer = client.chat.completions.create(**ASKED, max_tokens=4)
    message = answer.choices[0].message
    assert message.content is None and THOUGHT.startswith(message.reasoning_content)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 4


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_may_be_sent_back(client, name):
    messages = [*ASKED["messages"], {"role": "assistant", "content": ANSWER, name: THOUGHT}, *ASKED["messages"]]
    answer = client.chat.completions.create(**ASKED | {"messages": messages})
    assert answer.choices[0].message.content == ANSWER
    root = str(client.base_url).removesuffix("v1/")
    ids = httpx.post(f"{root}tokenize", json={"messages": messages}).json()["tokens"]
    prompt = httpx.post(f"{root}detokenize", json={"tokens": ids}).json()["prompt"]
    assert f"<think>\n{THOUGHT}\n</think>\n{ANSWER}" in prompt


def test_thoughts_belong_to_the_assistant(client):
    with pytest.raises(openai.BadRequestError, match=r"reasoning is allowed only in messages of the assistant"):
        client.chat.completions.create(model="pageserve", messages=[ASKED["messages"][0] | {"reasoning": THOUGHT}])


def test_responses_have_it_as_an_item(client):
    fields = {
        "reasoning": {"effort": "low"},
        "max_output_tokens": 8,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    response = client.responses.create(model="pageserve", input="6 times 7?", **fields)
    assert [item.type for item in response.output] == ["reasoning"]
    assert response.usage.output_tokens_details.reasoning_tokens == 8


@pytest.mark.parametrize("splits", [True, False])
def test_it_can_be_switched_off(splits):
    tokenizer = Tokenizer(resolve_model(EngineConfig()), THINKING)
    served = SimpleNamespace(driver=SimpleNamespace(tokenizer=tokenizer), config=ServerConfig(reasoning_split=splits))
    request = parse_request(ChatCompletionRequest, {key: ASKED[key] for key in ("model", "messages")})
    form = find_answer_form(served, request, tokenizer.encode("<|im_start|>assistant\n<think>\n"))
    assert form is None if not splits else form.opened is True
    tokenizer.close()


@pytest.mark.parametrize(
    ("content", "thought", "said"),
    [("<think>\nI do", "think so.", "Yes."), ("<think>\nI do.\n</think>\n\nWe", None, "think so.</think>Yes.")],
)
def test_a_thought_that_was_begun_for_the_model_goes_on(content, thought, said):
    with serving("--chat-template", THINKING.replace("(m.content.split('</think>') | last)", "m.content")) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        grammar = 'start: " think so.</think>Yes."'
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        fields |= {"structured_outputs": {"grammar": grammar}}
        messages = [*ASKED["messages"], {"role": "assistant", "content": content}]
        answer = client.chat.completions.create(model="pageserve", messages=messages, extra_body=fields)
        message = answer.choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content.strip()) == (thought, said)


@pytest.mark.parametrize("thinks_first", [True, False])
def test_a_form_holds_at_once_where_the_prompt_has_ended_the_thinking(thinks_first):
    """As templates do for a client that wants none."""
    tokenizer = Tokenizer(resolve_model(EngineConfig()), THINKING)
    served = SimpleNamespace(driver=SimpleNamespace(tokenizer=tokenizer), config=ServerConfig())
    fields = {"model": "pageserve", "messages": ASKED["messages"], "structured_outputs": {"choice": ["Yes."]}}
    prompt = "<|im_start|>assistant\n" + ("" if thinks_first else "<think>\n\n</think>\n\n")
    form = find_answer_form(served, parse_request(ChatCompletionRequest, fields), tokenizer.encode(prompt))
    assert ("thought" in form.grammar.text) == thinks_first and 'main: "Yes."' in form.grammar.text
    tokenizer.close()


@pytest.mark.parametrize("budget", [0, 5])
def test_a_response_has_the_logprobs_of_its_text(client, budget):
    asked = {"model": "pageserve", "input": "hello", "max_output_tokens": 30, "temperature": 0}
    asked |= {"include": ["message.output_text.logprobs"], "reasoning": {"max_tokens": budget}}
    whole = client.responses.create(**asked).output[-1].content[0]
    with client.responses.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
    streamed = [token for event in deltas for token in event.logprobs]
    assert whole.text and whole.text == "".join(event.delta for event in deltas)
    assert [token.token for token in streamed] == [token.token for token in whole.logprobs]
    text = b"".join(bytes(token.bytes) for token in whole.logprobs).decode()
    assert text.lstrip() == whole.text  # the first token may begin with white space behind the marker
