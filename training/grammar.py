"""A tiny template language: `[a|b]` picks one, `{name}` fills a value, `a_` becomes "a" or "an"."""

import random
import re
from collections.abc import Mapping

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_VALUE = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa])_ (?=(\w))")
_SENTENCE_START = re.compile(r'((?:^|[.!?] |[.]" |\n)"?)([a-z])')


def expand(template: str, rng: random.Random, values: Mapping[str, str] | None = None) -> str:
    """Resolve choices (innermost first), values and articles. An unknown value is a KeyError: templates are checked."""
    text = template
    while True:
        text, count = _CHOICE.subn(lambda match: rng.choice(match[1].split("|")), text)
        if values:
            text = _VALUE.sub(lambda match: _lookup(match[1], values), text)
        if not count and not (values and _VALUE.search(text)):
            break
    return _ARTICLE.sub(_article, text)


def _lookup(name: str, values: Mapping[str, str]) -> str:
    """`{Name}` is the capitalised form of the value called `name`."""
    if name in values:
        return values[name]
    return capitalize(values[name[0].lower() + name[1:]])


def _article(match: re.Match[str]) -> str:
    vowel = match[2] in "aeiouAEIOU8"
    return match[1] + ("n " if vowel else " ")


def capitalize(text: str) -> str:
    """Upper-case the first letter, leave the rest alone."""
    return text[:1].upper() + text[1:]


def sentences(text: str) -> str:
    """Capitalise sentences. After `?"` and `!"` the text may go on ("Why?" asked Tom), so nothing changes there."""
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)
