"""/v1/responses through openai-python, whose types every answer and event must be."""

import json
from typing import Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from server.protocol.response_items import chat_messages
from server.response_output import EventWriter, ResponseOutput
from server.tools.events import Arguments, CallStart, Content, Reasoning
from tests.server.live import MODEL, LiveServer, assert_error, chat_prompt, expected_text

PATH = "/v1/responses"
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
REQUIRED = {"id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools", "output"}
REQUIRED |= {"parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p", "status", "usage", "text"}
FUNCTION = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
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
    """What it thinks, says and calls, in any order: between a call and its output no other message may stand."""
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    other = CALL | {"call_id": "d"}
    items = [thought, said, CALL, said, thought, other, OUTPUT, OUTPUT | {"call_id": "d"}, said, said]
    first, *outputs, second, third = chat_messages([{"role": "user", "content": "x"}, *items])[1:]
    assert [call["id"] for call in first.pop("tool_calls")] == ["c", "d"]
    assert first == {"role": "assistant", "reasoning_content": "t\nt", "content": "a\na"}
    assert [message["tool_call_id"] for message in outputs] == ["c", "d"]
    assert second == third == {"role": "assistant", "content": "a"}
    (alone,) = chat_messages([CALL, said])
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


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ],
)
def test_what_would_need_a_store_says_so(client, fields, param):
    assert "this server stores nothing" in assert_error(client.post(PATH, json=body(**fields)), 400, param)


@pytest.mark.parametrize("fields", [{"context_management": [{"type": "compaction"}]}, {"moderation": {}}], ids=list)
def test_what_openai_documents_and_this_server_lacks_is_not_called_unknown(client, fields):
    (param,) = fields
    assert_error(client.post(PATH, json=body(**fields)), 400, param, "unsupported_value")


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": None}, "input"),
        ({"input": 1}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[0].extra"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [CALL | {"name": ""}]}, "input[0].name"),
        ({"input": [CALL | {"call_id": "c" * 257}]}, "input[0].call_id"),
        ({"input": [CALL | {"caller": {"type": "program", "caller_id": "p"}}]}, "input[0].caller"),
        ({"input": [CALL | {"id": 5}]}, "input[0].id"),
        ({"input": [CALL, OUTPUT | {"status": "done"}]}, "input[1].status"),
        ({"input": [{"role": "assistant", "content": "x", "phase": 1}]}, "input[0].phase"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary[0]"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 1}}}}, "text.format"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f", "strict": True}}, "tool_choice.strict"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION | {"x": 1}]}},
            "tool_choice.tools[0].x",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION], "x": 1}}, "tool_choice.x"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
    ids=str,
)
def test_errors_name_the_field(client, fields, param):
    message = assert_error(client.post(PATH, json=body(**fields)), 400, param)
    assert "messages" not in message and "response_format" not in message


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
        assert error["type"] == "error" and "finite" not in error["message"], "what went wrong is for the log"
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


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ],
    ids=str,
)
def test_errors_of_tools_name_the_field(client, fields, param):
    assert_error(client.post(PATH, json=body(**fields)), 400, param)


def test_reasoning_and_calls_are_items_with_events_of_their_own(server):
    events = EventWriter(True)
    output = ResponseOutput(events, server.driver.tokenizer)
    said = [Reasoning("a"), Reasoning("b"), Content("c"), CallStart(0, "call_1", "find"), Arguments(0, '{"x":')]
    for part in [*said, Arguments(0, "1}"), CallStart(1, "call_2", "find"), Arguments(1, "{")]:
        output.take(part, [])
    output.finish("incomplete", [])
    found = frames(events.take().decode())
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
    assert "not compacted" in assert_error(client.post(f"{PATH}/compact", json=body()), 404, code="not_found")
