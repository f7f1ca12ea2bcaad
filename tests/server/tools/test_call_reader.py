"""Calls in a text: for each format what is one, and that no way of cutting the text into pieces changes the result."""

import itertools
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from server.tools.call_reader import CallReader
from server.tools.calls.json_object import NotJsonError, ObjectScanner
from server.tools.events import Arguments, CallStart
from server.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, MISTRAL_V11, QWEN3_CODER

SCHEMAS = {
    "f": {
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "flag": {"type": "boolean"},
            "o": {"type": ["object", "null"]},
            "any": {},
        }
    },
    "get_weather": {},
}
F = ("f", '{"a": 1}')


def read(form, pieces, *, certain=False, cut=False, hidden=(), only_calls=False):
    """(text and calls in their order, whether the last call was cut), with neighbouring texts joined."""
    reader = CallReader(form, SCHEMAS, certain, hidden, only_calls)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish(cut)
    parts, ids = [], set()
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(ids) and event.id.startswith("call_")
            ids.add(event.id)
            parts.append((event.name, ""))
        elif isinstance(event, Arguments):
            assert event.index == len(ids) - 1 and event.text
            parts[-1] = parts[-1][0], parts[-1][1] + event.text
        elif parts and isinstance(parts[-1], str):
            parts[-1] += event.text
        else:
            parts.append(event.text)
    assert reader.num_calls == len(ids)
    return parts, reader.unfinished


HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NASTY = json.dumps({"s": 'x\\"}</tool_call>é<tool_call>]', "n": [-1.5e3, None, {"": []}]})
V11_F = '[TOOL_CALLS]f[ARGS]{"a": 1}'
XML_F = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def xml(**values):
    """A call of f whose values stand in lines of their own."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


# (format, text, what it is)
WHOLE = [
    (HERMES, HERMES_F, [F]),
    (HERMES, f"Sure.\n\n{HERMES_F}\n", ["Sure.", F]),
    (HERMES, f" \n{HERMES_F}\n{HERMES_F}", [F, F]),
    (HERMES, f"One.{HERMES_F} Two.{HERMES_F} Three.", ["One.", F, " Two.", F, " Three."]),
    (HERMES, f"{HERMES_F}\nDone.", [F, "Done."]),
    (HERMES, '<tool_call>{"name":"f","arguments":{"a": 1}}', [F]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [F]),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {json.dumps(F[1])}}}</tool_call>', [F]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {NASTY}}}</tool_call>', [("f", NASTY)]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', [F]),
    (LLAMA3, '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F]),
    (LLAMA3, 'I call.<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ["I call.", F]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}', [F, F]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', [F]),
    (MISTRAL, 'So: [TOOL_CALLS] [ {"name": "f", "arguments": {"a": 1}} ]', ["So:", F]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]', [F, F]),
    (MISTRAL_V11, V11_F, [F]),
    (MISTRAL_V11, f"So:\n{V11_F}{V11_F}", ["So:", F, F]),
    (MISTRAL_V11, '[TOOL_CALLS]f[CALL_ID]a1b2C3d4e[ARGS]{"a": 1}', [F]),
    (MISTRAL_V11, '[TOOL_CALLS] f {"a": 1}', [F]),
    (MISTRAL_V11, f"[TOOL_CALLS]get_weather[ARGS]{NASTY} Done.", [("get_weather", NASTY), "Done."]),
    (QWEN3_CODER, XML_F, [F]),
    (QWEN3_CODER, f"I look.\n{XML_F}\n{XML_F}", ["I look.", F, F]),
    (QWEN3_CODER, XML_F.replace("\n", ""), [F]),
    (QWEN3_CODER, xml(), [("f", "{}")]),
    (QWEN3_CODER, xml(a=" 1 ", s="1", flag="True"), [("f", '{"a": 1, "s": "1", "flag": true}')]),
    (QWEN3_CODER, xml(s="  x\n\ty\n"), [("f", '{"s": "  x\\n\\ty\\n"}')]),
    (QWEN3_CODER, xml(s="") + "\nOK", [("f", '{"s": ""}'), "OK"]),
    (QWEN3_CODER, "<tool_call><function=f><parameter=s>\n</parameter></function>", [("f", '{"s": ""}')]),
    (
        QWEN3_CODER,
        xml(s='é"\\</parameter> <parameter>\n</tool_call>'),
        [("f", '{"s": "é\\"\\\\</parameter> <parameter>\\n</tool_call>"}')],
    ),
    (QWEN3_CODER, xml(o='{"x": [1, null]}', any="007"), [("f", '{"o": {"x": [1, null]}, "any": "007"}')]),
    (QWEN3_CODER, xml(o="None", any="7", more="[]"), [("f", '{"o": null, "any": 7, "more": []}')]),
    (QWEN3_CODER, xml(a="many", flag="{", o="NaN"), [("f", '{"a": "many", "flag": "{", "o": "NaN"}')]),
]
# Texts without a call, which stay unchanged.
TEXT = [
    (HERMES, "\n a < b, <tool, <tool_call and no more \n"),
    (HERMES, "<tool_call>"),
    (HERMES, "x <tool_call>f(1)</tool_call> y"),
    (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'f'}</tool_call>"),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}'),
    (LLAMA3, ' {"answer": 42} it is'),
    (LLAMA3, '{"name": "f"}'),
    (LLAMA3, 'Text {"name": "f", "parameters": {}}'),
    (LLAMA3, "<|python_tag|>print(1)"),
    (MISTRAL, "[TOOL_CALLS] none [TOOL"),
    (MISTRAL, '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
    (MISTRAL_V11, "[TOOL_CALLS] none of them, [TOOL"),
    (MISTRAL_V11, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MISTRAL_V11, "[TOOL_CALLS]f[ARGS]null"),
    (MISTRAL_V11, '[TOOL_CALLS]f[ARGS]{"a": 1'),
    (MISTRAL_V11, "[TOOL_CALLS]f[CALL_ID]123456789"),
    (MISTRAL_V11, '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
    (QWEN3_CODER, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    (QWEN3_CODER, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    (QWEN3_CODER, "<tool_call>\n<function=f>\nno tag</function>\n</tool_call>"),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>"),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=s>\nx"),
    (QWEN3_CODER, "if a <function and <function=g> or <fun"),
]
# Texts that max_tokens cut off: (format, text, expected content and calls, whether a call was cut off).
CUT = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')], True),
    (HERMES, HERMES_F[:-4], [F], False),
    (HERMES, f'Well. {HERMES_F}\n<tool_call>\n{{"na', ["Well.", F], False),
    (HERMES, "Well. <tool_", ["Well. <tool_"], False),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {', ['<tool_call>{"name": "unknown", "arguments": {'], False),
    (LLAMA3, '{"name": "f", "parameters": {', [("f", "{")], True),
    (LLAMA3, '{"answer": 4', ['{"answer": 4'], False),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name"', [F], False),
    (MISTRAL, "[TOOL_CALLS]", [], False),
    (MISTRAL_V11, '[TOOL_CALLS]f[ARGS]{"a"', [("f", '{"a"')], True),
    (MISTRAL_V11, f"Well.{V11_F}[TOOL_CALLS]f[AR", ["Well.", F], False),
    (QWEN3_CODER, XML_F[:-4], [F], False),
    (QWEN3_CODER, "Well.\n<tool_call>\n<funct", ["Well."], False),
    (QWEN3_CODER, "<tool_call>\n<function=f>", [("f", "{")], True),
    (QWEN3_CODER, xml(s="two\nlines").partition("es\n")[0], [("f", '{"s": "two\\nlin')], True),
    (QWEN3_CODER, xml(a=12, s="x").partition("2")[0], [("f", '{"a": ')], True),
    (QWEN3_CODER, xml(s="x").partition("eter>\n</")[0], [("f", '{"s": "x')], True),
]
ALL = [(form, text, cut, False) for form, text, *_ in [*WHOLE, *TEXT, *CUT] for cut in (False, True)]
ALL += [(form, text, cut, True) for form, text, *_ in [*WHOLE, *CUT] for cut in (False, True)]


@pytest.mark.parametrize("form, text, parts", WHOLE, ids=lambda value: None)
@pytest.mark.parametrize("certain", [False, True])
def test_calls_are_read(form, text, parts, certain):
    assert read(form, [text], certain=certain) == (parts, False)


@pytest.mark.parametrize("form, text", TEXT, ids=lambda value: None)
def test_what_is_no_call_stays_text(form, text):
    assert read(form, [text]) == ([text], False)


@pytest.mark.parametrize("form, text, parts, unfinished", CUT, ids=lambda value: None)
def test_a_cut_call_is_what_there_is(form, text, parts, unfinished):
    assert read(form, [text], cut=True) == (parts, unfinished)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("cut", [False, True])
def test_where_only_calls_may_come_no_part_of_one_is_content(form, cut):
    text = form.write([("f", {"a": 1, "s": "x"}), ("get_weather", {})])
    for end in range(len(text) + 1):
        asked = {"certain": True, "cut": cut, "only_calls": True}
        parts, unfinished = read(form, [text[:end]], **asked)
        assert all(isinstance(part, tuple) for part in parts)
        assert read(form, list(text[:end]), **asked) == (parts, unfinished)
    assert (parts, unfinished) == read(form, [text], certain=True)


@pytest.mark.parametrize("form, text, cut, certain", ALL, ids=lambda value: None)
def test_every_split_gives_the_same(form, text, cut, certain):
    whole = read(form, [text], certain=certain, cut=cut)
    assert read(form, list(text), certain=certain, cut=cut) == whole
    for i in range(len(text)):
        assert read(form, [text[:i], text[i:]], certain=certain, cut=cut) == whole


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", ", ", "; ", "\n", " ", "a", "<"),
        *(V11_F, XML_F, "[ARGS]", "[CALL_ID]", "<function=", "f", ">", "<parameter=", "s", "a>", "</parameter>", "1"),
        *("</function>", "<tool_call>\n<function=f>\n", "<parameter=s>\n", "\n</parameter>\n", "</param"),
        *("{", "}", '"', '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"a": 1}', HERMES_F),
    ]
)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(PIECES, max_size=12).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_any_chunking_of_any_text_gives_the_same(form, text, cuts, cut):
    whole = read(form, [text], cut=cut)
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    assert read(form, [text[a:b] for a, b in itertools.pairwise(places)], cut=cut) == whole
    for name, arguments in (part for part in whole[0] if isinstance(part, tuple)):
        assert name in SCHEMAS
        if part_is_whole(whole, (name, arguments)):
            assert isinstance(json.loads(arguments), dict)


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(),
        "s": st.text(st.sampled_from('ab \n\t\\"{}<>/é=') | st.characters(codec="utf-8"), max_size=20),
        "flag": st.booleans(),
        "o": st.none() | st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=2),
    },
)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(ARGUMENTS, min_size=1, max_size=3),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_what_a_format_writes_is_read_again(form, calls, cuts, certain):
    text = form.write([("f", arguments) for arguments in calls])
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    parts, unfinished = read(form, [text[a:b] for a, b in itertools.pairwise(places)], certain=certain)
    assert [(name, json.loads(arguments)) for name, arguments in parts] == [("f", call) for call in calls]
    assert not unfinished


def part_is_whole(read_text, part) -> bool:
    parts, unfinished = read_text
    return not (unfinished and part == [p for p in parts if isinstance(p, tuple)][-1])


def test_text_is_held_back_only_while_it_may_become_a_marker():
    reader = CallReader(HERMES, SCHEMAS)
    said = ["".join(event.text for event in reader.feed(piece)) for piece in ("a", " ", "b", " <", "tool", "s", "\n")]
    assert said == ["a", "", " b", "", "", " <tools", ""]


def test_arguments_pass_as_they_come_where_a_grammar_holds():
    reader = CallReader(HERMES, SCHEMAS, certain=True)
    events = [reader.feed(piece) for piece in ('<tool_call>\n{"name": "f", "arguments": ', "{", '"a"', ": 1", "}", "}")]
    texts = [[event.text for event in found if isinstance(event, Arguments)] for found in events]
    assert texts == [[], ["{"], ['"a"'], [": 1"], ["}"], []]


def test_a_string_passes_as_it_comes_where_a_grammar_holds():
    reader = CallReader(QWEN3_CODER, SCHEMAS, certain=True)
    pieces = [
        "<tool_call>\n<function=f>\n",
        "<parameter=s>",
        "\nx",
        "y\n",
        "z</par",
        "!",
        "\n</parameter>\n",
        "</function>",
    ]
    texts = ["".join(e.text for e in reader.feed(piece) if isinstance(e, Arguments)) for piece in pieces]
    assert texts == ["{", '"s": ', '"x', "y", "\\nz", "</par!", "", '"}']


def test_a_call_without_its_first_marker_is_one():
    """Qwen3-Coder forgets it at times."""
    assert read(QWEN3_CODER, ["Well.\n" + XML_F.removeprefix("<tool_call>\n")]) == (["Well.", F], False)


def test_a_marker_that_is_a_special_token_is_no_text_where_it_marks_nothing():
    assert read(LLAMA3, ["<|python_tag|>", "print(1)"], hidden=("<|python_tag|>",)) == (["print(1)"], False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=12,
)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.integers(0, 40), st.booleans())
def test_the_scanner_finds_the_end_of_any_object(value, at, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    scanner = ObjectScanner()
    whole = text + '} "more'
    end = scanner.feed(whole[:at])
    assert scanner.feed(whole, end) == len(text) and scanner.done


BROKEN = ['{"a" 1', "{,", '{"a": 1,}', "[", '{"a": tru ', '{"a": 1.}', '{"\\x', '{"\n', "{1", '{"a": [1}']


@pytest.mark.parametrize("text", BROKEN)
def test_the_scanner_refuses_as_soon_as_it_can(text):
    scanner = ObjectScanner()
    scanner.feed(text[:-1])
    with pytest.raises(NotJsonError):
        scanner.feed(text, len(text) - 1)


def test_arguments_as_a_string_that_is_no_text_are_no_call():
    text = '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": \\"\\ud83e\\"}"}\n</tool_call>'
    [part], _ = read(HERMES, [text])
    assert part == text
