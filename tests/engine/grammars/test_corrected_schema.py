"""Schemas that llguidance accepts but would not enforce as they are written. Values as JSON texts, by their masks."""

import json

import pytest

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.grammars.checker_process import find_fault
from engine.grammars.compiler import Compiler
from engine.structured_output import StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer

TOO_LARGE = "a number of this size cannot be enforced"


@pytest.fixture(scope="module")
def compiler():
    folder = resolve_model(EngineConfig())
    tokenizer = Tokenizer(folder)
    yield Compiler(Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, read_eos_token_ids(folder)))
    tokenizer.close()


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
