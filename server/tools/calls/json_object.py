"""JSON objects in a growing text: finds the end of an object, and detects as early as possible that there is none."""

import json
import re

MAX_DEPTH = 128
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # inside a string
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = frozenset("+-.0123456789eE")
LITERALS = ("true", "false", "null")
SPACE = " \t\r\n"
MAX_NUMBER = 512  # characters


class NotJsonError(ValueError):
    """No continuation can make the text a JSON object."""


class ObjectScanner:
    """A pushdown automaton of RFC 8259. It reads each character once; the text starts with the object's brace."""

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []  # closing brackets still expected, the innermost last
        self._expects = "object"
        self._in_key = False
        self._word = ""  # characters so far of a number, a literal, or the four digits of an escape

    def feed(self, text: str, at: int = 0) -> int:
        """Reads text[at:]; returns the index after the object's end, or len(text). Raises NotJsonError."""
        while at < len(text) and not self.done:
            if self._expects in ("string", "key string"):
                at = self._string(text, at)
            elif self._expects == "word":
                at = self._read_word(text, at)
            else:
                character = text[at]
                at += 1
                if character not in SPACE or self._expects in ("object", "escape", "hex"):
                    self._read_character(character)
        return at

    def _read_character(self, character: str) -> None:
        expects = self._expects
        if expects == "escape":
            self._escape(character)
        elif expects == "hex":
            self._hex(character)
        elif expects == "object":
            self._require(character == "{")
            self._begin(character)
        elif expects in ("key", "key or end"):
            if character == "}" and expects == "key or end":
                return self._end(character)
            self._require(character == '"')
            self._in_key, self._expects = True, "key string"
        elif expects == "colon":
            self._require(character == ":")
            self._expects = "value"
        elif expects == "comma or end":
            if character != ",":
                return self._end(character)
            self._expects = "key" if self._open[-1] == "}" else "value"
        else:
            self._value(character)

    def _value(self, character: str) -> None:
        if character in "{[":
            self._begin(character)
        elif character == "]" and self._expects == "value or end":
            self._end(character)
        elif character == '"':
            self._in_key, self._expects = False, "string"
        else:
            self._require(character in "-0123456789tfn")
            self._word, self._expects = character, "word"

    def _begin(self, character: str) -> None:
        self._require(len(self._open) < MAX_DEPTH)
        self._open.append("}" if character == "{" else "]")
        self._expects = "key or end" if character == "{" else "value or end"

    def _end(self, character: str) -> None:
        self._require(self._open[-1] == character)
        self._open.pop()
        self._expects = "comma or end"
        self.done = not self._open

    def _string(self, text: str, at: int) -> int:
        plain = PLAIN.match(text, at)
        assert plain is not None
        at = plain.end()
        if at == len(text):
            return at
        self._require(text[at] in '"\\')
        if text[at] == "\\":
            self._expects = "escape"
        else:
            self._expects = "colon" if self._in_key else "comma or end"
        return at + 1

    def _escape(self, character: str) -> None:
        if character == "u":
            self._word, self._expects = "", "hex"
            return
        self._require(character in '"\\/bfnrt')
        self._expects = "string"

    def _hex(self, character: str) -> None:
        self._require(character in "0123456789abcdefABCDEF")
        self._word += character
        if len(self._word) == 4:
            self._expects = "string"

    def _read_word(self, text: str, at: int) -> int:
        """Reads a character of a number or literal, or ends it at the first character that cannot belong to it."""
        character = text[at]
        if character in NUMBER_CHARACTERS or character.isalpha():
            self._word += character
            number = self._word[0] in "-0123456789"
            self._require(
                len(self._word) <= MAX_NUMBER and character in NUMBER_CHARACTERS
                if number
                else any(literal.startswith(self._word) for literal in LITERALS)
            )
            return at + 1
        self._require(self._word in LITERALS or NUMBER.fullmatch(self._word) is not None)
        self._expects = "comma or end"
        return at

    def _require(self, holds: bool) -> None:
        if not holds:
            raise NotJsonError


def members(text: str) -> dict[str, tuple[int, int]]:
    """name -> (start, end) of the value in `text`, which is a whole object. Raises NotJsonError if json rejects it."""
    decode = json.JSONDecoder(strict=True).raw_decode
    found: dict[str, tuple[int, int]] = {}
    at = _skip_space(text, 1)
    try:
        while text[at] != "}":
            name, at = decode(text, at)
            start = _skip_space(text, _skip_space(text, at) + 1)
            _, end = decode(text, start)
            found[name] = start, end
            at = _skip_space(text, end)
            if text[at] == ",":
                at = _skip_space(text, at + 1)
    except (ValueError, RecursionError) as error:
        raise NotJsonError from error
    return found


def _skip_space(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at
