"""A model that writes harmony messages: the bundled one with the markers in its vocabulary, its text forced."""

import json
import shutil

import openai
import pytest

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from server.protocol import answers as described
from server.tools.harmony import CALL, CHANNEL, END, MARKERS, MESSAGE, RETURN, START
from tests.server.conftest import serving
from tests.server.tools.templates import HARMONY_STYLE

THOUGHT, ANSWER = "Hm, is it 4?", "It is 42."
QUESTION = [{"role": "user", "content": "6 times 7?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def ids():
    """Token id of each marker: they take the places of the last tokens of the bundled vocabulary."""
    return {marker: 3072 - len(MARKERS) + i for i, marker in enumerate(MARKERS)}


@pytest.fixture(scope="module")
def client(tmp_path_factory, ids):
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(resolve_model(EngineConfig()), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    gone = {token for token, token_id in model["vocab"].items() if token_id >= min(ids.values())}
    model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token not in gone}
    model["merges"] = [merge for merge in model["merges"] if not {*merge, "".join(merge)} & gone]
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**like, "id": token_id, "content": marker} for marker, token_id in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [ids[RETURN], ids[CALL]]}))
    with serving("--model", str(folder), "--served-model-name", "pageserve", "--chat-template", HARMONY_STYLE) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def no_thought():
    """A logit_bias under which a grammar of calls cannot spell "analysis": the model's thoughts might never end."""
    vocabulary = json.loads((resolve_model(EngineConfig()) / "tokenizer.json").read_text())["model"]["vocab"]
    begins = ("analysis"[:length] for length in range(1, 9))
    return {str(vocabulary[begin]): -100 for begin in begins if begin in vocabulary}


@pytest.fixture(scope="module")
def asked(ids):
    """A request whose answer is forced to a thought and a final message."""
    token = {marker: f"<[{token_id}]>" for marker, token_id in ids.items()}
    grammar = (
        f'start: {token[CHANNEL]} "analysis" {token[MESSAGE]} "{THOUGHT}" {token[END]} {token[START]} "assistant" '
        f'{token[CHANNEL]} "final" {token[MESSAGE]} "{ANSWER}"'
    )
    return {
        "model": "pageserve",
        "messages": QUESTION,
        "extra_body": {"structured_outputs": {"grammar": grammar}},
    }


def test_thought_and_answer(client, asked):
    answer = client.chat.completions.create(**asked)
    described.ChatCompletion.model_validate(answer.to_dict())
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
    assert answer.choices[0].finish_reason == "stop"
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens - 8


def test_a_stream_with_logprobs(client, asked):
    chunks = list(client.chat.completions.create(**asked, stream=True, logprobs=True))
    for chunk in chunks:
        described.ChatCompletionChunk.model_validate(chunk.to_dict())
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    thoughts = [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")]
    said = [delta["content"] for delta in deltas if delta.get("content")]
    assert ("".join(thoughts), "".join(said)) == (THOUGHT, ANSWER) and len(thoughts) > 1 and len(said) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call(client, no_thought, stream):
    asked = {"model": "pageserve", "messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": 400}
    asked |= {"logit_bias": no_thought}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "now" and not choice.message.content
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")


def test_json_that_is_asked_for_is_the_content(client):
    schema = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    messages = [*QUESTION, {"role": "assistant", "content": ""}]
    answer = client.chat.completions.create(
        model="pageserve",
        messages=messages,
        response_format=form,
        max_tokens=60,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert json.loads(answer.choices[0].message.content) == {"n": 4}
