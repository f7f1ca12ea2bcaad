"""The JSON of an argument's text, by the types that its schema allows."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from server.protocol.tools import FunctionDefinition
from server.tools.calls.call_body import SchemaError
from server.tools.calls.xml_grammar import xml_rules
from server.tools.calls.xml_values import as_json, parameter_types

ROOT = {
    "$defs": {"name": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#"}]}},
    "properties": {
        "s": {"type": "string"},
        "n": {"type": ["integer", "null"]},
        "e": {"enum": ["a", 1.5]},
        "c": {"const": True},
        "r": {"$ref": "#/$defs/name"},
        "u": {"anyOf": [{"$ref": "#/$defs/name"}, {"oneOf": [{"type": "null"}]}]},
        "loop": {"$ref": "#/$defs/loop"},
        "self": {"$ref": "#/properties/self"},
        "far": {"$ref": "https://x/y"},
        "wrong": {"type": 1, "anyOf": 2},
        "true": True,
    },
    "additionalProperties": {"type": "number"},
}


@pytest.mark.parametrize(
    "key, types",
    [
        ("s", {"string"}),
        ("n", {"integer", "null"}),
        ("e", {"string", "number"}),
        ("c", {"boolean"}),
        ("r", {"string"}),
        ("u", {"string", "null"}),
        ("other", {"number"}),
        *((key, set()) for key in ("loop", "self", "far", "wrong", "true")),
    ],
)
def test_types(key, types):
    assert parameter_types(ROOT, key) == types


@pytest.mark.parametrize(
    "text, types, value",
    [
        ("5", "string", "5"),
        (" null ", "string", " null "),
        ("007", "", "007"),
        ("5", "", 5),
        ("5", "integer", 5),
        ("5.0", "integer", 5.0),
        ("5", "number", 5),
        ("5", "string integer", 5),
        ("5", "string null", "5"),
        ("null", "string null", None),
        ('"x"', "string null", '"x"'),
        ("True", "boolean", True),
        ("{'a': 1}", "object", "{'a': 1}"),
        ('{"a": 1}', "object string", {"a": 1}),
        ('{"a": 1}', "array string", '{"a": 1}'),
        ("NaN", "number", "NaN"),
        ("[1]", "integer", [1]),
        ("", "integer", ""),
        ("[" * 100_000, "array", "[" * 100_000),
        ("9" * 5000, "integer", "9" * 5000),
    ],
)
def test_values(text, types, value):
    assert json.loads(as_json(text, frozenset(types.split()))) == value


KEYWORDS = st.sampled_from(
    [
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "$ref",
        "properties",
        "required",
        "additionalProperties",
        "pattern",
        "minLength",
        "maxLength",
        "$defs",
        "x",
    ]
)
NAMES = st.sampled_from(["string", "object", "null", "x", "a>b", "", "^a$", "(", "#", "#/$defs/x", "#/properties/x"])
LEAVES = st.none() | st.booleans() | st.integers(-1, 3) | st.floats(0, 2) | NAMES
PARTS = st.recursive(
    LEAVES, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(KEYWORDS, parts, max_size=4), max_leaves=20
)


@hypothesis.given(st.dictionaries(KEYWORDS, PARTS, max_size=5), st.booleans())
@hypothesis.settings(max_examples=500, deadline=None, derandomize=True)
def test_no_schema_is_too_strange(schema, strict):
    """Whatever it holds, it has types and a grammar, or the error that names what is wrong."""
    function = FunctionDefinition.model_construct(name="f", parameters=schema, strict=strict)
    assert isinstance(parameter_types(function.schema, "x"), frozenset)
    try:
        rules = xml_rules("0", function)
    except SchemaError as error:
        assert error.function == "f" and str(error)
    else:
        assert rules[0].startswith("call_0: ")


TYPES = st.sets(st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object", "strange"]))


@hypothesis.given(st.text(max_size=20) | st.sampled_from(["1e999", "-0", "[]", "{}", "\ud800"]), TYPES)
@hypothesis.settings(deadline=None, derandomize=True)
def test_whatever_the_text_it_is_json(text, types):
    json.loads(as_json(text, frozenset(types)))
