"""PlainContent: keeps client-written text inside a chat template from acting as control tokens.

A message that contains "<|im_end|>" must not end its own turn. In a rendered text, a special token of the template
looks the same as one from a message, so client text is marked before rendering. The mark is a character that occurs in
no text of the request. It is inserted inside every special token's text, and at the edges of a text that could form a
special token together with its neighbours (at its start, at its end, or as a whole if the text is a piece of one). The
mark is never white space and never inside ordinary text, so a template that trims, searches or splits treats a marked
text like the plain one.

In the rendered text every special token without a mark comes from the template. Each of these is replaced by an alias,
an added token with an unguessable text; the marks are removed; and a twin of the tokenizer encodes the result. To the
twin, aliases are tokens and special tokens are ordinary text. The text is encoded in one piece, so normalisation,
pre-tokenisation and the handling of the start of a text stay as usual.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tokenizers

# A template compares the values of these keys with its own words ("user"): such values are never marked as pieces.
WORD_KEYS = frozenset({"role", "type"})
OWN_KEYS = frozenset({"role", "content", "name", "type", "text"})  # keys of the API, not chosen by a client
PART_CHARS = 1 << 15  # characters of a text that one search reads: 0.6 ms
FEW = 4  # candidates that are tried before the whole text is scanned for unused characters
MANY_PIECES = 256  # from this number on, a set lookup per length is faster than a comparison with each piece
# Planes 15 and 16 of Unicode are for private use: their characters have no assigned meaning.
PRIVATE_USE = (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)


class PlainContent:
    """Tells special tokens of the template from special tokens in client text. Thread-safe.

    A special token of one character cannot be marked; no tokenizer in use has one.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        special = [(token_id, token) for token_id, token in added if token.special]
        texts = [token.content for _, token in special if len(token.content) > 1]
        # If the normaliser can turn other text ("＜s＞") into a special token, only the twin keeps it plain text.
        self.always = any(token.normalized for _, token in special)
        self._starts = {text[:2] for text in texts}
        prefixes = {text[:i] for text in texts for i in range(1, len(text))}
        suffixes = {text[i:] for text in texts for i in range(1, len(text))}
        self._may_go_on = _one_of(prefixes, str.endswith, lambda text, n: text[-n:])
        self._may_have_begun = _one_of(suffixes, str.startswith, lambda text, n: text[:n])
        self._longest = max(map(len, texts), default=0)
        self._joined = "\ue002".join(texts)
        self._first = re.compile(_first_pattern(texts))
        self._between = re.compile(f"[^{re.escape(''.join(set().union(*texts)))}]" if texts else "(?s:.)")
        self._all_added = re.compile(_pattern([token.content for _, token in added]))
        nonce = secrets.token_hex(16)
        self._aliases = {token.content: f"\ue000{nonce}:{token_id}\ue001" for token_id, token in special}
        self._twin = _twin(tokenizer, [(self._aliases[token.content], token) for _, token in special])
        self._id_of = {self._twin.token_to_id(self._aliases[token.content]): token_id for token_id, token in special}

    def mark(self, value: Any, mark: str) -> Any:
        """A copy of `value` (texts in lists and dicts) with a mark wherever a text could act as a special token."""
        return self._mark(value, mark, whole_words=True)

    def encode(self, text: str, mark: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered text. Only special tokens without a mark become special token ids."""
        aliased = self._all_added.sub(lambda match: self._aliases.get(match[0], match[0]), text)
        whole = self._twin.encode_batch_fast([aliased.replace(mark, "")], add_special_tokens=add_special_tokens)
        return [self._id_of.get(token_id, token_id) for token_id in whole[0].ids]

    def _parts(self, text: str) -> Iterator[str]:
        """Split a long text into pieces that end with a character of no special token. Short pieces matter because a
        regular expression search holds the GIL until it returns."""
        start = 0
        while start < len(text):
            found = self._between.search(text, start + PART_CHARS) if len(text) - start > PART_CHARS else None
            end = len(text) if found is None else found.end()
            yield text[start:end]
            start = end

    def _mark(self, value: Any, mark: str, whole_words: bool) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, mark, whole_words)
        if isinstance(value, (list, tuple)):
            return [self._mark(entry, mark, whole_words) for entry in value]
        if isinstance(value, dict):
            return {
                self._mark_key(key, mark): self._mark(entry, mark, whole_words and key not in WORD_KEYS)
                for key, entry in value.items()
            }
        return value

    def _mark_key(self, key: str, mark: str) -> str:
        return key if key in OWN_KEYS else self._mark_text(key, mark, whole_words=False)

    def _mark_text(self, text: str, mark: str, whole_words: bool) -> str:
        if any(start in text for start in self._starts):
            text = "".join(self._first.sub(rf"\g<0>{mark}", part) for part in self._parts(text))
        bare = text.strip()
        if not bare:
            return text
        is_piece = whole_words and len(bare) < self._longest and bare in self._joined
        start = len(text) - len(text.lstrip())
        before = mark if is_piece or self._may_have_begun(bare) else ""
        after = mark if is_piece or self._may_go_on(bare) else ""
        return f"{text[:start]}{before}{bare}{after}{text[start + len(bare) :]}"


def unused_characters(value: Any, *more: str) -> Iterator[str]:
    """Characters that occur in none of the texts in `value` (lists and dicts of them) nor in `more`."""
    texts = [*texts_in(value), *more]
    first = PRIVATE_USE[0][0]
    few = [chr(code) for code in range(first, first + FEW)]  # `in` is faster than collecting all characters in a set
    yield from (character for character in few if not any(character in text for text in texts))
    used = set(few).union(*texts)
    for first, last in PRIVATE_USE:
        for code in range(first, last + 1):
            if chr(code) not in used:
                yield chr(code)


def unescaped(text: str, mark: str, value: Any) -> str:
    """The rendered `text` with the mark in place of its escapes, which templates write that show texts as Python does
    or as JSON in ASCII. If a text in `value`, from which `text` was rendered, holds such an escape itself, it stays."""
    for escape in (repr(mark)[1:-1], json.dumps(mark)[1:-1]):
        if escape in text and not any(escape in own for own in texts_in(value)):
            text = text.replace(escape, mark)
    return text


def texts_in(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from texts_in(entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from texts_in(key)
            yield from texts_in(entry)


def _one_of(
    pieces: set[str], compare: Callable[[str, tuple[str, ...]], bool], edge: Callable[[str, int], str]
) -> Callable[[str], bool]:
    """A function that is True for a text that starts (or ends) with one of the pieces."""
    if len(pieces) < MANY_PIECES:
        some = tuple(pieces)
        return lambda text: compare(text, some)
    lengths = sorted({len(piece) for piece in pieces})
    return lambda text: any(edge(text, n) in pieces for n in lengths)


def _pattern(texts: Iterable[str]) -> str:
    """A regular expression that matches any of the texts, the longest first, built as a trie: a vocabulary may hold a
    thousand texts with the same beginning, and the search must not try each one."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _trie_pattern(trie) if trie else "(?!)"


def _first_pattern(texts: Iterable[str]) -> str:
    """A regular expression that matches the first character of any of the texts. It begins with characters, not with a
    lookahead, so that the search passes over all others fast."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    return "|".join(f"{re.escape(first)}(?={_pattern(rest)})" for first, rest in rests.items()) or "(?!)"


def _trie_pattern(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:  # a loop in place of recursion: texts may be long
        (character, node), *_ = node.items()
        prefix += re.escape(character)
    branches = "|".join(re.escape(character) + _trie_pattern(child) for character, child in node.items() if character)
    return prefix + (f"(?:{branches})" if branches else "") + ("?" if branches and "" in node else "")


def _twin(tokenizer: tokenizers.Tokenizer, aliases: list[tuple[str, tokenizers.AddedToken]]) -> tokenizers.Tokenizer:
    """A second tokenizer that reads special tokens as ordinary text and aliases as special tokens.

    The twin shares the model, so it costs neither memory nor time. If added tokens would get other ids in the twin, it
    is a full copy instead.
    """
    twin = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(twin, part, value)
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    twin.add_tokens([token for _, token in added])
    if any(twin.token_to_id(token.content) != token_id for token_id, token in added):
        twin = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    twin.encode_special_tokens = True
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    twin.add_tokens(
        [tokenizers.AddedToken(alias, **{flag: getattr(token, flag) for flag in flags}) for alias, token in aliases]
    )
    return twin
