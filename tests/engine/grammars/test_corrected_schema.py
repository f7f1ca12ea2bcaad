"""Schemas that llguidance accepts but would not enforce as they are written. Values as JSON texts, by their masks."""

import json
import time

import pytest

from engine.grammars.checker_process import find_fault
from engine.grammars.unusable_values import with_schemas
from engine.structured_output import StructuredOutput

TOO_LARGE = "a number of this size cannot be enforced"


def forms(schema):
    """The schema by itself and as a part of a Lark grammar, as in calls."""
    options = {"x-guidance": {"whitespace_pattern": "[ ]?", "lenient": True}}
    return [
        StructuredOutput.json_schema(schema),
        StructuredOutput.json_schema(schema, lenient=True),
        StructuredOutput("grammar", f"start: %json {json.dumps(schema | options)}\n", json_values=True),
    ]


def allows(compiler, output, text):
    matcher = compiler.compile(output)
    return matcher.consume_tokens(compiler.tokens_of(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    "value", [(1 << 53) + 1, -(1 << 53) - 1, 123456789012345678, (1 << 63) - 2, 1 << 63, -(1 << 63), -(1 << 70)]
)
def test_integers_that_would_be_rounded_are_refused(compiler, value):
    """9007199254740993 became 9007199254740992, and -2^63 killed the process that compiles."""
    for schema, path in (
        ({"const": value}, "$.const"),
        ({"enum": ["a", {"b": [value]}]}, "$.enum"),
        ({"type": "integer", "minimum": value}, "$.minimum"),
        ({"type": "number", "exclusiveMaximum": value}, "$.exclusiveMaximum"),
    ):
        strict, lenient, call = forms(schema)
        assert find_fault(compiler, strict) == f"{path}: {TOO_LARGE}"
        assert find_fault(compiler, lenient) == find_fault(compiler, call) == ""


@pytest.mark.parametrize("value", [(1 << 53) - 1, 1 << 53, -(1 << 62), 10**18, 0, 1e19])
def test_integers_that_a_double_holds_are_exact(compiler, value):
    for output in forms({"enum": ["a", value]}):
        assert find_fault(compiler, output) == ""
        assert allows(compiler, output, f"{int(value)}")
        assert not allows(compiler, output, f"{int(value) + 1}")


def test_large_integers_that_constrain_nothing_stay(compiler):
    number = 123456789012345678
    schema = {
        "type": "object",
        "properties": {"const": {"type": "integer", "default": number, "examples": [number]}},
        "required": ["const"],
        "description": f"ids such as {number}",
    }
    for output in forms(schema):
        assert find_fault(compiler, output) == ""
        assert allows(compiler, output, f'{{"const":{number}}}')


# (bounds, texts that are allowed, texts that are not)
BOUNDS = [
    ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.25", "0.0000001"], ["0", "-0", "0.0", "0.51", "1"]),
    ({"exclusiveMinimum": 0.0, "exclusiveMaximum": 0.05}, ["0.04"], ["0", "0.05"]),
    ({"exclusiveMinimum": 1, "maximum": 1.05}, ["1.01", "1.05", "1.001"], ["1", "1.0", "1.06", "2"]),
    ({"exclusiveMinimum": 10, "exclusiveMaximum": 10.5}, ["10.4"], ["10", "10.5", "11"]),
    ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.5", "-0.1"], ["0", "-0", "0.0", "-0.6"]),
    ({"exclusiveMaximum": -1, "minimum": -1.05}, ["-1.05", "-1.01"], ["-1", "-1.0", "-2"]),
    ({"exclusiveMinimum": -1, "exclusiveMaximum": -0.5}, ["-0.75"], ["-1", "-0.5", "0"]),
    ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.5", "0.25"], ["0", "0.6"]),
    ({"exclusiveMinimum": 0, "$ref": "#/$defs/half", "$defs": {"half": {"maximum": 0.5}}}, ["0.5"], ["0", "0.6"]),
    ({"exclusiveMinimum": 0}, ["1", "0.5"], ["0"]),
    ({"exclusiveMinimum": 0, "maximum": 1}, ["1", "0.5"], ["0"]),
]


@pytest.mark.parametrize("bounds, allowed, refused", BOUNDS, ids=str)
def test_an_exclusive_bound_excludes_its_integer(compiler, bounds, allowed, refused):
    """`exclusiveMinimum: 0, maximum: 0.5` allowed 0."""
    for output in forms({"type": "number", **bounds}):
        assert find_fault(compiler, output) == ""
        assert {text: allows(compiler, output, text) for text in [*allowed, *refused]} == {
            **dict.fromkeys(allowed, True),
            **dict.fromkeys(refused, False),
        }


@pytest.mark.parametrize(
    "others, allowed, refused",
    [
        ({"additionalItems": False}, ["[]", "[1]"], ["[true]", "[1,2]"]),
        ({"additionalItems": {"type": "null"}}, ["[1]", "[1,null]"], ["[null]", "[1,2]"]),
        ({"additionalItems": False, "items": {"type": "null"}}, ["[1,null]"], ["[true]", "[1,2]"]),
    ],
    ids=str,
)
def test_the_first_items_are_enforced_beside_a_keyword_of_older_drafts(compiler, others, allowed, refused):
    """`prefixItems` had no effect beside `additionalItems`."""
    for output in forms({"type": "array", "prefixItems": [{"type": "integer"}], **others}):
        assert find_fault(compiler, output) == ""
        assert all(allows(compiler, output, text) for text in allowed)
        assert not any(allows(compiler, output, text) for text in refused)


def test_thousands_of_bounds_compile(compiler):
    bounds = [{"exclusiveMinimum": i, "maximum": i + 0.5} for i in range(2000)]
    schema = {"type": "number", "$defs": {f"d{i}": bound for i, bound in enumerate(bounds)}}
    assert find_fault(compiler, StructuredOutput.json_schema(schema)) == ""


HALF = '{"type":"number","exclusiveMinimum":0,"maximum":0.5}'


@pytest.mark.parametrize(
    "grammar",
    [
        f"start: %json{HALF}",
        f"start: %json\n  {HALF}",
        f"# %json {{\nstart: %json {HALF}",
        f"start: %json {HALF} // %json {{",
        f"start: /a\n/? %json {HALF}",
    ],
)
def test_schemas_in_a_grammar_are_corrected_however_it_is_laid_out(compiler, grammar):
    output = StructuredOutput("grammar", grammar)
    assert find_fault(compiler, output) == ""
    assert allows(compiler, output, "0.5") and not allows(compiler, output, "0")


@pytest.mark.parametrize("ahead", ["</x>", '<|"|>', "<#>", "<a//b>"])
def test_schemas_behind_special_tokens_are_found(ahead):
    assert with_schemas(f"start: {ahead} %json {{}} {ahead}", lambda schema: f"[{schema}]").endswith(f"[{{}}] {ahead}")


@pytest.mark.parametrize(
    "start, repeated",
    [("// ", '\\"'), ('"', '\\"'), ("/", "\\/"), ("", "<a"), ("", "%json{"), ("", '%json {"a":'), ("", "%json  ")],
)
def test_the_search_for_schemas_takes_linear_time(start, repeated):
    """Each quote behind a backslash was read up to the end of its line: 20,000 in a comment took 5 s, in the Worker,
    too, where no other thread runs during that time."""
    began = time.thread_time()
    with_schemas(f"start: {start}{repeated * 40_000}", str)
    assert time.thread_time() - began < 2
