"""Text arrives in whole characters, never past a stop string, and adds up to the full decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer, StopStringMatcher
from engine.text.tokenizer import Tokenizer
from tests.checkpoints import save_fake_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = Tokenizer(save_fake_checkpoint(tmp_path_factory.mktemp("model")))
    yield tokenizer
    tokenizer.close()


def detokenize(tokenizer, token_ids, **params):
    """(pieces of text, match): what a stream would send, flush included."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    pieces = []
    for token_id in token_ids:
        text, match = detokenizer.append(token_id)
        pieces.append(text)
        if match:
            return pieces, match
    pieces.append(detokenizer.flush())
    return pieces, None


@given(st.lists(st.integers(0, 258), max_size=60))
def test_pieces_add_up_to_decoding_everything_at_once(tokenizer, token_ids):
    pieces, _ = detokenize(tokenizer, token_ids)
    raw = b"".join(tokenizer.token_bytes(i) for i in token_ids if i < 256)
    assert "".join(pieces) == raw.decode("utf-8", errors="replace")


@given(st.text(max_size=40))
def test_a_character_is_never_split(tokenizer, text):
    pieces, _ = detokenize(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_broken_tail_is_flushed_once(tokenizer):
    pieces, _ = detokenize(tokenizer, "a€".encode()[:-1])
    assert pieces == ["a", "", "", "\ufffd"]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer):
    assert "".join(detokenize(tokenizer, [97, 258, 98])[0]) == "ab"
    assert "".join(detokenize(tokenizer, [97, 258, 98], skip_special_tokens=False)[0]) == "a<|pad|>b"


def test_stop_string_across_tokens_is_cut_and_nothing_leaks(tokenizer):
    pieces, match = detokenize(tokenizer, b"one STOP two", stop="STOP")
    assert ("".join(pieces), match) == ("one ", "STOP")
    pieces, match = detokenize(tokenizer, b"one STOP two", stop="STOP", include_stop_str_in_output=True)
    assert "".join(pieces) == "one STOP"


def test_false_alarm_is_released(tokenizer):
    pieces, match = detokenize(tokenizer, b"STO STO", stop=["STOP"])
    assert ("".join(pieces), match) == ("STO STO", None)
    assert "".join(pieces[:4]) == "STO ", "released as soon as it cannot become a stop string"


def test_stop_string_does_not_count_before_min_tokens(tokenizer):
    pieces, match = detokenize(tokenizer, b"ab ab ab", stop="ab", min_tokens=4)
    assert ("".join(pieces), match) == ("ab ab ", "ab") or "".join(pieces) == "ab a"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_matcher_equals_a_reader_of_single_characters(text, stops, data):
    """However the text is cut into pieces, the outcome is that of feeding one character at a time."""
    expected, expected_match = text, None
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            expected, expected_match = text[: end - len(longest)], longest
            break
    matcher, sent, rest = StopStringMatcher(tuple(stops), include_stop=False), "", text
    match = None
    while rest and not match:
        cut = data.draw(st.integers(1, len(rest)))
        piece, match = matcher.feed(rest[:cut])
        sent, rest = sent + piece, rest[cut:]
    assert match == expected_match
    assert sent + ("" if match else matcher.flush()) == expected
