"""The cost of forced JSON does not grow with the vocabulary where a few tokens decide."""

import numpy as np
import pytest

from engine.grammars.compiler import as_words
from engine.worker.sampling import json_numbers
from engine.worker.sampling.grammar_ends import FILLER, allowed_tokens, first_of, longest_first, shapes_of
from engine.worker.sampling.json_numbers import JsonNumbers, Number

DIGITS = [str(value).zfill(length).encode() for length in (1, 2, 3, 4) for value in range(0, 10**length, 7)]
MIXED = [b".5", b"1.", b"e5", b"2e30", b"-7", b"e+3", b"0.0e-1", b"12e", b"1,", b'3"', b"999e999"]
TEXTS = [b"", b"a", b'"', b"}", *DIGITS, *MIXED, b"0" * 41]
STATES = [
    Number(num_before=1),
    Number(num_before=38),
    Number("frac", 1, 39),
    Number("frac", 20, 40),
    Number("exp", 1),
    Number("exp", 3, 0, 1, 3),
    Number("exp", 3, 0, 2, 30),
    Number("exp", 3, 0, 2, 30, negative=True),
]


def is_sane(number, text):
    """The definition: byte by byte until the number has ended."""
    for byte in text:
        number = number.then(byte)
        if number is None:
            return True
        if not number.is_sane:
            return False
    return True


@pytest.mark.parametrize("texts", [TEXTS, [text for text in TEXTS if text not in MIXED]], ids=["mixed", "plain"])
def test_number_limits_ban_what_byte_after_byte_makes_too_large(texts):
    num_words = -(-len(texts) // 32)
    numbers, banned = JsonNumbers(texts, num_words), 0
    for state in STATES:
        words = as_words((i for i, text in enumerate(texts) if text[:1].isdigit() or text[:1] in b"-+.e}"), num_words)
        before = words.copy()
        numbers.limit(state, words)
        for i, text in enumerate(texts):
            leading = json_numbers.NUMERIC.match(text)
            allowed = bool(before[i // 32] >> (i % 32) & 1) and (leading is None or is_sane(state, leading[0]))
            assert bool(words[i // 32] >> (i % 32) & 1) == allowed, (state, text)
            banned += before[i // 32] >> (i % 32) & 1 and not allowed
    assert banned > 1000


def test_a_number_looks_at_one_token_of_each_length(monkeypatch):
    """A vocabulary with thousands of digit tokens delayed a step by 0.16 s for each new state of a number."""
    looked, stays_sane = [], json_numbers.stays_sane
    monkeypatch.setattr(
        json_numbers, "stays_sane", lambda number, text: looked.append(text) or stays_sane(number, text)
    )
    num_words = -(-len(DIGITS) // 32)
    JsonNumbers(DIGITS, num_words).limit(Number("frac", 1, 38), as_words(range(len(DIGITS)), num_words))
    assert len(looked) == 4 and len(DIGITS) > 1500


@pytest.mark.parametrize("count", [0, 1, 5, 900, 5000])
def test_the_tokens_of_a_mask_are_found_whether_it_allows_few_or_many(count):
    expected = np.sort(np.random.default_rng(count).permutation(5000)[:count])
    words = as_words(expected, -(-5000 // 32))
    assert allowed_tokens(words, 5000).tolist() == expected.tolist()


def test_the_longest_allowed_token_comes_first():
    texts = [b"ab", b"abcd", b"x1", b"", b"abc", b"wxyz", *[b"q" * (5 + i % 3) for i in range(200)]]
    order = longest_first(texts, FILLER)
    assert [len(texts[i]) for i in order] == sorted((len(text) for text in texts if text.isalpha()), reverse=True)
    assert order.tolist()[-4:] == [1, 5, 4, 0], "equal lengths stay in the order of ids"
    for allowed, first in (([0, 4], 4), ([0, 1, 5], 1), ([0, 100, 200], 200), ([2, 3], None)):
        found = first_of(as_words(allowed, -(-len(texts) // 32)), order)
        assert found == ([] if first is None else [first])


@pytest.mark.parametrize(
    ("text", "anywhere", "outside", "inside"),
    [
        ("fox", "a", "a", "a"),
        (" fox", " a", "a", "a"),
        ("1.50", "0.00", "0.00", "a"),
        (" (x) = {y}", " a a {a}", "a{a}", "a"),
        ("d’été", "a", "a", "a"),
        ("\n\t", "\n\t", " ", "\n\t"),
        ('"', '"', '"', '"'),
        ('}", {"', '}", {"', '}"a"', 'a",{"'),
        ('"}, 12', '"}, 00', '"a', '"},00'),
        ('\\n\\"x\\', '\\a\\"a\\', '\\a\\"a\\', "a\\"),
        ("\\u00", "\\a00", "\\a00", "\\u00"),
    ],
)
def test_the_shapes_of_a_token(text, anywhere, outside, inside):
    assert shapes_of(7, text.encode()) == (anywhere, outside, inside)


def test_special_tokens_and_parts_of_characters_have_shapes_of_their_own():
    assert len({shapes_of(i, b"") for i in range(3)}) == 3
    first, second, third, behind = (shapes_of(0, text) for text in (b"\xc3", b"\xe2\x82", b"\xe2", b"x\xc3"))
    assert first == second == shapes_of(1, b"\xf0\x9f\x98"), "a byte is missing"
    assert len({first, third, behind}) == 3
