"""Reasoning is separated from the answer, however the text is split into pieces."""

import hypothesis
import pytest
from hypothesis import strategies as st

from engine.thinking import find_tags
from server.tools.reasoning import ReasoningSplitter

END_TOKEN = 7
TAGS = find_tags({1: b"H", 2: b"m", 3: b"m", 6: b" ", END_TOKEN: b"</think>"}, [], END_TOKEN)
# (text, whether the prompt has opened the thinking, what was thought, what was said)
CASES = [
    ("<think>\nHm.\n</think>\n\nYes.\n", False, "Hm.", "Yes.\n"),
    ("\n<think>a < b\n\nc</think>x", False, "a < b\n\nc", "x"),
    ("Hm.</think>Yes. </think>", True, "Hm.", "Yes. </think>"),
    ("Yes, <think> is a tag.</think>", False, "", "Yes, <think> is a tag.</think>"),
    ("<thin", False, "", "<thin"),
    ("  Yes.", False, "", "  Yes."),
    ("<think>Hm, </thin", False, "Hm, </thin", ""),
    ("\n\n</think>\n\nYes", True, "", "Yes"),
    ("", True, "", ""),
]


def split(pieces, inside):
    splitter = ReasoningSplitter(inside, TAGS)
    parts = [pair for piece in pieces for pair in splitter.feed(piece)] + [splitter.finish()]
    return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)


@pytest.mark.parametrize("text, inside, thought, said", CASES)
def test_every_split_gives_the_same(text, inside, thought, said):
    assert split([text], inside) == (thought, said)
    assert split(list(text), inside) == (thought, said)
    for i in range(len(text)):
        assert split([text[:i], text[i:]], inside) == (thought, said)


PIECES = st.sampled_from(["<think>", "</think>", "<", "/think>", "th", " ", "\n", "a"])


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.lists(PIECES, max_size=10), st.booleans())
def test_any_chunking_gives_the_same(pieces, inside):
    assert split(pieces, inside) == split(["".join(pieces)], inside)


def test_tokens_between_the_tags_are_counted():
    splitter = ReasoningSplitter(True, TAGS)
    for token_ids, text in (((1, 2), "Hm"), ((3, END_TOKEN, 4), "m</think>Yes"), ((5,), ".")):
        splitter.count(token_ids)
        splitter.feed(text)
    assert splitter.num_tokens == 3


def test_what_was_not_thinking_does_not_count():
    splitter = ReasoningSplitter(False, TAGS)
    for token_ids, text in (((6,), " "), ((2,), "Yes"), ((3,), ".")):
        splitter.count(token_ids)
        splitter.feed(text)
    splitter.finish()
    assert splitter.num_tokens == 0
