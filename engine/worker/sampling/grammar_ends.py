"""GrammarEnds: leads forced JSON to a valid end before its tokens run out.

Within some distance of the token limit, a row keeps the shortest completion of its text that a search finds: close the
string, add the values that the schema still requires, as small as possible, close open brackets, end. A token stays
allowed while a completion behind it fits, so a text that ends by itself in time is not changed. Copies of the matcher
try where tokens lead, two tokens of each shape (`"` and `",` lead to different states, the letters of words do not);
the result is kept while the text stays inside the same string. If the shortest text that the schema allows does not
fit, the mask stays as it is and the text is cut.

The search is greedy. It knows how JSON closes and reads masks for the rest. In a string with a pattern or format it
closes the string where a quote may close it, and else tries characters that lead on. It does not come to a character
that a pattern asks for behind nearly free text (`x$`). For a grammar that is not JSON it finds no completion and
changes no mask.
"""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.grammars.compiler import Compiler, GrammarError, Words, fill_mask
from engine.grammars.json_openings import largest_opening
from engine.structured_output import StructuredOutput
from engine.worker.batch.step_buffer import IntArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Tokens that one token may add to the shortest completion: another list entry, an optional object. Every token is
# checked within this distance of the shortest completion, or within less where the schema shows how much it can be.
MAX_JUMP = 64
UNSEEN_JUMP = 4  # on top of what the schema shows: an unfinished character or escape, white space, a bracket
WINDOW = 192  # tokens left when the search for a completion starts; more for schemas that require more
SHORT_WINDOW = 48  # the same if the empty text has no completion: too long, or hidden by a pattern
MAX_COMPLETION = 1024  # tokens of the longest completion searched for
# Masks that searches may compute, 5 to 50 us each. Counted, not timed: the same text always gets the same mask.
MAX_MASKS_IN_STATE, MAX_MASKS = 256, 1 << 14
UNTRIED = 16  # tokens that an untried token is assumed to add, once no masks are left
MAX_STEP = 3  # tokens of a completion that a single token may replace
# Limits of processor time, before one mask and once per grammar. Only patterns made to be slow come near them.
MAX_SECONDS, MAX_FIRST_SECONDS = 0.06, 0.5
TOO_SLOW = "to look for an end takes too long"
PATIENCE = 32  # tokens until the next search after one that found no completion
MAX_TRIES = 64  # tokens tried one by one in one state; the others count as the worst of their shape
FEW = 10  # a shape with at most so many tokens is tried token by token, such as that of digits
NEVER = 1 << 30
PLAIN = re.compile(r"[^\s\d\"\\\[\]{}:,.+-]+")
DIGIT = re.compile(r"\d")

# Outside of a string, in this order: tokens that close brackets, separate, or write a value.
CLOSERS = re.compile(rb"[\]}]+")
COMMAS = (b',"', b",")
COLONS = (b':""', b":0", b":[]", b":{}", b": 0", b':"', b":")
WORDS = ("null", "true", "false")
VALUES = (*(str(digit).encode() for digit in range(10)), b'""', b"[]", b"{}", *(word.encode() for word in WORDS))
OPENERS = (b"[", b"{", b"-", b".")
QUOTE_CLOSERS = re.compile(rb'"[\]}]+')
QUOTED = re.compile(rb'"[^"\\]+')
FILLER = re.compile(rb"[a-z]+")
IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])+')
BETWEEN_STRINGS = re.compile(r'[^"]+')
SPACES = re.compile(r"\s+")
OUTSIDE = frozenset('{}[],:"-+. 0123456789eEtrufalsn')  # characters of JSON outside of strings
# Characters tried inside a string that has a pattern or format, by kind. The first of equals is taken: digits, since
# after the `e` of a number a sign would only be longer.
KINDS = ("0123456789", "@.:/-_+,;!#$%&'()*<=>?[]^`{|}~ ", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
SPACE = b" \t\r\n"


@dataclass(slots=True)
class Ending:
    """The search state of one sequence. path: a completion of its text; behind: length of the completion behind a
    token."""

    window: int  # limit masks once at most so many tokens are left
    jump: int  # tokens that one token may add to the shortest completion
    ends: list[list[int]]  # token sequences that end a free text
    has_lines: bool = False  # a line break is allowed wherever white space is, but not inside strings
    path: list[int] | None = None
    behind: dict[int, int] = field(default_factory=dict)
    judged: tuple[bytes, IntArray, IntArray] | None = None  # a mask, its tokens, the completion length behind each
    num_masks: int = 0  # masks that searches computed
    until: float = 0.0  # deadline in processor time of the thread

    def fresh(self) -> "Ending":
        """A new state for another sequence of the same grammar."""
        return Ending(self.window, self.jump, self.ends, self.has_lines)


class _Characters:
    """The characters that a search takes inside strings with a pattern. One that was not possible before comes first:
    the pattern goes on there. Then come those of a kind that was taken less often, which leads out of repetitions."""

    def __init__(self, known: Sequence[tuple[int, str, int]], has_lines: bool) -> None:
        """known: (token, character, kind). has_lines: see Ending."""
        self._token_ids = np.array([token_id for token_id, _, _ in known], np.int64)
        self._kinds = [kind for _, _, kind in known]
        self._inside = np.array([has_lines or character not in OUTSIDE for _, character, _ in known], np.bool_)
        self._before: npt.NDArray[np.bool_] = np.ones(len(known), np.bool_)
        self._taken, self._taken_kinds = Counter[int](), Counter[int]()

    def next(self, words: Words) -> list[int]:
        """The next character; empty unless the mask allows characters of several kinds, some only inside strings."""
        allowed = _are_allowed(words, self._token_ids)
        before, self._before = self._before, allowed
        places = np.flatnonzero(allowed).tolist()
        if len({self._kinds[place] for place in places}) < 2 or not (allowed & self._inside).any():
            return []
        place = min(places, key=lambda i: (before[i], self._taken_kinds[self._kinds[i]], self._taken[i]))
        self._taken[place] += 1
        self._taken_kinds[self._kinds[place]] += 1
        return [int(self._token_ids[place])]


class GrammarEnds:
    """The search for one vocabulary; shared by all rows."""

    def __init__(self, compiler: Compiler, texts: Sequence[bytes]) -> None:
        self._compiler = compiler
        self._end = compiler.end_token_ids[0]
        self._ids = {text: i for i, text in reversed(list(enumerate(texts))) if text}
        lengths = np.array([0 if text[:1] in SPACE else len(text) for text in texts], np.int32)
        self._lengths = np.where([not text for text in texts], 1, lengths)  # 1: special tokens
        self._fillers, self._quoted = (longest_first(texts, pattern) for pattern in (FILLER, QUOTED))
        self._closers = self._known(sorted(filter(CLOSERS.fullmatch, self._ids), key=len, reverse=True))
        self._quote_closers = self._known(sorted(filter(QUOTE_CLOSERS.fullmatch, self._ids), key=len, reverse=True))
        self._quote, self._newline, self._brace, self._bracket = (
            self._ids.get(text, -1) for text in (b'"', b"\n", b"}", b"]")
        )
        kinds = [(c, kind) for kind, characters in enumerate(KINDS) for c in characters]
        self._characters = [(self._ids[c.encode()], c, kind) for c, kind in kinds if c.encode() in self._ids]
        self._commas, self._colons = self._known(COMMAS), self._known(COLONS)
        self._behind_strings = self._known((b"}", b"]", b",", b":"))
        self._behind_numbers = self._known((b"}", b"]", b",", b"\n"))
        self._digits = self._known(str(digit).encode() for digit in range(10))
        self._values, self._openers = self._known(VALUES), self._known(OPENERS)
        # An alternative of `null` may be an object that holds itself.
        self._spelled = [compiler.tokens_of(word) for word in WORDS if word.encode() not in self._ids]
        shapes = [shapes_of(i, text) for i, text in enumerate(texts)]
        self._shapes, self._shapes_outside, self._shapes_in_text = (
            _numbered(shape[place] for shape in shapes) for place in range(3)
        )
        self._works = min(self._quote, self._newline, self._brace, self._bracket) >= 0

    def begin(self, matcher: "LLMatcher", output: StructuredOutput) -> Ending:
        """The Ending of a grammar, from a matcher at its start. Each sequence gets a copy (`fresh`)."""
        if not self._works:
            return Ending(0, 0, [])
        until = time.thread_time() + MAX_FIRST_SECONDS
        jump = int(min(MAX_JUMP, self._largest_opening(output) + UNSEEN_JUMP))
        ends = [self._compiler.tokens_of(text) for text in output.ends]
        ending = Ending(WINDOW, jump, ends, output.kind != "grammar", until=until)
        try:
            found = self._search(matcher.deep_copy(), MAX_COMPLETION, ending)
        except GrammarError:
            return Ending(0, 0, [])
        window = SHORT_WINDOW if found is None else max(WINDOW, len(found) + 2 * MAX_JUMP)
        return Ending(window, jump, ending.ends, ending.has_lines)

    def _largest_opening(self, output: StructuredOutput) -> float:
        if output.kind == "grammar":
            return math.inf
        schema = json.loads(output.text) if output.kind == "json_schema" else {"type": "object"}
        return largest_opening(schema, lambda text: len(self._compiler.tokens_of(text)))

    def limit(self, ending: Ending, matcher: "LLMatcher", words: Words, num_left: int) -> None:
        """Remove from a mask the tokens that lead to no end within `num_left` tokens, the masked token included."""
        if num_left > ending.window or matcher.is_stopped():
            return
        ending.until = time.thread_time() + MAX_SECONDS
        try:
            self._limit(ending, matcher, words, num_left)
        except GrammarError:  # a copy of the matcher hit a limit; the text itself may not
            ending.window = 0

    def _limit(self, ending: Ending, matcher: "LLMatcher", words: Words, num_left: int) -> None:
        if not self._follow(ending, matcher, num_left) or ending.path is None:
            return
        spare = num_left - len(ending.path)
        if spare > ending.jump or not ending.path:
            return
        if ending.num_masks > MAX_MASKS:  # a costly grammar: force the completion once no token is left to spare
            if spare == 0:
                words[:] = 0
                words[ending.path[0] >> 5] = np.array(1 << (ending.path[0] & 31), np.uint32).view(np.int32)
            return
        mask = words.tobytes()
        if ending.judged is None or ending.judged[0] != mask:
            ending.judged = mask, *self._judge(ending, matcher, words, num_left)
        _, allowed, behind = ending.judged
        banned = allowed[behind > num_left - 1]
        if 0 < len(banned) < len(allowed):
            np.bitwise_and.at(words, banned >> 5, ~(np.uint32(1) << (banned & 31).astype(np.uint32)).view(np.int32))

    def _follow(self, ending: Ending, matcher: "LLMatcher", num_left: int) -> bool:
        """Update the completion to the present text. False if none is found that fits."""
        path = ending.path
        if path is not None:
            if rest := _rest(matcher, path):
                if len(rest) < len(path):
                    ending.path, ending.behind, ending.judged = rest, {}, None
                return len(rest) <= num_left
        ending.behind, ending.judged = {}, None
        ending.path = self._search(matcher.deep_copy(), min(num_left, MAX_COMPLETION), ending, path or ())
        if ending.path is None and not self._in_free_text(matcher):
            ending.window = min(num_left // 2, num_left - PATIENCE)  # the end does not fit, or a pattern hides it
        return ending.path is not None

    def _in_free_text(self, matcher: "LLMatcher") -> bool:
        words: Words = np.zeros(self._compiler.num_words, np.int32)
        fill_mask(matcher, words)
        return self._is_text(words) and _allows(words, self._newline)

    def _judge(self, ending: Ending, matcher: "LLMatcher", words: Words, num_left: int) -> tuple[IntArray, IntArray]:
        """(allowed tokens, length of the shortest completion behind each); NEVER if that exceeds the limit.

        If two tokens of a shape have equal lengths, all tokens of the shape count as equal; a small shape is tried
        token by token.
        """
        assert ending.path
        allowed = self._allowed(words)
        straight = num_left == len(ending.path) and len(allowed) > MAX_TRIES  # inside a string, with no token to spare
        until = ending.num_masks + (0 if straight else MAX_MASKS_IN_STATE)
        shapes = self._shapes_in(words)[allowed]
        order = np.argsort(shapes, kind="stable")
        allowed, shapes = allowed[order], shapes[order]
        edges = [0, *(np.flatnonzero(np.diff(shapes)) + 1).tolist(), len(allowed)]
        behind = np.empty(len(allowed), np.int64)
        tries = MAX_TRIES
        for start, end in pairwise(edges):
            first, last = (self._behind(ending, matcher, allowed[i], num_left, until) for i in (start, end - 1))
            behind[start:end] = max(first, last)
            if first != last or end - start <= FEW:
                for i in range(start + 1, min(end - 1, start + 1 + tries)):
                    behind[i] = self._behind(ending, matcher, allowed[i], num_left, until)
                    tries -= 1
        behind[allowed == ending.path[0]] = len(ending.path) - 1
        return allowed, behind

    def _behind(self, ending: Ending, matcher: "LLMatcher", token: np.int64, num_left: int, until: int) -> int:
        """Length of the shortest completion behind one token; an estimate after `until` masks."""
        token_id = int(token)
        if (known := ending.behind.get(token_id)) is not None:
            return known
        if (found := self._near(ending, matcher, token_id)) is None:
            path = ending.path or []
            if ending.num_masks >= until:
                return len(path) + UNTRIED
            trial = matcher.deep_copy()
            trial.consume_token(token_id)
            rest = self._search(trial, num_left - 1, ending, path)
            found = NEVER if rest is None else len(rest)
        ending.behind[token_id] = found
        return found

    def _near(self, ending: Ending, matcher: "LLMatcher", token_id: int) -> int | None:
        """Length of a completion behind one token that reuses the known completion's end; None if the matcher refuses
        it."""
        if token_id in self._compiler.end_token_ids:
            return 0
        path = ending.path or []
        if rest := _rest(matcher, path, [token_id]):
            return len(rest)
        for end in ending.ends:  # the completion may already contain a part of `end`
            for first in range(min(len(end), len(path)) + 1):
                rest = [*end, *path[first:]]
                if matcher.validate_tokens([token_id, *rest]) == 1 + len(rest):
                    return len(rest)
        return None

    def _search(self, matcher: "LLMatcher", limit: int, ending: Ending, known: Sequence[int] = ()) -> list[int] | None:
        """At most `limit` tokens that complete a text; None if not found. The last one is an end-of-sequence token,
        except in a free text, which may end anywhere.

        Moves the matcher. `known`: a completion of a similar text, tried as the rest.
        """
        path: list[int] = []
        words: Words = np.zeros(self._compiler.num_words, np.int32)
        characters = _Characters(self._characters, ending.has_lines)
        while True:
            if matcher.is_stopped():
                path.append(self._end)
                return path if len(path) <= limit else None
            fill_mask(matcher, words)
            ending.num_masks += 1
            if time.thread_time() > ending.until:
                raise GrammarError(TOO_SLOW)
            if _allows(words, self._end):
                if not self._is_text(words):
                    path.append(self._end)
                return path if len(path) <= limit else None
            if len(path) >= limit:
                return None
            if rest := _rest(matcher, known):
                path += rest
                return path if len(path) <= limit else None
            if _allows(words, self._newline) or self._is_text(words):
                tokens = self._next(matcher, words, ending.ends)
            else:  # maybe inside a string with a pattern
                tokens = self._closing(matcher, words, ending) or self._next(matcher, words, ending.ends, characters)
            if path and tokens == path[-1:] and path[-1] in self._digits:  # zeros alone may lead to no end
                tokens = self._last_digit(matcher, words, ending) or tokens
            if not tokens or not matcher.consume_tokens(tokens):
                return None
            path += tokens

    def _closing(self, matcher: "LLMatcher", words: Words, ending: Ending) -> list[int]:
        """The quote, if it closes a string in this state; empty if it opens one or is not allowed."""
        if not _allows(words, self._quote):
            return []
        trial, behind = matcher.deep_copy(), np.zeros_like(words)
        trial.consume_token(self._quote)
        if trial.is_stopped():
            return [self._quote]
        fill_mask(trial, behind)
        ending.num_masks += 1
        closes = _allows(behind, self._end) or bool(_first(behind, self._behind_strings))
        return [self._quote] if closes and not self._is_text(behind) and not _allows(behind, self._quote) else []

    def _last_digit(self, matcher: "LLMatcher", words: Words, ending: Ending) -> list[int]:
        """A digit that can be the last of its number; empty if none can.

        A number above an exclusiveMinimum may not end in a zero, and zeros make no number a multiple of 3.
        """
        behind = np.zeros_like(words)
        for digit in self._digits:
            if not _allows(words, digit):
                continue
            trial = matcher.deep_copy()
            trial.consume_token(digit)
            if trial.is_stopped():
                return [digit]
            fill_mask(trial, behind)
            ending.num_masks += 1
            if _allows(behind, self._end) or _first(behind, self._behind_numbers):
                return [digit]
        return []

    def _next(
        self,
        matcher: "LLMatcher",
        words: Words,
        ends: Sequence[list[int]],
        characters: _Characters | None = None,
    ) -> list[int]:
        """The next tokens on the way to an end; empty if the search knows none."""
        if ends and len(self._allowed(words)) > 2:  # fewer allowed tokens are forced text
            if end := next((end for end in ends if matcher.validate_tokens(end) == len(end)), []):
                return end
        if self._is_text(words):
            if _allows(words, self._newline):
                return []
            return _first(words, self._quote_closers) or _first(words, [self._quote]) or first_of(words, self._fillers)
        if characters is not None and (found := characters.next(words)):
            return found
        for known in (self._closers, self._commas, self._colons, self._values):
            if found := _first(words, known):
                return found
        if spelled := next((word for word in self._spelled if matcher.validate_tokens(word) == len(word)), []):
            return spelled
        if _allows(words, self._quote):
            quoted = self._quoted[_are_allowed(words, self._quoted)]
            return [int(quoted[0])] if 0 < len(quoted) <= FEW else [self._quote]
        forced: list[int] = matcher.compute_ff_tokens()  # the forced text in its usual tokens
        return forced or _first(words, self._openers) or self._longest(words)

    def _longest(self, words: Words) -> list[int]:
        """The longest allowed token; empty if none is allowed."""
        allowed = self._allowed(words)
        return [int(allowed[self._lengths[allowed].argmax()])] if len(allowed) else []

    def _allowed(self, words: Words) -> IntArray:
        return allowed_tokens(words, len(self._shapes))

    def _is_text(self, words: Words) -> bool:
        """True inside a string or a free text: only there both `}` and `]` are allowed."""
        return _allows(words, self._brace) and _allows(words, self._bracket)

    def _shapes_in(self, words: Words) -> IntArray:
        """The shape of each token where a mask holds. A string has no line breaks, and other places allow them."""
        if self._is_text(words):
            return self._shapes_in_text
        return self._shapes_outside if _allows(words, self._newline) else self._shapes

    def _known(self, texts: Iterable[bytes]) -> list[int]:
        return [self._ids[text] for text in texts if text in self._ids]


def _rest(matcher: "LLMatcher", path: Sequence[int], before: Sequence[int] = ()) -> list[int]:
    """The rest of a completion that the matcher accepts behind the tokens `before`; empty if it accepts none."""
    for first in range(min(MAX_STEP, len(path) - 1), -1, -1):
        rest = [*before, *path[first:]]
        if path and matcher.validate_tokens(rest) == len(rest):
            return list(path[first:])
    return []


def _allows(words: Words, token_id: int) -> bool:
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


def _first(words: Words, token_ids: Sequence[int]) -> list[int]:
    """The first of `token_ids` that a mask allows, as a list; empty if none is allowed."""
    return next(([token_id] for token_id in token_ids if _allows(words, token_id)), [])


def allowed_tokens(words: Words, vocab_size: int) -> IntArray:
    """The tokens of a mask, ascending, int64. Most masks of a search allow few: it looks at words before it looks at
    bits."""
    present = np.flatnonzero(words)
    if len(present) > len(words) // 8:
        bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")
        return np.flatnonzero(bits.view(np.bool_))
    bits = np.unpackbits(words[present].view(np.uint8), bitorder="little")
    at = np.flatnonzero(bits.view(np.bool_))
    token_ids: IntArray = present[at >> 5] * 32 + (at & 31)
    return token_ids


def _are_allowed(words: Words, token_ids: IntArray) -> npt.NDArray[np.bool_]:
    bits: npt.NDArray[np.bool_] = (words[token_ids >> 5] >> (token_ids & 31) & 1) != 0
    return bits


def first_of(words: Words, token_ids: IntArray) -> list[int]:
    """`_first` for many tokens, of which one of the first is mostly allowed."""
    for some in (token_ids[:MAX_TRIES], token_ids[MAX_TRIES:]):
        allowed = _are_allowed(words, some)
        if allowed.any():
            return [int(some[allowed.argmax()])]
    return []


def longest_first(texts: Sequence[bytes], pattern: re.Pattern[bytes]) -> IntArray:
    """The tokens whose whole text matches, int64."""
    lengths = np.array([len(text) if pattern.fullmatch(text) else 0 for text in texts], np.int32)
    return np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]


def _numbered(shapes: Iterable[bytes | str]) -> IntArray:
    """Equal numbers for equal shapes."""
    known: dict[bytes | str, int] = {}
    return np.array([known.setdefault(shape, len(known)) for shape in shapes])


def shapes_of(token_id: int, text: bytes) -> tuple[bytes | str, bytes | str, bytes | str]:
    """The shape of a token anywhere, outside of strings, and inside of one: letters and digits are merged, JSON's own
    characters stay. Tokens of one shape mostly lead a JSON text to the same state.

    The second and the third merge all text of a string, and leave out white space between strings.
    """
    if not text:
        shape = b"\xff%d" % token_id
        return shape, shape, shape
    try:
        said = text.decode()
    except UnicodeDecodeError as error:  # part of a character: the shape counts its missing bytes
        lead = text[error.start]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        shape = b"\xfe%d:%d" % (error.start > 0, size - (len(text) - error.start))
        return shape, shape, shape
    if (word := said.removeprefix(" ")).isalpha():  # most of a vocabulary
        return "a" if word == said else " a", "a", "a"
    return _merged(said), _in_turns(said, False), _in_turns(said, True)


def _in_turns(text: str, inside: bool) -> str:
    """The shape of a text that begins inside or outside of a string."""
    parts, at = [], 0
    while at < len(text):
        if found := (IN_STRING if inside else BETWEEN_STRINGS).match(text, at):
            parts.append("a" if inside else _merged(SPACES.sub("", found[0])))
            at = found.end()
        elif text[at] == '"':
            parts.append('"')
            inside, at = not inside, at + 1
        else:  # an unfinished escape, or what no string may hold
            parts.append(text[at:])
            break
    return "".join(parts) or " "


def _merged(text: str) -> str:
    return DIGIT.sub("0", PLAIN.sub("a", text))
