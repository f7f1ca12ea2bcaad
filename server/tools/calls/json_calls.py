"""Calls that are one JSON object with the name and the arguments: Hermes, Llama 3 and Mistral's first format."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from server.protocol.tools import FunctionDefinition
from server.tools.calls.call_body import NotACallError, Schemas, Written
from server.tools.calls.json_object import NotJsonError, ObjectScanner, members
from server.tools.calls.lark import arguments_rules, literal

ARGUMENTS_KEYS = ("arguments", "parameters")
HEAD = re.compile(r'\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class JsonCalls:
    """`arguments_key`: the key that models write; every key of ARGUMENTS_KEYS is read."""

    arguments_key: str = "arguments"
    markers = ()
    bare_strings = False
    ends = ()
    arguments_are = "its arguments as JSON"

    def write(self, name: str, arguments: Written) -> str:
        return json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)

    def body(self, schemas: Schemas, marked: bool) -> "JsonBody":
        return JsonBody(marked)

    def rules(self, label: str, function: FunctionDefinition, marker: Callable[[str], str]) -> list[str]:
        start = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
        return [
            f'call_{label}: {literal(start)} arguments_{label} "}}"',
            *arguments_rules(label, function),
        ]


class JsonBody:
    """See CallBody. The text starts with the object's brace."""

    def __init__(self, marked: bool) -> None:
        self._marked = marked
        self._text = ""
        self._scanner, self._scanned = ObjectScanner(), 0
        self._arguments: ObjectScanner | None = None
        self.consumed = 0

    def feed(self, text: str) -> int | None:
        self._text = text
        try:
            self._scanned = self._scanner.feed(text, self._scanned)
        except NotJsonError as error:
            raise NotACallError from error
        return self._scanned if self._scanner.done else None

    def start(self) -> str | None:
        head = HEAD.match(self._text)
        if head is None:
            return None
        if self._arguments is None:
            self.consumed, self._arguments = head.end(), ObjectScanner()
        return head[1]

    def pieces(self) -> str:
        assert self._arguments is not None, "start() comes first"
        if self._arguments.done:
            return ""
        at = self.consumed
        self.consumed = self._arguments.feed(self._text, at)
        return self._text[at : self.consumed]

    def whole(self) -> tuple[str, str] | None:
        raw = self._text[: self._scanned]
        try:
            places = members(raw)
        except NotJsonError:
            return None
        name = json.loads(raw[slice(*places["name"])]) if "name" in places else None
        at = next((places[key] for key in ARGUMENTS_KEYS if key in places), None)
        arguments = "{}" if at is None else _as_object(raw[slice(*at)])
        if not isinstance(name, str) or arguments is None or (at is None and not self._marked):
            return None
        return name, arguments


def _as_object(raw: str) -> str | None:
    """The arguments `raw` as the text of an object, which some models write as a JSON string. None for other values."""
    value = json.loads(raw)
    if isinstance(value, str):
        raw = value
        try:
            raw.encode()  # fails for lone surrogates
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return None
    return raw if isinstance(value, dict) else None
