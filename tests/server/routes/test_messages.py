"""/v1/messages through Anthropic's own client, whose types every answer and event must be."""

import json

import anthropic
import pytest
from anthropic.types import Message

from server.output.message_output import MessageOutput
from server.protocol.anthropic.message_answers import AnthropicErrorEnvelope
from server.tools.events import Arguments, CallStart, Content, Reasoning
from tests.server.anthropic_messages import HELLO, PATH, assert_error, body, frames
from tests.server.live import MODEL, LiveServer, chat_prompt, expected_text

TEXT = expected_text(chat_prompt("hello"), 1, 8)
SEED = {"seed": 1}


@pytest.fixture(scope="module")
def api(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        yield api


def prompt_of(*messages: tuple[str, str], end: str = "assistant\n") -> list[int]:
    ids = [part for role, text in messages for part in (256, *f"{role}\n{text}".encode(), 257, *b"\n")]
    return [*ids, 256, *end.encode()]


def stream(client, **fields) -> list[dict]:
    response = client.post(PATH, json=body(stream=True, **fields))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    return frames(response.text)


def test_a_message(api):
    message = api.messages.create(model=MODEL, messages=HELLO, max_tokens=8, extra_body=SEED)
    Message.model_validate(message.model_dump(), strict=True)
    assert message.id.startswith("msg_") and message.role == "assistant" and message.model == MODEL
    assert [(block.type, block.text) for block in message.content] == [("text", TEXT)]
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    usage = message.usage
    assert usage.output_tokens == 8 and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + usage.cache_read_input_tokens == len(chat_prompt("hello"))
    assert message._request_id.startswith("req-")


@pytest.mark.parametrize("budget", [5, "2000", 1024.5])
def test_a_budget_is_a_wish_within_the_documented_range(client, budget):
    thinking = {"type": "enabled", "budget_tokens": budget}
    response = client.post(PATH, json=body(thinking=thinking))
    assert response.status_code == 400 and "thinking.budget_tokens" in response.json()["error"]["message"]
    assert client.post(PATH, json=body(thinking=thinking | {"budget_tokens": 1024})).status_code == 200


def test_a_stop_sequence_is_named(api, client):
    stop = TEXT[4:6]
    message = api.messages.create(
        model=MODEL, messages=HELLO, max_tokens=8, stop_sequences=["never", stop], extra_body=SEED
    )
    assert message.content[0].text == TEXT[: TEXT.index(stop)]
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    *_, delta, end = stream(client, stop_sequences=[stop])
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop} and end["type"] == "message_stop"


def test_the_end_of_the_turn(folder):
    with LiveServer(folder, "--eos-every", "5") as live, live.client() as client:
        message = client.post(PATH, json=body(max_tokens=200)).json()
        assert message["stop_reason"] == "end_turn"
        assert stream(client, max_tokens=200)[-2]["delta"]["stop_reason"] == "end_turn"


def test_events_come_in_order_and_add_up(client):
    found = stream(client)
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(deltas) == TEXT and len(deltas) > 1
    others = [event["type"] for event in found if event["type"] != "content_block_delta"]
    start = ["message_start", "content_block_start", "ping"]
    assert others == [*start, "content_block_stop", "message_delta", "message_stop"]
    assert found[0]["message"]["content"] == [] and found[0]["message"]["stop_reason"] is None
    assert found[1]["content_block"] == {"type": "text", "text": ""}
    whole = client.post(PATH, json=body()).json()
    assert "".join(deltas) == whole["content"][0]["text"]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 8


def test_the_stream_helper(api):
    with api.messages.stream(model=MODEL, messages=HELLO, max_tokens=8, extra_body=SEED) as events:
        assert "".join(events.text_stream) == TEXT
        message = events.get_final_message()
    assert message.content[0].text == TEXT and message.usage.output_tokens == 8


async def test_the_asynchronous_client(server):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        message = await api.messages.create(model=MODEL, messages=HELLO, max_tokens=8, extra_body=SEED)
        assert message.content[0].text == TEXT
        async with api.messages.stream(model=MODEL, messages=HELLO, max_tokens=8, extra_body=SEED) as events:
            assert "".join([text async for text in events.text_stream]) == TEXT
        raw = await api.messages.create(model=MODEL, messages=HELLO, max_tokens=8, stream=True)
        assert [event.type async for event in raw][-1] == "message_stop"


def test_system_and_turns(api):
    asked = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    prompt = prompt_of(("system", "be\nbrief"), ("user", "a\nb"), ("assistant", "c\nd"), ("user", "e"))
    for system in ("be\nbrief", [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]):
        message = api.messages.create(model=MODEL, messages=asked, system=system, max_tokens=8, extra_body=SEED)
        assert message.content[0].text == expected_text(prompt, 1, 8)
    count = api.messages.count_tokens(model=MODEL, messages=asked, system="be\nbrief")
    assert count.input_tokens == len(prompt)


def test_an_answer_that_was_begun_goes_on(api):
    asked = [*HELLO, {"role": "assistant", "content": "Once"}]
    message = api.messages.create(model=MODEL, messages=asked, max_tokens=8, extra_body=SEED)
    assert message.content[0].text == expected_text(prompt_of(("user", "hello"), end="assistant\nOnce"), 1, 8)


def test_a_conversation_goes_on_with_what_the_client_got(api):
    first = api.messages.create(model=MODEL, messages=HELLO, max_tokens=8, extra_body=SEED)
    asked = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    second = api.messages.create(model=MODEL, messages=asked, max_tokens=8, extra_body=SEED)
    prompt = prompt_of(("user", "hello"), ("assistant", TEXT), ("user", "more"))
    assert second.content[0].text == expected_text(prompt, 1, 8)


def test_what_the_cache_holds_is_counted_apart(folder):
    long = [{"role": "user", "content": "x" * 100}]
    with LiveServer(folder) as live, live.client() as client:
        for cached in (0, 112):
            usage = client.post(PATH, json=body(messages=long)).json()["usage"]
            assert usage["cache_read_input_tokens"] == cached
            assert usage["input_tokens"] + cached == len(chat_prompt("x" * 100))
        assert stream(client, messages=long)[0]["message"]["usage"]["cache_read_input_tokens"] == 112


def test_errors_of_every_layer_are_anthropics(client, folder):
    assert_error(client.post(PATH, json=body(model="other")), 404, "not_found_error", "The model 'other'")
    assert_error(
        client.post(PATH, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error"
    )
    assert_error(client.get(PATH), 405, "invalid_request_error")
    assert_error(client.post(f"{PATH}/batches", json={}), 404, "not_found_error")
    with LiveServer(folder, "--load-seconds", "3", wait=False) as live, live.client() as loading:
        refused = loading.post(PATH, json=body())
        assert_error(refused, 503, "overloaded_error")
        assert int(refused.headers["retry-after"]) >= 1


def test_keys(folder):
    with LiveServer(folder, api_key=("sesame",)) as live:
        with live.client() as client:
            assert_error(client.post(PATH, json=body()), 401, "authentication_error")
            refused = client.post(PATH, json=body(), headers={"x-api-key": "wrong"})
            start = "Incorrect API key provided: send a valid one as x-api-key: KEY."
            assert_error(refused, 401, "authentication_error", start)
            keyed = {"x-api-key": "sesame"}
            assert client.post(PATH, json=body(), headers=keyed).status_code == 200
            assert client.post(PATH, json=body(), headers={"authorization": "Bearer sesame"}).status_code == 200
            assert client.get("/v1/models", headers=keyed).status_code == 401, "that header is of these routes only"
            wrong = {"x-api-key": "sesame", "authorization": "Bearer wrong"}
            assert client.post(PATH, json=body(), headers=wrong).status_code == 401
        for key, error in (("sesame", None), ("wrong", anthropic.AuthenticationError)):
            with anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0) as api:
                if error is None:
                    assert api.messages.create(model=MODEL, messages=HELLO, max_tokens=1).content
                    continue
                with pytest.raises(error):
                    api.messages.create(model=MODEL, messages=HELLO, max_tokens=1)


def test_a_wrong_base_url_and_unknown_routes(folder):
    """A base_url with /v1, which OpenAI's clients want, was told that the key is wrong where the server has keys."""
    with LiveServer(folder, api_key=("sesame",)) as live:
        for key, kind, begin in (
            ("sesame", "not_found_error", "Unknown route; did you mean /v1/messages?"),
            ("wrong", "authentication_error", "Incorrect API key provided: send a valid one as x-api-key: KEY."),
        ):
            with anthropic.Anthropic(base_url=f"{live.url}/v1", api_key=key, max_retries=0) as api:
                with pytest.raises(anthropic.APIStatusError) as caught:
                    api.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
            assert_error(caught.value.response, caught.value.status_code, kind, begin)
            assert caught.value.type == kind and caught.value.request_id
        with anthropic.Anthropic(base_url=live.url, api_key="sesame", max_retries=0) as api:
            with pytest.raises(anthropic.NotFoundError) as caught:
                api.beta.files.list()
        assert caught.value.type == "not_found_error"
        with live.client() as client:
            headers = {"anthropic-version": "2023-06-01", "authorization": "Bearer sesame"}
            for path in ("chat/completions", "completions", "embeddings", "responses"):
                assert client.post(f"/v1/{path}", json={}, headers=headers).json()["error"]["code"], "OpenAI's form"


def test_a_failure_after_the_headers(folder):
    with LiveServer(folder, "--fail-on-token", str(TEXT.encode()[2])) as live, live.client() as client:
        *_, error = stream(client, max_tokens=40)
        assert error["type"] == "error" and error["error"]["type"] == "api_error"
        assert_error(client.post(PATH, json=body(max_tokens=40)), 500, "api_error")
        with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as api:
            with (
                pytest.raises(anthropic.APIStatusError),
                api.messages.stream(model=MODEL, messages=HELLO, max_tokens=40, extra_body=SEED) as events,
            ):
                list(events)


SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "cat"]}},
    "required": ["animal"],
    "additionalProperties": False,
}
TOOL = {"name": "find", "description": "finds animals", "input_schema": SCHEMA}
CALLED = [
    {"role": "user", "content": "find it"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "find", "input": {"animal": "fox"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "gone"}],
                "is_error": True,
            },
            {"type": "text", "text": "again"},
        ],
    },
]


USE = {"type": "tool_use", "id": "t2", "name": "find", "input": {}}


def test_blocks_are_the_messages_of_a_chat(api, client):
    call = {"id": "t1", "type": "function", "function": {"name": "find", "arguments": '{"animal": "fox"}'}}
    function = {"name": "find", "description": "finds animals", "parameters": SCHEMA}
    chat = {
        "messages": [
            {"role": "user", "content": "find it"},
            {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "Error: gone"},
            {"role": "user", "content": "again"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    expected = client.post("/tokenize", json=chat).json()["count"]
    assert api.messages.count_tokens(model=MODEL, messages=CALLED, tools=[TOOL]).input_tokens == expected


def test_thinking_and_calls_are_blocks_with_events_of_their_own():
    output = MessageOutput(streamed=True)
    said = [Reasoning("a"), Reasoning("b"), Content("c"), CallStart(0, "call_1", "find"), Arguments(0, '{"x":')]
    raw = b"".join(output.feed(part) for part in [*said, Arguments(0, "1}"), CallStart(1, "call_2", "find")])
    found = frames((raw + output.feed(Arguments(1, "{")) + output.finish()).decode())
    kinds = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in found]
    start = [("start", 0), ("ping", None), ("delta", 0), ("delta", 0), ("stop", 0)]
    text, call = [("start", 1), ("delta", 1), ("stop", 1)], [("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)]
    assert kinds == [*start, *text, *call, ("start", 3), ("delta", 3), ("stop", 3)]
    thought, said_text, first, second = output.blocks
    assert thought == {"type": "thinking", "thinking": "ab", "signature": ""} and said_text["text"] == "c"
    assert first == {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"x": 1}}
    assert second["input"] == {}, "a call that was cut appears in a stream only"


def test_a_call_that_is_forced(bundled_server):
    with anthropic.Anthropic(base_url=bundled_server, api_key="none", max_retries=0) as api:
        asked = [{"role": "user", "content": "Find an animal."}]
        for choice in ({"type": "any"}, {"type": "tool", "name": "find", "disable_parallel_tool_use": True}):
            with api.messages.stream(
                model="pageserve", messages=asked, tools=[TOOL], tool_choice=choice, max_tokens=200
            ) as events:
                streamed = events.get_final_message()
            assert streamed.content[0].input["animal"] in ("fox", "cat")
        message = api.messages.create(
            model="pageserve", messages=asked, tools=[TOOL], tool_choice=choice, max_tokens=200
        )
        (block,) = message.content
        assert block.type == "tool_use" and block.input["animal"] in ("fox", "cat")
        assert message.stop_reason == streamed.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "found"}
        asked += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        again = api.messages.create(model="pageserve", messages=asked, tools=[TOOL], max_tokens=8)
        assert again.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_the_tool_runner_goes_on_without_a_thread(client, bundled_server):
    """Anthropic's client asks for a conversation that the server keeps, until it hears that there is none."""
    refused = client.post(PATH, json=body(thread={"type": "create"}))
    AnthropicErrorEnvelope.model_validate(refused.json())
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["message"].startswith("thread is not supported")
    assert error["details"]["error_code"] == "thread_unsupported_request"
    asked = []

    @anthropic.beta_tool
    def find(animal: str) -> str:
        """Finds animals.

        Args:
            animal: which
        """
        asked.append(animal)
        return "found"

    with anthropic.Anthropic(base_url=bundled_server, api_key="none", max_retries=0) as api:
        runner = api.beta.messages.tool_runner(
            model="pageserve",
            messages=[{"role": "user", "content": "Find an animal."}],
            tools=[find],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=300,
            max_iterations=2,
            extra_body={"temperature": 0},
        )
        messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert asked[:1] == [messages[0].content[0].input["animal"]]


def test_the_bundled_model(bundled_server):
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "cat"]}}, "required": ["name"]}
    schema["additionalProperties"] = False
    with anthropic.Anthropic(base_url=bundled_server, api_key="none", max_retries=0) as api:
        asked = [{"role": "user", "content": "Tell me a story about a fox."}]
        greedy = {"temperature": 0}
        with api.messages.stream(
            model="pageserve", messages=asked, system="Be kind.", max_tokens=24, extra_body=greedy
        ) as events:
            text = "".join(events.text_stream)
            message = events.get_final_message()
        assert text and message.content[0].text == text and message.stop_reason in ("end_turn", "max_tokens")
        form = {"format": {"type": "json_schema", "schema": schema}}
        answer = api.messages.create(
            model="pageserve",
            messages=asked,
            max_tokens=200,
            output_config=form,
            extra_body=greedy,
        )
        assert json.loads(answer.content[0].text)["name"] in ("fox", "cat")


def test_no_block_of_a_system_message_is_no_system_message(client):
    usages = [client.post(PATH, json=body() | fields).json()["usage"] for fields in ({}, {"system": []})]
    counts = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages]
    assert counts[0] == counts[1] > 0


def test_a_request_may_have_hundreds_of_tools_with_the_names_of_mcp(client):
    """Claude Code sends the tools of all its MCP servers, in this form and most of them deferred."""
    names = [f"mcp__{'server' * 18}__tool_{i:04d}" for i in range(1024)]
    assert len(names[0]) == 124
    tools = [TOOL | {"name": name, "defer_loading": i > 1} for i, name in enumerate(names)]
    count = f"{PATH}/count_tokens"
    few, many = (client.post(count, json={"model": MODEL, "messages": HELLO, "tools": t}) for t in (tools[:2], tools))
    assert many.status_code == 200 and many.json() == few.json()
    chat = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": names[0]}}]}
    assert client.post("/tokenize", json=chat).json()["count"] > 124
    flat = {"input": "hello", "tools": [{"type": "function", "name": names[0]}]}
    assert client.post("/v1/responses/input_tokens", json=flat).json()["input_tokens"] > 124


SERVER_BLOCKS = [
    {"type": "redacted_thinking", "data": "EmwK"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "foxes"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
]
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def test_tools_and_blocks_of_anthropics_servers_are_left_out_and_named(api, client):
    asked, answer = {"role": "user", "content": "hello"}, {"type": "text", "text": "A fox."}
    resumed = [asked, {"role": "assistant", "content": [*SERVER_BLOCKS, answer]}, asked]
    plain = [asked, {"role": "assistant", "content": [answer]}, asked]
    expected = api.messages.create(model=MODEL, messages=plain, max_tokens=8, extra_body=SEED)
    raw = api.messages.with_raw_response.create(
        model=MODEL, messages=resumed, max_tokens=8, extra_body=SEED, tools=[WEB_SEARCH]
    )
    assert raw.parse().content == expected.content
    assert raw.headers["x-pageserve-left-out"] == (
        "web_search, redacted_thinking, server_tool_use, web_search_tool_result"
    )
    fields = body(messages=resumed, tools=[WEB_SEARCH | {"type": f"web_search_2025{i:04d}"} for i in range(3)])
    streamed = client.post(PATH, json=fields | {"stream": True})
    assert streamed.headers["x-pageserve-left-out"].startswith("web_search, redacted") and frames(streamed.text)
    counted = client.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": resumed})
    assert counted.headers["x-pageserve-left-out"].startswith("redacted_thinking, ")
    assert "x-pageserve-left-out" not in client.post(PATH, json=body()).headers


def test_errors_name_the_place_among_blocks_and_tools_that_are_left_out(client):
    wrong = [*SERVER_BLOCKS, USE | {"id": ""}]
    messages = [*HELLO, {"role": "assistant", "content": wrong}]
    tools = [WEB_SEARCH, TOOL | {"name": "a b"}]
    for fields, place in (({"messages": messages}, "messages[1].content[3].id"), ({"tools": tools}, "tools[1].name")):
        assert_error(client.post(PATH, json=body(**fields)), 400, "invalid_request_error", place)


def test_deferred_tools_are_described_where_anthropics_servers_would_search_them(client):
    def count(*tools):
        return client.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": HELLO, "tools": tools}).json()

    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert count(search, TOOL | {"defer_loading": True}) == count(TOOL) != count(TOOL | {"defer_loading": True})


def test_documents_search_results_and_compactions_are_text(client):
    def count(*messages):
        asked = client.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": messages})
        assert asked.status_code == 200, asked.text
        return asked.json()["input_tokens"], asked.headers.get("x-pageserve-left-out")

    def user(*blocks):
        return {"role": "user", "content": list(blocks)}

    source = {"type": "text", "media_type": "text/plain", "data": "A fox."}
    document = {"type": "document", "source": source, "title": "Foxes", "citations": {"enabled": False}}
    text = {"type": "text", "text": "Foxes\nA fox."}
    assert count(user(document)) == count(user(text))
    of_blocks = document | {"source": {"type": "content", "content": [{"type": "text", "text": "A fox."}]}}
    assert count(user(of_blocks)) == count(user(document | {"context": None})) == count(user(text))
    assert count(user(document | {"source": {"type": "content", "content": "A fox."}})) == count(user(text))
    found = {"type": "search_result", "title": "Foxes", "source": "fox.txt", "content": [text, text]}
    as_text = {"type": "text", "text": "Foxes\nfox.txt" + 2 * "\nFoxes\nA fox."}
    assert count(user(found)) == count(user(found | {"citations": {"enabled": False}})) == count(user(as_text))
    result = {"type": "tool_result", "tool_use_id": "t1"}
    asked = CALLED[:2]
    assert count(*asked, user(result | {"content": [found]})) == count(*asked, user(result | {"content": [as_text]}))
    assert count(*asked, user(result | {"content": [document]})) == count(*asked, user(result | {"content": [text]}))
    turns = [[{"type": "compaction", "content": summary}] for summary in ("So far.", None)]
    turns += [[{"type": "text", "text": "So far."}], []]
    found = [count({"role": "assistant", "content": blocks}, *HELLO) for blocks in turns]
    assert found[0] == found[2] and found[1] == (found[3][0], "compaction")
