"""/v1/responses through openai-python, whose types every answer and event must be."""

import json
import re
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from server.output.response_output import EventWriter, ResponseOutput
from server.protocol.responses.items import read_items
from server.protocol.responses.request import ResponseRequest
from server.protocol.responses.response_answers import ResponseEvent
from server.protocol.responses.response_tools import ToolSet, chat_name, parse_tool
from server.protocol.strict import parse_request
from server.protocol.tools import NAME
from server.tools.events import Arguments, CallStart, Content, Input, Reasoning
from tests.server.live import MODEL, LiveServer, assert_error, chat_prompt, expected_text

PATH = "/v1/responses"
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
REQUIRED = {"id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools", "output"}
REQUIRED |= {"parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p", "status", "usage", "text"}
FUNCTION = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom", "name": "c"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "c", "input": "x"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
NAMESPACE = {"type": "namespace", "name": "n", "description": "more of them", "tools": [FUNCTION]}
WEB_SEARCH = {"type": "web_search", "external_web_access": True}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
TEXT = expected_text(chat_prompt("hello"), 1, 8)
MESSAGE = ["response.output_item.added", "response.content_part.added", "response.output_text.delta"]
MESSAGE_END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def body(**fields) -> dict:
    return {"model": MODEL, "input": "hello", "max_output_tokens": 8, "seed": 1} | fields


def prompt_of(*messages: tuple[str, str]) -> list[int]:
    ids = [part for role, text in messages for part in (256, *f"{role}\n{text}".encode(), 257, *b"\n")]
    return [*ids, 256, *b"assistant\n"]


def frames(raw: str) -> list[dict]:
    """The data of each event; checks the framing, the numbers and the types."""
    found = []
    assert raw.endswith("\n\n")
    for frame in raw[:-2].split("\n\n"):
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(found)
        EVENT.validate_python(event)
        found.append(event)
    return found


def stream(client, **fields) -> list[dict]:
    response = client.post(PATH, json=body(stream=True, **fields))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    return frames(response.text)


def collapsed(found: list[dict]) -> list[str]:
    """Types in their order, several deltas in a row as one."""
    types = [event["type"] for event in found]
    return [kind for i, kind in enumerate(types) if not kind.endswith("delta") or types[i - 1] != kind]


def test_obfuscation_pads_every_delta(client):
    response = client.post(PATH, json=body(stream=True, stream_options={"include_obfuscation": True}))
    padded = frames(response.text)
    sizes = [len(frame) + 2 for frame in response.text.split("\n\n") if frame.partition("\n")[0].endswith(".delta")]
    assert sizes and {size % 64 for size in sizes} == {0}
    assert all(("obfuscation" in event) == event["type"].endswith(".delta") for event in padded)
    plain = stream(client, stream_options={"include_obfuscation": False})
    assert "".join(event.get("delta", "") for event in padded) == TEXT
    assert not any("obfuscation" in event for event in plain)


def test_a_text(api):
    response = api.responses.create(model=MODEL, input="hello", max_output_tokens=8, extra_body={"seed": 1})
    assert response.output_text == TEXT and response.id.startswith("resp_") and response.object == "response"
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert item.type == "message" and item.role == "assistant" and item.status == "incomplete"
    assert item.id.startswith("msg_") and item.content[0].annotations == [] and response.error is None
    assert response.usage.output_tokens == 8 and response.usage.total_tokens == response.usage.input_tokens + 8
    assert response.usage.input_tokens == len(chat_prompt("hello"))
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert REQUIRED <= response.model_fields_set and response.store is False and response.completed_at is None
    Response.model_validate(response.model_dump(), strict=True)


def test_an_answer_that_ends_by_itself_is_completed(folder):
    with LiveServer(folder, "--eos-every", "5") as live, live.client() as client:
        response = client.post(PATH, json=body(max_output_tokens=200)).json()
        assert response["status"] == "completed" and response["incomplete_details"] is None
        assert response["completed_at"] >= response["created_at"] and response["output"][0]["status"] == "completed"
        assert stream(client, max_output_tokens=200)[-1]["type"] == "response.completed"


def test_the_settings_come_back(client):
    asked = {
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "truncation": "auto",
        "user": "u",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    response = client.post(PATH, json=body(**asked, store=True, service_tier="auto")).json()
    assert {name: response[name] for name in asked} == asked
    assert response["max_output_tokens"] == 8 and response["service_tier"] == "default"


def test_events_come_in_order_and_add_up(client):
    found = stream(client)
    head = ["response.created", "response.in_progress"]
    assert collapsed(found) == [*head, *MESSAGE, *MESSAGE_END, "response.incomplete"]
    created, last = found[0]["response"], found[-1]["response"]
    assert created["status"] == "in_progress" and created["output"] == [] and created["usage"] is None
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == TEXT and len(deltas) > 1
    (item,) = last["output"]
    assert {event.get("item_id", item["id"]) for event in found} == {item["id"]}
    assert found[-2]["item"] == item and item["content"][0]["text"] == TEXT
    assert found[2]["item"] == item | {"status": "in_progress", "content": []}
    whole = client.post(PATH, json=body()).json()
    for response in (last, whole):
        response["output"][0].pop("id"), response.pop("id"), response.pop("created_at")
        response["usage"].pop("input_tokens_details")
    assert last == whole, "a stream ends with what is answered without one"


def test_logprobs(client):
    for asked in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}):
        part = client.post(PATH, json=body(**asked)).json()["output"][0]["content"][0]
        assert bytes(byte for token in part["logprobs"] for byte in token["bytes"]).decode() == part["text"] == TEXT
        assert {len(token["top_logprobs"]) for token in part["logprobs"]} == {2}, "the fake device tells two"
        found = stream(client, **asked)
        streamed = [event["logprobs"] for event in found if event["type"].endswith("text.delta")]
        assert [token for tokens in streamed for token in tokens] == part["logprobs"]
        assert next(event for event in found if event["type"].endswith("text.done"))["logprobs"] == part["logprobs"]
    assert client.post(PATH, json=body()).json()["output"][0]["content"][0]["logprobs"] == []


def test_a_conversation_goes_on_with_what_the_client_got(api):
    first = api.responses.create(model=MODEL, input="hello", max_output_tokens=8, extra_body={"seed": 1})
    conversation = [
        {"role": "user", "content": "hello"},
        *first.output,
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    second = api.responses.create(model=MODEL, input=conversation, max_output_tokens=8, extra_body={"seed": 1})
    prompt = prompt_of(("user", "hello"), ("assistant", TEXT), ("user", "a\nb"))
    assert second.output_text == expected_text(prompt, 1, 8)


def test_instructions_are_one_message_with_what_follows(api):
    first = {"role": "developer", "content": "in English"}
    asked = [first, {"role": "user", "content": "hello"}]
    response = api.responses.create(
        model=MODEL, instructions="be brief", input=asked, max_output_tokens=8, extra_body={"seed": 1}
    )
    prompt = prompt_of(("system", "be brief\n\nin English"), ("user", "hello"))
    assert response.output_text == expected_text(prompt, 1, 8)
    alone = api.responses.create(model=MODEL, instructions="be brief", input="hello", extra_body={"seed": 1})
    assert alone.output_text.startswith(expected_text(prompt_of(("system", "be brief"), ("user", "hello")), 1, 8))


def test_the_stream_helper(api):
    with api.responses.stream(model=MODEL, input="hello", max_output_tokens=8, extra_body={"seed": 1}) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == TEXT


async def test_the_asynchronous_client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        events = await api.responses.create(
            model=MODEL, input="hello", max_output_tokens=8, stream=True, extra_body={"seed": 1}
        )
        assert [event.delta async for event in events if event.type == "response.output_text.delta"]


def test_calls_come_back_with_all_that_clients_know_of_them(client):
    direct = {"id": "fc_1", "status": "completed", "caller": {"type": "direct"}}
    asked = [CALL | direct, CALL | {"call_id": "d", "arguments": ""}]
    asked += [
        OUTPUT | {"call_id": "d", "output": [{"type": "input_text", "text": "y"}]},
        OUTPUT | direct | {"name": "f"},
    ]
    counted = client.post(f"{PATH}/input_tokens", json={"input": [{"role": "user", "content": "x"}, *asked]}).json()
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for call_id, arguments in (("c", "{}"), ("d", ""))
    ]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    messages += [
        {"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in (("d", "y"), ("c", "x"))
    ]
    assert counted["input_tokens"] == client.post("/tokenize", json={"messages": messages}).json()["count"]


def test_a_turn_of_the_assistant_is_one_message():
    """Thoughts, texts and calls in any order: no other message may stand between a call and its output."""
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    other = CALL | {"call_id": "d"}
    items = [thought, said, CALL, said, thought, other, OUTPUT, OUTPUT | {"call_id": "d"}, said, said]
    first, *outputs, second, third = read_items([{"role": "user", "content": "x"}, *items]).messages[1:]
    assert [call["id"] for call in first.pop("tool_calls")] == ["c", "d"]
    assert first == {"role": "assistant", "reasoning_content": "t\nt", "content": "a\na"}
    assert [message["tool_call_id"] for message in outputs] == ["c", "d"]
    assert second == third == {"role": "assistant", "content": "a"}
    (alone,) = read_items([CALL, said]).messages
    assert alone["content"] == "a" and len(alone["tool_calls"]) == 1


def test_truncation_drops_whole_turns_from_the_beginning(api, client):
    system = {"role": "system", "content": "S"}
    turns = [{"role": role, "content": f"{i}" * 60} for i in range(6) for role in ("user", "assistant")]
    asked = [system, *turns, {"role": "user", "content": "end"}]
    message = assert_error(client.post(PATH, json=body(input=asked)), 400, "input", "context_length_exceeded")
    assert "max_tokens" not in message
    response = api.responses.create(
        model=MODEL, input=asked, truncation="auto", max_output_tokens=50, extra_body={"seed": 1}
    )
    kept = next(
        prompt
        for first in range(0, len(turns), 2)
        if len(prompt := prompt_of(*[(m["role"], m["content"]) for m in (system, *turns[first:], asked[-1])])) <= 462
    )
    assert response.output_text == expected_text(kept, 1, 50) and response.usage.input_tokens == len(kept) > 300
    alone = body(input="x" * 600, truncation="auto")
    assert_error(client.post(PATH, json=alone), 400, "input", "context_length_exceeded")


def test_count_of_input_tokens(api, client):
    count = api.responses.input_tokens.count(model=MODEL, input="hello", instructions="be brief")
    assert count.object == "response.input_tokens"
    assert count.input_tokens == len(prompt_of(("system", "be brief"), ("user", "hello")))
    assert_error(client.post(f"{PATH}/input_tokens", json={"input": []}), 400, "input")
    assert_error(client.post(f"{PATH}/input_tokens", json={"input": "x", "model": "other"}), 404, "model")


def test_an_unknown_model_is_a_404(client):
    assert_error(client.post(PATH, json=body(model="other")), 404, "model", "model_not_found")


def test_nothing_can_be_fetched(api, client):
    for call in (api.responses.retrieve, api.responses.delete, api.responses.cancel, api.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            call("resp_1")
    assert_error(client.get(f"{PATH}/resp_1"), 404, code="response_not_found")


def test_a_failure_after_the_headers(folder):
    third = TEXT.encode()[2]
    with LiveServer(folder, "--fail-on-token", str(third)) as live, live.client() as client:
        found = stream(client, max_output_tokens=40)
        error, failed = found[-2:]
        assert error["type"] == "error" and "finite" not in error["message"], "the log has the internal error"
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert failed["response"]["error"]["code"] == "server_error"
        assert_error(client.post(PATH, json=body(max_output_tokens=40)), 500)


def test_the_first_events_do_not_wait_for_a_token(folder):
    with LiveServer(folder, "--step-seconds", "0.5") as live, live.client() as client:
        with client.stream("POST", PATH, json=body(stream=True, max_output_tokens=2)) as response:
            texts = response.iter_text()  # httpx closes a response whose iterator is dropped
            assert next(texts).startswith("event: response.created")
            assert live.call(lambda: live.driver.num_live_requests) == 1
        live.wait_idle()


TOOL = {
    "type": "function",
    "name": "find",
    "description": "finds animals",
    "parameters": {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "cat"]}},
        "required": ["animal"],
        "additionalProperties": False,
    },
}
CALLED = [
    {"role": "user", "content": "find it"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "find", "arguments": '{"animal": "fox"}'},
    {"type": "function_call", "call_id": "c2", "name": "find", "arguments": '{"animal": "cat"}', "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "a fox"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a cat"}]},
]


def test_items_are_the_messages_of_a_chat(client):
    function = {name: part for name, part in TOOL.items() if name != "type"}
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "find", "arguments": f'{{"animal": "{animal}"}}'}}
        for i, animal in ((1, "fox"), (2, "cat"))
    ]
    chat = {
        "messages": [
            {"role": "user", "content": "find it"},
            {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "a fox"},
            {"role": "tool", "tool_call_id": "c2", "content": "a cat"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    expected = client.post("/tokenize", json=chat).json()["count"]
    counted = client.post(f"{PATH}/input_tokens", json={"input": CALLED, "tools": [TOOL], "model": MODEL})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": expected}


def test_reasoning_and_calls_are_items_with_events_of_their_own(server):
    events = EventWriter(True)
    output = ResponseOutput(events, server.driver.tokenizer)
    said = [Reasoning("a"), Reasoning("b"), Content("c"), CallStart(0, "call_1", "find"), Arguments(0, '{"x":')]
    for part in [*said, Arguments(0, "1}"), CallStart(1, "call_2", "find"), Arguments(1, "{")]:
        output.feed(part, [])
    output.finish("incomplete", [])
    found = frames(events.flush().decode())
    added, done = "response.output_item.added", "response.output_item.done"
    reasoning = ["response.content_part.added", "response.reasoning_text.delta", "response.reasoning_text.done"]
    call = [added, "response.function_call_arguments.delta", "response.function_call_arguments.done", done]
    expected = [added, *reasoning, "response.content_part.done", done, *MESSAGE, *MESSAGE_END, *call, *call]
    assert collapsed(found) == expected
    assert [event["item"] for event in found if event["type"] == done] == output.items
    thought, message, first, second = output.items
    assert thought["content"] == [{"type": "reasoning_text", "text": "ab"}] and thought["summary"] == []
    assert message["content"][0]["text"] == "c" and message["status"] == "completed"
    assert (first["call_id"], first["arguments"], first["status"]) == ("call_1", '{"x":1}', "completed")
    assert (second["call_id"], second["arguments"], second["status"]) == ("call_2", "{", "incomplete")
    indexes = [event["output_index"] for event in found]
    assert indexes == sorted(indexes) and set(indexes) == {0, 1, 2, 3}


def test_a_call_that_is_forced(bundled_server):
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0) as api:
        asked = [{"role": "user", "content": "Find an animal."}]
        choices = ("required", {"type": "function", "name": "find"})
        subset = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "find"}]}
        for choice in (*choices, subset):
            first = api.responses.create(
                model="pageserve", input=asked, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
            )
            (call,) = first.output
            assert call.type == "function_call" and call.name == "find" and first.status == "completed"
            assert json.loads(call.arguments)["animal"] in ("fox", "cat")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        second = api.responses.create(
            model="pageserve", input=[*asked, call, result], tools=[TOOL], tool_choice="none", max_output_tokens=8
        )
        assert second.output[0].type == "message"
        with api.responses.stream(
            model="pageserve", input=asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
        ) as events:
            types = [event.type for event in events]
            assert json.loads(events.get_final_response().output[0].arguments)["animal"] in ("fox", "cat")
        assert types[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]


def test_the_bundled_model(bundled_server):
    class Answer(pydantic.BaseModel):
        name: Literal["fox", "cat"]
        happy: bool

    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0) as api:
        parsed = api.responses.parse(
            model="pageserve", input="Tell me about a fox.", text_format=Answer, max_output_tokens=200, temperature=0
        )
        assert isinstance(parsed.output_parsed, Answer)
        with api.responses.stream(
            model="pageserve", input="Tell me a story.", instructions="Be kind.", max_output_tokens=24
        ) as events:
            types = [event.type for event in events]
        assert types[0] == "response.created" and types[-1] in ("response.completed", "response.incomplete")
        plain = api.responses.create(model="pageserve", input="Tell me a story.", max_output_tokens=12, temperature=0)
        assert plain.output_text and plain.usage.output_tokens <= 12


@pytest.mark.parametrize("kind", ["json_schema", "json_object", "text"])
def test_a_format_of_the_chat_api_is_told_where_its_fields_stand(client, kind):
    form = {"type": kind, "json_schema": {"name": "x", "schema": {"type": "object"}}}
    message = assert_error(client.post(PATH, json=body(text={"format": form})), 400, "text.format.json_schema")
    assert "stand beside type" in message


def test_what_openai_python_adds_to_answers_may_be_sent_back(client):
    part = {"type": "output_text", "text": "hello", "annotations": [], "parsed": {"a": 1}}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {}}
    items = [
        {"role": "assistant", "content": [part]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    assert client.post(PATH, json=body(input=items)).status_code == 200


def test_compaction_is_not_taken_for_the_name_of_a_response(client):
    assert "compacts no conversations" in assert_error(
        client.post(f"{PATH}/compact", json=body()), 404, code="not_found"
    )


SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [SPAWN, CUSTOM]}
EVERY_TOOL = [TOOL, AGENTS, CUSTOM | {"name": "run"}, {"type": "local_shell"}, {"type": "shell"}]
EVERY_TOOL += [{"type": "apply_patch"}, WEB_SEARCH, {"type": "mcp", "server_label": "x", "server_url": "y"}]
CALLS = [
    {"type": "function_call", "call_id": "c0", "name": "spawn", "namespace": "agents", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c0", "output": "o"},
    {"type": "custom_tool_call", "id": "x", "call_id": "c1", "name": "run", "input": 'a "b"', "status": "completed"},
    {"type": "custom_tool_call_output", "id": "o", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
    {"type": "local_shell_call", "id": "l", "call_id": "c2", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}},
    {"type": "local_shell_call_output", "id": "c2", "output": "o"},
    {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"], "timeout_ms": 5}, "environment": None},
    {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "o", "stderr": "", "outcome": {"type": "x"}}]},
    {"type": "apply_patch_call", "call_id": "c4", "status": "completed",
     "operation": {"type": "delete_file", "path": "a"}},
    {"type": "apply_patch_call_output", "call_id": "c4", "status": "failed", "output": "o"},
]  # fmt: skip


def test_calls_of_every_kind_are_those_of_a_chat():
    found = read_items([{"role": "user", "content": "x"}, *CALLS]).messages
    asked = [message["tool_calls"][0] for message in found if message["role"] == "assistant"]
    shown = [(call["id"], (call.get("function") or call["custom"])) for call in asked]
    assert shown == [
        ("c0", {"name": "agents__spawn", "arguments": "{}"}),
        ("c1", {"name": "run", "input": 'a "b"'}),
        ("c2", {"name": "local_shell", "arguments": '{"command": ["ls"], "env": {}}'}),
        ("c3", {"name": "shell", "arguments": '{"commands": ["ls"], "timeout_ms": 5}'}),
        ("c4", {"name": "apply_patch", "arguments": '{"type": "delete_file", "path": "a", "diff": ""}'}),
    ]
    outputs = [(message["tool_call_id"], message["content"]) for message in found if message["role"] == "tool"]
    shell = '[{"stdout": "o", "stderr": "", "outcome": {"type": "x"}}]'
    assert outputs == [("c0", "o"), ("c1", "o"), ("c2", "o"), ("c3", shell), ("c4", "failed\no")]


@pytest.mark.parametrize("streamed", [False, True])
def test_what_runs_elsewhere_is_left_out_and_said(bundled_server, streamed):
    foreign = [
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}
    ]
    foreign += [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, {"type": "compaction", "x": "y"}]
    asked = [{"role": "user", "content": "x"}, *CALLS]
    with httpx.Client(base_url=bundled_server, timeout=60) as client:
        common = body(model="pageserve", max_output_tokens=1)
        plain = client.post(PATH, json=common | {"input": asked, "tools": EVERY_TOOL[:-2]})
        more = {"input": [*asked, *foreign], "tools": EVERY_TOOL, "stream": streamed}
        both = client.post(PATH, json=common | more)
        alone = client.post(PATH, json=common | {"tools": [WEB_SEARCH]})
        bare = client.post(PATH, json=common)
    assert plain.status_code == both.status_code == 200, both.text
    assert both.headers["x-pageserve-left-out"] == "web_search, mcp, web_search_call, reasoning, compaction"
    assert "x-pageserve-left-out" not in plain.headers
    last = frames(both.text)[-1]["response"] if streamed else both.json()
    assert last["usage"]["input_tokens"] == plain.json()["usage"]["input_tokens"]
    assert [tool["type"] for tool in last["tools"]] == [tool["type"] for tool in EVERY_TOOL[:-2]]
    Response.model_validate(last)
    assert alone.json()["usage"]["input_tokens"] == bare.json()["usage"]["input_tokens"], "no tool is left"


def test_a_kind_that_is_left_out_is_logged_once(client, caplog):
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    for _ in range(2):
        assert (
            client.post(PATH, json=body(tools=[shell], max_output_tokens=1)).headers["x-pageserve-left-out"] == "shell"
        )
    assert len([record for record in caplog.records if "requests name shell" in record.message]) == 1


def test_tools_of_the_input_join_the_others(client):
    added = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [AGENTS, TOOL | {"strict": True}]}
    asked = [{"role": "user", "content": "x"}]
    one = client.post(f"{PATH}/input_tokens", json={"input": [added, *asked], "tools": [TOOL]}).json()
    other = client.post(f"{PATH}/input_tokens", json={"input": asked, "tools": [TOOL, AGENTS]}).json()
    assert one == other and one["input_tokens"] > 100
    many = {"type": "additional_tools", "tools": [AGENTS | {"tools": [SPAWN] * 128}] * 8}
    message = assert_error(client.post(PATH, json=body(input=[many, many, *asked])), 400, "input[1].tools[0]")
    assert "1024" in message
    wrong = AGENTS | {"tools": [SPAWN | {"parameters": {"type": "array"}}]}
    asked = [added | {"tools": [TOOL, wrong]}, *asked]
    param = "input[0].tools[1].tools[0].parameters.type"
    assert_error(client.post(PATH, json=body(input=asked, tools=[TOOL])), 400, param)


def test_names_of_namespaces_can_be_told_apart():
    names = {chat_name("a" * 126, "f"), chat_name("a" * 126, "g"), chat_name("a b", "f"), chat_name("a_b", "f")}
    assert len(names) == 4 and all(NAME.fullmatch(name) for name in names)
    assert chat_name(None, "f") == "f" and chat_name("mcp", "f" * 123) == "mcp__" + "f" * 123


def test_codex_s_fields_are_taken(client):
    asked = {
        "reasoning": {"effort": "high", "summary": "detailed", "context": "all_turns"},
        "client_metadata": {"session_id": "s", "x-codex-turn-metadata": "{}" * 400},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "service_tier": "priority",
        "store": False,
        "parallel_tool_calls": True,
        "text": {"verbosity": "low"},
    }
    answer = client.post(PATH, json=body(**asked, tools=[FUNCTION | {"defer_loading": True}], max_output_tokens=1))
    assert answer.status_code == 200 and answer.json()["service_tier"] == "default", answer.text


def test_reasoning_comes_back_in_whatever_form_a_client_keeps():
    output = ResponseOutput(EventWriter(False), None, encrypts_reasoning=True)
    output.feed(Reasoning("thought: é\n"), [])
    output.feed(Content("said"), [])
    output.finish("completed", [])
    item = output.items[0]
    assert item["encrypted_content"].startswith("pageserve.1.")
    alone = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    for sent in (item, alone, item | {"encrypted_content": "other"}):
        assert read_items([sent]).messages == [
            {"role": "assistant", "reasoning_content": "thought: é\n", "content": ""}
        ]
    changed = alone | {"encrypted_content": item["encrypted_content"][:-4] + "AAAA"}
    assert read_items([changed]).left_out == ["reasoning"] and read_items([changed]).messages == []


def test_thoughts_of_earlier_turns_are_left_out_where_asked():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    asked = [{"role": "user", "content": "a"}, thought, OUTPUT, {"role": "user", "content": "b"}, thought, CALL]
    for context, count in (("all_turns", 2), ("auto", 2), ("current_turn", 1)):
        request = parse_request(ResponseRequest, body(input=asked, reasoning={"context": context}))
        thoughts = [message for message in request.chat_fields()["messages"] if "reasoning_content" in message]
        assert len(thoughts) == count and thoughts[-1]["tool_calls"]


def test_leading_messages_of_the_system_are_one(client):
    asked = [{"role": "developer", "content": text} for text in ("a", "b")] + [{"role": "user", "content": "x"}]
    counted = client.post(f"{PATH}/input_tokens", json={"input": asked}).json()
    assert counted["input_tokens"] == len(prompt_of(("system", "a\n\nb"), ("user", "x")))


def test_calls_are_items_of_their_kind():
    tools = ToolSet([(f"tools[{i}]", parse_tool(tool)) for i, tool in enumerate(EVERY_TOOL)]).by_chat_name
    events = EventWriter(True)
    output = ResponseOutput(events, None, tools)
    said: list = [CallStart(0, "c0", "agents__spawn"), Arguments(0, "{}"), CallStart(1, "c1", "run", custom=True)]
    said += [
        Input(1, "a "),
        Input(1, "b"),
        CallStart(2, "c2", "local_shell"),
        Arguments(2, '{"command": '),
        Arguments(2, '["ls"]}'),
    ]
    said += [CallStart(3, "c3", "shell"), Arguments(3, '{"commands": ["ls"], "timeout_ms": 5}')]
    said += [CallStart(4, "c4", "apply_patch"), Arguments(4, '{"type": "create_file", "path": "p", "diff": "+a"}')]
    said += [CallStart(5, "c5", "agents__c", custom=True), CallStart(6, "c6", "local_shell"), Arguments(6, '{"comm')]
    for part in said:
        output.feed(part, [])
    output.finish("incomplete", [])
    found = frames(events.flush().decode())
    for event in found:
        ResponseEvent.model_validate(event)
    items = [{name: part for name, part in item.items() if name != "id"} for item in output.items]
    whole = {"status": "completed"}
    assert items == [
        {"type": "function_call", **whole, "call_id": "c0", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", **whole, "call_id": "c1", "name": "run", "input": "a b"},
        {"type": "local_shell_call", **whole, "call_id": "c2",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "shell_call", **whole, "call_id": "c3",
         "action": {"commands": ["ls"], "timeout_ms": 5, "max_output_length": None}},
        {"type": "apply_patch_call", **whole, "call_id": "c4",
         "operation": {"type": "create_file", "path": "p", "diff": "+a"}},
        {"type": "custom_tool_call", **whole, "call_id": "c5", "name": "c", "namespace": "agents", "input": ""},
        {"type": "function_call", "status": "incomplete", "call_id": "c6", "name": "local_shell",
         "arguments": '{"comm'},
    ]  # fmt: skip
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == output.items
    inputs = [event for event in found if "custom_tool_call_input" in event["type"]]
    assert [event.get("delta", event.get("input")) for event in inputs] == ["a ", "b", "a b", ""]
    assert read_items(output.items).messages[0]["tool_calls"][5]["custom"] == {"name": "agents__c", "input": ""}


LINES = {"type": "grammar", "syntax": "lark", "definition": 'start: "go" LF /[a-c]{1,3}/\n%import common.LF'}
FORCED = [
    (CUSTOM | {"format": LINES}, CUSTOM, r"go\n[a-c]{1,3}"),
    (CUSTOM | {"format": LARK | {"syntax": "regex", "definition": '"[ab]{2}"\\n'}}, CUSTOM, r'"[ab]{2}"\n'),
    (AGENTS | {"tools": [CUSTOM | {"format": LINES}]}, CUSTOM | {"namespace": "agents"}, r"go\n[a-c]{1,3}"),
    (AGENTS | {"tools": [SPAWN]}, {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "namespace", "name": "agents"}, {"type": "web_search"}]}, r"\{ ?\}"),
    ({"type": "apply_patch"}, {"type": "apply_patch"}, "(create|update|delete)_file"),
]  # fmt: skip


@pytest.mark.parametrize("tool, choice, form", FORCED, ids=("lark", "regex", "inside", "namespace", "patch"))
def test_a_call_of_each_kind_that_is_forced(bundled_server, tool, choice, form):
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0) as api:
        asked = {"model": "pageserve", "input": "Go.", "tools": [tool, WEB_SEARCH], "tool_choice": choice}
        asked |= {"parallel_tool_calls": False, "max_output_tokens": 300, "temperature": 1.2, "extra_body": {"seed": 5}}
        with api.responses.with_streaming_response.create(**asked, stream=True) as raw:
            found = frames(raw.read().decode())
        for event in found:
            ResponseEvent.model_validate(event)
        response = api.responses.create(**asked)
        (item,) = response.output
        streamed = found[-1]["response"]["output"][0]
        text = {"function_call": "arguments", "custom_tool_call": "input", "apply_patch_call": "operation"}[item.type]
        value = item.to_dict()[text]
        assert value == streamed[text], "the same seed"
        if item.status == "incomplete":
            assert (item.type, item.name) == ("function_call", "apply_patch"), "which a client must not carry out"
        else:
            assert re.fullmatch(form, value["type"] if isinstance(value, dict) else value), value
        if tool["type"] == "namespace":
            assert item.namespace == streamed["namespace"] == "agents" and item.name in ("c", "spawn")
        back = [{"role": "user", "content": "Go."}, item]
        output = {"type": f"{item.type.removesuffix('_call')}_call_output", "call_id": item.call_id, "output": "done"}
        output |= {"status": "completed"} if item.type == "apply_patch_call" else {}
        again = api.responses.create(
            **asked | {"input": [*back, output], "tool_choice": "none", "max_output_tokens": 3}
        )
        assert again.output[0].type == "message"
