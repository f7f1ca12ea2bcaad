"""The Supervisor with Executors that are told how their Workers fare: which deaths count, and who is started again."""

import pytest

import engine.executor.recovery
import engine.executor.supervisor
from engine.config import EngineConfig
from engine.errors import EngineError, ModelError, WorkerDiedError
from engine.executor.executor import NoRoomError
from engine.executor.step import StartWorker, WorkerReady
from engine.executor.supervisor import Supervisor

START = StartWorker(EngineConfig(), "folder", [2])
READY = WorkerReady(4, 64, 2, 64, 256, "fake", "none", {})
KILLED = WorkerDiedError("killed", from_outside=True)
CRASHED = WorkerDiedError("crashed")


@pytest.fixture
def make(monkeypatch):
    """`make(fates)`: a Supervisor whose Workers, one after the other, come to READY or die of an error."""
    monkeypatch.setattr(engine.executor.recovery, "FIRST_BACKOFF", 0.0)
    monkeypatch.setattr(engine.executor.supervisor, "NO_ROOM_SECONDS", 0.0)

    def make_with(*fates, max_restarts=5):
        waiting = list(fates)

        class FatedExecutor:
            def __init__(self, command, durations):
                self.stopped = False

            async def start(self, message):
                assert message is START
                self.fate = waiting.pop(0)
                if isinstance(self.fate, NoRoomError):
                    raise self.fate

            async def wait_ready(self, on_progress):
                if isinstance(self.fate, Exception):
                    raise self.fate
                return self.fate

            async def stop(self, grace=0):
                self.stopped = True

        monkeypatch.setattr(engine.executor.supervisor, "Executor", FatedExecutor)
        starts = []
        supervisor = Supervisor(None, max_restarts, 600.0, lambda: starts.append(supervisor.executor))
        return supervisor, starts

    return make_with


async def test_a_first_worker_that_is_killed_from_outside_is_started_again(make):
    supervisor, starts = make(KILLED, KILLED, READY)
    await supervisor.start(START)
    assert await supervisor.wait_loaded(lambda phase: None) is READY
    assert len(starts) == 2 and all(executor.stopped for executor in starts)


@pytest.mark.parametrize("fate", [CRASHED, ModelError("no weights")], ids=["crash", "refusal"])
async def test_a_first_worker_that_cannot_load_ends_the_start(make, fate):
    supervisor, starts = make(fate)
    await supervisor.start(START)
    with pytest.raises(type(fate), match=str(fate)):
        await supervisor.wait_loaded(lambda phase: None)
    assert not starts


async def test_a_death_while_loading_again_counts_and_a_lack_of_room_does_not(make):
    lack = NoRoomError("no descriptor left")
    supervisor, starts = make(READY, CRASHED, lack, lack, READY, max_restarts=2)
    await supervisor.start(START)
    await supervisor.wait_loaded(lambda phase: None)
    assert supervisor.record_death(CRASHED, ["a"]) == []
    assert await supervisor.restart(CRASHED, lambda: 1) is READY
    assert len(starts) == 4
    supervisor.record_death(CRASHED, [])
    with pytest.raises(EngineError, match="a Worker has died 3 times within 600 s, and max_worker_restarts is 2"):
        await supervisor.restart(CRASHED, lambda: 1)


def test_a_death_from_outside_is_held_against_no_request(make):
    supervisor, _ = make()
    for _ in range(5):
        assert supervisor.record_death(KILLED, ["a"]) == []
    assert supervisor.recovery.suspects_nobody
    assert [supervisor.record_death(CRASHED, ["a"]) for _ in range(3)] == [[], [], ["a"]]
