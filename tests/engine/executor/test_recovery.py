"""The policy after a death: budget, backoff, suspicion; and when a Worker counts as hung. No process, no clock."""

import pytest

from engine.errors import EngineError
from engine.executor.recovery import Recovery
from engine.executor.step import NewSequence, SequenceStep, StepPlan
from engine.executor.step_durations import LIMIT_FACTOR, MIN_LIMIT, StepDurations
from engine.executor.step_watch import StepWatch
from engine.sampling_params import SamplingParams

CAUSE = EngineError("the Worker was eaten")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_the_first_death_costs_no_time_and_each_next_one_twice_as_much():
    recovery = Recovery(100, 600.0, Clock())
    delays = []
    for _ in range(10):
        recovery.record_death([])
        delays.append(recovery.backoff(CAUSE))
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_the_budget_is_a_sliding_window():
    clock = Clock()
    recovery = Recovery(3, 600.0, clock)
    for _ in range(20):  # one death in 200.1 s: never more than three in a window, for ever
        recovery.record_death([])
        assert recovery.backoff(CAUSE) <= 1.0
        clock.now += 200.1
    clock.now += 600
    for _ in range(3):
        recovery.record_death([])
        recovery.backoff(CAUSE)
    clock.now += 600  # the three are just still within
    recovery.record_death([])
    with pytest.raises(EngineError, match=r"was eaten; .* died 4 times within 600 s.* max_worker_restarts is 3"):
        recovery.backoff(CAUSE)


def test_no_budget_means_no_restart():
    recovery = Recovery(0, 600.0, Clock())
    recovery.record_death([])
    with pytest.raises(EngineError):
        recovery.backoff(CAUSE)


def test_who_was_there_at_two_deaths_runs_alone_and_at_the_third_is_guilty():
    recovery = Recovery(9, 600.0, Clock())
    assert recovery.record_death(["a", "b"]) == [] and recovery.suspect is None
    assert recovery.record_death(["b", "c"]) == [] and recovery.suspect == "b"
    assert recovery.record_death(["b"]) == ["b"]
    recovery.clear("b")
    assert recovery.suspect is None


def test_suspects_come_one_after_the_other_and_a_token_clears():
    recovery = Recovery(9, 600.0, Clock())
    for _ in range(2):
        recovery.record_death(["a", "b", "c"])
    assert recovery.suspect == "a"
    recovery.clear("a")
    assert recovery.suspect == "b"
    assert recovery.record_death(["b"]) == ["b"], "a and c were not there"
    recovery.clear("b")
    assert recovery.suspect == "c"
    recovery.clear("c")
    assert recovery.suspect is None
    assert recovery.record_death(["a", "c"]) == [] and recovery.suspect is None, "they begin anew"


def test_who_moves_on_between_deaths_is_never_suspected():
    recovery = Recovery(1000, 600.0, Clock())
    for _ in range(50):
        assert recovery.record_death(["a"]) == [] and recovery.suspect is None
        recovery.clear("a")


def test_a_request_that_is_in_no_plan_gets_no_blame():
    recovery = Recovery(9, 600.0, Clock())
    recovery.record_death(["a"])
    for _ in range(5):
        assert recovery.record_death([]) == [] and recovery.suspect is None


DECODES = StepPlan(1, [], [], [], [], decodes=[1, 2, 3])


class WatchOfTest(StepWatch):
    """Its `clock` stands still unless the test moves it."""

    def __init__(self, timeout, durations=None):
        self.clock, self.durations = Clock(), durations or StepDurations()
        super().__init__(timeout, self.durations, self.clock)


def prompt_of(num_tokens, **params):
    """A step that computes a new sequence."""
    new = NewSequence(9, [5] * num_tokens, num_tokens, 0, [0], SamplingParams(**params), 7)
    return StepPlan(2, [], [new], [], [SequenceStep(9, num_tokens, True, [])])


def do(watch, plan, seconds=0.0, num_steps=1):
    """Let a Worker do such steps."""
    for _ in range(num_steps):
        watch.sent(plan)
        for _ in range(int(seconds / watch.interval)):
            assert not watch.tick()
        watch.clock.now += seconds
        watch.received()


def finished_first_steps(timeout, plan=None):
    """By default of steps unlike those that follow: the timeout alone holds for these."""
    watch = WatchOfTest(timeout)
    do(watch, plan or prompt_of(1000), num_steps=StepWatch.FIRST_STEPS)
    return watch


def ask(watch):
    assert watch.idle
    watch.sent_heartbeat()


def ticks_until_hung(watch, at_most=1000):
    return next(i for i in range(1, at_most) if watch.tick())


def test_a_step_gets_its_time_and_no_more():
    watch = finished_first_steps(2.0)
    watch.sent(DECODES)
    seconds = ticks_until_hung(watch) * watch.interval
    assert 2.0 <= seconds <= 2.5
    assert watch.silence == pytest.approx(seconds)


def test_first_steps_may_compile():
    for timeout, allowed in ((2.0, 10.0), (60.0, 300.0), (100.0, 300.0), (300.0, 300.0), (900.0, 900.0)):
        watch = StepWatch(timeout)
        watch.sent(DECODES)
        assert allowed <= ticks_until_hung(watch) * watch.interval <= allowed + 2.01 * watch.interval


def test_an_idle_worker_never_hangs_and_the_time_starts_with_the_plan():
    watch = finished_first_steps(1.0)
    assert not any(watch.tick() for _ in range(100))
    watch.sent(DECODES)
    assert ticks_until_hung(watch) * watch.interval > 1.0


def test_each_result_gives_new_time():
    watch = finished_first_steps(1.0)
    watch.sent(DECODES)
    for _ in range(30):
        watch.sent(DECODES)
        assert not any(watch.tick() for _ in range(StepWatch.TICKS))
        watch.received()


def seconds_until_hung(watch, plan):
    watch.sent(plan)
    return ticks_until_hung(watch) * watch.interval


@pytest.mark.parametrize("timeout", [60.0, 300.0])
@pytest.mark.parametrize("seconds, allowed", [(0.01, MIN_LIMIT), (2.0, 2 * LIMIT_FACTOR), (20.0, 1000.0)])
def test_a_step_gets_as_long_as_those_before_it_say(timeout, seconds, allowed):
    watch = finished_first_steps(timeout, DECODES)
    do(watch, DECODES, seconds / 10)
    do(watch, DECODES, seconds, num_steps=30)
    allowed = min(allowed, timeout)
    assert allowed <= seconds_until_hung(watch, DECODES) <= allowed + LIMIT_FACTOR * watch.interval


def test_a_step_that_was_slow_once_is_forgotten():
    watch = finished_first_steps(300.0, DECODES)
    do(watch, DECODES, 8.0)
    assert seconds_until_hung(watch, DECODES) >= 160.0
    watch.received()
    do(watch, DECODES, 0.01, num_steps=100)
    assert seconds_until_hung(watch, DECODES) <= MIN_LIMIT + 2.0


@pytest.mark.parametrize(
    "new",
    [
        prompt_of(40),
        prompt_of(8, top_k=4),
        StepPlan(3, [], [], [], [], decodes=list(range(40))),
        StepPlan(3, [], [], [], [SequenceStep(1, 500, False, [])]),
    ],
    ids=["longer prompt", "another filter", "more decodes", "larger chunk"],
)
def test_steps_of_a_new_kind_and_those_behind_them_may_compile(new):
    watch = finished_first_steps(60.0, DECODES)
    do(watch, prompt_of(8), num_steps=10)
    do(watch, DECODES, num_steps=10)
    do(watch, new, 50.0)
    for _ in range(StepWatch.STEPS_OF_A_NEW_KIND - 1):
        do(watch, DECODES, 50.0)  # the first tokens behind it
    do(watch, new, 0.01, num_steps=200)
    assert seconds_until_hung(watch, new) <= MIN_LIMIT + 2.0, "nothing is new of it"


def test_a_worker_that_follows_another_knows_its_steps():
    watch = finished_first_steps(300.0, DECODES)
    again = WatchOfTest(300.0, watch.durations)
    assert seconds_until_hung(again, DECODES) <= StepWatch.AGAIN_SECONDS + 2.0
    other = WatchOfTest(300.0, watch.durations)
    assert seconds_until_hung(other, prompt_of(8)) >= 300.0


def test_time_in_which_this_process_stood_still_is_no_time_of_a_step():
    watch = finished_first_steps(300.0, DECODES)
    watch.sent(DECODES)
    watch.clock.now += 3600.0  # stopped, with the Worker
    assert not watch.tick()
    watch.received()
    assert watch.durations.limit(DECODES) <= 2 * LIMIT_FACTOR


def test_a_heartbeat_is_due_when_there_was_nothing_to_wait_for():
    watch = finished_first_steps(300.0)
    watch.sent(DECODES)
    assert not watch.idle
    watch.received()
    assert watch.idle and not watch.heartbeat_due
    due = next(i for i in range(1000) if watch.tick() or watch.heartbeat_due)
    assert 28 <= due * watch.interval <= 31, "every tenth of the timeout"
    ask(watch)
    assert not watch.idle and watch.awaits_heartbeat
    watch.received_heartbeat()
    assert watch.idle and not watch.awaits_heartbeat


def test_a_heartbeat_gets_the_time_of_a_step_and_half_a_minute_at_most():
    for timeout, allowed in ((2.0, 2.0), (20.0, 20.0), (60.0, 30.0), (300.0, 30.0), (900.0, 30.0)):
        watch = finished_first_steps(timeout)
        ask(watch)
        assert allowed <= ticks_until_hung(watch) * watch.interval <= allowed + 1.01 * watch.interval


def test_graphs_may_be_recorded_before_the_first_steps():
    for timeout, allowed in ((2.0, 10.0), (60.0, 150.0), (300.0, 30.0)):
        watch = StepWatch(timeout)
        for _ in range(2 * StepWatch.FIRST_STEPS):  # answers are no steps
            ask(watch)
            watch.received_heartbeat()
        ask(watch)
        assert allowed <= ticks_until_hung(watch) * watch.interval <= allowed + 1.01 * watch.interval


def test_a_plan_behind_a_heartbeat_gets_its_time_after_the_answer():
    watch = finished_first_steps(300.0)
    ask(watch)
    watch.sent(DECODES)
    assert not watch.tick()
    watch.received_heartbeat()
    assert 300.0 <= ticks_until_hung(watch) * watch.interval <= 302.0


def test_a_heartbeat_that_is_not_answered_ends_it_with_a_plan_behind_it_too():
    watch = finished_first_steps(300.0)
    ask(watch)
    watch.sent(DECODES)
    assert 30.0 <= ticks_until_hung(watch) * watch.interval <= 32.0


def test_the_way_to_sleep_has_a_time_of_its_own():
    watch = finished_first_steps(60.0)
    ask(watch)
    watch.sent_sleep()
    assert 30.0 <= ticks_until_hung(watch) * watch.interval <= 32.0, "the heartbeat was sent before"
    watch.received_heartbeat()
    assert not watch.idle
    assert 300.0 <= ticks_until_hung(watch) * watch.interval <= 302.0
