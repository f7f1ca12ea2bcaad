"""Calls that are a name and a JSON object of arguments: Mistral's format since its tokenizer v11, and harmony's.

https://github.com/mistralai/mistral-common (tokens/tokenizers): `name[ARGS]{...}` after a [TOOL_CALLS] for each call,
with v11 `name[CALL_ID]id[ARGS]{...}`. The id that the model writes is skipped: two calls may have the same id. In
harmony (server/tools/harmony.py) the rest of the message's header stands in place of [ARGS], and there is no id.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from server.protocol.tools import NAME, FunctionDefinition
from server.tools.calls.call_body import NotACallError, Schemas, Written
from server.tools.calls.json_object import SPACE, NotJsonError, ObjectScanner
from server.tools.calls.lark import arguments_rules, literal

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
ID = re.compile(r"[a-zA-Z0-9_-]{0,64}")


@dataclass(frozen=True)
class NamedCalls:
    """`args`: the text between name and arguments. `call_id`: the marker before an id; empty: models write no ids."""

    args: str = ARGS
    call_id: str = CALL_ID
    bare_strings = False
    ends = ()
    arguments_are = "its arguments as JSON"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.call_id, self.args) if self.call_id else (self.args,)

    def write(self, name: str, arguments: Written) -> str:
        return f"{name}{self.args}{json.dumps(arguments, ensure_ascii=False)}"

    def body(self, schemas: Schemas, marked: bool) -> "NamedBody":
        return NamedBody(self.args, self.call_id)

    def rules(self, label: str, function: FunctionDefinition, marker: Callable[[str], str]) -> list[str]:
        call_id = f" id_{label}?" if self.call_id else ""
        return [
            f"call_{label}: {literal(function.name)}{call_id} {marker(self.args)} arguments_{label}",
            *([f"id_{label}: {marker(self.call_id)} /[a-zA-Z0-9]{{9}}/"] if self.call_id else []),
            *arguments_rules(label, function),
        ]


class NamedBody:
    """See CallBody. The text starts with the name; `args` may be missing, since some tokenizers do not show it."""

    def __init__(self, args: str, call_id: str) -> None:
        self._args, self._call_id = args, call_id
        self._text = ""
        self._name: str | None = None
        self._begin = 0  # index of the arguments
        self._scanner, self._scanned = ObjectScanner(), 0
        self.consumed = 0

    def feed(self, text: str) -> int | None:
        self._text = text
        if self._name is None and not self._read_head():
            return None
        try:
            self._scanned = self._scanner.feed(text, self._scanned)
        except NotJsonError as error:
            raise NotACallError from error
        return self._scanned if self._scanner.done else None

    def start(self) -> str | None:
        return self._name

    def pieces(self) -> str:
        piece, self.consumed = self._text[self.consumed : self._scanned], self._scanned
        return piece

    def whole(self) -> tuple[str, str] | None:
        return None if self._name is None else (self._name, self._text[self._begin : self._scanned])

    def _read_head(self) -> bool:
        name = NAME.match(self._text)
        if name is None:
            raise NotACallError
        at = self._behind(self._call_id, name.end()) if self._call_id else name.end()
        if at is not None and at > name.end():
            found = ID.match(self._text, at)
            at = found.end() if found is not None and found.end() < len(self._text) else None
        at = None if at is None else self._behind(self._args, at)
        while at is not None and at < len(self._text) and self._text[at] in SPACE:
            at += 1
        if at is None or at == len(self._text):
            return False
        if self._text[at] != "{":
            raise NotACallError
        self._name, self._begin, self._scanned, self.consumed = name[0], at, at, at
        return True

    def _behind(self, marker: str, at: int) -> int | None:
        """Index after the marker at `at`, or `at` if there is no marker; None while that is unknown."""
        if self._text.startswith(marker, at):
            return at + len(marker)
        return None if marker.startswith(self._text[at:]) else at
