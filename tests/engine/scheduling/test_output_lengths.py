"""The forecast of output lengths, against brute force over the lengths themselves."""

import random

import pytest

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduling.output_lengths import (
    MAX_OBSERVATIONS,
    LengthClass,
    OutputLengths,
    bucket_of,
    bucket_start,
    horizons,
)


def learned(lengths, limit=512, running=None, censored=()):
    table = LengthClass(limit, 16)
    for length in lengths:
        table.observe(length, censored=False)
    for length in censored:
        table.observe(length, censored=True)
    table.fit(running or {})
    return table


def test_buckets_tile_the_lengths():
    for length in range(20_000):
        assert bucket_start(bucket_of(length)) <= length < bucket_start(bucket_of(length) + 1)


def test_horizons_of_a_class_are_the_start_of_those_of_a_larger_one():
    assert horizons(16, 100) == (4, 8, 12, 16, 24, 32, 48, 64, 96)
    for limit in (1, 2, 17, 64, 1024):
        assert horizons(16, limit) == tuple(ahead for ahead in horizons(16, 1 << 20) if ahead < limit)


@pytest.mark.parametrize("mean", [5, 40, 150])
def test_the_survivor_function_is_the_share_of_lengths_that_got_as_far(mean):
    rng = random.Random(mean)
    lengths = [min(512, 1 + int(rng.expovariate(1 / mean))) for _ in range(1000)]
    table = learned(lengths)
    for length in range(1, 514):
        assert table.reach(length) == pytest.approx(sum(x >= length for x in lengths) / 1000, abs=0.02)


def test_alive_is_the_conditional_survivor_function():
    table = learned(range(1, 501))
    begin = bucket_start(bucket_of(100))
    expected = [table.reach(begin + ahead) / table.reach(begin) for ahead in table.horizons]
    assert table.alive(bucket_of(100)) == pytest.approx(expected)


def test_aborted_outputs_do_not_make_the_others_look_short():
    rng = random.Random(2)
    ended, aborted = [], []
    for _ in range(1000):
        length, cut = rng.randint(1, 500), rng.randint(1, 500)
        (ended if length <= cut else aborted).append(min(length, cut))
    table = learned(ended, censored=aborted)
    naive = learned(ended)
    for length in (100, 200, 300):
        assert table.reach(length) == pytest.approx(1 - length / 500, abs=0.06)
        assert naive.reach(length) < table.reach(length) - 0.05


def test_those_that_still_run_count_as_far_as_they_came():
    """100 outputs began together; the 10 that ended at 20 tokens are the short ones."""
    assert learned([20] * 10).reach(60) < 0.2
    assert learned([20] * 10, running={bucket_of(60): 90}).reach(60) > 0.85


def test_with_nothing_learned_half_get_twice_as_far_and_none_past_the_limit():
    table = learned([])
    assert table.reach(112) / table.reach(48) == pytest.approx(0.5, abs=0.02), "(112 + 16) = 2 x (48 + 16)"
    assert table.reach(512) > 0
    assert table.reach(513) == 0


def test_counts_are_bounded_and_old_lengths_are_forgotten():
    table = learned([300] * 5000 + [10] * 3 * MAX_OBSERVATIONS)
    assert table._num_observed < MAX_OBSERVATIONS
    assert table.reach(100) < 0.05


def sequence(max_tokens, limit=None, **params):
    params = SamplingParams(max_tokens=max_tokens, **params)
    return Sequence(0, [1, 2], params, seed=0, max_num_tokens=2 + (limit or max_tokens))


def test_classes_are_powers_of_two_of_the_limit():
    lengths = OutputLengths(16)
    assert lengths.class_of(sequence(65)) is lengths.class_of(sequence(128))
    assert lengths.class_of(sequence(64)) is not lengths.class_of(sequence(65))
    assert lengths.class_of(sequence(1)).limit == 1
    apart = {lengths.class_of(s) for s in (sequence(128), sequence(None, 128), sequence(128, ignore_eos=True))}
    assert len(apart) == 3
    assert {table.limit for table in apart} == {128}


@pytest.mark.parametrize(
    ("reason", "learns"),
    [
        (FinishReason.STOP, True),
        (FinishReason.LENGTH, True),
        (FinishReason.ABORT, False),
        (FinishReason.ERROR, False),
    ],
)
def test_an_end_of_its_own_is_a_length_and_one_from_outside_a_lower_bound(reason, learns):
    lengths = OutputLengths(16)
    seq = sequence(100)
    seq.token_ids += [5] * 30
    for _ in range(500):
        lengths.observe(seq, reason)
    table = lengths.class_of(seq)
    table.fit({})
    assert (table.reach(40) < 0.1) is learns
    assert table.reach(20) > 0.9
