"""Admission by prediction: the forecast against drawing the future, and what it does to whole runs."""

import math
import random

import pytest

from benchmarks.admission import Simulation, make_work
from engine.memory.sequence import SequenceStatus
from engine.outputs import FinishReason
from engine.scheduling.block_reserve import Forecast, PredictedReserve
from engine.scheduling.output_lengths import LengthClass, bucket_of
from tests.engine.scheduling.loop import ForkLoop, Loop, prompt


def uniform_class(limit=256):
    table = LengthClass(limit, 16)
    for length in range(1, limit + 1):
        for _ in range(3):
            table.observe(length, censored=False)
    table.fit({})
    return table


def test_the_forecast_equals_the_mean_of_many_futures():
    """20 sequences of 3 blocks, whose next token is the 64th; the lengths are uniform."""
    table, rng, futures = uniform_class(), random.Random(0), 2000
    forecast = Forecast(16)
    forecast.add(table, bucket_of(64), 20, 60)
    for i, ahead in enumerate(ahead for ahead in table.horizons if ahead <= 128):  # the prior has a say in the tail
        held = [sum(rng.randint(64, 256) >= 64 + ahead for _ in range(20)) * (3 + ahead / 16) for _ in range(futures)]
        mean = sum(held) / futures
        variance = sum((x - mean) ** 2 for x in held) / futures
        assert forecast.mean[i] == pytest.approx(mean, rel=0.05, abs=0.5)
        assert math.sqrt(max(0.0, forecast.variance[i])) == pytest.approx(math.sqrt(variance), rel=0.2, abs=0.5)


def test_who_goes_is_taken_out_of_the_forecast():
    table, forecast = uniform_class(), Forecast(16)
    forecast.add(table, 3, 2, 10)
    alone = forecast.peak_with(table, 5, 1, 4, math.inf)
    forecast.add(table, 17, 7, 30)
    assert forecast.peak_with(table, 5, 1, 4, math.inf) > alone + 10
    forecast.add(table, 17, 7, 30, -1)
    assert forecast.peak_with(table, 5, 1, 4, math.inf) == pytest.approx(alone)


def test_a_peak_farther_away_than_asked_does_not_count():
    table = LengthClass(1024, 16)
    for _ in range(500):
        table.observe(1024, censored=False)
    table.fit({})
    forecast = Forecast(16)
    forecast.add(table, 1, 10, 10)
    assert forecast.peak_with(table, 1, 1, 1, max_ahead=32) == pytest.approx(11 * 3, rel=0.05)
    assert forecast.peak_with(table, 1, 1, 1, max_ahead=512) == pytest.approx(11 * 33, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_the_same_with_either_setting(seed):
    """And the oracle's, in tiny pools, with aborts: the books of the prediction balance at the end."""
    texts = {}
    for admission in ("plain", "predict"):
        rng = random.Random(seed)
        loop = ForkLoop(
            num_blocks=rng.randint(12, 30),
            block_size=rng.choice([1, 2, 4]),
            depth=rng.randint(1, 3),
            eos_every=rng.choice([0, 9]),
            prefix_caching=rng.random() < 0.5,
            max_num_seqs=rng.randint(1, 9),
            admission=admission,
        )
        room = loop.scheduler.block_manager.num_blocks * loop.scheduler.block_manager.block_size
        seqs, aborted = [], set()
        for turn in range(100):
            if rng.random() < 0.3:
                length = rng.randint(1, min(12, room - 2))
                seqs += loop.add_samples(prompt(rng, length), rng.randint(1, 4), rng.randint(1, min(30, room - length)))
            if seqs and rng.random() < 0.05:
                aborted.add(victim := rng.choice(seqs))
                loop.scheduler.finish(victim, FinishReason.ABORT)
            if turn % 2:
                loop.step()
        loop.run()
        survivors = [seq for seq in seqs if seq not in aborted]
        loop.check_finished(survivors, loop.device.eos_every)
        texts[admission] = {seq.seq_id: seq.token_ids for seq in survivors}
        if admission == "predict":
            assert not loop.scheduler.admission.reserve.holders
    assert texts["plain"] == texts["predict"]


@pytest.mark.parametrize("lied", [(2, 60), (60, 2)])
def test_nothing_starves_when_lengths_are_not_what_was_learned(lied):
    """Taught short and then all long, and the other way round: all are served, in the order in which they came."""
    loop = Loop(num_blocks=24, admission="predict", max_num_seqs=6)
    for length in lied:
        seqs = []
        for i in range(60):
            seqs.append(loop.add(prompt(random.Random(i), 8), max_tokens=64, stop_token_ids=[], min_tokens=0))
        started = []
        while any(seq.status is not SequenceStatus.FINISHED for seq in seqs):
            assert loop.step(), "requests wait but nothing runs"
            started += [s for s in seqs if s.first_scheduled_time is not None and s not in started]
            for seq in seqs:
                if seq.status is SequenceStatus.RUNNING and seq.num_generated_tokens >= length:
                    loop.scheduler.finish(seq, FinishReason.STOP)
        assert started == seqs
    loop.run()


def test_with_nothing_running_the_first_is_admitted_whatever_is_predicted():
    loop = Loop(num_blocks=11, admission="predict", prefix_caching=False)
    for i in range(40):
        loop.add(prompt(random.Random(i), 20), max_tokens=20)
    loop.run()
    assert loop.scheduler.admission.num_delayed > 0
    alone = loop.add(prompt(random.Random(99), 20), max_tokens=20)
    loop.step()
    assert alone.status is SequenceStatus.RUNNING


def test_a_shared_prefix_is_counted_once():
    """32 sequences of one prompt of 16 blocks; each has a block or two of its own. Counted twice, three would fit."""
    loop = Loop(num_blocks=80, admission="predict", max_num_seqs=32, max_num_batched_tokens=512)
    shared = prompt(random.Random(3), 64)
    for _ in range(40):
        loop.add(shared + prompt(random.Random(4), 2), max_tokens=2)
    loop.run()
    assert loop.scheduler.admission.num_delayed == 0
    for i in range(32):
        loop.add(shared + prompt(random.Random(i), 2), max_tokens=2)
    loop.step()
    assert len(loop.scheduler.running) == 32


def test_samples_are_counted_with_their_number():
    """The same pool and the same lengths: a request of one sample fits beside what runs, one of eight does not."""
    spares = {}
    for num_forks in (0, 7):
        loop = Loop(num_blocks=64, block_size=4, admission="predict", max_num_seqs=16)
        for i in range(30):
            loop.add(prompt(random.Random(i), 64), max_tokens=30, ignore_eos=True)
        loop.run()
        running = loop.add(prompt(random.Random(50), 64), max_tokens=30, ignore_eos=True)
        loop.step()
        candidate = loop.add(prompt(random.Random(51), 64), max_tokens=30, ignore_eos=True)
        reserve = loop.scheduler.admission.reserve
        assert isinstance(reserve, PredictedReserve)
        spares[num_forks] = reserve.spare(candidate, [], num_forks, [running])
    grown = spares[7] - spares[0]
    assert 7 * 4 <= grown <= 7 * 6, "each grows by 16 tokens and copies a block within the horizon"


@pytest.mark.parametrize("lengths", ["long", "at limit"])
def test_fewer_preemptions_in_an_oversubscribed_pool(lengths):
    works = make_work(lengths, 120, None, seed=1)
    plain, predicted = Simulation(works, "plain").run(), Simulation(works, "predict").run()
    assert plain.delayed == 0
    assert predicted.preemptions < 0.8 * plain.preemptions
    assert predicted.recomputed_tokens < 0.8 * plain.recomputed_tokens
    assert predicted.tokens_per_s > 0.97 * plain.tokens_per_s


def test_prediction_costs_nothing_where_the_pool_is_large_enough():
    works = make_work("short", 120, None, seed=1)
    plain, predicted = Simulation(works, "plain").run(), Simulation(works, "predict").run()
    assert plain.preemptions == predicted.preemptions == predicted.delayed == 0
    assert predicted.tokens_per_s == plain.tokens_per_s


def test_what_ends_leaves_nothing_in_the_forecast():
    """However far it got since it was put in; between two refreshes, too."""
    loop = Loop(num_blocks=64, admission="predict", max_num_seqs=4)
    for i in range(3):
        loop.add(prompt(random.Random(i), 12), max_tokens=11 + i, ignore_eos=True)
    loop.run()
    forecast = loop.scheduler.admission.reserve.forecast
    assert forecast.mean == pytest.approx([0.0] * len(forecast.mean))
