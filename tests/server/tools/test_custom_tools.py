"""Custom tools below HTTP: their grammar as that of a JSON string, and the text out of the arguments."""

import json
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.protocol.grammars.lark_in_json import LarkError, lark_of_json_string
from server.tools.custom_input import InputEvents, InputReader
from server.tools.events import Arguments, CallStart, Content, Input

PATCH = """
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?
hunk: "*** Add: " filename LF add_line+ | "*** Update: " filename LF change+ eof?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF

%import common.LF
"""
CODE = "start: pragma | SOURCE\npragma: PRAGMA NEWLINE SOURCE\nPRAGMA: /[ \\t]*\\/\\/ @x:[^\\r\\n]*/\n"
CODE += "NEWLINE: /\\r?\\n/\nSOURCE: /[\\s\\S]+/\n"
STRINGS = 'start: "say " TEXT ";" END\nTEXT: "\\"" CHAR* "\\""\nCHAR: /[^"\\\\]/ | "\\\\" /./\nEND: /.*x/ "\\n"'
COUNTS = 'start: /"[^"]*"|[a-z]+\\n{2}|\\t{3,}|x{2}.{0,90}y/'
CASES = 'start: A ("," B)* C?\nA: "Ab\\"c"i\nB: /[^"a-c\\n]+x/i\nC: /(?s:q.)|\\s\\/|\\x22|\\d{2,3}|[\\w\\-]z/'
OBJECT = 'start: "{" (PAIR ("," PAIR)*)? "}"\nPAIR: ESCAPED_STRING ":" NUMBER\n%import common.ESCAPED_STRING\n'
OBJECT += "%import common (NUMBER, WS)\n%ignore WS\n"
# Grammar, texts that it allows, texts that it does not.
GRAMMARS = [
    (PATCH, ['*** Begin\n*** Add: "b".txt\n+x\\y\n+\n*** End', "*** Begin\n*** Update: a\n@@ f\n-\ta\n+\tb\n*** End\n"],
     ["*** Begin\n*** End", "*** Begin\n*** Add: a\nx\n*** End", "x"]),
    (CODE, ['// @x: a\nx = "1\\n"\n\ttext()', "a", "\x00\x1f\x7f\u2028é"], [""]),
    (STRINGS, ['say "a\\"b\nc";foo x\n', 'say "";x\n', 'say "q";a"x"x\n'], ['say "a";y\n', 'say "a"']),
    (COUNTS, ['"a\n\\"', "ab\n\n", "\t\t\t\t", 'xx"\\yy'], ['"a', "ab\n", "\t\t", "xxab"]),
    (CASES, ['AB"c,zzX', 'ab"C', 'ab"cq\n', 'ab"c\t/', 'ab"c"', 'ab"c123', 'ab"c,\\\tX', 'ab"c-z'],
     ['ab"c,aX', 'ab"c,"X', 'ab"cq']),
    ("start: A\nA: B & /[a-c]{2}/\nB: /[b-z]+/", ["bc"], ["ab", "d"]),
    ('start: /[\\s\\S]{3}/ " ".."~"', ['\n"\\"', "abc\\"], ["abcé", "ab"]),
    (r'start: "a" /(\s+)?/ /\n*/? "b"', ["ab", "a\t\nb", "a b"], ["a", "axb"]),  # repetitions of repetitions
    (r'start: (/"+a/ | /(\\n)+;/ | /x(\n){0}y/) /(b"?){2}/~2', ['""abb"bb"', "\\n\\n;bbbb", "xybbbb"],
     ["abbbb", ";bbbb"]),
    (OBJECT, ['{"a":1, "b\\"c":2.5e3}', "{}", "{ }"], ['{"a":}', "{a:1}"]),
]  # fmt: skip


def accepts(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("definition, allowed, others", GRAMMARS)
def test_a_grammar_allows_the_same_texts_in_a_json_string(definition, allowed, others):
    quoted = f'start: "{{\\"input\\": \\"" text "}}"\ntext: %lark {{\n{lark_of_json_string(definition)}}}'
    for text in (*allowed, *others):
        assert accepts(definition, text) == (text in allowed), text
        assert accepts(quoted, json.dumps({"input": text}, ensure_ascii=False)) == (text in allowed), text


@pytest.mark.parametrize(
    "definition",
    [
        *("start: <a>", "start: %json {}", 'x: "a"', "start[lazy]: /a/", "start: /(?=a)/", "start: /a", 'start: "\\q"'),
        *("start: A\nA: B\nB: A", "start: /\\b/", "start: /[a[b]]/", '%import x.y\nstart: "a"', "start: /^a$/"),
        *('start: A\nA: ~"\\n"', 'start: "a', "start: " + "(" * 1990, "x" * (1 << 16), "start: " + "/.*/ " * 1990),
        "start: /" + "(?:" * 90 + "\\n" + ")" * 90 + "/",
        "start: A\nA: " + "(" * 990 + '"\\n"' + ")" * 990,
        "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60)) + 'A60: "\\n"',
    ],
    ids=range(20),
)
def test_what_cannot_be_rewritten_is_said_at_once(definition):
    start = time.process_time()
    try:
        quoted = lark_of_json_string(definition)
    except LarkError as error:
        assert str(error)
    else:
        assert definition.startswith("start: (") or len(quoted) < 1 << 17, "the compiler must refuse the rest"
    assert time.process_time() - start < 2


TEXTS = ["", "a", 'say "hi"\n\tnow \\ then', "\x00 \x1f é \U0001f600 \ud800 \udc00", "\\u0041", '"']


@pytest.mark.parametrize("text", TEXTS, ids=repr)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("quoted", [True, False])
def test_the_text_comes_out_of_the_arguments_however_they_are_cut(text, ascii_only, quoted):
    if not ascii_only:
        text = text.encode("utf-8", "replace").decode()
    value = json.dumps(text, ensure_ascii=ascii_only) if quoted else text
    arguments = json.dumps({"input": value}, ensure_ascii=ascii_only)
    expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if quoted and ascii_only and expected != text:
        expected = text.replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")
    for size in (1, 2, 5, len(arguments)):
        reader = InputReader(quoted)
        pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
        assert "".join(map(reader.feed, pieces)) + reader.finish() == expected, size


@pytest.mark.parametrize(
    "arguments, text",
    [
        *[('{"code": "x"}', "x"), ('{"input": 5}', '{"input": 5}'), ("{}", "{}"), ('{"input": "a', "a"), ("{", "{")],
        *[
            ('{"a": "b", "input": "x"}', "x"),
            ('{ "input" : "x\\', "x"),
            ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ],
    ],
)
def test_what_a_free_model_or_a_cut_makes_of_the_arguments(arguments, text):
    reader = InputReader(False)
    assert reader.feed(arguments) + reader.finish() == text


def test_only_calls_of_custom_tools_become_inputs():
    events = InputEvents({"run": False})
    first = events.feed([Content("a"), CallStart(0, "x", "f"), Arguments(0, "{}"), CallStart(1, "y", "run")])
    assert first == [Content("a"), CallStart(0, "x", "f"), Arguments(0, "{}"), CallStart(1, "y", "run", custom=True)]
    assert events.feed([Arguments(1, '{"input": "b'), Arguments(1, 'c"}'), CallStart(2, "z", "run")]) == [
        Input(1, "b"),
        Input(1, "c"),
        CallStart(2, "z", "run", custom=True),
    ]
    assert events.feed([Arguments(2, '{"other": "d"}')]) == [] and events.finish() == [Input(2, "d")]
    assert events.finish() == []
