"""The frame of the attacks: what it measures, and that it notices what it is there for. The attacks: `make attacks`."""

import os
import threading
import time

import pytest

from tests.attacks.__main__ import as_json, show
from tests.attacks.frame import load_attacks
from tests.attacks.measure import Limits, Result, Sample, Sampler, Waits
from tests.attacks.stand import find_target, measure
from tests.server.conftest import folder  # noqa: F401
from tests.server.live import LiveServer, completion_body

KEYS = ("sk-of-the-other", "sk-of-the-attacker")


def test_an_attack_is_measured_beside_another_key_and_a_silence_is_noticed(folder, tmp_path):  # noqa: F811
    with LiveServer(folder, api_key=KEYS) as live:
        port = live.listener.getsockname()[1]
        body = completion_body(max_tokens=4)
        target = find_target(port, os.getpid(), *KEYS, body)
        sampler = Sampler(os.getpid(), most_mb=1e6)
        over = threading.Event()

        def fall_silent() -> None:
            while not over.wait(0.3):
                live.call(lambda: time.sleep(0.35))

        silence = threading.Thread(target=fall_silent)
        silence.start()
        attack = load_attacks()["smuggled_requests"]
        result = measure(attack, target, tmp_path, sampler, (KEYS[0], body), quiet=0.3, after=0.0)
        over.set()
        silence.join()
        sampler.stop()
    assert result.quiet.seconds and result.other_key.seconds and not result.other_key.failures
    assert result.health.worst_ms > 250 and result.before.driver_mb > 1 and result.peak.descriptors > 3
    result.judge(Limits())
    assert [fault for fault in result.faults if "/health" in fault], result.faults
    assert result.name in show(result) and as_json([result])["attacks"][result.name]["faults"] == result.faults


def a_result(**changes) -> Result:
    few, many = Sample(100.0, 500.0, 20), Sample(900.0, 1500.0, 60)
    waits = {name: Waits([seconds] * 9) for name, seconds in (("quiet", 0.02), ("other_key", 0.05), ("health", 0.01))}
    rest = {"before": few, "peak": many, "after": few, "exit_seconds": 0.1}
    return Result("a", 1, **(waits | rest | changes))


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({}, None),
        ({"other_key": Waits([0.05] * 9 + [1.1])}, "other key"),
        ({"other_key": Waits([0.07] * 9)}, "quiet p50"),
        ({"other_key": Waits()}, "other key"),
        ({"health": Waits([0.3])}, "/health"),
        ({"health": Waits([0.01], {0: 1})}, "/health: 1 with status 0"),
        ({"after": Sample(151.0, 151.0, 20)}, "memory"),
        ({"after": Sample(100.0, 500.0, 41)}, "descriptors"),
        ({"exit_seconds": 2.1}, "exit"),
    ],
)
def test_every_limit_is_held_against_what_was_measured(changes, fault):
    result = a_result(**changes)
    result.judge(Limits())
    assert bool(result.faults) == (fault is not None)
    assert fault is None or fault in result.faults[0]


def test_every_attack_has_a_line_that_says_what_it_does():
    attacks = load_attacks()
    assert len(attacks) > 10
    for name, attack in attacks.items():
        assert attack.function.__doc__.strip().splitlines()[0].endswith((".", ":")), name
