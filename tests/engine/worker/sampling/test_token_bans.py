"""Bad words and allowed tokens, step by step against a plain reading of the rule."""

import numpy as np
import pytest
import torch

from engine.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from engine.worker.sampling.sampler import TokenCounts, sample
from engine.worker.sampling.sampling_rows import SamplingRows
from engine.worker.sampling.token_bans import RecentTokens

VOCAB, EOS = 40, [3]
CPU = torch.device("cpu")


class Rows:
    """Sequences that are sampled greedily from the same logits in every step; the prompt is one token."""

    def __init__(self, params, generated=None, one_draw=False):
        self.said = [list(tokens) for tokens in generated or [[]] * len(params)]
        self.rows = SamplingRows(len(params), VOCAB, EOS, one_draw=one_draw)
        self.counts = TokenCounts(len(params), VOCAB, CPU)
        for row, one in enumerate(params):
            self.rows.set(row, one, row, 1)
            if self.rows.needs_history(row):
                said = torch.tensor(self.said[row], dtype=torch.int64)
                self.counts.reset(row, torch.tensor([1]), said)

    def step(self, logits, rows=None):
        rows = np.arange(len(self.said)) if rows is None else np.array(rows)
        positions = np.array([1 + len(self.said[row]) for row in rows])
        inputs = self.rows.build(rows, positions, torch.from_numpy)
        output = sample(torch.as_tensor(logits, dtype=torch.float32)[rows].clone(), inputs, self.counts)
        for row, token in zip(rows.tolist(), output.token_ids.tolist(), strict=True):
            self.said[row].append(token)
        return output


def greedy(**more):
    return SamplingParams(temperature=0.0, **more)


def reference(params, logits, num_steps, said=()):
    said = list(said)
    for _ in range(num_steps):
        x = np.array(logits, np.float64)
        for word in params.bad_words:
            if len(word) == 1 or tuple(said[len(said) - len(word) + 1 :]) == word[:-1]:
                x[word[-1]] = -np.inf
        if params.allowed_token_ids is not None:
            x[[i for i in range(VOCAB) if i not in params.allowed_token_ids]] = -np.inf
        if len(said) < params.min_tokens:
            x[EOS] = -np.inf
        said.append(int(x.argmax()))
    return said


@pytest.mark.parametrize("one_draw", [False, True])
def test_rows_with_and_without_bans_beside_each_other(one_draw):
    rng = np.random.default_rng(0)
    # Few likely tokens, so that words of several tokens come up all the time.
    logits = rng.normal(size=(12, VOCAB)) + 20 * (np.arange(VOCAB) < 4)
    params = [greedy()]
    for i in range(1, 12):
        words = tuple(tuple(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(i % 6))
        words = tuple(word for word in words if len(set(word)) > 1 or len(word) > 1)
        allowed = tuple(rng.choice(VOCAB, 25, replace=False).tolist()) if i % 3 == 0 else None
        params.append(greedy(bad_words=words, allowed_token_ids=allowed, min_tokens=i % 2 * 5))
    rows = Rows(params, one_draw=one_draw)
    for _ in range(30):
        rows.step(logits)
    for row, one in enumerate(params):
        assert rows.said[row] == reference(one, logits[row], 30), one


def test_a_word_is_looked_for_in_what_was_generated_not_in_the_prompt():
    logits = np.zeros((1, VOCAB))
    logits[0, 7] = 5
    rows = Rows([greedy(bad_words=((1, 7),))])  # the prompt is token 1
    rows.step(logits)
    assert rows.said == [[7]]


def test_preemption_forgets_nothing():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, VOCAB)) + 20 * (np.arange(VOCAB) < 3)
    params = greedy(bad_words=((0, 1), (1, 2, 0), (2, 2), (0, 0), (1, 1)))
    whole = Rows([params])
    for _ in range(20):
        whole.step(logits)
    for cut in (1, 2, 7, 19):
        back = Rows([params], [whole.said[0][:cut]])
        for _ in range(20 - cut):
            back.step(logits)
        assert back.said == whole.said


def test_a_row_taken_over_forgets_the_bans_before():
    logits = np.zeros((1, VOCAB))
    logits[0, 7] = 5
    rows = Rows([greedy(bad_words=((7,),), allowed_token_ids=(1, 2))])
    assert rows.step(logits).token_ids.tolist() == [1]
    rows.rows.set(0, greedy(), 0, 1)
    assert rows.step(logits).token_ids.tolist() == [7]
    assert rows.rows.build(np.array([0]), np.array([1]), torch.from_numpy) is None, "free when unused"


def test_draws_keep_to_the_allowed_tokens():
    allowed = (5, 9, 11)
    rows = Rows([SamplingParams(allowed_token_ids=allowed, bad_words=((9,),), seed=1)])
    for _ in range(50):
        rows.step(np.zeros((1, VOCAB)))
    assert set(rows.said[0]) == {5, 11}


def test_logprobs_stay_those_of_the_model():
    logits = np.zeros((1, VOCAB))
    rows = Rows([greedy(allowed_token_ids=(5,), logprobs=1)])
    output = rows.step(logits)
    assert output.token_ids.tolist() == [5]
    assert output.logprobs[0, 0].item() == pytest.approx(-np.log(VOCAB), abs=1e-5)


def test_bans_that_leave_nothing_fail_the_row_alone():
    rows = Rows([greedy(allowed_token_ids=(5,), bad_words=((5,),)), greedy()])
    assert rows.step(np.zeros((2, VOCAB))).failed.tolist() == [True, False]


@pytest.mark.parametrize("params", [greedy(bad_words=((VOCAB,),)), greedy(allowed_token_ids=(VOCAB,))])
def test_ids_outside_the_vocabulary_are_refused(params):
    with pytest.raises(ValueError, match="bad_words and allowed_token_ids"):
        SamplingRows(1, VOCAB, EOS).set(0, params, 0, 1)


def test_a_text_that_nobody_turned_into_tokens_is_refused():
    with pytest.raises(ValueError, match="token ids"):
        SamplingRows(1, VOCAB, EOS).set(0, greedy(bad_words=("text",)), 0, 1)


def test_the_longest_word_is_remembered_whole():
    word = tuple([1] * (MAX_BAD_WORD_TOKENS - 1) + [2])
    logits = np.zeros((1, VOCAB))
    logits[0, [2, 4]] = 5, 4
    long_enough = Rows([greedy(bad_words=(word,))], [[1] * (MAX_BAD_WORD_TOKENS - 1)])
    too_short = Rows([greedy(bad_words=(word,))], [[1] * (MAX_BAD_WORD_TOKENS - 2)])
    assert long_enough.step(logits).token_ids.tolist() == [4]
    assert too_short.step(logits).token_ids.tolist() == [2]


def test_recent_tokens_shift():
    recent = RecentTokens(2, CPU)
    recent.reset(0, torch.tensor([4, 5]))
    recent.add(torch.tensor([0]), torch.tensor([6]))
    assert recent.token_ids[0, -4:].tolist() == [-1, 4, 5, 6]
    assert (recent.token_ids[1] == -1).all()
