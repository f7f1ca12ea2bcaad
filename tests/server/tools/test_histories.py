"""Histories are taken as they are: arguments of any text, calls without answers, answers without calls, empty turns."""

import json
import time

import pytest

from engine.errors import InvalidRequestError
from server.intake.prompts import holds
from server.output.message_output import MessageOutput
from server.protocol import ChatCompletionRequest, parse_request
from server.protocol.anthropic.request import MessagesRequest
from server.protocol.responses.items import read_items
from server.protocol.tools import parse_arguments
from server.tools.events import Arguments, CallStart
from server.tools.rendering import mended
from tests.server.live import MODEL, chat_body
from tests.server.tools.rendered import prompt_of
from tests.server.tools.templates import MISTRAL_STYLE, PLAIN, QWEN, QWEN_CODER_STYLE, STYLES

DEEP = '{"a": ' + "[" * 127 + "]" * 127 + "}"
TEXTS = {
    "cut": '{"city": "Zür',
    "infinite": '{"far": 1e400, "near": [-1e999, NaN, Infinity]}',
    "null": "null",
    "a list": "[]",
    "a number": "12",
    "no JSON": "city=Zürich</parameter> {{ x }} <|im_end|>",
    "space": " \n",
    "128 levels": DEEP,
    "a hundred thousand levels": '{"a": ' + "[" * 100_000,
    "many lists": '{"a": [' + "[]," * 70_000 + "1]}",
    "half a character": r'{"a": "\ud800", "\udfff": 1}',
    "a large integer": '{"a": ' + "9" * 5_000 + "}",
    "twice": '{"a": 1, "a": 2}',
}
# Insists on its order, as templates of Mistral do.
STRICT = """\
{%- set state = namespace(waits=0, last='assistant') %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if state.waits == 0 %}{{ raise_exception('an answer without a call') }}{% endif %}
{%- set state.waits = state.waits - 1 %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}
{%- if state.waits %}{{ raise_exception('a call without an answer') }}{% endif %}
{%- if m.role == 'user' and state.last == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('nothing') }}{% endif %}
{%- set state.last = m.role %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function | tojson }}{% endfor %}
{%- set state.waits = (m.tool_calls or []) | length %}
{%- endif %}
{%- endfor %}{{ tools or '' }}"""
USER = {"role": "user", "content": "Weather?"}


def called(*ids, arguments="{}", **fields):
    calls = [{"id": i, "type": "function", "function": {"name": "get", "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls} | fields


def answer(call_id, text="sunny"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat(*messages, **fields):
    return parse_request(ChatCompletionRequest, {"model": "m", "messages": list(messages)} | fields)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_arguments_may_be_any_text(style, text):
    request = chat(USER, called("call_1", arguments=text), answer("call_1", "the answer"), USER)
    prompt = prompt_of(STYLES[style], request)
    assert "the answer" in prompt and "get" in prompt
    prompt.encode()
    word = "Zür" if "Zür" in text else "1e400" if "1e400" in text else "get"
    assert word in prompt


def test_every_style_shows_what_is_no_object_in_its_own_way():
    request = chat(USER, called("call_1", arguments='{"city": "Zür'), answer("call_1"), USER)
    assert r'"arguments": "{\"city\": \"Zür"' in prompt_of(QWEN, request)
    assert r'"arguments": "{\"city\": \"Zür"' in prompt_of(PLAIN, request)
    assert '<parameter=arguments>\n{"city": "Zür\n</parameter>' in prompt_of(QWEN_CODER_STYLE, request)
    verbatim = QWEN.replace("{{ call.function.arguments | tojson }}", "{{ call.function.arguments }}")
    assert '"arguments": {"city": "Zür}' in prompt_of(verbatim, request)


def test_the_object_is_kept_where_a_number_is_too_large():
    assert parse_arguments('{"a": 1e400, "b": -Infinity, "c": 1.5}') == {"a": "1e400", "b": "-Infinity", "c": 1.5}
    assert parse_arguments('{"a": ' + "9" * 5_000 + "}") == {"a": "9" * 5_000}
    assert parse_arguments(r'{"a": "\ud800b"}') == {"a": "\ufffdb"}
    assert parse_arguments("") == {} == parse_arguments(" ")
    assert parse_arguments(DEEP) == json.loads(DEEP) and parse_arguments(f'{{"a": {DEEP}}}') is None


IRREGULAR = {
    "an answer without a call": (USER, answer("call_9"), USER),
    "an answer at the start": (answer("call_9"), USER),
    "an answer of another call": (USER, called("call_1"), answer("call_9"), USER),
    "a late answer": (USER, called("call_1"), USER, answer("call_1"), USER),
    "answers that are too many": (USER, called("call_1"), answer("call_1"), answer("call_1"), USER),
    "a call without an answer": (USER, called("call_1"), USER),
    "one of two": (USER, called("call_1", "call_2"), answer("call_2"), USER),
    "a call at the end": (USER, called("call_1")),
    "an empty turn": (USER, {"role": "assistant", "content": None}, USER),
    "an empty answer": (USER, called("call_1"), {"role": "tool", "tool_call_id": "call_1", "content": None}, USER),
}


@pytest.mark.parametrize("style", [*STYLES, "strict"])
@pytest.mark.parametrize("name", IRREGULAR)
def test_calls_and_answers_may_be_without_each_other(style, name):
    source = STYLES.get(style, "{#<tool_call>#}" + STRICT)
    messages = IRREGULAR[name]
    for fields in ({}, {"tools": [{"type": "function", "function": {"name": "get"}}]}):
        prompt = prompt_of(source, chat(*messages, **fields))
        said = [message for message in messages if message["role"] == "tool" and message["content"]]
        assert prompt.count("sunny") == len(said)
        assert prompt.count("Weather?") == len([message for message in messages if message["role"] == "user"])


def test_what_is_regular_is_left_alone_and_refused_as_before():
    system = {"role": "system", "content": "Be brief."}
    regular = chat(system, USER, called("call_1", "call_2"), answer("call_2"), answer("call_1"), USER)
    assert mended(regular.messages) == regular.messages
    twice = chat(USER, called("call_1"), answer("call_1"), {"role": "assistant", "content": "a"}, *2 * [USER])
    assert [message.role for message in mended(twice.messages)] == ["user", "assistant", "tool", "assistant", "user"]
    with pytest.raises(InvalidRequestError, match="no way"):
        prompt_of("{{ raise_exception('no way') }}", chat(USER, answer("call_9")))


def test_turns_in_a_row_are_one_where_a_template_wants_them_in_turn():
    """Agents send rules of the system in several messages, also later on, and the user's place and words apart."""
    rules = [{"role": "developer", "content": text} for text in ("rule one", "rule two")]
    asked = [*rules, USER, {"role": "user", "content": "Now?"}, {"role": "assistant", "content": "Yes."}]
    asked += [{"role": "system", "content": "rule three"}, USER]
    strict = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    strict += "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }};{% endfor %}"
    expected = "user: rule one\nrule two\nWeather?\nNow?;assistant: Yes.;user: rule three\nWeather?;"
    assert prompt_of(strict, chat(*asked)) == expected
    first = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% set messages = messages[1:] %}{% endif %}"
    )
    expected = "rule one;user: rule two\nWeather?\nNow?;assistant: Yes.;user: rule three\nWeather?;"
    assert prompt_of(first + strict, chat(*asked)) == expected
    assert prompt_of(PLAIN, chat(*asked)).count("<user>") == 3, "left alone where a template takes it"


# Counts turns of the user and answers of the assistant, as templates of Mistral do; Gemma's counts all messages.
COUNTS = """\
{%- set state = namespace(turns=0) %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and (ALL or not m.tool_calls)) %}
{%- if (m.role == 'user') != (state.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set state.turns = state.turns + 1 %}
{%- endif %}{{ m.role }}: {{ m.content }}{{ m.tool_calls or '' }};
{%- endfor %}"""


@pytest.mark.parametrize(
    "source", [COUNTS.replace("ALL", "true"), COUNTS.replace("ALL", "false") + "{{ tools or '' }}"]
)
def test_the_user_may_speak_after_a_result_where_a_template_wants_turns(source):
    """Anthropic's clients send results and words of the user in one turn."""
    asked = [USER, called("call_1"), answer("call_1"), {"role": "user", "content": "Go on."}]
    for fields in ({}, {"tools": [{"type": "function", "function": {"name": "get"}}]}):
        prompt = prompt_of(source + "{#<tool_call>#}", chat(*asked, **fields))
        assert "user: <tool_response>\nsunny\n</tool_response>\nGo on.;" in prompt and '"name": "get"' in prompt


def test_calls_of_one_turn_come_one_by_one_where_the_template_takes_one():
    prompt = prompt_of(STYLES["llama3"], chat(USER, called("1", "2"), answer("2", "rain"), answer("1"), USER))
    assert prompt.count('<|python_tag|>{"name": "get"') == 2 and prompt.index("sunny") < prompt.index("rain")


# Skips system messages behind the first message, as gpt-oss's template does, or has one place for all (DeepSeek R1).
SKIPS = "{% for m in messages %}{% if loop.first or m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endif %}"
REPLACES = """\
{%- set state = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{% set state.system = m.content %}{% endfor %}{{ state.system }}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"""


@pytest.mark.parametrize("source", [SKIPS + "{% endfor %}", REPLACES])
@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be brief."}]])
def test_no_system_message_is_lost(source, first):
    """One that the template does not show becomes a turn of the user."""
    talk = [*first, USER, {"role": "assistant", "content": "Yes."}, {"role": "system", "content": " In French. "}, USER]
    for fields in ({}, {"tools": [{"type": "function", "function": {"name": "get"}}]}):
        prompt = prompt_of(source, chat(*talk, **fields))
        assert prompt.count("Be brief.") == len(first) and ('"get"' in prompt) == bool(fields)
        assert prompt.endswith("<user> In French. \nWeather?</>") or not (first or fields)
        assert prompt.count("In French.") == 1


# Takes a switch out of the first message and skips later ones, as SmolLM3's template does.
SWITCH = """\
{%- if '/off' in messages[0].content %}(off){% endif %}<system>{{ messages[0].content.replace('/off', '') }}</>
{%- for m in messages[1:] if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"""
# Shows the system message in the last turn of the user, if it is the last message, as Mistral Nemo's does.
LAST_WORD = """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in rest %}<{{ m.role }}>
{%- if loop.last and m.role == 'user' and rest != messages %}{{ messages[0].content }} {% endif %}{{ m.content }}</>
{%- endfor %}"""


def test_a_switch_in_the_system_message_stays_one():
    switch, late = {"role": "system", "content": "Be brief. /off"}, {"role": "system", "content": "In French."}
    assert prompt_of(SWITCH, chat(switch, USER)) == "(off)<system>Be brief. </><user>Weather?</>"
    assert prompt_of(SWITCH, chat(switch, late, USER)) == "(off)<system>Be brief. </><user>In French.\nWeather?</>"


def test_the_system_message_is_shown_where_the_user_does_not_have_the_last_word():
    talk = [{"role": "system", "content": "Be brief."}, USER]
    assert prompt_of(LAST_WORD, chat(*talk)) == "<user>Be brief. Weather?</>"
    prompt = prompt_of(LAST_WORD, chat(*talk, {"role": "assistant", "content": "Sunny."}))
    assert prompt == "<user>Be brief.\nWeather?</><assistant>Sunny.</>"


def test_a_message_of_the_developer_is_shown_where_the_template_has_only_the_word():
    source = "{# the developer's preamble #}{% for m in messages if m.role in ('system', 'user') %}<{{ m.role }}>"
    talk = [{"role": "developer", "content": "Be brief."}, USER]
    assert prompt_of(source + "{{ m.content }}{% endfor %}", chat(*talk)) == "<system>Be brief.<user>Weather?"


def test_a_prompt_is_searched_once_for_all_system_messages():
    texts = [f"Rule {i}." for i in range(50_000)]
    start = time.process_time()
    assert holds("<user>Hi</>" + "".join(texts), texts)
    assert time.process_time() - start < 2  # 7 s if each search starts at the beginning
    assert holds("b c a", ["a", "b", "c"])  # Mistral Nemo's template shows the first message behind the others
    assert not holds("a c", ["a", "b", "c"]) and not holds("c b a", ["a", "b", "c"])


def test_a_template_without_any_message_is_not_refused():
    assert prompt_of("{{ 'always' }}", chat(USER, {"role": "system", "content": "Be brief."})) == "always"


def test_a_template_that_takes_ids_of_nine_letters_gets_such():
    assert "[TOOL_RESULTS]" in prompt_of(MISTRAL_STYLE, chat(USER, answer("an id that nobody gave")))


def test_over_http(client):
    """Each API, with a template that knows no tools; none of it is refused."""
    for messages in IRREGULAR.values():
        assert client.post("/v1/chat/completions", json=chat_body(messages=messages)).status_code == 200
    for text in TEXTS.values():
        body = chat_body(messages=[USER, called("call_1", arguments=text), answer("call_1"), USER], max_tokens=1)
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200 or "maximum context length" in response.text, response.text
    call = {"type": "function_call", "call_id": "c", "name": "f"}
    output = {"type": "function_call_output", "call_id": "d", "output": "sunny"}
    for items in ([output], [call | {"arguments": "{"}, output], [output, call | {"arguments": "[]"}]):
        response = client.post("/v1/responses", json={"model": MODEL, "input": items, "max_output_tokens": 1})
        assert response.status_code == 200, response.text
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": "sunny"}]}
    for messages in ([result], [USER, use], [USER, use, result], [USER, {"role": "assistant", "content": []}, USER]):
        response = client.post("/v1/messages", json={"model": MODEL, "messages": messages, "max_tokens": 1})
        assert response.status_code == 200, response.text


def test_a_last_turn_with_calls_is_not_continued():
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    for content, continued in (("It is", True), ([{"type": "text", "text": "I look."}, use], False)):
        fields = {"model": "m", "max_tokens": 1, "messages": [USER, {"role": "assistant", "content": content}]}
        assert parse_request(MessagesRequest, fields).continues is continued


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_blocks_of_an_answer_hold_what_a_client_can_send_back(text):
    output = MessageOutput(streamed=False)
    output.feed(CallStart(0, "call_1", "get"))
    output.feed(Arguments(0, text))
    output.finish()
    (block,) = output.blocks
    json.dumps(block, ensure_ascii=False, allow_nan=False).encode()


def test_items_of_calls_need_no_order():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
    output = {"type": "function_call_output", "call_id": "d", "output": "x"}
    assert [message["role"] for message in read_items([output, call]).messages] == ["tool", "assistant"]
