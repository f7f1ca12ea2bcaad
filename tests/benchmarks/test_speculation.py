"""The texts that benchmarks/speculation.py calls repeating."""

from types import SimpleNamespace

import pytest

from benchmarks.speculation import repeated_share, repeating_starts
from engine.llm import LLM


def test_the_share_counts_tokens_that_followed_the_same_three_before():
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == 1 / 5
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5]) == 1 / 9, "the last follower counts"
    assert repeated_share(list(range(50))) == repeated_share([1, 2]) == 0.0


def test_the_bundled_model_repeats_itself_from_some_words_on():
    with LLM(device="cpu", dtype="bfloat16", num_blocks=4096) as engine:
        assert repeating_starts(engine)


def test_a_model_that_never_repeats_itself_is_an_error_that_says_what_to_do():
    answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(256))])
    engine = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [1, 2, 3]),
                             generate=lambda prompts, params, use_tqdm: [answer] * len(prompts))  # fmt: skip
    with pytest.raises(ValueError, match="use --only ordinary"):
        repeating_starts(engine)
