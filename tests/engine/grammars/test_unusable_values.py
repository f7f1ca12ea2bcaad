"""Schemas with values that llguidance refuses: lenient ones are served without these values, strict ones are refused
with the place of the first."""

import json
import time

import pytest

from engine.grammars.checker_process import find_fault
from engine.grammars.compiler import GrammarError
from engine.grammars.unusable_values import (
    MAX_TRIALS,
    json_path,
    unusable_values,
    usable_lark,
    without_unusable_values,
)
from engine.structured_output import StructuredOutput

ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_INTEGER = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
LOOKS_AROUND = "look-around, including look-ahead and look-behind, is not supported"
TOO_LARGE = "a number of this size cannot be enforced"
NO_ANYOF = "oneOf is supported only if no value fits two of its alternatives: use anyOf"

# (schema of a property, keyword with the unusable value, fault)
REFUSED = [
    ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, "pattern", LOOKS_AROUND),
    ({"type": "string", "pattern": r"^(a)\1$"}, "pattern", "backreferences are not supported"),
    ({"type": "string", "pattern": "[^]"}, "pattern", "unclosed character class"),
    ({"type": "string", "pattern": r"\cA"}, "pattern", "unrecognized escape sequence"),
    ({"type": "string", "pattern": "^{a}$"}, "pattern", "repetition quantifier expects a valid decimal"),
    ({"type": "string", "pattern": r"\bfox\b"}, "pattern", "lookarounds not supported yet"),
    ({"type": "string", "pattern": 3}, "pattern", "Expected string"),
    ({"pattern": "a(?=b)"}, "pattern", LOOKS_AROUND),
    ({"type": ["string", "null"], "pattern": "a(?=b)"}, "pattern", LOOKS_AROUND),
    ({"type": "string", "maxLength": 1 << 32}, "maxLength", TOO_LARGE),
    ({"type": "string", "maxLength": 9007199254740991}, "maxLength", TOO_LARGE),
    ({"type": "string", "maxLength": -1}, "maxLength", "Expected positive integer"),
    ({"type": "string", "maxLength": None}, "maxLength", "Expected positive integer"),
    ({"type": "string", "format": 3}, "format", "Expected string"),
    ({"type": "integer", "minimum": -9223372036854775808}, "minimum", TOO_LARGE),
    ({"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}, "minimum", TOO_LARGE),
    ({"minimum": -9223372036854775808}, "minimum", TOO_LARGE),
    ({"type": "number", "minimum": -3.4028234663852886e38}, "minimum", TOO_LARGE),
    ({"type": "number", "minimum": 0, "maximum": 3.4028234663852886e38}, "maximum", TOO_LARGE),
    ({"type": "number", "maximum": 1.7976931348623157e308}, "maximum", TOO_LARGE),
    ({"type": "number", "exclusiveMinimum": 5e-324}, "exclusiveMinimum", TOO_LARGE),
    ({"type": "integer", "multipleOf": 0}, "multipleOf", "invalid multiple of"),
]
# The same for keywords that lenient schemas never enforce.
UNKNOWN = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "this keyword cannot be enforced"),
    ({"not": {"type": "string"}}, "not", "this keyword cannot be enforced"),
    ({"type": "string", "format": "idn-email"}, "format", "Unknown format: idn-email"),
    ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf", NO_ANYOF),
]


def object_of(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def allows(compiler, output, value):
    matcher = compiler.compile(output)
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return matcher.consume_tokens(compiler.tokens_of(text)) and matcher.is_accepting()


def in_a_call(*schemas):
    """A grammar as the server makes it. schemas: pairs (schema, lenient)."""
    rules = [
        f"json_{i}: %json " + json.dumps(schema | {"x-guidance": {"lenient": lenient}})
        for i, (schema, lenient) in enumerate(schemas)
    ]
    names = " | ".join(f"json_{i}" for i in range(len(schemas)))
    text = "\n".join([f"start: /<%json \\{{\\/>/ one\none: {names}", *rules])
    return StructuredOutput("grammar", text + "\n", json_values=True)


@pytest.mark.parametrize("part, keyword, fault", REFUSED + UNKNOWN, ids=lambda value: str(value)[:40])
def test_a_lenient_schema_loses_the_value_and_a_strict_one_is_refused_with_its_place(compiler, part, keyword, fault):
    schema = object_of(age={"type": "integer", "maximum": 30}, it=part)
    lenient = StructuredOutput.json_schema(schema, lenient=True)
    assert find_fault(compiler, lenient) == ""
    found = find_fault(compiler, StructuredOutput.json_schema(schema))
    assert found.startswith(f"$.properties.it.{keyword}: {fault}")
    call = in_a_call(({"const": 1}, False), (schema, True))
    assert find_fault(compiler, call) == ""
    assert find_fault(compiler, in_a_call((schema, False), (schema, True))) != "", "one of them is strict"


def test_all_other_values_stay(compiler):
    parts = {f"p{i}": part for i, (part, _, _) in enumerate(REFUSED)}
    schema = object_of(
        code={"type": "string", "pattern": "^[A-Z]{3}$"},
        age=ZOD_INTEGER | {"maximum": 30},
        pattern={"type": "string", "maxLength": 3},  # a name, not a keyword
        data={"const": {"pattern": "(?!a)", "enum": ["(?!b)"]}},
        mail={"$ref": "#/$defs/p0"},
    ) | {"$defs": parts}
    whole = {
        "code": "FOX",
        "age": 30,
        "pattern": "abc",
        "data": {"pattern": "(?!a)", "enum": ["(?!b)"]},
        "mail": "a@b.de",
    }
    output = StructuredOutput.json_schema(schema, lenient=True)
    call = in_a_call((schema, True))
    for form, before in ((output, ""), (call, "<%json {/>")):
        for changes, is_allowed in [
            ({}, True),
            ({"code": "fox"}, False),
            ({"age": 31}, False),
            ({"pattern": "abcd"}, False),
            ({"data": {}}, False),
            ({"mail": "no address"}, False),  # `format` stays
        ]:
            text = before + json.dumps(whole | changes, separators=(",", ":"))
            assert allows(compiler, form, text) == is_allowed, (form.kind, changes)


def test_a_name_pattern_is_left_out_with_its_schema(compiler):
    schema = {"type": "object", "patternProperties": {"^(?!x)": {"type": "integer"}, "^b": {"type": "boolean"}}}
    output = StructuredOutput.json_schema(schema, lenient=True)
    assert allows(compiler, output, {"a": "free", "b": True})
    assert not allows(compiler, output, {"b": 1})
    fault = find_fault(compiler, StructuredOutput.json_schema(schema))
    assert fault == f"$.patternProperties['^(?!x)']: {LOOKS_AROUND}"


def test_a_terminal_that_the_server_marks_may_be_any_text(compiler):
    text = 'start: a b\na[lazy]: {} "!"\nb: "b"\n'
    kept = StructuredOutput("grammar", text.format("OPTIONAL_A") + "OPTIONAL_A: /[a\\/]+/\n", json_values=True)
    assert allows(compiler, kept, "a/!b") and not allows(compiler, kept, "x!b")
    free = StructuredOutput("grammar", text.format("OPTIONAL_A") + "OPTIONAL_A: /(?!x)[a\\/]+/\n", json_values=True)
    assert allows(compiler, free, "x\ny!b")
    for output in (
        StructuredOutput("grammar", text.format("OTHER_A") + "OTHER_A: /(?!x)/\n", json_values=True),
        StructuredOutput("grammar", free.text),  # a client's own grammar
    ):
        with pytest.raises(GrammarError, match="look-around"):
            compiler.compile(output)


def test_a_clients_grammar_is_strict(compiler):
    lark = 'start: %json {"type": "string", "pattern": "(?!a)", "x-guidance": {"lenient": true}}\n'
    assert "look-around" in find_fault(compiler, StructuredOutput("grammar", lark))


@pytest.mark.parametrize("schema", [{"type": "strin"}, {"enum": "a"}, {"enum": "a", "pattern": "(?!a)"}, {"$ref": "#"}])
def test_what_is_no_schema_stays_an_error(compiler, schema):
    fault = find_fault(compiler, StructuredOutput.json_schema(schema, lenient=True))
    assert fault in ("Invalid type: strin", "enum must be an array", "no text matches it")


@pytest.mark.parametrize(
    "part, allowed, refused",
    [
        ({"type": "string", "pattern": r"^\p{L}+$"}, "éa", "1"),
        ({"type": "string", "pattern": r"^(?<y>\d{4})$"}, "2026", "26"),
        ({"type": "string", "pattern": r"^[\d-x]$"}, "-", "y"),
    ],
)
def test_patterns_need_not_be_pythons(compiler, part, allowed, refused):
    for lenient in (False, True):
        output = StructuredOutput.json_schema(part, lenient=lenient)
        assert find_fault(compiler, output) == ""
        assert allows(compiler, output, f'"{allowed}"') and not allows(compiler, output, f'"{refused}"')


@pytest.mark.parametrize(
    "part, place",
    [
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "array", "items": [{"type": "string"}]}, "items"),
    ],
)
def test_values_of_older_drafts_without_their_schema(compiler, part, place):
    schema = object_of(a=part)
    assert find_fault(compiler, StructuredOutput.json_schema(schema, lenient=True)) == ""
    assert find_fault(compiler, StructuredOutput.json_schema(schema)).startswith(f"$.properties.a.{place}: ")
    wrong = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": {"title": 5}}
    assert find_fault(compiler, StructuredOutput.json_schema(wrong, lenient=True)).startswith("$.items: ")


def test_thousands_of_unusable_values_cost_little(compiler):
    """The number of trials has a limit, and equal values are tried once."""
    many = {f"p{i}": {"type": "string", "pattern": f"^(?!{i})"} for i in range(4000)}
    started = time.process_time()
    assert find_fault(compiler, StructuredOutput.json_schema({"$defs": many, "$ref": "#/$defs/p1"}, lenient=True)) == ""
    assert time.process_time() - started < 2.5, "some tenths of a second"
    tried = []
    schema = {"$defs": many, "properties": {f"q{i}": {"type": "string", "pattern": "^(?!1)"} for i in range(9)}}
    text = "json: %json " + json.dumps(schema | {"x-guidance": {"lenient": True}})
    assert "pattern" not in usable_lark(text, lambda schema: tried.append(schema) or "no", str)
    assert len(tried) == len(set(tried)) == MAX_TRIALS


def test_a_repaired_grammar_is_kept(compiler, monkeypatch):
    output = StructuredOutput.json_schema({"type": "string", "pattern": "^(?!kept)"}, lenient=True)
    repairs = []

    def repair(schema, fault_of):
        repairs.append(schema)
        return without_unusable_values(schema, fault_of)

    monkeypatch.setattr("engine.grammars.compiler.without_unusable_values", repair)
    for _ in range(3):
        compiler.compile(output)
    assert len(repairs) == 1


def test_paths():
    assert json_path(("properties", "a b", "c\"'", 0, "$defs")) == "$.properties['a b']['c\"\\''][0]['$defs']"
    long = {"properties": {"x" * 500: {"type": "string", "pattern": "(?!a)"}}}
    [found] = unusable_values(long, lambda text: "wrong")
    assert len(str(found)) < 120 and str(found).endswith("...: wrong")
