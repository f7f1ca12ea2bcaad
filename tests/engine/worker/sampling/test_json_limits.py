"""Forced JSON: its numbers are what a double holds, and it ends within its tokens. Random walks over masks of rows."""

import json
import math

import jsonschema
import numpy as np
import pytest

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.grammars.compiler import Compiler, fill_mask
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer
from engine.worker.batch.input_batch import SampleTargets
from engine.worker.sampling import grammar_ends
from engine.worker.sampling.grammar_cache import GrammarCache
from engine.worker.sampling.grammar_rows import GrammarRows
from engine.worker.sampling.json_numbers import MAX_DIGITS
from server.protocol.tools import Tool
from server.tools.call_reader import CallReader
from server.tools.events import Arguments
from server.tools.formats import FORMATS
from server.tools.grammar import CallGrammar
from server.tools.reasoning import after_thinking, rules_before_main

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "score": {"type": "number"},
        "count": {"type": "integer", "minimum": 10},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "place": PLACE,
    },
    "required": ["name", "score", "count"],
    "additionalProperties": False,
}
LINKED = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
ANY = {"type": ["object", "array", "number", "string", "boolean", "null"]}
SCHEMAS = {
    "object": {"type": "object"},
    "schema": SCHEMA,
    "list": {"type": "array", "items": PLACE},
    "linked": LINKED,
    "any": ANY,
}
TOOL = Tool.model_validate({"type": "function", "function": {"name": "rate", "parameters": SCHEMA}})
NUM_PROMPT = 3
BUDGET = 130  # tokens; the longest least is that of XML's tags, 102


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(resolve_model(EngineConfig()))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def walker(tokenizer):
    return Walker(tokenizer, read_eos_token_ids(resolve_model(EngineConfig())))


class Walker:
    """Texts of random tokens, each by its seed and position alone, so that a mask that is the same leads the same way.

    Tokens of JSON's own characters come often, so that texts have some structure.
    """

    def __init__(self, tokenizer, ends):
        self.ends = ends
        self.vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, ends)
        self.cache = GrammarCache()
        self.cache.set_vocabulary(self.vocabulary)
        self.compiler = Compiler(self.vocabulary)
        texts = self.compiler.token_texts()
        self._often = np.array([bool(text) and set(text) <= set(b'"}],:0eE </>\nparmet') for text in texts])
        self._often[ends] = True

    def rows(self, output, max_tokens):
        rows = GrammarRows(self.cache, self.ends)
        rows.add(0, SamplingParams(max_tokens=max_tokens, structured_output=output), NUM_PROMPT)
        return rows

    def mask(self, rows, ids, position):
        at = SampleTargets(np.array([0]), np.array([0]), np.array([position]))
        words, failed = rows.masks(at, np.array([0]), ids)
        assert not failed
        return words[0]

    def walk(self, output, max_tokens, seed, prefix=""):
        """(token ids of a text, the mask of each); it has ended if the last is an end."""
        rows = self.rows(output, max_tokens)
        ids = np.zeros((1, NUM_PROMPT + max_tokens), np.int32)
        given = self.compiler.tokens_of(prefix) if prefix else []
        masks = []
        for i in range(max_tokens):
            masks.append(self.mask(rows, ids, NUM_PROMPT + i))
            rng = np.random.default_rng([seed, i])
            wish = rng.random(len(self._often)) + 0.9 * (self._often & (rng.random() < 0.5))
            allowed = np.unpackbits(masks[-1].view(np.uint8), count=len(wish), bitorder="little").astype(bool)
            token_id = given[i] if i < len(given) else int(np.where(allowed, wish, -1).argmax())
            assert allowed[token_id]
            ids[0, NUM_PROMPT + i] = token_id
            if token_id in self.ends:
                break
        return ids[0, NUM_PROMPT : NUM_PROMPT + i + 1].tolist(), masks

    def text(self, ids):
        return self.compiler.text_of([token_id for token_id in ids if token_id not in self.ends])


def calls(form, tokenizer):
    return CallGrammar(form, [TOOL], False, tokenizer).required()


def is_sane(value):
    if isinstance(value, dict | list):
        return all(map(is_sane, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < 10**MAX_DIGITS


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("lenient", [False, True])
def test_json_ends_within_its_tokens(walker, name, lenient):
    output = StructuredOutput.json_schema(SCHEMAS[name], lenient=lenient)
    lengths = set()
    for seed in range(8):
        ids, _ = walker.walk(output, BUDGET, seed)
        assert ids[-1] in walker.ends, walker.text(ids)
        value = json.loads(walker.text(ids))
        jsonschema.validate(value, SCHEMAS[name])
        assert is_sane(value)
        lengths.add(len(ids))
    assert max(lengths) > BUDGET - 10 or name == "any", "no text came near its last token"


def test_an_end_is_found_where_null_is_no_token(walker):
    """The search spells it. It opened one object of the list after the other."""
    assert "null" not in map(bytes.decode, filter(bytes.isalpha, walker.compiler.token_texts()))
    for seed in range(8):
        ids, _ = walker.walk(StructuredOutput.json_schema(LINKED), 22, seed)
        jsonschema.validate(json.loads(walker.text(ids)), LINKED)


def test_an_end_is_found_behind_a_pattern_that_hides_it(walker):
    """The search is lost within the code, whose last letter it does not come to, and looks again behind it."""
    code = {"type": "string", "pattern": "^[^Q]+Q$"}
    schema = {"type": "object", "properties": {"code": code, "name": {"type": "string"}}, "required": ["code", "name"]}
    output = StructuredOutput.json_schema(schema)
    for seed in range(4):
        ids, _ = walker.walk(output, 150, seed, prefix='{"code":"12Q","name":"')
        assert ids[-1] in walker.ends, walker.text(ids)
        jsonschema.validate(json.loads(walker.text(ids)), schema)


STRINGS = [
    *[{"format": name} for name in ("date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")],
    *[
        {"pattern": pattern}
        for pattern in ("^[a-z]+$", "^[A-Z]{3}-[0-9]{4,}$", r"^[a-z0-9-]+\.com$", r"^\w+@\w+\.\w+$")
    ],
    *[
        {"pattern": pattern}
        for pattern in ("^[a-z]{5,}$", "^/(\\w+/)*$", r"^\p{L}+$", "b", "^(fox|wolf)( (fox|wolf))*$")
    ],
]
IN_JSON = [{"pattern": pattern} for pattern in (r"^v\d+\.\d+\.\d+$", r"^\d+-\d+$")]


@pytest.mark.parametrize("keywords", STRINGS + IN_JSON, ids=str)
def test_strings_with_a_pattern_or_format_end(walker, tokenizer, keywords):
    """In answers and in the arguments of calls. Those of IN_JSON look like numbers to a search that does not see line
    breaks between values, as in calls."""
    schema = {
        "type": "object",
        "properties": {"it": {"type": "string", **keywords}, "others": {"type": "array", "items": {"type": "number"}}},
        "required": ["it", "others"],
        "additionalProperties": False,
    }
    function = {"name": "rate", "parameters": schema, "strict": True}
    tool = Tool.model_validate({"type": "function", "function": function})
    outputs = [StructuredOutput.json_schema(schema)]
    if keywords in STRINGS:
        outputs.append(CallGrammar(FORMATS["mistral"], [tool], False, tokenizer).required())
    for output in outputs:
        for seed in range(4):
            ids, _ = walker.walk(output, 90, seed)
            assert ids[-1] in walker.ends, walker.text(ids)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_calls_end_within_their_tokens(walker, tokenizer, form):
    for seed in range(5):
        ids, _ = walker.walk(calls(form, tokenizer), BUDGET, seed)
        assert ids[-1] in walker.ends, walker.text(ids)
        reader = CallReader(form, {"rate": SCHEMA}, certain=True, only_calls=True)
        events = [*reader.feed(walker.text(ids)), *reader.finish(cut=False)]
        arguments = json.loads("".join(event.text for event in events if isinstance(event, Arguments)))
        if form.name != "qwen3_coder":  # whose bare strings have no lengths below an object
            jsonschema.validate(arguments, SCHEMA)
        assert is_sane(arguments) and not reader.unfinished


@pytest.mark.parametrize("name", [*SCHEMAS, "hermes", "mistral"])
def test_a_text_that_ends_by_itself_in_time_is_not_changed(walker, tokenizer, name):
    """Not even where it takes the very last token. A sequence that comes back gets the masks that it had."""
    output = StructuredOutput.json_schema(SCHEMAS[name]) if name in SCHEMAS else calls(FORMATS[name], tokenizer)
    ended = 0
    for seed in range(4):
        ids, _ = walker.walk(output, 700, seed)
        if ids[-1] not in walker.ends or len(ids) > 500:
            continue
        ended += 1
        again, masks = walker.walk(output, len(ids), seed)
        assert again == ids
        padded = np.array([[*[0] * NUM_PROMPT, *ids]], np.int32)
        for i in (len(ids) - 1, len(ids) // 2):
            fresh = walker.rows(output, len(ids))
            assert (walker.mask(fresh, padded, NUM_PROMPT + i) == masks[i]).all()
    assert ended


def unlimited(walker, output, ids):
    """Masks of the grammar alone."""
    matcher = walker.compiler.compile(output)
    words = np.zeros(walker.compiler.num_words, np.int32)
    for token_id in ids:
        fill_mask(matcher, words)
        yield words.copy()
        matcher.consume_token(token_id)


OPEN = {
    "a schema that needs more": (StructuredOutput.json_schema(SCHEMA), 12),
    "a hundred items": (StructuredOutput.json_schema({"type": "array", "items": PLACE, "minItems": 100}), 40),
    "a regex": (StructuredOutput("regex", '"[a-z]*[0-9]*"'), 40),
    "a grammar of the client's": (StructuredOutput("grammar", "start: /[0-9]+/"), 60),
}


@pytest.mark.parametrize("name", [*OPEN, "thinking", "free text before calls"])
def test_what_cannot_end_in_time_and_what_is_no_json_is_left_alone(walker, tokenizer, name):
    if name == "thinking":
        output, budget = after_thinking(StructuredOutput.json_schema(SCHEMA), rules_before_main(tokenizer, True)), 40
    elif name == "free text before calls":
        output, budget = CallGrammar(FORMATS["hermes"], [TOOL], False, tokenizer).after_text(), 40
    else:
        output, budget = OPEN[name]
    for seed in range(3):
        ids, masks = walker.walk(output, budget, seed)
        assert all((ours == theirs).all() for ours, theirs in zip(masks, unlimited(walker, output, ids), strict=True))


def digits_of(walker, schema, prefix, seed=0):
    ids, _ = walker.walk(StructuredOutput.json_schema(schema), len(prefix) + 700, seed, prefix)
    return walker.text(ids)


@pytest.mark.parametrize("prefix", ["9" * MAX_DIGITS, "-" + "9" * MAX_DIGITS, "1." + "3" * MAX_DIGITS, "9e30", "123E3"])
def test_numbers_have_an_end(walker, prefix):
    for seed in range(6):
        text = digits_of(walker, {"type": "number"}, prefix, seed)
        assert text.startswith(prefix) and is_sane(json.loads(text))
    in_object = digits_of(walker, {"type": "object", "additionalProperties": {"type": "number"}}, f'{{"a":{prefix}')
    assert is_sane(json.loads(in_object))


ZEROS = [  # no number of these ends behind a zero, or behind zeros alone
    ({"type": "number", "exclusiveMinimum": 0}, "0.5"),
    ({"type": "number", "exclusiveMinimum": 99, "maximum": 199}, "99."),
    ({"type": "integer", "multipleOf": 3}, "1"),
    ({"type": "number", "multipleOf": 7}, "8"),
]


@pytest.mark.parametrize("number, digits", ZEROS, ids=str)
def test_numbers_end_that_zeros_do_not_end(walker, tokenizer, number, digits):
    schema = {"type": "object", "properties": {"it": number}, "required": ["it"], "additionalProperties": False}
    tool = Tool.model_validate({"type": "function", "function": {"name": "rate", "parameters": schema}})
    for output, begin in (
        (StructuredOutput.json_schema(schema), ""),
        (
            CallGrammar(FORMATS["mistral"], [tool], False, tokenizer).required(),
            '[TOOL_CALLS][{"name": "rate", "arguments": ',
        ),
    ):
        prefix = f'{begin}{{"it":{digits}{"0" * 20}'
        ids, _ = walker.walk(output, len(walker.compiler.tokens_of(prefix)) + 12, 0, prefix)
        assert ids[-1] in walker.ends, walker.text(ids)
        value = json.loads(walker.text(ids).removeprefix(begin).removesuffix("}]" if begin else ""))
        assert value["it"] > 0 and (number["type"] == "number" or value["it"] % 3 == 0)


def test_a_fraction_that_may_not_end_in_a_zero_has_an_end(walker):
    number, zeros = {"type": "number", "exclusiveMinimum": 0}, "0." + "0" * MAX_DIGITS
    assert not allowed_after(walker, number, zeros, "0") and allowed_after(walker, number, zeros, "1")
    assert not allowed_after(walker, number, zeros + "1", "1")


def allowed_after(walker, schema, prefix, text):
    """Whether `text` may come behind `prefix`."""
    output = StructuredOutput.json_schema(schema)
    ids = walker.compiler.tokens_of(prefix)
    padded = np.array([[*[0] * NUM_PROMPT, *ids, 0]], np.int32)
    words = walker.mask(walker.rows(output, 2000), padded, NUM_PROMPT + len(ids))
    (token_id,) = walker.compiler.tokens_of(text)
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


def test_what_numbers_may_be(walker):
    number, integer = {"type": "number"}, {"type": "integer"}
    for prefix, digit, allowed in (
        ("1e30", "7", True),
        ("1e30", "8", False),
        ("1e-30", "9", True),
        ("1e-309", "9", False),
        ("12e+30", "6", True),
        ("12e+30", "7", False),
        ("1e", "9", True),
        ("9" * (MAX_DIGITS - 1), "9", True),
        ("9" * MAX_DIGITS, "9", False),
        ("9" * MAX_DIGITS, ".", True),
        ("0." + "9" * MAX_DIGITS, "9", False),
        ("0." + "9" * MAX_DIGITS, "e", True),
    ):
        assert allowed_after(walker, number, prefix, digit) is allowed, (prefix, digit)
    assert not allowed_after(walker, integer, "9" * MAX_DIGITS, "9")


def test_digits_of_texts_and_of_what_a_schema_asks_for_are_left_alone(walker):
    digits = "9" * MAX_DIGITS
    for schema, prefix in (
        ({"type": "string"}, f'"{digits}'),
        ({"type": "string"}, '"1e99'),
        ({"type": "string", "pattern": "^[0-9]{50}$"}, f'"{digits}'),
        ({"type": "object", "patternProperties": {"^[0-9]+$": {}}, "additionalProperties": False}, f'{{"{digits}'),
    ):
        assert allowed_after(walker, schema, prefix, "9"), schema


def test_masks_that_take_long_are_reported_once(walker, monkeypatch):
    rows = walker.rows(StructuredOutput.json_schema(SCHEMA), BUDGET)
    ids = np.zeros((1, NUM_PROMPT + 1), np.int32)
    monkeypatch.setattr("engine.worker.sampling.grammar_rows.SLOW_SECONDS", 1.0)
    walker.mask(rows, ids, NUM_PROMPT)
    assert rows.take_slow() == {}
    monkeypatch.setattr("engine.worker.sampling.grammar_rows.SLOW_SECONDS", 0.0)
    walker.mask(rows, ids, NUM_PROMPT)
    (seconds,) = rows.take_slow().values()
    assert 0 < seconds < 1 and rows.take_slow() == {}


def test_a_grammar_that_is_slow_to_match_is_left_alone(walker, monkeypatch):
    """The search has a limit of time on the step's thread, then the text is cut as any other form is."""
    output = StructuredOutput.json_schema(SCHEMA, lenient=True)
    walker.rows(output, BUDGET)
    monkeypatch.setattr("engine.worker.sampling.grammar_ends.MAX_SECONDS", -1.0)
    ids, masks = walker.walk(output, 60, 1)
    assert all((ours == theirs).all() for ours, theirs in zip(masks, unlimited(walker, output, ids), strict=True))
    monkeypatch.setattr("engine.worker.sampling.grammar_ends.MAX_FIRST_SECONDS", -1.0)
    cache = GrammarCache()
    cache.set_vocabulary(walker.vocabulary)
    assert cache.start(output) is not None and cache.limits(output)[2].window == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("object", '{"answer": "the fox, the hen", "steps": [1, 2, 3], "done": true}'),
        ("schema", '{"name":"Ada","score":0.5,"count":12,"tags":["a","b"],"place":{"city":"Rome","unit":"celsius"}}'),
    ],
)
def test_no_token_is_tried_while_many_are_left(walker, monkeypatch, name, text):
    """A text that ends 50 tokens early costs some masks for each of its parts, not one for each token that is allowed:
    at a vocabulary of 129,280 tokens, an answer of 32 tokens took 0.11 s of the step's thread."""
    output, searched = StructuredOutput.json_schema(SCHEMAS[name]), []
    walker.rows(output, BUDGET)
    monkeypatch.setattr(grammar_ends, "fill_mask", lambda *mask: searched.append(fill_mask(*mask)))
    num_tokens, counts = len(walker.compiler.tokens_of(text)), []
    for spare in (50, 3):
        searched.clear()
        walker.walk(output, num_tokens + spare, 0, text)
        counts.append(len(searched))
    assert counts[0] < 2 * num_tokens < counts[1]
