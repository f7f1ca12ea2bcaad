"""The largest part that a JSON text may open: for each keyword, and never less than what tokens really add."""

import math

import numpy as np
import pytest

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.grammars.compiler import Compiler, fill_mask
from engine.grammars.json_openings import ANY_KEY, ANY_VALUE, FORMAT, largest_opening
from engine.structured_output import StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer
from engine.worker.sampling import grammar_ends
from engine.worker.sampling.grammar_cache import GrammarCache
from engine.worker.sampling.grammar_ends import UNSEEN_JUMP, GrammarEnds

OPEN_KEY = ANY_KEY + 2 * ANY_VALUE  # a property with a name of its own and any value
PLACE = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "country": {"enum": ["Germany", "United Kingdom"]}},
    "required": ["street", "country"],
    "additionalProperties": False,
}
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
SCHEMAS = {
    "any": {},
    "object": {"type": "object"},
    "optional place": {"type": "object", "properties": {"id": {"type": "integer"}, "place": PLACE}, "required": ["id"]},
    "places": {"type": "array", "items": PLACE},
    "list": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "alternatives": {
        "type": "object",
        "properties": {"kind": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": PLACE, "minItems": 2}]}},
        "required": ["kind"],
    },
}
PLACE_BYTES = ANY_VALUE + len('"street"') + 2 * ANY_VALUE + len('"country"') + ANY_VALUE + len('"Germany"')


def closed(**properties):
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "length"),
    [
        (True, ANY_VALUE),
        ({"type": "integer"}, ANY_VALUE),
        ({"type": "object"}, OPEN_KEY),
        (closed(abc={"type": "boolean"}), len('"abc"') + 2 * ANY_VALUE),
        ({**closed(abc={"type": "boolean"}), "required": ["abc"]}, ANY_VALUE),
        (closed(a={"const": "a long text"}), len('"a"') + ANY_VALUE + len('"a long text"')),
        ({"enum": ["a", "some", "longest"]}, len('"longest"')),
        ({"type": "array", "items": PLACE}, 1 + PLACE_BYTES),
        ({"type": "array", "items": False, "prefixItems": [PLACE, {"type": "null"}]}, 1 + PLACE_BYTES),
        ({"type": "array", "items": False, "prefixItems": [{"type": "null"}], "minItems": 1}, ANY_VALUE),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "null"}, "minItems": 5}]}, 17),
        ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 30}]}, ANY_VALUE + 30),
        ({"anyOf": [{"type": "null"}, {"type": "string", "format": "uuid"}]}, ANY_VALUE + FORMAT),
        ({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 10**20}]}, ANY_VALUE + 2 * 21),
        ({"$defs": {"a/b": PLACE}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}}, None),
        ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, None),
        ({"type": "array", "items": {"type": "string", "pattern": "a{50}"}}, math.inf),
        ({"type": "array", "items": {"$ref": "other.json#/a"}}, math.inf),
        ({"type": "array", "items": {"$ref": "#/$defs/none"}}, math.inf),
        ({"type": "array", "items": [PLACE]}, math.inf),
        ({"type": "array", "items": {"type": "object", "minProperties": 1}}, math.inf),
        ({**closed(a={"type": "object", "minProperties": 1}), "required": ["a"]}, OPEN_KEY),
        ({"type": "array", "items": {"$ref": "#"}}, 1 + ANY_VALUE),
        ({"type": "string", "minLength": "5"}, math.inf),
        ({"type": "integer", "minimum": 10**400}, math.inf),
        ({"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(9999)}, "$ref": "#/$defs/0"}, math.inf),
    ],
)
def test_the_largest_opening_of_each_keyword(schema, length):
    """With a token for each byte."""
    found = largest_opening(schema, len)
    assert found == length if length is not None else PLACE_BYTES // 2 < found < 2 * PLACE_BYTES


def test_no_text_is_encoded_twice_and_no_long_one_at_all():
    counted = []
    node = {"type": "object", "properties": {"kind": {"enum": ["a" * 300, "bb"]}, "next": {"$ref": "#"}}}
    assert largest_opening(node, lambda text: counted.append(text) or 1) == 302
    assert sorted(counted) == ['"bb"', '"kind"', '"next"']


@pytest.fixture(scope="module")
def grammars():
    tokenizer = Tokenizer(resolve_model(EngineConfig()))
    vocabulary = Vocabulary(
        tokenizer.to_json(), tokenizer.vocab_size, read_eos_token_ids(resolve_model(EngineConfig()))
    )
    tokenizer.close()
    cache = GrammarCache()
    cache.set_vocabulary(vocabulary)
    return cache, Compiler(vocabulary)


class Unbounded:
    """GrammarEnds that tries every token."""

    def __init__(self, grammars, schema):
        cache, self.compiler = grammars
        output = StructuredOutput.json_schema(schema)
        self.matcher = cache.start(output)
        self.ends: GrammarEnds = cache.limits(output)[1]
        self.ending = cache.limits(output)[2]

    def added(self, rng, num_tokens=40):
        """The tokens that the dearest token adds to the shortest end, in each state of a random text. Dear tokens are
        drawn often."""
        most = []
        for _ in range(num_tokens):
            if self.matcher.is_stopped():
                break
            words = np.zeros(self.compiler.num_words, np.int32)
            fill_mask(self.matcher, words)
            self.ending.jump = 10**6
            self.ends.limit(self.ending, self.matcher, words, self.ending.window)
            _, allowed, behind = self.ending.judged
            added = behind - (len(self.ending.path) - 1)
            added[behind == grammar_ends.NEVER] = -99
            most.append(added.max())
            dear = allowed[np.argsort(-added)[:5]]
            token_id = int(rng.choice(dear if rng.random() < 0.4 else allowed))
            self.matcher.consume_token(token_id)
        return most


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_token_adds_more_than_the_bound(grammars, monkeypatch, name):
    monkeypatch.setattr(grammar_ends, "MAX_MASKS_IN_STATE", 1 << 20)
    monkeypatch.setattr(grammar_ends, "MAX_SECONDS", 60.0)
    bound = largest_opening(SCHEMAS[name], lambda text: len(grammars[1].tokens_of(text)))
    added = [
        most for seed in range(4) for most in Unbounded(grammars, SCHEMAS[name]).added(np.random.default_rng(seed))
    ]
    assert len(added) > 20 and max(added) > 0
    assert max(added) <= bound + UNSEEN_JUMP
    assert bound < grammar_ends.MAX_JUMP
