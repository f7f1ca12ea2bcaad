"""The grammar of the calls of xml_calls.py: parameters in the order of the schema, optional ones may be left out, and
each value has the type that its schema allows."""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.structured_output import MAX_TEXT_BYTES, OPTIONAL
from server.errors import MAX_NAME_LENGTH
from server.protocol.tools import INPUT, FunctionDefinition, LarkFunction
from server.tools.calls.call_body import SchemaError
from server.tools.calls.lark import CALL_SPACES, input_rule, json_rule, literal, regex, up_to
from server.tools.calls.xml_values import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, resolved, types_of

END_VALUE = f"\n{END_PARAMETER}\n"
KEY = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"  # name of an argument that the schema does not list
ABOUT = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})  # no constraints
LENGTHS = frozenset({"minLength", "maxLength"})
OF_OBJECTS = ABOUT | {"$defs", "$id", "$ref", "$schema", "additionalProperties", "definitions", "properties"}
OF_OBJECTS |= {"required", "type"}
MAX_BRANCHES = 32
NO_STRINGS = ("array", "boolean", "integer", "null", "number", "object")
ANYTHING = r"(.|\n)*"
ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")  # an unescaped $ at the end
SCALARS = frozenset({"boolean", "integer", "null", "number", "string"})


def xml_rules(label: str, function: FunctionDefinition) -> list[str]:
    """See CallStyle.rules."""
    if isinstance(function, LarkFunction):  # quoted: in bare text a greedy terminal would not stop at the end tag
        start = literal(f'{FUNCTION}{function.name}>\n{PARAMETER}{INPUT}>\n"')
        end = literal(f"{END_VALUE}{END_FUNCTION}")
        return [f"call_{label}: {start} input_{label} {end}", input_rule(label, function)]
    return _Rules(label, function).all()


class _Rules:
    def __init__(self, label: str, function: FunctionDefinition) -> None:
        self._label, self._function = label, function
        self._root = function.schema
        self._rules: list[str] = []
        self._num_chars = 0

    def all(self) -> list[str]:
        schema = resolved(self._root, self._root)
        self._only(schema, OF_OBJECTS)
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise self._wrong("properties must be an object, and required a list of names", "")
        named = properties | {key: {} for key in required if isinstance(key, str) and key not in properties}
        parts = [f"{label}{'' if key in required else '?'}" for key, label in self._parameters(named).items()]
        if not named and schema.get("additionalProperties", True) is not False:
            parts.append(self._open_parameters(schema.get("additionalProperties", True)))
        start = literal(f"{FUNCTION}{self._function.name}>\n")
        return [f"call_{self._label}: {' '.join([start, *parts, literal(END_FUNCTION)])}", *self._rules]

    def _parameters(self, named: Mapping[str, Any]) -> dict[str, str]:
        labels = {}
        for i, (key, schema) in enumerate(named.items()):
            if not key or ">" in key or "\n" in key:
                raise self._wrong(f"the name {key[:64]!r} cannot be written in this model's call format", "properties")
            labels[key] = label = f"parameter_{i}_{self._label}"
            value = self._value(label, schema, f"properties.{key}")
            self._add(f"{label}: {literal(f'{PARAMETER}{key}>' + chr(10))} {value}")
        return labels

    def _open_parameters(self, schema: Any) -> str:
        label = f"open_{self._label}"
        value = self._value(label, {} if schema is True else schema, "additionalProperties")
        self._add(f'{label}: {literal(PARAMETER)} {KEY} ">\\n" {value}')
        return f"{label}*"

    def _add(self, rule: str) -> None:
        """Adds a rule. SchemaError over a limit: a part that many arguments refer to is written once for each."""
        self._num_chars += len(rule)
        if self._num_chars > MAX_TEXT_BYTES:
            raise self._wrong(f"written out as a grammar this has more than {MAX_TEXT_BYTES} characters", "")
        self._rules.append(rule)

    def _value(self, label: str, schema: Any, path: str) -> str:
        """Lark of a value followed by its end tag."""
        schema = resolved(schema, self._root)
        types = types_of(schema, self._root)
        values = self._listed(schema, path)
        if values is None and types and "string" not in types:
            values = [self._json(schema)]
        if values is None:
            values = self._branches(schema, path)
        if values is not None:
            return f"({' | '.join(values)}) {literal(END_VALUE)}"
        self._add(f"{label}_text[lazy]: {self._text(label, schema, types, path)}")
        return f"{label}_text"

    def _branches(self, schema: Mapping[str, Any], path: str) -> list[str] | None:
        """Lark of the values that anyOf allows; None if one of its branches is a free string, or has several types."""
        parts = schema.get("anyOf")
        if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_BRANCHES:
            return None
        branches = [resolved(part, self._root) for part in parts]
        if not all(_lists_values(branch) or branch.get("type") in NO_STRINGS for branch in branches):
            return None
        self._only(schema, ABOUT | {"anyOf"}, path)
        return [text for branch in branches for text in self._listed(branch, path) or [self._json(branch)]]

    def _listed(self, schema: Mapping[str, Any], path: str) -> list[str] | None:
        """Lark of the values of const or enum; None without them."""
        if not _lists_values(schema):
            return None
        self._only(schema, ABOUT | {"const", "enum", "type"}, path)
        values = [schema["const"]] if "const" in schema else schema["enum"]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        return list(map(literal, texts))

    def _json(self, schema: Mapping[str, Any]) -> str:
        """Lark of a value that is written as JSON."""
        below: dict[str, Any] = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return json_rule({**below, **schema}, self._function.strict, CALL_SPACES)

    def _text(self, label: str, schema: Mapping[str, Any], types: frozenset[str], path: str) -> str:
        """Lark of a value that may be a string, with its end tag. A value of several types has no other constraint:
        every text is either valid JSON of another type or a string."""
        if types != {"string"}:
            if self._function.strict:
                self._only(schema, ABOUT | {"type", *(("anyOf", "oneOf") if self._are_free(schema) else ())}, path)
            if types - SCALARS:
                self._refuse("a string or an object or list", path)
            return up_to(END_VALUE)
        if isinstance(pattern := schema.get("pattern"), str):
            self._only(schema, ABOUT | {"type", "pattern"}, path)
            return self._ended(label, _searched(pattern))
        self._only(schema, ABOUT | LENGTHS | {"type"}, path)
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if not all(type(length) is int and length >= 0 for length in (low, high or 0)):
            if self._function.strict:
                raise self._wrong("minLength and maxLength must be numbers of characters", path)
            low, high = 0, ""
        return up_to(END_VALUE) if low == 0 and high == "" else self._ended(label, rf"(.|\n){{{low},{high}}}")

    def _ended(self, label: str, text: str) -> str:
        """Lark of a text that matches a regex, with its end tag. Unless the function is strict, the text may be any
        text if the regex cannot be compiled."""
        if self._function.strict:
            return up_to(END_VALUE, text)
        terminal = f"{OPTIONAL}{label.upper()}"
        self._add(f"{terminal}: /{text}/")
        return f"{terminal} {literal(END_VALUE)}"

    def _are_free(self, schema: Mapping[str, Any]) -> bool:
        """True if every branch of anyOf and oneOf constrains only the type."""
        lists = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        branches = [branch for branches in lists for branch in branches]
        return all(resolved(branch, self._root).keys() <= ABOUT | {"type"} for branch in branches)

    def _only(self, schema: Mapping[str, Any], known: frozenset[str] | set[str], path: str = "") -> None:
        if self._function.strict and (others := schema.keys() - known):
            self._refuse(min(others)[:MAX_NAME_LENGTH], path)

    def _wrong(self, text: str, path: str) -> SchemaError:
        return SchemaError(self._function.name, path, text)

    def _refuse(self, what: str, path: str) -> None:
        if self._function.strict:
            text = f"{what} cannot be enforced in this model's call format: leave it out, or set strict to false"
            raise self._wrong(text, path)


def _lists_values(schema: Mapping[str, Any]) -> bool:
    """True if `schema` has a const or an enum."""
    return "const" in schema or (isinstance(schema.get("enum"), list) and bool(schema["enum"]))


def _searched(pattern: str) -> str:
    """Regex of a whole text that contains a match of `pattern`, which is how JSON Schema uses patterns."""
    begins, ends = pattern.startswith("^"), ENDS.search(pattern) is not None
    inner = regex(pattern[begins : len(pattern) - ends])
    return f"{'' if begins else ANYTHING}({inner}){'' if ends else ANYTHING}"
