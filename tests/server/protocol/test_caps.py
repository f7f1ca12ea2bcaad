"""Every string, list and number of a request has a bound: in its schema, or where BOUNDED_ELSEWHERE says."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from server.protocol import ChatCompletionRequest, CompletionRequest
from server.protocol.anthropic.request import MessagesRequest
from server.protocol.responses.request import ResponseRequest
from server.routes.embeddings import EmbeddingRequest
from server.routes.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from tests.server.live import LiveServer, completion_body

GENERATION = (CompletionRequest, ChatCompletionRequest, ResponseRequest, MessagesRequest)
KINDS = (*GENERATION, EmbeddingRequest, TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest)
LOW, HIGH = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}

# Paths (regular expressions) of what has no bound in the schema, and what bounds it. The size of the body, and the
# number of lists, objects, values and names in it (server/http/json_bounds.py), bound all of them together.
BOUNDED_ELSEWHERE = {
    r"prompt.*|input.*|messages|instructions|suffix|tokens.*|system(\[\]\.text)?": "the context of the model",
    r"prediction\.content.*": "the context of the model: what is longer is cut",
    r"messages\[\]\.(content.*|refusal|reasoning(_content)?|tool_calls.*)": "the context of the model",
    r"model": "equal to a name of the model",
    r"n|best_of|logprobs|top_logprobs": "start options: Served.check_request, check_limits",
    r"max_tokens|max_completion_tokens|max_output_tokens|min_tokens|(options\.)?num_(predict|ctx)": "the context",
    r"length_penalty|logit_bias\{\}": "SamplingParams, BeamSearchParams",
    r"(options\.)?stop(\[\])?|stop_sequences\[\]|bad_words\[\]": "SamplingParams: characters and number",
    r"(stop|allowed)_token_ids(\[\])?": "ids of the vocabulary, each once",
    r"dimensions|truncate_prompt_tokens": "the model: hidden size, context",
    r"structured_outputs\..*": "256 KiB, and the limits of the grammar compiler",
    r".*\.name|tool_choice\.(namespace|(allowed_tools\.)?tools.*)": "a name of up to 128 letters, one among `tools`",
    r"documents\[\]\{\}|chat_template_kwargs\{\}": "validators: MAX_TEMPLATE_STRING, the context",
    r"metadata\{\}": "a validator: MAX_METADATA_VALUE",
    r"client_metadata\{\}": "has no effect",
    r"context_management\.edits\[\]\.(clear_tool_inputs|exclude_tools)(\[\])?": "MAX_NAMES names, which nothing keeps",
    r"include": "members of a list of a few words",
}


def unbounded(
    schema: dict[str, Any], definitions: dict[str, Any], path: str = "", seen: tuple[str, ...] = ()
) -> Iterator[str]:
    """Paths of what has no bound; `seen` are the definitions that the path goes through."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from unbounded(definitions[name], definitions, path, (*seen, name))
        return
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        outer = {key: schema[key] for key in (*LOW, *HIGH) if key in schema}
        yield from unbounded(outer | inner, definitions, path, seen)
    for name, inner in schema.get("properties", {}).items():
        yield from unbounded(inner, definitions, f"{path}.{name}".lstrip("."), seen)
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from unbounded(schema[key], definitions, path + suffix, seen)
    if not _is_bounded(schema):
        yield path


def _is_bounded(schema: dict[str, Any]) -> bool:
    if "enum" in schema or "const" in schema:
        return True
    match schema.get("type"):
        case "string":
            return "maxLength" in schema
        case "array":
            return "maxItems" in schema
        case "integer" | "number":
            return bool(LOW & set(schema)) and bool(HIGH & set(schema))
    return True


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_bound(kind):
    schema = kind.model_json_schema()
    found = set(unbounded(schema, schema.get("$defs", {})))
    assert found, "the walk found the prompt"
    unknown = {path for path in found if not any(re.fullmatch(known, path) for known in BOUNDED_ELSEWHERE)}
    assert not unknown, f"{sorted(unknown)}: give them a max_length, ge and le, or say here what bounds them"


def test_the_walk_finds_what_has_no_bound():
    definitions = {"A": {"properties": {"x": {"type": "string"}, "again": {"$ref": "#/$defs/A"}}}}
    schema = {
        "properties": {
            "a": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
            "b": {"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 0, "maximum": 9},
            "c": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/A"}},
            "d": {"type": "object", "additionalProperties": {"type": "number"}},
            "e": {"enum": ["x"], "type": "string"},
        }
    }
    assert set(unbounded(schema, definitions)) == {"a", "c[].x", "d{}"}


def test_token_ids_that_are_repeated_travel_once(folder):
    with LiveServer(folder) as live, live.client() as client:
        generate, seen = live.driver.generate, []
        live.driver.generate = lambda request: seen.append(request.params.allowed_token_ids) or generate(request)
        body = completion_body(allowed_token_ids=[98, 97] * 100_000)
        assert client.post("/v1/completions", json=body).status_code == 200 and seen == [(98, 97)]
