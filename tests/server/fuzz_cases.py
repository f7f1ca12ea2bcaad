"""Hostile requests, made from /openapi.json: a field or a route that is added is fuzzed without a change here.

Everything is drawn from a seed, so a case is repeated by its number.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RAW = "@raw:"  # a string that begins so is written into the body as it stands, without quotes
HALF_CHARACTER = RAW + '"a\\ud83db"'
NUMBERS = (-1, 0, 1, 2, 7, 3071, 3072, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.5, 1.5, 1e308, 5e-324)
RAW_NUMBERS = tuple(
    RAW + text for text in ("NaN", "Infinity", "-Infinity", "1e999", "-0", "1" * 5000, "01", "+1", "0x1")
)
TEXTS = (
    "",
    "x",
    "auto",
    "\0",
    "é\u202e\uffff",
    "\U0001f98a" * 40,
    "%s%n{0}",
    "<|im_end|>",
    "../../etc/passwd",
    "a" * 70_000,
)
LISTS: tuple[Any, ...] = (
    [],
    [None],
    [[]],
    [0],
    [-1],
    [3072, 10**12],
    ["a", ""],
    ["a", 1],
    [1.0],
    [True],
    [[1], ["a"]],
    [1] * 3000,
    ["stop"] * 300,
    [{}],
    [{"type": "text"}],
    [{"type": "text", "text": None}],
    [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
)
OBJECTS: tuple[Any, ...] = (
    {},
    {"": ""},
    {"a": 1},
    {"type": "json_schema"},
    {"1": 1000},
    {"-1": 1},
    {"99999999": 1},
    {"1": None},
    {"type": "function", "function": {"name": "f"}},
    {"__proto__": {}, "constructor": 1},
    {str(i): 1 for i in range(2000)},
)
DEEP = tuple(RAW + text for text in ("[" * 400 + "]" * 400, '{"a":' * 400 + "1" + "}" * 400, "[" * 200_000))
BROKEN = tuple(RAW + text for text in ("", "tru", '"open', "{,}", "[1,]", '"\\x"', "'x'", "1 2", '{"a":1,"a":2}'))
VALUES: tuple[Any, ...] = (
    *(None, True, False, HALF_CHARACTER),
    *NUMBERS,
    *RAW_NUMBERS,
    *TEXTS,
    *LISTS,
    *OBJECTS,
    *DEEP,
    *BROKEN,
)


# Right values of fields whose schema does not tell enough, or where any number would take too long.
RIGHT: dict[str, tuple[Any, ...]] = {
    "n": (1, 2, 8),
    "best_of": (1, 8),
    "max_tokens": (0, 1, 5, 16, None),
    "max_completion_tokens": (1, 5, None),
    "max_output_tokens": (16, 20),
    "min_tokens": (0, 1, 3),
    "stop": (["x"], "\n", ["a", "bc", "\U0001f98a", " the"], []),
    "stop_token_ids": ([], [5], [0, 1, 3071]),
    "allowed_token_ids": ([5], [5, 6, 7, 3071], list(range(100, 1000))),
    "logit_bias": ({}, {"5": -100, "6": 100.0}, {str(i): -0.5 for i in range(300)}),
    "bad_words": ([], ["a"], ["Once", " the", "x" * 60]),
    "logprobs": (0, 1, 5, True, False, None),
    "top_logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 1, 20),
    "temperature": (0, 1e-9, 0.7, 1, 2),
    "seed": (-(2**63), 0, 2**63 - 1, 42),
    "priority": (-1, 0, 1, 2**31 - 1),
    "timeout": (1e-6, 0.05, 30, 86400),
    "truncate_prompt_tokens": (-1, 1, 7),
    "dimensions": (1, 7, 64),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "structured_outputs": (
        {"regex": "[a-z]{1,9}"},
        {"choice": ["yes", "no", "\U0001f98a"]},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"grammar": 'start: "a" | "b" start'},
    ),
    "stream_options": (None, {"include_usage": True}),
    "prompt": ("a", "<|im_end|>", "\U0001f98a" * 40, "word " * 300, [5, 6, 7], ["a", "b"], [[5], [6, 7]]),
    "input": ("a", "\0", ["a", "b" * 500], [5, 6, 7], [[5], [6, 7]]),
    "tokens": ([], [5, 6, 3071]),
    "messages": (
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "\0"}]}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "x" * 900},
            {"role": "user", "content": ""},
        ],
    ),
}
TOP_LEVEL = 1  # length of a path


@dataclass(frozen=True)
class Case:
    number: int
    route: str
    body: bytes
    what: str


class Schema:
    """The routes of a server that take a JSON object, and every field of it at any depth."""

    def __init__(self, openapi: dict[str, Any]) -> None:
        self._definitions = openapi.get("components", {}).get("schemas", {})
        self.fields: dict[str, list[tuple[str | int, ...]]] = {}
        self._right: dict[tuple[str, tuple[str | int, ...]], list[Any]] = {}
        for route, methods in openapi["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" in content:
                found = list(self._walk(content["application/json"]["schema"], (), 0))
                self.fields[route] = sorted({path for path, _ in found}, key=str)
                for path, field in found:
                    self._right.setdefault((route, path), []).extend(_right_values(field))

    def right(self, route: str) -> dict[str, list[Any]]:
        """Fields of a body with values that are right as such, the extreme ones among them."""
        paths = [path for path in self.fields[route] if len(path) == TOP_LEVEL and path[0] != "model"]
        found = {str(path[0]): list(RIGHT.get(str(path[0]), ())) or self._right[route, path] for path in paths}
        return {name: values for name, values in found.items() if values}

    def _walk(
        self, schema: dict[str, Any], path: tuple[str | int, ...], depth: int
    ) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
        if path:
            yield path, schema
        if depth > 5:
            return
        if "$ref" in schema:
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        for name, inner in schema.get("properties", {}).items():
            yield from self._walk(inner, (*path, name), depth + 1)
        if isinstance(schema.get("items"), dict):
            yield from self._walk(schema["items"], (*path, 0), depth + 1)
        for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
            yield from self._walk(inner, path, depth + 1)


def cases(schema: Schema, model: str, seed: int, count: int) -> Iterator[Case]:
    """`count` of them, in turn: a field of a plain request is hostile; one beside others that are right; none is."""
    rng = random.Random(seed)
    singles = [(route, path, value) for route, paths in schema.fields.items() for path in paths for value in VALUES]
    rng.shuffle(singles)
    right = {route: schema.right(route) for route in schema.fields}
    for number in range(count):
        changes: list[tuple[tuple[str | int, ...], Any]] = []
        route, path, hostile = singles[number % len(singles)]
        if number % 3:
            names = rng.sample(sorted(right[route]), min(rng.randint(1, 4), len(right[route])))
            changes = [((name,), rng.choice(right[route][name])) for name in names]
        if number % 3 != 2:
            changes.append((path, hostile))
        body = _base(route, model, rng.getrandbits(30))
        for path, value in changes:
            body = _put(body, path, value)
        what = ", ".join(f"{'.'.join(map(str, path))} = {str(value)[:40]!r}" for path, value in changes)
        yield Case(number, route, _write(body), f"{route}: {what}")


def _right_values(schema: dict[str, Any]) -> list[Any]:
    """By type and bounds; nothing for what has a structure."""
    if "enum" in schema or "const" in schema:
        return list(schema.get("enum", ())) or [schema["const"]]
    kind, low, high = schema.get("type"), schema.get("minimum"), schema.get("maximum")
    if kind == "boolean":
        return [True, False]
    if kind in ("integer", "number") and low is not None and high is not None:
        return [low, high]
    if kind == "string":
        return ["x", "a" * min(100, schema.get("maxLength", 100))]
    return [None] if kind == "null" else []


def _base(route: str, model: str, seed: int) -> dict[str, Any]:
    """A request that is right, and soon done."""
    body: dict[str, Any] = {"model": model, "seed": seed}
    if route.endswith("/completions"):
        body["max_tokens"] = 3
    if "messages" in route or "chat" in route:
        return body | {"max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    if route.endswith("/responses"):
        return body | {"max_output_tokens": 3, "input": "hello"}
    return body | ({"prompt": "hello"} if route.endswith("ize") or "max_tokens" in body else {"input": "hello"})


def _put(target: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(first, int):
        items = list(target) if isinstance(target, list) and target else [{}]
        return [_put(items[0], tuple(rest), value), *items[1:]]
    fields = dict(target) if isinstance(target, dict) else {}
    return {**fields, first: _put(fields.get(first), tuple(rest), value)}


def _write(body: Any) -> bytes:
    """JSON, in which raw pieces are not quoted."""
    if isinstance(body, dict):
        return b"{" + b",".join(json.dumps(name).encode() + b":" + _write(v) for name, v in body.items()) + b"}"
    if isinstance(body, list) and any(isinstance(item, (dict, list, str)) for item in body):
        return b"[" + b",".join(map(_write, body)) + b"]"
    if isinstance(body, str) and body.startswith(RAW):
        return body[len(RAW) :].encode()
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


def big_bodies(model: str) -> Iterator[tuple[str, bytes]]:
    """(what it is, a body of some 30 MB or more)."""
    start = b'{"model":' + json.dumps(model).encode() + b","
    yield "a prompt of 30 MB", start + b'"prompt":"' + b"word " * 6_000_000 + b'"}'
    yield "30 MB of token ids", start + b'"prompt":[' + b"1," * 15_000_000 + b"1]}"
    yield "30 MB of stop strings", start + b'"prompt":"a","stop":[' + b'"ab",' * 6_000_000 + b'"a"]}'
    yield "an unknown field of 30 MB", start + b'"prompt":"a","x":"' + b"y" * 30_000_000 + b'"}'
    yield "a key of 30 MB", start + b'"' + b"y" * 30_000_000 + b'":1}'
    yield "30 MB of blanks", b" " * 30_000_000 + start + b'"prompt":"a","max_tokens":1}'
    yield "30 MB of brackets", b"[" * 30_000_000
    yield "40 MB", start + b'"prompt":"' + b"word " * 8_000_000 + b'"}'
    yield "30 MB that are no text", b"\xff" * 30_000_000


def raw_attacks(model: str) -> Iterator[tuple[str, list[bytes]]]:
    """(what it is, what is sent on a connection, piece by piece). Afterwards the connection is dropped."""
    body = json.dumps(
        {"model": model, "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    ).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = post + b"Content-Length: %d\r\n\r\n" % len(body) + body
    yield "header flood", [b"GET /health HTTP/1.1\r\n", *[b"x-a: 1\r\n" * 500] * 20]
    yield "a header of 4 MB", [b"GET /health HTTP/1.1\r\nx: ", *[b"a" * 100_000] * 40]
    yield "a path of 1 MB", [b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n"]
    yield "no HTTP", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20]
    yield "pipelined garbage after a request", [whole + b"\x00\xff" * 4000]
    yield "a hundred pipelined requests", [b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 100]
    yield "pipelined streams, unread", [whole * 20]
    yield "half a body", [post + b"Content-Length: 5000\r\n\r\n" + body]
    yield "left amid a stream", [whole]
    yield "negative length", [post + b"Content-Length: -5\r\n\r\n" + body]
    yield "two lengths", [post + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n" + body]
    yield (
        "length and chunks",
        [post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"],
    )
    yield "a chunk of all memory", [post + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body]
    yield "chunks of a byte", [post + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000]
    yield (
        "upgrade",
        [b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"\x81" * 99],
    )
    yield "NUL in the head", [b"GET /v1/mo\x00dels HTTP/1.1\r\nHo\x00st: x\r\n\r\n"]
