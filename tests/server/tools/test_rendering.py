"""Conversations with tools in templates of each style, and in one that knows no tools."""

import re

import pytest

from engine.text.chat_template import ChatTemplate
from server.protocol import ChatCompletionRequest, parse_request
from server.tools.formats import HERMES, LLAMA3, MISTRAL, MISTRAL_V11, QWEN3_CODER, find_tool_use
from server.tools.rendering import with_tools
from tests.server.tools.rendered import prompt_of
from tests.server.tools.templates import (
    LLAMA,
    MISTRAL_STYLE,
    MISTRAL_V11_STYLE,
    NO_SYSTEM,
    PLAIN,
    QWEN,
    QWEN_CODER_STYLE,
    UNKNOWN,
)


class NoTokens:
    def added_token_id(self, text):
        return None


class PythonTag:
    def added_token_id(self, text):
        return 5 if text == "<|python_tag|>" else None


REQUEST = parse_request(
    ChatCompletionRequest,
    {
        "model": "m",
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"city":"Zürich"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": {"name": "get", "description": "the weather", "strict": True}}],
    },
)


def render(source, request=REQUEST, tokenizer=None, chosen=None):
    template = ChatTemplate(source, {})
    use = find_tool_use(template, tokenizer or NoTokens(), chosen)
    messages, variables = with_tools(template, use, request.messages, request.offered_tools, False)
    return use, template.render(messages, True, variables)


@pytest.mark.parametrize(
    "source, form, in_template",
    [
        (QWEN, HERMES, True),
        (LLAMA, LLAMA3, True),
        (MISTRAL_STYLE, MISTRAL, True),
        (MISTRAL_V11_STYLE, MISTRAL_V11, True),
        (QWEN_CODER_STYLE, QWEN3_CODER, True),
        (PLAIN, HERMES, False),
        (UNKNOWN, HERMES, False),
        (UNKNOWN.replace("<functions>", "<tool_call>f<arg_key>x</arg_key>"), HERMES, False),
        (
            UNKNOWN.replace("<functions>", "within <tool_call></tool_call>: <tool_calls>[{}]</tool_calls>"),
            HERMES,
            False,
        ),
        (UNKNOWN.replace("<functions>", "<|python_tag|> for code, else <function=f>{}</function>"), HERMES, False),
    ],
)
def test_the_format_is_what_the_template_shows(source, form, in_template):
    use, _ = render(source)
    assert (use.form, use.in_template) == (form, in_template)


def test_a_template_of_llama_that_speaks_of_json_alone():
    source = LLAMA.replace("<|python_tag|>", "").replace("function name", '"parameters"')
    assert render(source, tokenizer=PythonTag())[0].form is LLAMA3


def test_the_format_can_be_set():
    use, text = render(PLAIN, chosen="mistral")
    assert use.form is MISTRAL and '[TOOL_CALLS][{"name": "get", "arguments": {"city": "Zürich"}}]' in text


def test_qwen_style():
    _, text = render(QWEN)
    assert '{"type": "function", "function": {"name": "get", "description": "the weather", "parameters": {' in text
    assert '<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>sunny</tool_response>" in text and "strict" not in text


def test_content_stays_a_text_where_a_template_asks_for_reasoning_content():
    """As Qwen3's template does, which then searches the content for </think>."""
    asks = (
        "{%- if m.reasoning_content is defined and m.reasoning_content is not none %}{{ m.reasoning_content }}"
        "{%- elif '</think>' in m.content %}{{ raise_exception('no thought was given') }}{% endif %}"
    )
    use, text = render(QWEN.replace("{%- for call in", f"{asks}{{%- for call in"))
    assert use.in_template and '<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>' in text


def test_content_is_none_where_the_template_tells_calls_by_it_and_a_text_where_it_takes_its_length():
    none = QWEN.replace("{{ m.role + '\\n' + m.content }}", "{{ m.role }}{{ '!' if m.content is none }}")
    assert "assistant!<tool_call>" in render(none)[1]
    length = none.replace("m.content is none", "m.content is none or m.content | length > 9")
    use, text = render(length.replace("{{ m.role }}", "{{ m.role }}{{ m.content | length }}"))
    assert use.in_template and "assistant0<tool_call>" in text


def test_reasoning_has_the_name_that_the_template_reads():
    said = {"role": "assistant", "content": "It is", "reasoning_content": "Look."}
    last = parse_request(ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "?"}, said]})
    source = "{% for m in messages %}{% if 'NAME' in m %}[{{ m.NAME }}]{% endif %}{{ m.content }}{% endfor %}"
    for name in ("thinking", "reasoning_content"):
        assert prompt_of(source.replace("NAME", name), last) == "?[Look.]It is"


@pytest.mark.parametrize(
    "names",
    [
        "{{ '<think>' + (m.reasoning_content or m.thinking) + '</think>' if m.reasoning_content or m.thinking }}",
        "{% for part in [] %}{{ part['thinking'] }}{% endfor %}",  # Ministral's, for parts of a content
    ],
)
def test_text_before_a_call_stays_content_beside_reasoning(names):
    call = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "get"}}]
    fields = {"model": "m", "messages": [{"role": "user", "content": "?"}, said], "tools": tools}
    source = QWEN.replace("{{ m.role + '\\n' + m.content }}", f"{{{{ m.role + '\\n' }}}}{names}{{{{ m.content }}}}")
    _, text = render(source, parse_request(ChatCompletionRequest, fields))
    assert 'I look.<tool_call>\n{"name": "get"' in text and "Hm.\nI" not in text


def test_llama_style():
    _, text = render(LLAMA)
    assert '<|python_tag|>{"name": "get", "parameters": {"city": "Zürich"}}<|eot|><|start|>ipython<|end|>sunny' in text
    assert '"description": "the weather"' in text


def test_mistral_style_has_ids_of_nine_characters():
    _, text = render(MISTRAL_STYLE)
    call_id = re.search(r'"id": "([a-zA-Z0-9]{9})"}\]', text)[1]
    assert f"[TOOL_RESULTS]{call_id}: sunny" in text and "[AVAILABLE_TOOLS]" in text


def test_mistral_v11_style():
    _, text = render(MISTRAL_V11_STYLE)
    call_id = re.search(r'\[TOOL_CALLS\]get\[CALL_ID\]([a-zA-Z0-9]{9})\[ARGS\]{"city": "Zürich"}', text)[1]
    assert f"[TOOL_RESULTS]{call_id}[TOOL_CONTENT]sunny[/TOOL_RESULTS]" in text and "[AVAILABLE_TOOLS]" in text


def test_qwen_coder_style():
    _, text = render(QWEN_CODER_STYLE)
    call = "<tool_call>\n<function=get>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call><|im_end|>"
    assert call in text and "<name>get</name>" in text


@pytest.mark.parametrize(
    "chosen, call",
    [
        ("mistral_v11", '<assistant>[TOOL_CALLS]get[ARGS]{"city": "Zürich"}</>'),
        ("qwen3_coder", "<assistant><tool_call>\n<function=get>\n<parameter=city>\nZürich\n</parameter>\n</function>"),
    ],
)
def test_newer_formats_by_the_preamble(chosen, call):
    _, text = render(PLAIN, chosen=chosen)
    assert call in text and "<user><tool_response>\nsunny\n</tool_response></>" in text
    assert ("as JSON" in text) == (chosen == "mistral_v11")


@pytest.mark.parametrize("source", [PLAIN, UNKNOWN])
def test_the_preamble(source):
    _, text = render(source)
    assert text.startswith("<system>You can call functions")
    assert '<tools>\n{"name": "get", "description": "the weather"' in text
    assert '<assistant><tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call></>' in text
    assert "<user><tool_response>\nsunny\n</tool_response></><user>And now?</>" in text


def test_the_preamble_follows_a_system_message_or_comes_with_the_first_question():
    fields = {"model": "m", "tools": [tool.model_dump() for tool in REQUEST.tools]}
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    request = parse_request(ChatCompletionRequest, fields | {"messages": messages})
    assert render(PLAIN, request)[1].startswith("<system>Be short.\n\nYou can call functions")
    request = parse_request(ChatCompletionRequest, fields | {"messages": messages[1:]})
    text = render(NO_SYSTEM, request)[1]
    assert text.startswith("<user>You can call functions") and text.endswith("\n\nHi</>")


def test_answers_of_tools_that_follow_each_other_are_one_message():
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "get", "arguments": ""}} for i in range(2)]
    messages = [{"role": "assistant", "content": "I look.", "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in range(2)]
    _, text = render(PLAIN, parse_request(ChatCompletionRequest, {"model": "m", "messages": messages}))
    assert "You can call" not in text and "<assistant>I look.\n<tool_call>" in text
    assert text.endswith("<user><tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response></>")


@pytest.mark.parametrize("source", [PLAIN, QWEN])
def test_answers_stand_as_the_calls_that_they_answer(source):
    """In whichever order a client's tools have answered: these templates show no ids."""
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "get", "arguments": ""}} for i in range(3)]
    messages = []
    for _ in range(2):  # ids may come again
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": f"c{i}", "content": f"answer {i}"} for i in (2, 0, 1)]
        messages.append({"role": "user", "content": "Again."})
        calls = calls[::-1]
    _, text = render(source, parse_request(ChatCompletionRequest, {"model": "m", "messages": messages}))
    assert re.findall("answer ([0-9])", text) == ["0", "1", "2", "2", "1", "0"]
