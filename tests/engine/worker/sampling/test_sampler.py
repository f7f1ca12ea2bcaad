"""The sampler against slow, clear numpy."""

import numpy as np
import pytest
import torch

from engine.worker.sampling import sampling_rows
from engine.worker.sampling.sampler import (
    MIN_LOGPROB,
    TokenCounts,
    _nucleus_thresholds,
    sample,
)
from engine.worker.sampling.sampling_rows import SamplingRows, uniforms
from tests.engine.worker.sampling.reference import (
    CASES,
    CPU,
    EOS,
    GENERATED,
    PROMPT,
    VOCAB,
    Batch,
    random_logits,
    reference_draw,
    reference_logits,
    sampling,
    with_logprobs,
)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    params = CASES[name]
    n = 64
    logits = random_logits(n)
    logits[:, [*EOS, 8, 9, 4, 17]] += 6.0  # so that masks and penalties decide something
    batch = Batch([params] * n, prompts=[PROMPT] * n, generated=[GENERATED] * n)
    drawn = batch.sample(logits)
    expected = [
        reference_draw(reference_logits(row, params, PROMPT, GENERATED), u)
        for row, u in zip(logits, uniforms(np.arange(n), batch.lengths), strict=True)
    ]
    assert drawn.token_ids.tolist() == expected
    assert not drawn.failed.any()


DRAWN = [name for name, params in CASES.items() if not params.greedy and 999 not in (params.logit_bias or {})]


@pytest.mark.parametrize("name", DRAWN)
def test_distribution_by_chi_square(name):
    """20,000 draws of one distribution; the bound is 4.5 standard deviations of the statistic above its mean."""
    params, vocab, rounds, rows = CASES[name], 40, 40, 500
    logits = random_logits(1, vocab, scale=1.0, seed=3)
    prompt, generated = [1, 2, 4], [9, 9, 17]
    weights = np.exp(reference_logits(logits[0], params, prompt, generated))
    probabilities = weights / weights.sum()
    observed = np.zeros(vocab)
    batch = Batch([params] * rows, prompts=[prompt] * rows, generated=[generated] * rows, vocab_size=vocab)
    before = batch.counts.generated.clone()
    for start in range(rounds):
        batch.rows._seed[:] = np.arange(start * rows, (start + 1) * rows)
        batch.counts.generated.copy_(before)
        ids = batch.sample(np.repeat(logits, rows, 0)).token_ids
        observed += np.bincount(ids.numpy(), minlength=vocab)
    assert (observed[probabilities == 0] == 0).all()
    n = rounds * rows
    likely = probabilities * n >= 5
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * n
    seen = np.append(observed[likely], observed[~likely].sum())
    expected, seen = expected[expected > 0], seen[expected > 0]
    freedom = len(expected) - 1
    assert ((seen - expected) ** 2 / expected).sum() <= freedom + 4.5 * np.sqrt(2 * max(freedom, 1))


def test_the_batch_does_not_matter_bit_for_bit():
    """Each sequence alone, in the whole batch, and in a shuffled half give the same token and the same logprobs."""
    params = [CASES[name] for name in CASES] * 3
    params = [with_logprobs(one) for one in params]
    n = len(params)
    logits = random_logits(n)
    make = dict(prompts=[PROMPT] * n, generated=[GENERATED] * n)
    together = Batch(params, **make).sample(logits)
    alone = [Batch(params, **make).sample(logits[i : i + 1], rows=[i]) for i in range(n)]
    half = np.random.default_rng(1).permutation(n)[: n // 2]
    shuffled = Batch(params, **make, sparse=False).sample(logits[half], rows=half)
    for i in range(n):
        assert together.token_ids[i] == alone[i].token_ids[0]
        assert torch.equal(together.logprobs[i], alone[i].logprobs[0])
    assert together.token_ids[half].tolist() == shuffled.token_ids.tolist()
    assert torch.equal(together.logprobs[half], shuffled.logprobs)


def test_groups_of_bounded_size_draw_the_same(monkeypatch):
    logits = random_logits(40)
    params = list(CASES.values()) * 2
    params = params[:40]
    whole = Batch(params).sample(logits).token_ids
    monkeypatch.setattr(sampling_rows, "MAX_DRAW_ELEMENTS", 3 * VOCAB)
    assert torch.equal(Batch(params).sample(logits).token_ids, whole)


def test_penalties_kept_step_by_step_equal_those_rebuilt_after_preemption():
    """Counts that are kept, counts that are made anew, and what a kernel counts in the known tokens."""
    params = sampling(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4, min_tokens=3
    )
    batch = Batch([params], prompts=[PROMPT], sparse=False)
    generated: list[int] = []
    for step in range(20):
        logits = random_logits(1, scale=1.0, seed=step)
        rebuilt, counted = (Batch([params], prompts=[PROMPT], generated=[generated], sparse=s) for s in (False, True))
        token = int(batch.sample(logits).token_ids[0])
        assert token == int(rebuilt.sample(logits).token_ids[0]) == int(counted.sample(logits).token_ids[0])
        assert torch.equal(batch.counts.generated, rebuilt.counts.generated)
        batch.token_ids[0, batch.lengths[0]] = token
        batch.lengths[0] += 1
        generated.append(token)
    assert batch.counts.generated.sum() == 20


def test_a_row_taken_over_forgets_the_sequence_before():
    counts = TokenCounts(1, 10, CPU)
    counts.reset(0, torch.tensor([1, 2]), torch.tensor([3, 3]))
    counts.reset(0, torch.tensor([4]), torch.tensor([], dtype=torch.long))
    assert counts.in_prompt[0].nonzero().flatten().tolist() == [4]
    assert counts.generated.sum() == 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("name", ["greedy", "plain", "top_p", "top_k", "large top_k", "everything"])
def test_a_row_that_is_not_finite_fails_alone(poison, name):
    params = [CASES[name]] * 5
    logits = random_logits(5)
    clean = Batch(params).sample(logits)
    logits[2, :] = -np.inf if poison == "all -inf" else logits[2]
    logits[2, EOS[0]] = -np.inf if poison == "all -inf" else poison
    drawn = Batch(params).sample(logits)
    assert drawn.failed.tolist() == [False, False, True, False, False]
    others = [0, 1, 3, 4]
    assert torch.equal(drawn.token_ids[others], clean.token_ids[others])
    if clean.logprobs is not None:
        assert torch.equal(drawn.logprobs[others], clean.logprobs[others])
    assert 0 <= int(drawn.token_ids[2]) < VOCAB


def test_a_mask_that_leaves_no_token_fails_the_row():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, EOS] = 1.0
    assert Batch([sampling(temperature=0.0)]).sample(logits).failed.tolist() == [False]
    assert Batch([sampling(temperature=0.0, min_tokens=1)]).sample(logits).failed.tolist() == [True]


def nucleus_by_sorting(x, weights, top_p):
    """The logit of the last token that top_p keeps, by the definition."""
    order = x.masked_fill(weights == 0, -torch.inf).sort(-1, descending=True)
    mass = weights.gather(1, order.indices).cumsum(-1, dtype=torch.float64)
    last = torch.searchsorted(mass, top_p[:, None] * mass[:, -1:]).clamp_(max=x.shape[1] - 1)
    return order.values.gather(1, last)[:, 0]


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 100.0])
def test_the_nucleus_by_histogram_is_the_nucleus_by_sorting(scale):
    logits = torch.from_numpy(random_logits(50, scale=scale))
    x = logits - logits.amax(-1, keepdim=True)
    weights = x.exp() * (x > -8.0 * scale / 3)  # as if min_p had cut some
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12):
        p = torch.full((50,), top_p, dtype=torch.float64)
        kept = (x >= nucleus_by_sorting(x, weights, p)[:, None]) & (weights > 0)
        assert torch.equal(kept, (x >= _nucleus_thresholds(x, weights, p)[:, None]) & (weights > 0))


def test_tokens_of_minus_infinity_are_never_drawn():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [10, 640, 999]] = 0.0
    drawn = set()
    for position in range(200):
        for name in ("plain", "top_p", "top_k", "flat top_p"):
            drawn.add(int(Batch([CASES[name]]).sample(logits, positions=[position]).token_ids[0]))
    assert drawn == {10, 640, 999}


def test_min_tokens_ends_when_enough_are_generated():
    params = sampling(temperature=0.0, min_tokens=3, stop_token_ids=(8,))
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 5, 8]] = [9.0, 8.0, 7.0]
    logits[0, 100] = 1.0
    for generated, expected in (([], 100), ([1, 1], 100), ([1, 1, 1], 3)):
        assert Batch([params], generated=[generated]).sample(logits).token_ids.tolist() == [expected]


def test_logprobs_are_of_the_models_own_distribution():
    params = [
        sampling(temperature=0.1, logit_bias={5: 50.0}, logprobs=4),
        sampling(),
        sampling(top_k=2, logprobs=0),
        sampling(temperature=0.0, repetition_penalty=2.0, logprobs=2),
    ]
    logits = random_logits(4)
    logits[0, 0] = -np.inf
    drawn = Batch(params).sample(logits)
    raw = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for place, row in enumerate((0, 2, 3)):
        best = np.argsort(-logits[row], kind="stable")[:4]
        assert drawn.top_ids[place].tolist() == best.tolist()
        expected = raw[row, [int(drawn.token_ids[row]), *best]]
        np.testing.assert_allclose(drawn.logprobs[place].numpy(), expected, atol=1e-5)
    assert drawn.token_ids[0] == 5


def test_minus_infinity_never_leaves_in_logprobs():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 7] = 0.0
    drawn = Batch([sampling(logprobs=3)]).sample(logits)
    assert drawn.logprobs[0].tolist() == [0.0, 0.0, MIN_LOGPROB, MIN_LOGPROB]


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_tied_tokens_stay_in_together(name):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :5] = 5.0
    drawn = {int(Batch([CASES[name]]).sample(logits, positions=[i]).token_ids[0]) for i in range(300)}
    params = {"top_k": 7, "top_p": 0.8}[name]
    assert drawn >= {0, 1, 2, 3, 4}
    assert max(drawn) > 500 if params == 7 else True


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000])
def test_vocabularies_of_any_width(vocab_size):
    logits = random_logits(3, vocab_size)
    rows = SamplingRows(3, vocab_size, [0] if vocab_size > 1 else [])
    for row, params in enumerate((sampling(), sampling(top_p=0.5), sampling(top_k=50, logprobs=20))):
        rows.set(row, params, 1, 1)
    inputs = rows.build(np.arange(3), np.array([5, 6, 7]), torch.from_numpy)
    drawn = sample(torch.from_numpy(logits.copy()), inputs, TokenCounts(3, vocab_size, CPU))
    assert not drawn.failed.any()
    for row, params in enumerate((sampling(), sampling(top_p=0.5), sampling(top_k=50))):
        x = reference_logits(logits[row], params, [], []) if params.top_k < vocab_size else logits[row] * 1.0
        assert int(drawn.token_ids[row]) == reference_draw(x, uniforms(np.array([1]), np.array([5 + row]))[0])


def test_extreme_uniforms_stay_inside(monkeypatch):
    logits = random_logits(2)
    logits[:, -40:] = -np.inf
    for value, bound in ((0.0, 0), (1 - 2.0**-53, VOCAB - 41)):
        monkeypatch.setattr(sampling_rows, "uniforms", lambda seeds, positions, value=value: np.full(len(seeds), value))
        drawn = Batch([sampling()] * 2, sparse=False).sample(logits)  # else the kernel makes the numbers by itself
        assert drawn.token_ids.tolist() == [bound, bound]


def test_uniforms_are_uniform_and_depend_on_seed_and_position():
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300))
    u = uniforms(seeds.ravel(), positions.ravel())
    counts = np.bincount((u * 100).astype(int), minlength=100)
    assert ((counts - 900) ** 2 / 900).sum() < 99 + 4.5 * np.sqrt(198)
    assert len(np.unique(u)) == len(u)
    grid = u.reshape(300, 300) - 0.5
    assert abs((grid[1:] * grid[:-1]).mean()) < 0.002  # neighbouring positions
    assert abs((grid[:, 1:] * grid[:, :-1]).mean()) < 0.002  # neighbouring seeds
    assert uniforms(np.array([2**64 - 1], np.uint64), np.array([0])) < 1.0


def test_known_values_of_the_generator():
    """A change of the generator would change the text of every seeded request: it must be deliberate."""
    expected = uniforms(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 10, 100]))
    assert expected.tolist() == KNOWN


KNOWN = [0.6524484863740322, 0.6147466984242799, 0.3430236274313533]


def test_negative_seeds_are_taken_modulo_two_to_the_64():
    batch = Batch([sampling()] * 2, seeds=[-1, 2**64 - 1])
    drawn = [batch.sample(np.zeros((2, VOCAB)), positions=[i, i]).token_ids.tolist() for i in range(2, 12)]
    assert all(first == second for first, second in drawn) and len({first for first, _ in drawn}) > 5


def test_ids_outside_the_vocabulary_are_refused():
    rows = SamplingRows(1, VOCAB, [])
    with pytest.raises(ValueError, match="1000"):
        rows.set(0, sampling(logit_bias={VOCAB: 1.0}), 0, 1)
    with pytest.raises(ValueError, match="1000"):
        rows.set(0, sampling(stop_token_ids=(VOCAB,), min_tokens=1), 0, 1)


def test_all_greedy_needs_no_inputs():
    rows = SamplingRows(2, VOCAB, EOS)
    for row in range(2):
        rows.set(row, sampling(temperature=0.0), 0, 1)
    assert rows.build(np.arange(2), np.array([1, 1]), torch.from_numpy) is None
