"""How long steps take, learnt from steps."""

import random

import pytest

from engine.short_steps import StepTimes


def observe(times, num_steps, base=1e-3, per_decode=2e-4, per_token=3e-5, noise=0.0, rng=None, steps=None):
    rng = rng or random.Random(1)
    for _ in range(num_steps):
        decodes, tokens = steps or rng.choice([(0, 32), (rng.randrange(100), 0), (rng.randrange(100), 128), (1, 0)])
        seconds = base + per_decode * decodes + per_token * tokens
        times.observe(decodes, tokens, seconds * rng.uniform(1 - noise, 1 + noise))


@pytest.mark.parametrize(("noise", "rel"), [(0.0, 0.01), (0.3, 0.35)])
def test_the_limits_follow_from_what_was_seen(noise, rel):
    times = StepTimes()
    assert times.within(3.0) is None
    observe(times, 300, noise=noise)
    decodes, tokens = times.within(3.0)
    assert decodes == pytest.approx(2 * 1e-3 / 2e-4, rel=rel) and tokens == pytest.approx(2 * 1e-3 / 3e-5, rel=rel)


def test_they_change_with_the_device():
    times = StepTimes()
    observe(times, 300)
    observe(times, 600, base=6e-3, per_decode=4e-5, per_token=4e-5)
    decodes, tokens = times.within(3.0)
    assert decodes == pytest.approx(300, rel=0.15) and tokens == pytest.approx(300, rel=0.15)


def test_steps_that_are_all_alike_do_not_undo_what_is_known():
    times = StepTimes()
    observe(times, 300)
    times.within(3.0)
    for _ in range(20):
        observe(times, 100, steps=(10, 0))
        decodes, tokens = times.within(3.0)
    assert decodes == pytest.approx(10, rel=0.5) and tokens == pytest.approx(66, rel=0.5)


@pytest.mark.parametrize("steps", [(127, 129), (0, 1), (1, 0)])
def test_from_steps_that_say_nothing_come_finite_limits(steps):
    times = StepTimes()
    observe(times, 50, steps=steps)
    decodes, tokens = times.within(3.0)
    assert 0 <= decodes < 1e12 and 0 <= tokens < 1e12
