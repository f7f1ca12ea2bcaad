"""Parses regular expressions of Rust's regex crate into nodes that know which characters a JSON string must escape.

Supports only the syntax that grammars of a JSON string need (server/protocol/grammars/lark_in_json.py): no look-around,
no nested classes, no flags but i and s.
"""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

SHORT = {'"': '"', "\\": "\\", "\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r"}
SPECIAL = frozenset(SHORT) | frozenset(map(chr, range(0x20)))  # characters that a JSON string must escape
NOT_SPECIAL = r'[^"\\\x00-\x1f]'
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
CLASSES = {
    "s": frozenset("\t\n\v\f\r"),
    "d": frozenset[str](),
    "w": frozenset[str](),
}  # members in SPECIAL
HEX = re.compile(r"\\x([0-9a-fA-F]{2})|\\[xuU]\{([0-9a-fA-F]{1,6})\}|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")
# Unicode properties that no special character has: kinds of letters, marks and numbers, and scripts.
NAMES = "[LMN][a-z]?|Alphabetic|Letter|Lowercase|Mark|Number|Uppercase"
PROPERTY = re.compile(rf"\\[pP](?:[LMN]|\{{(?:{NAMES}|Script=\w+)\}})")
GROUP = re.compile(r"\((?:\?(?P<flags>[a-zA-Z]*(?:-[a-zA-Z]+)?)(?P<end>[:)])|\?P?<[a-zA-Z_]\w*>)?")
COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
MAX_DEPTH = 64
MAX_SIZE = 1 << 12


class PatternError(ValueError):
    """The regular expression cannot be parsed. The message follows the name of its field."""


class Node:
    """A part of a regular expression.

    `specials`: True if a text of the node may contain characters of SPECIAL. `regex`: regular expression of the node's
    text as a JSON string spells it. `size`: number of characters and classes; a node over MAX_SIZE raises PatternError.
    """

    specials: bool
    regex: str
    size: int = 1

    def _count(self, nodes: Sequence["Node"]) -> None:
        self.specials = any(node.specials for node in nodes)
        self.size = 1 + sum(node.size for node in nodes)
        if self.size > MAX_SIZE:
            raise PatternError(f"is made of more than {MAX_SIZE} characters and classes when it is written out")

    @property
    def grouped(self) -> str:
        """`regex` in the form needed inside a longer regular expression."""
        return f"(?:{self.regex})"


class Pattern(Node):
    """A regular expression without special characters, kept as text."""

    specials = False

    def __init__(self, regex: str) -> None:
        self.regex = regex


class Chars(Node):
    """One character of a class. `text`: the class with its brackets; `[^]` stands for every character."""

    def __init__(self, text: str, ignores_case: bool = False) -> None:
        self._found, self._only = _specials_in(text)
        self.specials = bool(self._found)
        self._text = f"(?i:{text})" if ignores_case else text

    @classmethod
    def of(cls, character: str, ignores_case: bool = False) -> "Chars":
        return cls(f"[\\x{{{ord(character):x}}}]", ignores_case and character.isalpha())

    @cached_property
    def parts(self) -> list[str]:
        """Regular expressions of the plain characters, if the class has any, and of the escaped ones."""
        short = "".join(re.escape(SHORT[c]) for c in sorted(self._found & SHORT.keys()))
        long = "|".join(f"{ord(c):02x}" for c in sorted(self._found - SHORT.keys()))
        escaped = "|".join([rf"\\[{short}]"] * bool(short) + [rf"\\u00(?:{long})"] * bool(long))
        if self._only:
            return [escaped]
        plain = NOT_SPECIAL if self._text == "[^]" else _both(self._text, NOT_SPECIAL)
        return [plain, escaped]

    @property
    def regex(self) -> str:  # type: ignore[override]
        return f"(?:{'|'.join(self.parts)})" if self.specials else self._text

    @property
    def grouped(self) -> str:
        return self.regex


class Series(Node):
    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._count(nodes)

    @cached_property
    def flat(self) -> list[Node]:
        """The nodes, with nested series replaced by their nodes."""
        return [part for node in self.nodes for part in (node.flat if isinstance(node, Series) else [node])]

    @cached_property
    def regex(self) -> str:  # type: ignore[override]
        return "".join(node.grouped for node in self.nodes)


class Alternatives(Node):
    def __init__(self, nodes: Sequence[Node]) -> None:
        inner = [node.nodes if isinstance(node, Alternatives) else [node] for node in nodes]
        self.nodes: list[Node] = [part for parts in inner for part in parts]
        self._count(nodes)

    @cached_property
    def regex(self) -> str:  # type: ignore[override]
        return "|".join(node.regex for node in self.nodes)


class Repeat(Node):
    """`node` repeated `low` to `high` times; `high` is None for no limit."""

    def __init__(self, node: Node, low: int, high: int | None) -> None:
        self.node, self.low, self.high = node, low, high
        self._count([node])

    @cached_property
    def regex(self) -> str:  # type: ignore[override]
        return f"{self.node.grouped}{{{self.low},{'' if self.high is None else self.high}}}"


def parse_regex(text: str, ignores_case: bool = False, dot_is_all: bool = False) -> Node:
    """The node of a regular expression. `ignores_case`, `dot_is_all`: the flags i and s. Raises PatternError."""
    return _Parser(text, ignores_case, dot_is_all).all()


class _Parser:
    def __init__(self, text: str, ignores_case: bool, dot_is_all: bool) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._ignores_case, self._dot_is_all = ignores_case, dot_is_all

    def all(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("has a regular expression with a ) that closes no group")
        return node

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _alternatives(self) -> Node:
        series = [self._series()]
        while self._next() == "|":
            self._at += 1
            series.append(self._series())
        return series[0] if len(series) == 1 else Alternatives(series)

    def _series(self) -> Node:
        nodes: list[Node] = []
        while (character := self._next()) not in ("", "|", ")"):
            node = self._group() if character == "(" else self._one(character)
            if node is not None:
                nodes.append(self._repeated(node))
        return nodes[0] if len(nodes) == 1 else Series(nodes)

    def _repeated(self, node: Node) -> Node:
        while (character := self._next()) and character in "*+?{":
            if character == "{":
                found = COUNT.match(self._text, self._at)
                if found is None:
                    raise PatternError(
                        "has a regular expression with a { that is no repeat count: write \\{ for a bracket"
                    )
                low, high = int(found[1]), int(found[3]) if found[3] else None if found[2] else int(found[1])
                self._at = found.end()
            else:
                low, high = int(character == "+"), 1 if character == "?" else None
                self._at += 1
            if self._next() == "?":  # a lazy repetition matches the same texts
                self._at += 1
            node = Repeat(node, low, high)
        return node

    def _group(self) -> Node | None:
        found = GROUP.match(self._text, self._at)
        assert found is not None
        on, _, off = (found["flags"] or "").partition("-")
        if (set(on) | set(off)) - set("isu") or (found[0] == "(" and self._text.startswith("(?", self._at)):
            raise PatternError(f"has a group that is not supported: {self._text[self._at : self._at + 8]}")
        self._at = found.end()
        before = self._ignores_case, self._dot_is_all
        self._ignores_case = ("i" in on or self._ignores_case) and "i" not in off
        self._dot_is_all = ("s" in on or self._dot_is_all) and "s" not in off
        if found["end"] == ")":
            return None  # the flags hold for the rest of the enclosing group
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"has a regular expression with more than {MAX_DEPTH} nested groups")
        node = self._alternatives()
        if self._next() != ")":
            raise PatternError("has a regular expression with a group that is not closed")
        self._at += 1
        self._depth -= 1
        self._ignores_case, self._dot_is_all = before
        return node

    def _one(self, character: str) -> Node:
        text, at = self._text, self._at
        if character in "*+?{^$":
            what = "an anchor, which a whole text does not need" if character in "^$" else "there is nothing to repeat"
            raise PatternError(f"has a regular expression with a {character}: {what}")
        if character == ".":
            self._at += 1
            return Chars("[^]" if self._dot_is_all else r"[^\n]")
        if character not in "[\\":
            self._at += 1
            return Chars.of(character, self._ignores_case)
        self._at = _class_end(text, at) if character == "[" else _escape_end(text, at)
        found = text[at : self._at]
        return Chars(found if character == "[" else f"[{found}]", self._ignores_case)


def _escape_end(text: str, at: int) -> int:
    """Index after the escape that starts at `at`."""
    found = HEX.match(text, at) or PROPERTY.match(text, at)
    if found is not None:
        return found.end()
    letter = text[at + 1 : at + 2]
    if not letter or (letter.isalnum() and letter not in ESCAPED and letter.lower() not in CLASSES):
        raise PatternError(f"has an escape in a regular expression that is not supported: {text[at : at + 8]}")
    return at + 2


def _class_end(text: str, at: int) -> int:
    """Index after the class that starts at `at`."""
    end = at + 1 + text.startswith("^", at + 1)
    end += text.startswith("]", end)
    while end < len(text) and text[end] != "]":
        if text[end] == "[" or text.startswith(("&&", "--", "~~"), end):
            raise PatternError("has a character class inside a character class, which is not supported")
        end = _escape_end(text, end) if text[end] == "\\" else end + 1
    if end >= len(text):
        raise PatternError("has a character class that is not closed")
    return end + 1


@lru_cache(maxsize=512)
def _specials_in(text: str) -> tuple[frozenset[str], bool]:
    """(members of the class in SPECIAL, True if the class has no other members)."""
    if text == "[^]":
        return SPECIAL, False
    at, end = 1, len(text) - 1
    negated = text.startswith("^", at)
    at += negated
    found: set[str] = set()
    others = False
    low: str | None = None  # the character before, with which a range may start
    while at < end:
        is_range = text[at] == "-" and low is not None and at + 1 < end
        high, members, at = _member(text, at + is_range)
        if is_range and high is None:
            raise PatternError("has a character class with a range that does not end in a character")
        if is_range and low is not None and high is not None:
            found |= {c for c in SPECIAL if low <= c <= high}
            others = True
            low = None
        else:
            found |= members
            others = others or high is None or high not in SPECIAL
            low = high
    return (SPECIAL - found, False) if negated else (frozenset(found), not others)


def _member(text: str, at: int) -> tuple[str | None, frozenset[str], int]:
    """(the character at `at`, or None for a set of characters; its members in SPECIAL; the index after it)."""
    if text[at] != "\\":
        return text[at], SPECIAL & {text[at]}, at + 1
    end = _escape_end(text, at)
    if (code := HEX.match(text, at)) is not None:
        number = int(code[1] or code[2] or code[3] or code[4], 16)
        if number > 0x10FFFF:
            raise PatternError("has an escape of a character that does not exist")
        return chr(number), SPECIAL & {chr(number)}, end
    letter = text[at + 1]
    if letter in "pP":
        return None, frozenset() if letter == "p" else SPECIAL, end
    if letter.lower() in CLASSES:
        members = CLASSES[letter.lower()]
        return None, members if letter.islower() else SPECIAL - members, end
    character = ESCAPED.get(letter, letter)
    return character, SPECIAL & {character}, end


def _both(text: str, other: str) -> str:
    """The intersection of both classes."""
    if text.startswith("(?i:"):
        return f"(?i:[{text[4:-1]}&&{other}])"
    return f"[{text}&&{other}]"
