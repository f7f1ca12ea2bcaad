"""Requests of agents to /v1/messages beyond a plain conversation: context editing, deferred tools, hidden thinking.

The prompts of the fake model are bytes, so a count of tokens says which texts are in a prompt.
"""

import json
import re

import anthropic
import pytest
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount, BetaRawMessageDeltaEvent

from server.intake.context_edits import PLACEHOLDER
from server.output.message_output import MessageOutput
from server.tools.events import Content, Reasoning
from tests.checkpoints import save_fake_checkpoint
from tests.server.anthropic_messages import PATH, assert_error, body, frames
from tests.server.live import MODEL, LiveServer

BETAS = ["context-management-2025-06-27"]
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONG = "a long result of a tool " * 2


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A server with a longer context, and a template that shows thinking."""
    folder = save_fake_checkpoint(tmp_path_factory.mktemp("roomy") / "model", THINKS)
    with LiveServer(folder, engine={"max_model_len": 4096}) as live:
        yield live


@pytest.fixture(scope="module")
def roomy_client(roomy):
    with roomy.client() as client:
        yield client


def called(i: int, name: str = "find", result: str = LONG, **arguments) -> list[dict]:
    """A call and its result."""
    use = {"type": "tool_use", "id": f"t{i}", "name": name, "input": arguments}
    answer = {"type": "tool_result", "tool_use_id": f"t{i}", "content": result}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]


def history(*results: str) -> list[dict]:
    """A conversation with these results of tools in it."""
    turns = [called(i, result=result) for i, result in enumerate(results)]
    return [{"role": "user", "content": "go"}, *[message for turn in turns for message in turn]]


def thought(text: str, said: str) -> dict:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": said}]}


def count(client, messages: list[dict], **fields) -> dict:
    response = client.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": messages} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def clear(**fields) -> dict:
    """A body's context_management with one edit, which applies whatever the length."""
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}} | fields
    return {"context_management": {"edits": [edit]}}


def clear_thinking(keep) -> dict:
    return {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}}


def keep(value: int) -> dict:
    return {"type": "tool_uses", "value": value}


def test_the_first_request_of_a_coding_agent(roomy_client):
    """In the form of Claude Code's: a system message amid the turns, a deferred tool, hidden thinking, an edit that
    changes nothing, cache_control everywhere."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tool = {"name": "Run", "description": "Runs.", "input_schema": {"type": "object", "properties": {}}}
    sent = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<note>n</note>"}, {"type": "text", "text": "hi"}]},
            {"role": "system", "content": [{"type": "text", "text": "It is Monday.", **cached}]},
        ],
        "system": [{"type": "text", "text": "Help.", **cached}],
        "tools": [tool | cached | {"eager_input_streaming": True}, tool | {"name": "Later", "defer_loading": True}],
        "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s" * 36})},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high"},
        "speed": "fast",
        **clear_thinking("all"),
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-1m-2025-08-07,"
        "fine-grained-tool-streaming-2025-05-14,context-management-2025-06-27,effort-2025-11-24",
    }
    assert roomy_client.head("/").status_code == 200
    response = roomy_client.post(f"{PATH}?beta=true", json=body(stream=True, **sent), headers=headers)
    assert response.status_code == 200, response.text
    *_, delta, _end = frames(response.text)
    assert BetaRawMessageDeltaEvent.model_validate(delta).context_management.applied_edits == []
    fields = {name: value for name, value in sent.items() if name != "metadata"}
    counted = roomy_client.post(f"{PATH}/count_tokens?beta=true", json={"model": MODEL} | fields).json()
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}


def test_older_results_are_cleared_and_the_answer_says_so(roomy, roomy_client):
    whole, cut = history(LONG, LONG, "short", LONG), history(PLACEHOLDER, LONG, "short", LONG)
    before, after = (count(roomy_client, messages)["input_tokens"] for messages in (whole, cut))
    asked = {"model": MODEL, "messages": whole, "max_tokens": 4, "betas": BETAS} | clear()
    applied = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 1, "cleared_input_tokens": before - after}
    assert before - after == len(LONG) - len(PLACEHOLDER)

    with anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0) as api:
        message = api.beta.messages.create(**asked)
        with api.beta.messages.stream(**asked) as events:
            (delta,) = [event for event in events if event.type == "message_delta"]
        del asked["max_tokens"]
        counted = api.beta.messages.count_tokens(**asked)
    BetaMessage.model_validate(message.model_dump(), strict=True)
    assert [edit.model_dump() for edit in message.context_management.applied_edits] == [applied]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == after
    assert [edit.model_dump() for edit in delta.context_management.applied_edits] == [applied]
    assert isinstance(counted, BetaMessageTokensCount)
    assert (counted.input_tokens, counted.context_management.original_input_tokens) == (after, before)


@pytest.mark.parametrize(
    "fields, results",
    [
        ({}, ["", LONG, LONG, LONG]),  # three are kept
        ({"keep": keep(4)}, [LONG] * 4),
        ({"keep": keep(1)}, ["", "", "", LONG]),
        ({"keep": keep(0)}, [""] * 4),
        ({"trigger": None}, [LONG] * 4),  # 100,000 tokens
        ({"trigger": {"type": "tool_uses", "value": 3}}, ["", LONG, LONG, LONG]),
        ({"trigger": {"type": "tool_uses", "value": 4}}, [LONG] * 4),  # it is not exceeded
        ({"keep": keep(1), "exclude_tools": ["find"]}, [LONG] * 4),
        ({"keep": keep(1), "exclude_tools": ["other"]}, ["", "", "", LONG]),
        ({"clear_at_least": {"type": "input_tokens", "value": len(LONG) - len(PLACEHOLDER)}}, ["", LONG, LONG, LONG]),
        ({"clear_at_least": {"type": "input_tokens", "value": len(LONG) - len(PLACEHOLDER) + 1}}, [LONG] * 4),
    ],
    ids=str,
)
def test_which_results_are_cleared(client, fields, results):
    expected = count(client, history(*[result or PLACEHOLDER for result in results]))
    counted = count(client, history(*[LONG] * 4), **clear(**fields))
    assert counted["input_tokens"] == expected["input_tokens"]


@pytest.mark.parametrize("cleared, emptied", [(True, True), (["find"], True), (["other"], False), (False, False)])
def test_inputs_of_calls_are_cleared_where_that_is_asked(client, cleared, emptied):
    start = [{"role": "user", "content": "go"}]
    counted = count(client, [*start, *called(1, q="where is it")], **clear(keep=keep(0), clear_tool_inputs=cleared))
    arguments = {} if emptied else {"q": "where is it"}
    expected = count(client, [*start, *called(1, result=PLACEHOLDER, **arguments)])
    assert counted["input_tokens"] == expected["input_tokens"]


@pytest.mark.parametrize(
    "kept, thoughts",
    [("all", 3), ({"type": "all"}, 3), ({"type": "thinking_turns", "value": 2}, 2), (None, 1)],
    ids=str,
)
def test_older_turns_lose_their_thinking(roomy_client, kept, thoughts):
    """A turn is all that the assistant says and calls until the user says something."""
    user = {"role": "user", "content": "go"}
    first = [user, thought("one", "a"), *called(1, result="r"), thought("two", "b")]
    rest = [user, thought("three", "c"), user, thought("four", "d"), user]
    plain = [user, thought("", "a"), *called(1, result="r"), thought("", "b")]
    expected = [*(first if thoughts == 3 else plain), *rest]
    if thoughts == 1:
        expected = [*plain, user, thought("", "c"), *rest[2:]]
    counted = count(roomy_client, [*first, *rest], **clear_thinking(kept))
    whole, after = (count(roomy_client, messages)["input_tokens"] for messages in ([*first, *rest], expected))
    assert (counted["input_tokens"], counted["context_management"]["original_input_tokens"]) == (after, whole)
    asked = {"model": MODEL, "messages": [*first, *rest], "max_tokens": 2}
    applied = roomy_client.post(PATH, json=asked | clear_thinking(kept)).json()["context_management"]
    edit = {"type": "clear_thinking_20251015", "cleared_thinking_turns": 3 - thoughts}
    assert applied["applied_edits"] == ([] if thoughts == 3 else [edit | {"cleared_input_tokens": whole - after}])


def test_both_edits_count_what_each_cleared(roomy_client):
    user = {"role": "user", "content": "go"}
    messages = [user, thought("long thoughts", "a"), *called(1), user, thought("late", "b"), user]
    edits = [clear_thinking(None), clear(keep=keep(0))]
    both = {"context_management": {"edits": [edit["context_management"]["edits"][0] for edit in edits]}}
    asked = {"model": MODEL, "messages": messages, "max_tokens": 2}
    first, second = roomy_client.post(PATH, json=asked | both).json()["context_management"]["applied_edits"]
    assert first["cleared_input_tokens"] == len("<think>long thoughts</think>")
    assert second["cleared_input_tokens"] == len(LONG) - len(PLACEHOLDER)


def test_a_prompt_that_fits_only_after_its_edits(client):
    """The limit holds for the prompt that the model sees."""
    asked = body(messages=history("x" * 600, "end")) | clear(keep=keep(1))
    response = client.post(PATH, json=asked)
    assert response.status_code == 200, response.text
    del asked["context_management"]
    assert_error(client.post(PATH, json=asked), 400, "invalid_request_error", "prompt is too long")


EDIT = {"type": "clear_tool_uses_20250919"}
THINKING = {"type": "clear_thinking_20251015"}


def test_a_prompt_that_is_too_long_says_so_in_anthropics_words(server, client):
    """Claude Code compacts a conversation by itself where it reads these, and nothing else, as the message."""
    long = [{"role": "user", "content": "x" * 600}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        with pytest.raises(anthropic.BadRequestError) as refused:
            api.messages.create(model=MODEL, messages=long, max_tokens=8)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    length, limit = map(int, TOO_LONG.fullmatch(refused.value.body["error"]["message"]).groups())
    assert (length, limit) == (client.post("/tokenize", json={"messages": long[:1]}).json()["count"], 511)
    by_characters = client.post(PATH, json=body(messages=[{"role": "user", "content": "x" * 100_000}]))
    length, limit = map(int, TOO_LONG.fullmatch(by_characters.json()["error"]["message"]).groups())
    assert length > limit == 511
    counted = client.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": body()["messages"] * 9_000})
    assert TOO_LONG.fullmatch(counted.json()["error"]["message"])


def tools(*deferred: str) -> dict:
    schema = {"type": "object", "properties": {}}
    return {
        "tools": [
            {"name": name, "description": name * 9, "input_schema": schema, "defer_loading": name in deferred}
            for name in ("find", "load")
        ]
    }


def reference(name: str) -> list[dict]:
    return called(1, "find", [{"type": "tool_reference", "tool_name": name}])


def change(kind: str, name: str) -> dict:
    block = {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}
    return {"role": "system", "content": [block]}


def test_a_deferred_tool_is_in_the_prompt_once_it_is_referred_to(client):
    start = [{"role": "user", "content": "go"}]
    one = {"tools": tools()["tools"][:1]}
    assert count(client, start, **tools("load")) == count(client, start, **one) != count(client, start, **tools())
    loaded = [*start, *reference("load")]
    text = "The tool load can be called now."
    assert count(client, loaded, **tools("load")) == count(client, [*start, *called(1, result=text)], **tools())
    added = [*start, change("addition", "load")]
    assert count(client, added, **tools("load")) == count(client, start, **tools())
    removed = [*start, change("addition", "load"), change("removal", "load")]
    assert count(client, removed, **tools("load")) == count(client, start, **one)
    forced = {"tool_choice": {"type": "tool", "name": "load"}}
    assert count(client, start, **tools("load"), **forced) == count(client, start, **tools(), **forced)


def test_a_system_message_may_hold_until_the_user_speaks_again(client):
    user, note = {"role": "user", "content": "go"}, {"role": "system", "content": "be quick"}
    passing = note | {"clear_at": "next_user_message"}
    assert count(client, [user, passing]) == count(client, [user, note | {"clear_at": "never"}])
    answer = {"role": "assistant", "content": "ok"}
    assert count(client, [user, passing, answer, user]) == count(client, [user, answer, user])
    refused = client.post(PATH, json=body(messages=[user, note | {"clear_at": "soon"}]))
    assert_error(refused, 400, "invalid_request_error", "messages[1].clear_at must be 'next_user_message' or 'never'")
    refused = client.post(PATH, json=body(messages=[user | {"clear_at": "never"}]))
    assert_error(refused, 400, "invalid_request_error", "messages[0].clear_at is not a field")


def test_an_agent_is_told_that_nothing_judges_its_calls(client):
    """Claude Code asks its user then, and would run what it takes for checked if the field were ignored."""
    refused = client.post(PATH, json=body(safeguards=[{"type": "dangerous_tool_use", "classifier_context": {}}]))
    said = assert_error(refused, 400, "invalid_request_error")
    assert said == "safeguards is not supported by this server: leave it out."


def test_errors_of_deferred_tools_name_the_field(client):
    start = [{"role": "user", "content": "go"}]
    refused = client.post(PATH, json=body(messages=[*start, *reference("other")], **tools("load")))
    where = "messages[2].content[0].content[0].tool_name is not the name of one of the tools"
    assert_error(refused, 400, "invalid_request_error", where)
    refused = client.post(PATH, json=body(messages=[*start, change("addition", "other")], **tools("load")))
    assert_error(refused, 400, "invalid_request_error", "messages[1].content[0].tool.name is not the name")
    wrong = tools("find")["tools"]
    wrong[1]["input_schema"] = {"type": "array"}
    refused = client.post(PATH, json=body(tools=wrong))
    assert_error(refused, 400, "invalid_request_error", "tools[1].input_schema.type")


@pytest.mark.parametrize("display", ["summarized", "updates", "omitted"])
def test_how_thinking_is_displayed(client, display):
    assert client.post(PATH, json=body(thinking={"type": "adaptive", "display": display})).status_code == 200


def test_thinking_that_is_not_shown_comes_back_in_its_signature(roomy_client):
    output = MessageOutput(streamed=True, shows_thinking=False)
    raw = b"".join(output.feed(part) for part in [Reasoning("deep "), Reasoning("thöught"), Content("said")])
    found = frames((raw + output.finish()).decode())
    block = output.blocks[0]
    assert block["type"] == "thinking" and block["thinking"] == "" and b"deep" not in raw
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "signature_delta", "signature": block["signature"]}
    user = {"role": "user", "content": "go"}
    shown, hidden = thought("deep thöught", "said"), {"role": "assistant", "content": output.blocks}
    assert count(roomy_client, [user, hidden, user]) == count(roomy_client, [user, shown, user])
    others = {"role": "assistant", "content": [block | {"signature": "EqQBCkYIB"}, output.blocks[1]]}
    assert count(roomy_client, [user, others, user]) == count(roomy_client, [user, thought("", "said"), user])
