"""Whatever a grammar of calls lets through is read as calls whose arguments obey the schemas: random walks over it."""

import json
import random
import time

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.errors import InvalidRequestError
from engine.grammars.compiler import Compiler, fill_mask
from engine.structured_output import StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer
from server.protocol.tools import Tool
from server.tools import harmony
from server.tools.call_reader import CallReader
from server.tools.calls.call_body import SchemaError
from server.tools.events import Arguments, CallStart, Content
from server.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, MISTRAL_V11, QWEN3_CODER
from server.tools.grammar import CallGrammar
from server.tools.reasoning import after_thinking, rules_before_main

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PLACE = {
    "$defs": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
    "properties": {"at": {"$ref": "#/$defs/point"}},
    "required": ["at"],
    "additionalProperties": False,
}


def tool(name, parameters=None, strict=True):
    return Tool.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}
    )


NOTE = {
    "properties": {
        "tag": {"type": "string", "pattern": "^[a-z/]{1,3}$"},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "kind": {"enum": ["a b", 7, None, "7"]},
        "where": {"$ref": "#/$defs/where"},
    },
    "$defs": {"where": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}},
    "required": ["tag", "code", "kind"],
    "additionalProperties": False,
}
TOOLS = [tool("get_weather", WEATHER), tool("move-to", PLACE), tool("now"), tool("note", NOTE)]
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "[ARGS]",
    "[CALL_ID]",
    *harmony.MARKERS,
]


@pytest.fixture(scope="module", params=["markers are text", "markers are tokens"])
def model(request, tmp_path_factory):
    """(tokenizer, compiler) of the bundled model, plain or with a token for each marker."""
    source = resolve_model(EngineConfig())
    folder = source
    if request.param == "markers are tokens":
        folder = tmp_path_factory.mktemp("tokens")
        marked = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
        marked.add_tokens([AddedToken(marker, special=i % 2 == 0) for i, marker in enumerate(MARKERS)])
        marked.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    yield tokenizer, Compiler(Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, read_eos_token_ids(source)))
    tokenizer.close()


def walk(model, output: StructuredOutput, seed: int, max_tokens=1500) -> str:
    """A random text that the grammar allows, whole: the pieces that its tokens add."""
    tokenizer, compiler = model
    matcher, rng = compiler.compile(output), random.Random(seed)
    words, raw = np.zeros(compiler.num_words, np.int32), b""
    for _ in range(max_tokens):
        fill_mask(matcher, words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        ends = [token_id for token_id in allowed if token_id in compiler.end_token_ids]
        if ends and (len(allowed) == len(ends) or rng.random() < 0.5):
            return raw.decode("utf-8", "replace")
        token_id = rng.choice([token_id for token_id in allowed if token_id not in ends])
        assert matcher.consume_token(token_id)
        raw += tokenizer.token_bytes(token_id)
    raise AssertionError(f"no end: {raw[-80:]!r}")


def read(form, text):
    """(content, [(name, arguments)])"""
    reader = CallReader(form, {tool.function.name: tool.function.schema for tool in TOOLS}, certain=True)
    events = reader.feed(text) + reader.finish(cut=False)
    calls = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            calls[event.index][1] += event.text
    assert not reader.unfinished
    return "".join(event.text for event in events if isinstance(event, Content)), calls


def check(calls):
    schemas = {tool.function.name: tool.function.schema for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_forced_calls_always_parse_and_obey_their_schema(model, form):
    seen = set()
    for seed in range(12):
        text = walk(model, CallGrammar(form, TOOLS, True, model[0]).required(), seed)
        content, calls = read(form, text)
        assert calls and not content, text
        check(calls)
        seen |= {name for name, _ in calls}
    assert len(seen) > 1


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_one_call_and_no_more(model, form):
    for seed in range(6):
        _, calls = read(form, walk(model, CallGrammar(form, TOOLS[:1], False, model[0]).required(), seed))
        assert [name for name, _ in calls] == ["get_weather"]


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3, MISTRAL_V11, QWEN3_CODER], ids=lambda form: form.name)
def test_free_text_is_held_to_the_form_once_a_call_begins(model, form):
    """Forced to begin a call after some text, a random walk completes one."""
    tokenizer, compiler = model
    output = CallGrammar(form, TOOLS, False, tokenizer).after_text()
    matcher = compiler.compile(output)
    text = "Let me see: "
    start = tokenizer.encode(text + form.begin)
    assert matcher.consume_tokens(start) and not matcher.is_accepting()
    assert compiler.compile(output).consume_tokens(tokenizer.encode("No tool is called. {x"))
    words, rng, raw = np.zeros(compiler.num_words, np.int32), random.Random(1), (text + form.begin).encode()
    while not matcher.is_stopped():
        fill_mask(matcher, words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        token_id = rng.choice(allowed)
        assert matcher.consume_token(token_id)
        raw += b"" if token_id in compiler.end_token_ids else tokenizer.token_bytes(token_id)
    content, calls = read(form, raw.decode("utf-8", "replace"))
    assert content == text.rstrip() and len(calls) == 1
    check(calls)


FREE = {"text": {"type": "string"}, "until": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {}}


@pytest.mark.parametrize(
    "parameters, arguments",
    [
        ({}, {"where": "here", "n": 1}),
        ({"properties": FREE}, {"text": 'a\n  "b"\n</parameter>?\n', "until": None, "any": [1]}),
        ({"properties": FREE}, {"text": "", "until": "null and void"}),
    ],
)
def test_arguments_that_a_schema_leaves_open(model, parameters, arguments):
    tools = [tool("now", parameters)]
    text = QWEN3_CODER.write([("now", arguments)])
    matcher = model[1].compile(CallGrammar(QWEN3_CODER, tools, False, model[0]).required())
    assert matcher.consume_tokens(model[0].encode(text)) and matcher.is_accepting()
    reader = CallReader(QWEN3_CODER, {"now": tools[0].function.schema}, certain=True)
    told = "".join(event.text for event in reader.feed(text) if isinstance(event, Arguments))
    assert json.loads(told) == arguments


ONE_OF_A_FEW = [
    ({"anyOf": [{"enum": ["low", "high"]}, {"type": "null"}]}, ("low", "null"), ("", "lower", "none", "1")),
    ({"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}], "default": None}, ("low", "null"), ("", "mid")),
    ({"anyOf": [{"type": "integer", "minimum": 3}, {"const": "auto"}]}, ("3", "auto"), ("2", "automatic", '"auto"')),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("schema, allowed, refused", ONE_OF_A_FEW, ids=lambda value: str(value)[:40])
def test_branches_hold_between_tags(model, schema, allowed, refused, strict):
    """As Python's Optional[Literal["low", "high"]] has them."""
    parameters = {"properties": {"x": schema}, "required": ["x"], "$defs": {"level": {"enum": ["low"]}}}
    grammar = CallGrammar(QWEN3_CODER, [tool("f", parameters, strict=strict)], False, model[0]).required()
    for value in allowed + refused:
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
        matcher = model[1].compile(grammar)
        fits = matcher.consume_tokens(model[0].encode(text)) and matcher.is_accepting()
        assert fits == (value in allowed), value


UNENFORCED = [
    ({"format": "date"}, "properties.x"),
    ({"pattern": "a", "maxLength": 3}, "properties.x"),
    ({"type": ["string", "object"]}, "properties.x"),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}], "type": None}, "properties.x"),
    ({"enum": ["a"], "maxLength": 1}, "properties.x"),
]


@pytest.mark.parametrize("keywords, path", UNENFORCED)
def test_what_tags_cannot_enforce_is_an_error_with_strict(model, keywords, path):
    schema = {"type": "string"} | keywords
    parameters = {"properties": {"x": {key: value for key, value in schema.items() if value is not None}}}
    with pytest.raises(SchemaError) as failed:
        CallGrammar(QWEN3_CODER, [tool("f", parameters)], False, model[0]).required()
    assert (failed.value.function, failed.value.path) == ("f", path)
    model[1].compile(CallGrammar(QWEN3_CODER, [tool("f", parameters, strict=False)], False, model[0]).required())


UNUSABLE = [
    {"pattern": "^(?!a)b$"},
    {"pattern": "b\\"},
    {"pattern": "/(?=\n)"},
    {"maxLength": 1 << 40},
    {"minLength": -1},
    {"maxLength": "3"},
]


@pytest.mark.parametrize("keywords", UNUSABLE, ids=str)
def test_a_value_that_cannot_be_enforced_leaves_any_text_between_tags(model, keywords):
    schema = {"properties": {"x": {"type": "string", **keywords}, "code": {"type": "string", "pattern": "^[A-Z]$"}}}
    grammar = CallGrammar(QWEN3_CODER, [tool("f", schema, strict=False)], False, model[0]).required()
    for code, is_allowed in (("B", True), ("b", False)):
        text = f"<tool_call>\n<function=f>\n<parameter=x>\na/\n\n</parameter>\n<parameter=code>\n{code}\n"
        text += "</parameter>\n</function>\n</tool_call>"
        matcher = model[1].compile(grammar)
        assert (matcher.consume_tokens(model[0].encode(text)) and matcher.is_accepting()) == is_allowed


def test_a_small_schema_whose_grammar_is_large_is_refused_at_once(model):
    """Each argument refers to the same parts; what is done for one of them has a limit."""
    many = {f"p{i}": {"$ref": "#/$defs/big"} for i in range(1500)}
    bigs = [
        {"enum": [f"{i}" for i in range(10_000)]},
        {"type": "object", "properties": {f"x{i}": {} for i in range(5_000)}},
        {"type": "string", "pattern": "a" * 100_000},
    ]
    for big in bigs:
        with pytest.raises(SchemaError, match="more than"):
            QWEN3_CODER.style.rules("0", tool("f", {"properties": many, "$defs": {"big": big}}, False).function, repr)
    free = [
        {"anyOf": [{"enum": list(range(3_000))}, *[{}] * 20_000]},
        {"type": "string", **dict.fromkeys(map(str, range(20_000)), 0)},
        {"$ref": "#" + "/a" * 50_000},
    ]
    started = time.process_time()
    for big in free:
        assert QWEN3_CODER.style.rules(
            "0", tool("f", {"properties": many, "$defs": {"big": big}}, False).function, repr
        )
    assert time.process_time() - started < 6, "it takes some tenths of a second"


def test_a_name_that_tags_cannot_hold_is_an_error(model):
    parameters = {"properties": {"a>b": {"type": "string"}}}
    with pytest.raises(SchemaError, match="cannot be written"):
        CallGrammar(QWEN3_CODER, [tool("f", parameters, strict=False)], False, model[0]).required()


def test_calls_or_json(model):
    output = CallGrammar(HERMES, TOOLS, False, model[0]).or_json({"type": "object", "maxProperties": 0}, strict=True)
    kinds = set()
    for seed in range(8):
        content, calls = read(HERMES, walk(model, output, seed))
        assert bool(content) != bool(calls)
        kinds.add(bool(calls))
        if content:
            assert json.loads(content) == {}
    assert True in kinds


@pytest.mark.parametrize("opened", [True, False])
def test_a_form_holds_behind_the_thinking(model, opened):
    tokenizer, compiler = model
    forms = [
        StructuredOutput.json_schema({"type": "integer", "minimum": 10, "maximum": 99}),
        StructuredOutput("regex", "[0-9]{2}"),
        StructuredOutput.choice(["42", "a/b"]),
    ]
    for form in forms:
        output = after_thinking(form, rules_before_main(tokenizer, opened))
        thought = ("" if opened else "<think>") + "\nLet me { think } 1/2</think>\n\n"
        for text, fits in ((thought + "42", True), (thought + "4x", False), ("42", not opened)):
            matcher = compiler.compile(output)
            assert (matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting()) == fits, (form, text)


def test_a_lark_grammar_stays_as_it_is(model):
    grammar = StructuredOutput("grammar", 'start: "x"')
    assert after_thinking(grammar, rules_before_main(model[0], True)) is grammar


def test_a_grammar_that_is_too_long_is_an_error_of_the_tools(model):
    tools = [tool(f"t{i}", WEATHER) for i in range(600)]
    with pytest.raises(InvalidRequestError, match="tools: the grammar of their calls exceeds 262144 bytes"):
        CallGrammar(HERMES, tools, True, model[0]).required()
