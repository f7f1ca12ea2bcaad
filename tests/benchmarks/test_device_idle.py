"""The step loop, the Driver and a simulated device overlap, and benchmarks/device_idle.py counts what is left."""

import gc
from types import SimpleNamespace

import pytest

from benchmarks import watched_worker
from benchmarks.device_idle import WARM_UP_STEPS, Row, measure, row_of, summarize
from benchmarks.simulated_device import SimulatedStep
from engine.executor.step import StepPlan


def row(**figures):
    defaults = {
        "step": 4.0, "batch": 2, "num_steps": 100, "idle": 0.0, "idle_p99": 0.0, "short": 1.0,
        "driver": 1.0, "launch": 0.5, "turnaround": 1.5,
    }  # fmt: skip
    return Row(**(defaults | figures))


def test_the_device_computes_while_driver_and_worker_prepare_the_next_step():
    """Real processes. Without overlap the device idles before every step; with it, only before the steps that other
    programs of the machine delay."""
    thresholds = gc.get_threshold()
    try:
        found = measure(step_ms=20.0, launch_ms=0.2, batch=4, num_steps=60)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    assert found.num_steps == 60 and found.driver > 0 and found.launch >= 0.2
    assert found.short > 0.5 and found.turnaround < 20.0


def test_idle_time_is_between_the_end_of_a_step_and_the_start_of_the_next():
    steps, now = [SimulatedStep(0, 2, 0.001, 0.0, 0.0, 0.0, 0.004)], 0.004
    for i in range(WARM_UP_STEPS + 100):
        started = now + (0.001 if i % 10 == 0 else 0.00001)
        steps.append(SimulatedStep(2, 0, 0.001, 0.0005, started, started, now := started + 0.004))
    steps.append(SimulatedStep(1, 0, 0.001, 0.0, now + 1, now + 1, now + 2))  # one of two sequences has ended
    found = row_of(steps, 4.0, 2, 100, driver_ms=1.0)
    assert found.num_steps == 100
    assert found.idle == pytest.approx(0.9 * 0.01 + 0.1 * 1.0)
    assert found.short == pytest.approx(0.9) and found.idle_p99 == pytest.approx(1.0)
    assert found.launch == pytest.approx(1.5) and found.turnaround == pytest.approx(4.02)
    assert found.must_hide and not found.meets


@pytest.mark.parametrize(
    "figures, meets",
    [
        ({"idle": 0.3, "short": 0.99}, True),
        ({"idle": 0.01, "short": 0.98}, False),
        ({"driver": 3.5, "short": 0.99}, True),  # just fits into a step of 4 ms
        ({"driver": 4.5, "idle": 0.89, "short": 0.0}, True),  # (4.5 + 0.5 - 4) / 2, and a tenth of a step
        ({"driver": 4.5, "idle": 0.91, "short": 0.0}, False),
        ({"driver": 6.0, "idle": 2.39, "short": 0.0}, True),  # the Driver is the bottleneck
    ],
)
def test_a_row_meets_its_aim(figures, meets, capsys):
    assert row(**figures).meets == meets
    assert summarize([row(), row(**figures)]) == (0 if meets else 1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("every row meets" in last) == meets and "mean idle" in last


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


class Event:
    """A CUDA event that a device reaches at `time`."""

    def __init__(self, clock, time):
        self.clock, self.time = clock, time

    def query(self):
        return self.clock.now >= self.time

    def elapsed_time(self, later):
        return 1e3 * (later.time - self.time)


class Runner:
    """Launches take 1 s. Steps take 10 s on a GPU, and on a CPU the time of their launch."""

    def __init__(self, clock, kind):
        self.clock, self.device, self.free_at = clock, SimpleNamespace(type=kind), 0.0

    def event(self):
        return Event(self.clock, max(self.clock.now, self.free_at))

    def launch(self, plan):
        self.clock.now += 1.0
        self.free_at = max(self.clock.now, self.free_at) + 10.0

    def result(self, step):
        return None


@pytest.mark.parametrize(
    "kind, launches, idle",
    [
        # The second launch begins 1 s before the device is done, and is over 3 s before; the last are late.
        ("cuda", [0.0, 7.0, 21.0, 40.0], [0.0, 0.0, 1.0, 9.0]),
        ("cpu", [0.0, 1.0, 5.0], [0.0, 0.0, 3.0]),
    ],
)
def test_the_watched_worker_logs_idle_time(monkeypatch, kind, launches, idle):
    clock, steps = Clock(), []
    runner = Runner(clock, kind)
    monkeypatch.setattr(watched_worker.time, "perf_counter", clock)
    monkeypatch.setattr(watched_worker, "_cuda_event", runner.event)
    watched_worker.StepWatcher(runner, steps)
    in_flight = []
    for begin in launches:
        clock.now = begin
        in_flight.append(runner.launch(StepPlan(1, [], [], [], [])))
        if len(in_flight) == 2:
            runner.result(in_flight.pop(0))
    runner.result(in_flight.pop())
    assert [step.idle_seconds for step in steps] == pytest.approx(idle)
    assert [step.launched for step in steps] == launches and all(step.launch_seconds == 1.0 for step in steps)
