"""Calls in the tags of Qwen3-Coder: each argument is a separate text, whose type the schema tells.

    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>

In the template of Qwen/Qwen3-Coder-30B-A3B-Instruct strings are bare text and other values JSON; one line break before
and one after each value do not belong to the value. A `</parameter>` that no other tag of a call follows belongs to the
value.
"""

import json
from collections.abc import Callable

from server.protocol.tools import FunctionDefinition
from server.tools.calls.call_body import NotACallError, Schemas, Written, held_back
from server.tools.calls.json_object import SPACE
from server.tools.calls.xml_grammar import END_VALUE, xml_rules
from server.tools.calls.xml_values import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    STRING,
    as_json,
    parameter_types,
)

WHOLE = "arguments"  # name of the argument that holds the text of arguments that are no object
MAX_TAG = 256  # characters of a name


class XmlCalls:
    markers = ()
    bare_strings = True
    ends = (END_VALUE,)
    arguments_are = "its arguments"

    def write(self, name: str, arguments: Written) -> str:
        if isinstance(arguments, str):
            arguments = {WHOLE: arguments}
        parameters = [
            f"{PARAMETER}{key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            f"\n{END_PARAMETER}\n"
            for key, value in arguments.items()
        ]
        return f"{FUNCTION}{name}>\n{''.join(parameters)}{END_FUNCTION}"

    def body(self, schemas: Schemas, marked: bool) -> "XmlBody":
        return XmlBody(schemas)

    def rules(self, label: str, function: FunctionDefinition, marker: Callable[[str], str]) -> list[str]:
        return xml_rules(label, function)


class XmlBody:
    """See CallBody. The text starts with `<function=`. `pieces` returns strings as they arrive, other values whole."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._text = ""
        self._name: str | None = None
        self._arguments: list[str] = []
        self._num_given = 0  # entries of _arguments that `pieces` has returned
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._seek = 0  # index from which the end of a value is searched
        self._done = False
        self._state = self._in_head
        self.consumed = 0

    def feed(self, text: str) -> int | None:
        self._text = text
        while self._state():
            pass
        return self.consumed if self._done else None

    def start(self) -> str | None:
        return self._name

    def pieces(self) -> str:
        new, self._num_given = self._arguments[self._num_given :], len(self._arguments)
        return "".join(new)

    def whole(self) -> tuple[str, str] | None:
        return None if self._name is None else (self._name, "".join(self._arguments))

    # Each state consumes what it can of self._text from self.consumed on. It returns True if the next state should run.

    def _in_head(self) -> bool:
        name = self._tag(FUNCTION)
        if name is None:
            return False
        if name not in self._schemas:
            raise NotACallError
        self._name, self._state = name, self._between
        self._arguments.append("{")
        return True

    def _between(self) -> bool:
        while self.consumed < len(self._text) and self._text[self.consumed] in SPACE:
            self.consumed += 1
        if self._text.startswith(END_FUNCTION, self.consumed):
            self.consumed += len(END_FUNCTION)
            self._arguments.append("}")
            self._done = True
            return False
        if END_FUNCTION.startswith(self._text[self.consumed :]):
            return False
        key = self._tag(PARAMETER)
        if key is None:
            return False
        self._types = parameter_types(self._schemas[self._name or ""], key)
        self._arguments.append(f"{', ' * bool(self._num_parameters)}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_parameters += 1
        self._state = self._before_value
        return True

    def _before_value(self) -> bool:
        if self.consumed == len(self._text):
            return False
        self.consumed += self._text[self.consumed] == "\n"
        self._seek = self.consumed
        if self._types == STRING:
            self._arguments.append('"')
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        """Holds back a line break as long as it may be the one after the value."""
        ended = self._find_end()
        end = self._seek
        if end > self.consumed and self._text[end - 1] == "\n":
            end -= 1
        value = self._text[self.consumed : end]
        if self._types == STRING:
            self._arguments += [json.dumps(value, ensure_ascii=False)[1:-1]] if value else []
            self.consumed = end
        if not ended:
            return False
        self._arguments.append('"' if self._types == STRING else as_json(value, self._types))
        self.consumed = self._seek + len(END_PARAMETER)
        self._state = self._between
        return True

    def _find_end(self) -> bool:
        """True if the value ends at self._seek; otherwise the value reaches at least to there."""
        text = self._text
        while (at := text.find(END_PARAMETER, self._seek)) >= 0:
            rest = text[at + len(END_PARAMETER) :].lstrip(SPACE)
            if rest.startswith((PARAMETER, END_FUNCTION)):
                self._seek = at
                return True
            if PARAMETER.startswith(rest) or END_FUNCTION.startswith(rest):
                self._seek = at
                return False
            self._seek = at + len(END_PARAMETER)
        self._seek = max(self._seek, len(text) - held_back(text, END_PARAMETER))
        return False

    def _tag(self, begin: str) -> str | None:
        """Consumes the tag that starts with `begin` and returns its name; None while the tag is incomplete."""
        after = self.consumed + len(begin)
        if not self._text.startswith(begin, self.consumed):
            if begin.startswith(self._text[self.consumed :]):
                return None
            raise NotACallError
        end = self._text.find(">", after, after + MAX_TAG)
        if end < 0:
            if len(self._text) >= after + MAX_TAG or "\n" in self._text[after:]:
                raise NotACallError
            return None
        name = self._text[after:end]
        if not name or "\n" in name:
            raise NotACallError
        self.consumed = end + 1
        return name
