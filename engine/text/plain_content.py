"""Texts of clients inside a chat template, kept from acting as control tokens.

A message that says "<|im_end|>" must not end its own turn. After rendering nobody can tell a special token that the
template wrote from one that came with a message, so what a client says is marked before: an unused character is put
inside every special token's text that it holds, and where it could become one together with its neighbours (at its
start, at its end, and in a short text that is a piece of one). The mark is never white space and never in the middle of
ordinary text, so templates that trim, search or split do with a marked text what they do with the plain one.

In the rendered text every special token without a mark is the template's own. It is replaced by an alias, a made-up
token that nobody can guess; the marks are taken out; and a twin of the tokenizer encodes the whole, to which aliases
are tokens and special tokens are ordinary text. As the text is encoded in one piece, normalisation, pre-tokenisation
and what a tokenizer does at the start of a text are those of the ordinary way.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tokenizers

# Keys whose values a template compares with words of its own ("user", "function"): never marked as pieces of a token.
WORD_KEYS = frozenset({"role", "type"})
OWN_KEYS = frozenset({"role", "content", "name", "type", "text"})  # not of a client's making
PART_CHARS = 1 << 15  # of a text that is searched at once: 0.6 ms
FEW = 4  # characters that hardly any text holds
MANY_PIECES = 256  # from here on looking up each length is faster than comparing with each piece
# Characters that stand for nothing: planes 15 and 16 are for private use.
PRIVATE_USE = (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)


class PlainContent:
    """Tells a template's special tokens from those that a client wrote. Thread-safe.

    Tokens of a single character cannot be marked; no tokenizer in use has a special one.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        special = [(token_id, token) for token_id, token in added if token.special]
        texts = [token.content for _, token in special if len(token.content) > 1]
        # Where the normaliser can make a special token of other text ("＜s＞"), only the twin knows it for plain text.
        self.always = any(token.normalized for _, token in special)
        self._starts = {text[:2] for text in texts}
        prefixes = {text[:i] for text in texts for i in range(1, len(text))}
        suffixes = {text[i:] for text in texts for i in range(1, len(text))}
        self._may_go_on = _one_of(prefixes, str.endswith, lambda text, n: text[-n:])
        self._may_have_begun = _one_of(suffixes, str.startswith, lambda text, n: text[:n])
        self._longest = max(map(len, texts), default=0)
        self._joined = "\ue002".join(texts)
        self._inside = re.compile(f"(?={_pattern(texts)})(.)", re.DOTALL)
        self._between = re.compile(f"[^{re.escape(''.join(set().union(*texts)))}]" if texts else "(?s:.)")
        self._all_added = re.compile(_pattern([token.content for _, token in added]))
        nonce = secrets.token_hex(16)
        self._aliases = {token.content: f"\ue000{nonce}:{token_id}\ue001" for token_id, token in special}
        self._twin = _twin(tokenizer, [(self._aliases[token.content], token) for _, token in special])
        self._id_of = {self._twin.token_to_id(self._aliases[token.content]): token_id for token_id, token in special}

    def mark(self, value: Any, mark: str) -> Any:
        """`value` (texts in lists and dicts) with marks where a text could act as a special token; else equal to it."""
        return self._mark(value, mark, whole_words=True)

    def encode(self, text: str, mark: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered text: special where no mark says that a client wrote it."""
        aliased = self._all_added.sub(lambda match: self._aliases.get(match[0], match[0]), text)
        whole = self._twin.encode_batch_fast([aliased.replace(mark, "")], add_special_tokens=add_special_tokens)
        return [self._id_of.get(token_id, token_id) for token_id in whole[0].ids]

    def _parts(self, text: str) -> Iterator[str]:
        """A long text in pieces, each of which ends with a character that is in no special token: a search holds the
        GIL from start to end."""
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
            text = "".join(self._inside.sub(rf"\1{mark}", part) for part in self._parts(text))
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
    few = [chr(code) for code in range(first, first + FEW)]  # to look for one is faster than to collect all there are
    yield from (character for character in few if not any(character in text for text in texts))
    used = set(few).union(*texts)
    for first, last in PRIVATE_USE:
        for code in range(first, last + 1):
            if chr(code) not in used:
                yield chr(code)


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
    """Whether a text starts (or ends) with one of the pieces."""
    if len(pieces) < MANY_PIECES:
        some = tuple(pieces)
        return lambda text: compare(text, some)
    lengths = sorted({len(piece) for piece in pieces})
    return lambda text: any(edge(text, n) in pieces for n in lengths)


def _pattern(texts: Iterable[str]) -> str:
    """A regular expression of any of the texts, the longest that matches, as a trie: a vocabulary may have a thousand
    of them that begin alike, and nobody shall make the search try each."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _trie_pattern(trie) if trie else "(?!)"


def _trie_pattern(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:  # not by recursion: texts may be long
        (character, node), *_ = node.items()
        prefix += re.escape(character)
    branches = "|".join(re.escape(character) + _trie_pattern(child) for character, child in node.items() if character)
    return prefix + (f"(?:{branches})" if branches else "") + ("?" if branches and "" in node else "")


def _twin(tokenizer: tokenizers.Tokenizer, aliases: list[tuple[str, tokenizers.AddedToken]]) -> tokenizers.Tokenizer:
    """The same tokenizer, to which special tokens are ordinary text, and aliases what special tokens were.

    It shares the model, so it costs neither memory nor time. Where added tokens get other ids that way, a copy is made.
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
