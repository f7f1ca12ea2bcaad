"""The Driver plans ahead: with overlapped scheduling, the Worker gets its next plan before readers get their tokens."""

import asyncio
from itertools import accumulate

import pytest

from engine.executor.executor import Executor
from engine.executor.step import StepPlan
from engine.outputs import FinishReason
from engine.requests.live_requests import LiveRequests
from tests.checkpoints import save_fake_checkpoint
from tests.engine import bundled_driver
from tests.engine.driving import PROMPT, assert_idle, collect, request, running_driver, until
from tests.fake_device import expected_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def events(monkeypatch):
    """("sent" or "delivered", step id), in order."""
    found = []
    send, deliver = Executor.send, LiveRequests.deliver

    def observed_send(executor, message):
        send(executor, message)
        if isinstance(message, StepPlan):
            found.append(("sent", message.step_id))

    def observed_deliver(live, result, *args):
        found.append(("delivered", result.step_id))
        deliver(live, result, *args)

    monkeypatch.setattr(Executor, "send", observed_send)
    monkeypatch.setattr(LiveRequests, "deliver", observed_deliver)
    return found


@pytest.mark.parametrize("async_scheduling, ahead", [(True, 2), (False, 0)], ids=["overlapped", "one by one"])
async def test_the_next_plan_is_sent_before_tokens_are_delivered(folder, events, async_scheduling, ahead):
    async with running_driver(folder, async_scheduling=async_scheduling) as driver:
        await collect(driver.generate(request("a", max_tokens=12)))
    sent = [step_id for event, step_id in events if event == "sent"]
    assert sent == list(range(1, 13))
    for event, step_id in events:
        if event == "delivered":
            before = events[: events.index((event, step_id))]
            assert ("sent", min(step_id + ahead, 12)) in before
            assert ("sent", step_id + ahead + 1) not in before


async def test_a_sequence_that_failed_is_not_planned_again(folder, events):
    """Also with a plan under way, as the result that reports the failure comes."""
    async with running_driver(folder, "--fail-on-token", str(ord("!"))) as driver:
        with pytest.raises(Exception, match="not finite"):
            await collect(driver.generate(request("bad", b"fail!", max_tokens=9)))
        await until(lambda: not driver.num_in_flight)
        assert [step_id for event, step_id in events if event == "sent"] == [1, 2]
        assert_idle(driver)


async def test_a_stop_string_ends_exactly_the_sequence_that_holds_it(folder):
    """Two more plans hold the sequence when its text is looked at. Neither their tokens nor their blocks remain."""
    ids = expected_tokens(PROMPT, 7, 40)
    text = bytes(ids).decode()
    async with running_driver(folder, num_blocks=8, block_size=8) as driver:
        for end in range(3, 15):
            stop = text[end - 2 : end]
            first = text.find(stop)
            stopped = driver.generate(request("stops", max_tokens=20, stop=[stop]))
            other = driver.generate(request("goes on", [*PROMPT, 98], max_tokens=9))
            [found] = await collect(stopped)
            assert found == (text[:first], tuple(ids[: first + 2]), FinishReason.STOP, stop)
            [(_, tokens, *_)] = await collect(other)
            assert list(tokens) == expected_tokens([*PROMPT, 98], 7, 9)
            assert_idle(driver)


@pytest.mark.parametrize("streams, ahead", [(2, 2), (12, 0)])
async def test_a_cpu_goes_ahead_of_steps_with_few_sequences(events, streams, ahead, monkeypatch):
    """The real Worker on a CPU. No plan goes ahead of the first step, which holds the prompts."""
    monkeypatch.setattr("engine.requests.loaded.CPU_AHEAD_SEQUENCES", 8)
    async with bundled_driver.running_driver() as driver:
        await asyncio.gather(*(collect(driver.generate(request(str(i), max_tokens=12))) for i in range(streams)))
    assert events[:2] == [("sent", 1), ("delivered", 1)]
    not_delivered = list(accumulate(1 if event == "sent" else -1 for event, _ in events))
    assert max(not_delivered) == 1 + ahead
