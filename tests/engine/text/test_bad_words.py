"""Bad words from texts to token sequences, and through the whole engine with the bundled model."""

import pytest

from engine import LLM, SamplingParams
from engine.checkpoint.locate import BUNDLED_MODEL
from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from engine.text.bad_words import resolve_bans
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BUNDLED_MODEL)


def test_a_word_is_spelled_at_the_start_after_a_space_and_inside_a_line(tokenizer):
    bans = resolve_bans(SamplingParams(bad_words=("dog", (5, 6))), tokenizer, [0])
    assert tuple(tokenizer.encode("dog", False)) in bans.bad_words
    assert tuple(tokenizer.encode(" dog", False)) in bans.bad_words
    assert (5, 6) in bans.bad_words


def test_parameters_without_bans_are_the_same_object(tokenizer):
    params = SamplingParams()
    assert resolve_bans(params, tokenizer, [0]) is params


def test_a_word_of_too_many_tokens_is_refused(tokenizer):
    with pytest.raises(InvalidRequestError, match="bad_words") as error:
        resolve_bans(SamplingParams(bad_words=("#@" * (MAX_BAD_WORD_TOKENS + 1),)), tokenizer, [0])
    assert error.value.param == "bad_words"


@pytest.mark.parametrize("words", [("",), (" ",), ((),), ("x" * 257,), ("a",) * (MAX_BAD_WORDS + 1), ((1,) * 33,)])
def test_invalid_bad_words_are_refused(words):
    with pytest.raises(InvalidRequestError, match="bad_words"):
        SamplingParams(bad_words=words)


def test_bans_that_could_leave_nothing_are_refused(tokenizer):
    for params in (
        SamplingParams(allowed_token_ids=[7, 8], bad_words=[[7], [3, 8]]),
        SamplingParams(allowed_token_ids=[0, 9], min_tokens=1, stop_token_ids=[9]),
    ):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
            resolve_bans(params, tokenizer, [0])
    with pytest.raises(InvalidRequestError, match="at least one"):
        SamplingParams(allowed_token_ids=[])


def test_end_to_end():
    prompt = "Once upon a time, there was a little"
    with LLM(dtype="float32", num_blocks=64) as llm:
        free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
        words = [word.strip(",.") for word in free.text.split()[:3]]
        banned = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, bad_words=words))[0].outputs[0]
        assert not set(words) & {word.strip(",.") for word in banned.text.split()}
        several = free.token_ids[2:5]
        other = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, bad_words=[several]))[0].outputs[0]
        assert other.token_ids[:4] == free.token_ids[:4], "the word may begin"
        assert other.token_ids[4] != free.token_ids[4], "but not end"
        allowed = sorted({*free.token_ids[::2], 0})
        held = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=allowed))[0]
        assert set(held.outputs[0].token_ids) <= set(allowed)
        sampled = SamplingParams(temperature=2, top_p=0.0, seed=1, max_tokens=24)
        assert llm.generate(prompt, sampled)[0].outputs[0].token_ids == free.token_ids, "top_p 0 is greedy"
