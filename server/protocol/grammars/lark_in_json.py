"""Rewrites the Lark grammar of a text into a grammar of the JSON string that holds the text.

Models write the arguments of a call as JSON, so the input of a custom tool is a JSON string, where a line break is a
backslash and an n. Every character has exactly one spelling in the string. Characters that are spelled with a backslash
(`SPECIAL`) become separate terminals: the lexer of llguidance is greedy and never backtracks, so a terminal that may
continue with such a character would consume the start of a terminal that must follow. Terminals without special
characters stay unchanged; terminals with them become rules. In a grammar with %ignore the ignored text would be allowed
between the parts of such a rule, so there every terminal remains one terminal, and some texts that the grammar allows
cannot be written. Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md, with regular expressions
of Rust's regex crate.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from server.protocol.grammars.regex_nodes import (
    Alternatives,
    Chars,
    Node,
    Pattern,
    PatternError,
    Repeat,
    Series,
    parse_regex,
)

MAX_DEFINITION = 1 << 15  # characters of a grammar
MAX_TOKENS = 2000  # names, strings and operators of a grammar
MAX_RESULT = 1 << 17  # characters of the rewritten grammar
MAX_SINGLE = 64  # repetitions written as a rule; the parser of llguidance gives up at many thousand
MAX_NAMES = 64  # depth of terminals used in terminals, which are written out
CHARACTER = r'"(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^"\\\n])"'
TOKEN = re.compile(
    rf"""(?P<space>\s+|//[^\n]*|\#[^\n]*)
      | (?P<range>{CHARACTER}\s*\.\.\s*{CHARACTER})
      | (?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
      | (?P<import>%import\b[^\n]*)
      | (?P<ignore>%ignore\b)
      | (?P<directive>%[a-zA-Z]+)
      | (?P<token><[^<>\s]*>|@[a-zA-Z_]\w*)
      | (?P<repeat>[*+?]|\{{\d*,?\d*\}}|~\s*\d+(?:\s*\.\.\s*\d+)?)
      | (?P<alias>->\s*[a-zA-Z_]\w*)
      | (?P<name>[!?]?_?[a-zA-Z][\w-]*)
      | (?P<mark>[():|\[\]])
      | (?P<other>.)""",
    re.VERBOSE,
)
IMPORT = re.compile(r"%import\s+common\s*\.\s*(\w+)\s*(?:->\s*(\w+)\s*)?|%import\s+common\s*\(([\w\s,]+)\)\s*")
# The terminals of Lark's library `common`, as regular expressions.
FRACTION = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
FLOAT = rf"(?:[0-9]+[eE][+\-]?[0-9]+|{FRACTION}(?:[eE][+\-]?[0-9]+)?)"
NUMBER = rf"(?:{FLOAT}|[0-9]+)"
COMMON = {
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "CR": r"\r",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/",
    "DECIMAL": FRACTION,
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": FLOAT,
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": NUMBER,
    "SH_COMMENT": r"#[^\n]*",
    "SIGNED_FLOAT": rf"[+\-]?{FLOAT}",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "SIGNED_NUMBER": rf"[+\-]?{NUMBER}",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


class LarkError(ValueError):
    """The grammar uses syntax that cannot be rewritten. The message follows the name of its field."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str


@lru_cache(maxsize=64)
def lark_of_json_string(definition: str) -> str:
    """Returns a grammar of the string's characters and its closing quote, without the opening quote. Raises LarkError.

    Its start rule is `start`. Text that the grammar ignores is allowed before the closing quote, too.
    """
    if len(definition) > MAX_DEFINITION:
        raise LarkError(f"may be at most {MAX_DEFINITION} characters")
    found = [Token(f"{match.lastgroup}", match[0]) for match in TOKEN.finditer(definition)]
    tokens = [token for token in found if token.kind != "space"]
    if len(tokens) > MAX_TOKENS:
        raise LarkError(f"may have at most {MAX_TOKENS} names, strings, regular expressions and operators")
    _check(tokens)
    try:
        result = _Grammar(tokens).written()
    except (PatternError, RecursionError) as error:
        raise LarkError(str(error) or "is nested too deeply") from None
    if len(result) > MAX_RESULT:
        raise LarkError(f"has more than {MAX_RESULT} characters when it is written out for a JSON string")
    return result


def _check(tokens: Sequence[Token]) -> None:
    for i, token in enumerate(tokens):
        if token.kind == "directive":
            raise LarkError(f"may not use {token.text}: only rules and terminals can describe the input of a tool")
        if token.kind == "token":
            raise LarkError(f"may not use {token.text[:64]}: the input of a tool is text")
        if token.text == "]" and i + 1 < len(tokens) and tokens[i + 1].text == ":":
            raise LarkError("may not set options of a rule")
        if token.kind == "other" and token.text not in "&~.,":
            raise LarkError(f"has a {token.text} in the wrong place")


class _Grammar:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._statements = _statements(tokens)
        self._terminals: dict[str, Sequence[Token]] = {}
        self._imported: dict[str, Node] = {}
        self._nodes: dict[str, Node] = {}
        self._busy: list[str] = []
        for head, body in self._statements:
            if head.kind == "import":
                self._imported |= _imports(head.text)
            elif head.kind == "name" and _is_terminal(head.text):
                self._terminals[head.text] = body
        names = {token.text.lstrip("!?") for token in tokens if token.kind == "name"}
        if "start" not in names:
            raise LarkError("must have a rule named start")
        self._start = _unused("text", names)
        self._prefix = _unused("terminal", names)
        self._rule = _rule
        if any(head.kind == "ignore" for head, _ in self._statements):
            self._rule = lambda node: f"/{node.regex}/"

    def written(self) -> str:
        lines = [f'start: {self._start} "\\""']
        for head, body in self._statements:
            if head.kind == "import":
                lines += [self._definition(name) for name in _imports(head.text)]
            elif head.kind == "ignore":
                lines += [f"%ignore /{text}/" for text in _ignored(_Expression(body, self._named).all())]
            elif _is_terminal(head.text):
                lines.append(self._definition(head.text, body))
            else:
                lines.append(f"{self._renamed(head.text)}: {' '.join(map(self._in_rule, body))}")
        return "\n".join(lines) + "\n"

    def _definition(self, name: str, body: Sequence[Token] = ()) -> str:
        if any(token.text in ("&", "~") for token in body):
            if not all(self._is_plain(token) for token in body):
                raise LarkError(f"uses & or ~ on texts with line breaks, quotes or backslashes: {name[:64]}")
            return f"{name}: {' '.join(token.text for token in body)}"
        node = self._named(name)
        return f"{self._renamed(name)}: {self._rule(node)}" if node.specials else f"{name}: /{node.regex}/"

    def _is_plain(self, token: Token) -> bool:
        if token.kind in ("string", "regex", "range"):
            return not _atom(token).specials
        return token.kind != "name" or not self._named(token.text).specials

    def _in_rule(self, token: Token) -> str:
        if token.kind in ("string", "regex", "range"):
            node = _atom(token)
            return self._rule(node) if node.specials else token.text
        if token.kind == "name":
            return self._renamed(token.text)
        if token.text in ("&", "~"):
            raise LarkError(f"uses {token.text} in a rule: only terminals may use it")
        return token.text

    def _renamed(self, name: str) -> str:
        mark, name = (name[0], name[1:]) if name[0] in "!?" else ("", name)
        if name == "start":
            return mark + self._start
        if _is_terminal(name) and name in {**self._terminals, **self._imported}:
            body = self._terminals.get(name, ())
            if not any(token.text in ("&", "~") for token in body) and self._named(name).specials:
                return f"{self._prefix}_{name.lower()}_{sum(c == '_' for c in name)}"
        return mark + name

    def _named(self, name: str) -> Node:
        """The node of the terminal `name`."""
        if name in self._imported:
            return self._imported[name]
        if name not in self._nodes:
            if name in self._busy or len(self._busy) == MAX_NAMES:
                raise LarkError(f"has a terminal that refers to itself, or to too many others: {name[:64]}")
            if name not in self._terminals:
                raise LarkError(f"uses {name[:64]}, which it does not define")
            body = self._terminals[name]
            if any(token.text in ("&", "~") for token in body):
                text = " ".join(token.text for token in body if self._is_plain(token))
                return Pattern(text)
            self._busy.append(name)
            self._nodes[name] = _Expression(body, self._named).all()
            self._busy.pop()
        return self._nodes[name]


def _statements(tokens: Sequence[Token]) -> list[tuple[Token, Sequence[Token]]]:
    """(name or directive, tokens of the body) of each statement."""
    starts = [
        i
        for i, token in enumerate(tokens)
        if token.kind in ("import", "ignore")
        or (token.kind == "name" and i + 1 < len(tokens) and tokens[i + 1].text == ":")
    ]
    if tokens and (not starts or starts[0] != 0):
        raise LarkError('must begin with a rule, such as start: "a"')
    ends = [*starts[1:], len(tokens)]
    return [
        (tokens[i], tokens[i + 2 : end] if tokens[i].kind == "name" else tokens[i + 1 : end])
        for i, end in zip(starts, ends, strict=True)
    ]


def _is_terminal(name: str) -> bool:
    return name.lstrip("_").isupper()


def _unused(name: str, names: set[str]) -> str:
    while any(other.startswith(name) for other in names):
        name += "_"
    return name


def _imports(text: str) -> dict[str, Node]:
    found = IMPORT.fullmatch(text)
    names = [] if found is None else [name.strip() for name in (found[1] or found[3]).split(",")]
    if found is None or any(name not in COMMON for name in names):
        raise LarkError(f"may import only these terminals of common: {', '.join(COMMON)}")
    return {found[2] or name: parse_regex(COMMON[name]) for name in names}


def _atom(token: Token) -> Node:
    if token.kind == "regex":
        body, _, flags = token.text[1:].rpartition("/")
        if set(flags) - set("is"):
            raise LarkError(f"has a regular expression with the flags {flags}: only i and s are supported")
        return parse_regex(body, "i" in flags, "s" in flags)
    if token.kind == "range":
        low, high = (_value(part) for part in re.findall(r'"(?:\\.|[^"\\])[^"]*"', token.text))
        return Chars(f"[\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}]")
    ignores_case = token.text.endswith("i")
    return Series([Chars.of(character, ignores_case) for character in _value(token.text.removesuffix("i"))])


def _value(text: str) -> str:
    try:
        return str(json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", text)))
    except ValueError:
        raise LarkError(f"has a string that cannot be read: {text[:64]}") from None


class _Expression:
    """Parser of the right-hand side of a terminal."""

    def __init__(self, tokens: Sequence[Token], named: Callable[[str], Node]) -> None:
        self._tokens, self._named, self._at = tokens, named, 0

    def all(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._tokens):
            raise LarkError(f"has a terminal with a {self._tokens[self._at].text[:64]} in the wrong place")
        return node

    def _text(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _alternatives(self) -> Node:
        series = [self._series()]
        while self._text() == "|":
            self._at += 1
            series.append(self._series())
        return series[0] if len(series) == 1 else Alternatives(series)

    def _series(self) -> Node:
        nodes: list[Node] = []
        while self._text() not in ("", "|", ")", "]"):
            token = self._tokens[self._at]
            self._at += 1
            if token.kind == "alias":
                continue
            node = self._group(token.text) if token.text in ("(", "[") else self._one(token)
            while self._at < len(self._tokens) and self._tokens[self._at].kind == "repeat":
                node = _repeated(node, self._tokens[self._at].text)
                self._at += 1
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else Series(nodes)

    def _group(self, opening: str) -> Node:
        node = self._alternatives()
        if self._text() != {"(": ")", "[": "]"}[opening]:
            raise LarkError("has a bracket that is not closed")
        self._at += 1
        return node if opening == "(" else Repeat(node, 0, 1)

    def _one(self, token: Token) -> Node:
        if token.kind == "name":
            return self._named(token.text)
        if token.kind in ("string", "regex", "range"):
            return _atom(token)
        raise LarkError(f"has a terminal with a {token.text[:64]} in the wrong place")


def _repeated(node: Node, text: str) -> Node:
    if text in ("*", "+", "?"):
        return Repeat(node, int(text == "+"), 1 if text == "?" else None)
    low, comma, high = re.fullmatch(r"[{~]\s*(\d*)\s*(,|\.\.|)\s*(\d*)\}?", text).groups()  # type: ignore[union-attr]
    return Repeat(node, int(low or 0), (int(high) if high else None) if comma else int(low or 0))


# Nodes with special characters become rules; other nodes stay terminals.


def _rule(node: Node) -> str:
    if not node.specials:
        return f"/{node.regex}/" if node.regex else '""'
    if isinstance(node, Chars):
        return f"({' | '.join(f'/{part}/' for part in node.parts)})"
    if isinstance(node, Alternatives):
        return f"({' | '.join(map(_rule, node.nodes))})"
    if isinstance(node, Repeat):
        return _rule_of_repeat(node)
    assert isinstance(node, Series)
    if any(isinstance(part, Repeat) and part.specials and (part.high or 0) > MAX_SINGLE for part in node.flat):
        return f"/{node.regex}/"
    return f"({' '.join(_rules_of_series(node.flat))})"


def _rules_of_series(nodes: Sequence[Node]) -> list[str]:
    """Rules for nodes in a row. Neighbours without special characters form one terminal.

    If an unlimited repetition precedes them, its last plain characters join that terminal: `.*;` ends with a terminal
    of the characters of `.*` that need no backslash, followed by `;`.
    """
    rules: list[str] = []
    at = 0
    while at < len(nodes):
        end = at + 1
        while end < len(nodes) and not nodes[end].specials:
            end += 1
        behind = "".join(node.grouped for node in nodes[at + 1 : end])
        node = nodes[at]
        if not node.specials:
            rules.append(f"/{node.grouped}{behind}/")
        elif behind and isinstance(node, Repeat) and node.high is None:
            body, plain = _unlimited(node.node)
            last = f"/(?:{plain})*{behind}/" if plain else f"/{behind}/"
            if node.low == 0:
                rules += [f"{body}*", last]
            elif node.low == 1 and plain:
                rules.append(f"(/(?:{plain})+{behind}/ | {body}+ {last})")
            else:
                rules += [_rule(Repeat(node.node, node.low - 1, node.low - 1))] * (node.low > 1) + [f"{body}+", last]
        else:
            rules += [_rule(node)] + [f"/{behind}/"] * bool(behind)
        at = end
    return rules


def _rule_of_repeat(node: Repeat) -> str:
    """A rule that a further operator may follow."""
    body, _ = _unlimited(node.node)
    if node.high is None and node.low <= 1:
        return f"({body}{'+' if node.low else '*'})"
    if node.high is None:
        return f"({_rule(Repeat(node.node, node.low - 1, node.low - 1))} {body}+)"
    if node.high > MAX_SINGLE:
        return f"/{node.regex}/"
    return f"({_rule(node.node)}{{{node.low},{node.high}}})" if node.high else '""'


def _unlimited(node: Node) -> tuple[str, str]:
    """(rule of the repeated node, with as few terminals as possible; regular expression of its plain characters)."""
    nodes = node.nodes if isinstance(node, Alternatives) else [node]
    plain: list[str] = []
    others: list[str] = []
    for part in nodes:
        if isinstance(part, Chars) and part.specials:
            plain += part.parts[:-1]
            others.append(f"/{part.parts[-1]}/")
        elif part.specials:
            others.append(_rule(part))
        else:
            plain.append(part.regex)
    together = "|".join(plain)
    return f"({' | '.join([f'/(?:{together})+/'] * bool(plain) + others)})", together


def _ignored(node: Node) -> list[str]:
    """Regular expressions of the ignored texts, each as short as possible, because ignored texts may repeat."""
    if not node.specials:
        return [node.regex]
    inner = node.node if isinstance(node, Repeat) and node.high is None and node.low <= 1 else node
    nodes = inner.nodes if isinstance(inner, Alternatives) else [inner]
    return [
        text for part in nodes for text in (part.parts if isinstance(part, Chars) and part.specials else [part.regex])
    ]
