"""The start and the end of thinking in tokens: as in the text, for any split into tokens."""

import random

import pytest

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.thinking import BEGIN, END, ThinkingScan, check_budget, find_tags
from tests.checkpoints import byte_tokenizer

PIECES = [b"<", b"</", b"</th", b"think", b"k", b">", b">\n", b"<think>", b" <th", b"ink>a", b"</think>.", b" ", b"\n"]
PIECES += [b"a"]
VOCABULARY = dict(enumerate([*PIECES, *(bytes([byte]) for byte in b"/thinM")]))
SILENT = len(VOCABULARY)  # a special token, which adds nothing to a text
TAGS = find_tags(VOCABULARY, [SILENT], None)
TEXT = {**{token_id: text.decode() for token_id, text in VOCABULARY.items()}, SILENT: ""}


def read_text(token_ids, opened):
    """(inside, over, thinking tokens) by the text alone."""
    text = "".join(TEXT[token_id] for token_id in token_ids)
    start = 0
    if not opened:
        begun = text.lstrip(" \t\r\n")
        start = len(text) - len(begun) + len(BEGIN)
        if not begun.startswith(BEGIN):
            return False, not BEGIN.startswith(begun), 0
    at, thought, seen = text.find(END, start), 0, ""
    for token_id in token_ids:
        is_thought = len(seen) >= start and (at < 0 or len(seen) < at or (len(seen) == at and not TEXT[token_id]))
        thought, seen = thought + is_thought, seen + TEXT[token_id]
    return at < 0, at >= 0, thought


@pytest.mark.parametrize("opened", [True, False])
def test_tokens_say_what_the_text_says(opened):
    random.seed(1)
    seen = set()
    for _ in range(4000):
        token_ids = [random.choice([*VOCABULARY, SILENT]) for _ in range(random.randrange(9))]
        if random.random() < 0.6:  # most random texts hold no tag
            spelled = random.choice([[2, 3, 5], [1, 3, 6], [0, 14, 3, 5], [2, 9], [10]])
            token_ids[random.randrange(9) : 0] = spelled
        if not opened and random.random() < 0.7:
            token_ids[:0] = random.choice([[7], [11, 7], [8, 9], [12, SILENT, 7]])
        scan = ThinkingScan(TAGS, opened)
        scan.feed(token_ids)
        assert (scan.inside, scan.over, scan.num_tokens) == read_text(token_ids, opened), [TEXT[i] for i in token_ids]
        seen.add((scan.inside, scan.over, scan.num_tokens > 0))
    assert len(seen) >= 4


@pytest.mark.parametrize("opened", [True, False])
def test_the_tag_is_completed_from_wherever_it_is(opened):
    for begun in ([], [0], [1], [2], [13, 1], [2, 14], [1, 3], [13], [SILENT]):
        token_ids = [*([] if opened else [7]), 13, *begun]
        scan = ThinkingScan(TAGS, opened)
        scan.feed(token_ids)
        while not scan.over:
            token_ids.append(scan.next_closing_token())
            scan.feed(token_ids[-1:])
        text = "".join(TEXT[token_id] for token_id in token_ids)
        assert text.count(END) == 1 and text.endswith(END) and scan.num_tokens <= 1 + len(begun)


def test_a_token_that_is_the_whole_tag_closes_the_thinking():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([BEGIN, END])
    end = tokenizer.token_to_id(END)
    tags = find_tags({byte: bytes([byte]) for byte in range(256)} | {end: END.encode()}, [], end)
    scan = ThinkingScan(tags, True)
    scan.feed(b"Hm </thi")
    assert scan.next_closing_token() == end and scan.num_tokens == 8
    scan.feed([end, 65])
    assert scan.over and scan.num_tokens == 8


def test_a_vocabulary_without_the_letters_has_no_tags():
    assert find_tags({0: b"<", 1: b"/", 2: b"a"}, [], None) is None


def test_the_bundled_tokenizer_spells_it_in_pieces():
    tokenizer = Tokenizer(BUNDLED_MODEL, "{{ '</think>' }}")
    tags = tokenizer.thinking_tags
    assert tags is not None and tags.closing[0] == tokenizer.encode(END, add_special_tokens=False)
    assert len(tags.closing[0]) > 1 and Tokenizer(BUNDLED_MODEL).thinking_tags is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": (1, 3)}, "allowed_token_ids"),
        ({"bad_words": ((3,),)}, "bad_words"),
        ({"bad_words": ((13, 3), (2, 3))}, "bad_words"),
    ],
)
def test_bans_of_the_closing_tag_are_refused(fields, param):
    tags = find_tags({0: b"</", 2: b"think", 3: b">", 1: b"a"}, [], None)
    assert tags.closing[0] == [0, 2, 3]
    check_budget(SamplingParams(**fields), tags)
    check_budget(SamplingParams(thinking_token_budget=1, allowed_token_ids=(0, 1, 2, 3), bad_words=((1, 0),)), tags)
    with pytest.raises(InvalidRequestError) as caught:
        check_budget(SamplingParams(thinking_token_budget=1, **fields), tags)
    assert caught.value.param == param


def test_a_model_that_marks_no_thinking_has_no_budget():
    with pytest.raises(InvalidRequestError, match="thinking_token_budget: this model does not think"):
        check_budget(SamplingParams(thinking_token_budget=1), None)
    with pytest.raises(InvalidRequestError, match="thinking_token_budget must be an integer from 0"):
        SamplingParams(thinking_token_budget=-1)
