"""Calls in the tags of Qwen3-Coder, where each argument is a text of its own and its type is that of the schema.

    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>

The template of Qwen/Qwen3-Coder-30B-A3B-Instruct: strings stand as they are and all else as JSON, one line break before
and after each value is not of it. A value goes on where `</parameter>` is followed by no other tag of a call.
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

WHOLE = "arguments"  # names the text of arguments that are no object
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
    """See CallBody. Its text starts with `<function=`. Strings are given out as they come, other values whole."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._text = ""
        self._name: str | None = None
        self._arguments: list[str] = []
        self._num_given = 0  # of them
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._seek = 0  # where the end of a value is looked for
        self._done = False
        self._state = self._in_head
        self.taken = 0

    def feed(self, text: str) -> int | None:
        self._text = text
        while self._state():
            pass
        return self.taken if self._done else None

    def start(self) -> str | None:
        return self._name

    def pieces(self) -> str:
        new, self._num_given = self._arguments[self._num_given :], len(self._arguments)
        return "".join(new)

    def whole(self) -> tuple[str, str] | None:
        return None if self._name is None else (self._name, "".join(self._arguments))

    # Each state takes what it can from self._text, from self.taken on; true: another state goes on.

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
        while self.taken < len(self._text) and self._text[self.taken] in SPACE:
            self.taken += 1
        if self._text.startswith(END_FUNCTION, self.taken):
            self.taken += len(END_FUNCTION)
            self._arguments.append("}")
            self._done = True
            return False
        if END_FUNCTION.startswith(self._text[self.taken :]):
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
        if self.taken == len(self._text):
            return False
        self.taken += self._text[self.taken] == "\n"
        self._seek = self.taken
        if self._types == STRING:
            self._arguments.append('"')
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        """A line break is held back for as long as it may be the one behind the value."""
        ended = self._find_end()
        end = self._seek
        if end > self.taken and self._text[end - 1] == "\n":
            end -= 1
        value = self._text[self.taken : end]
        if self._types == STRING:
            self._arguments += [json.dumps(value, ensure_ascii=False)[1:-1]] if value else []
            self.taken = end
        if not ended:
            return False
        self._arguments.append('"' if self._types == STRING else as_json(value, self._types))
        self.taken = self._seek + len(END_PARAMETER)
        self._state = self._between
        return True

    def _find_end(self) -> bool:
        """Whether the value ends at self._seek; else it goes on to there at least."""
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
        """The name in the tag that begins so, which is taken; None while it is not whole."""
        after = self.taken + len(begin)
        if not self._text.startswith(begin, self.taken):
            if begin.startswith(self._text[self.taken :]):
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
        self.taken = end + 1
        return name
