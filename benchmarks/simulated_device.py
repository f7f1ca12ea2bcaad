"""A Worker process whose device takes time and computes nothing: the real protocol and the real step loop, no model.

    python -m benchmarks.simulated_device STEP_MS LAUNCH_MS LOG FD

The device computes launched steps in order, each in STEP_MS milliseconds, from the end of the step before it or from
its own launch, whichever is later. A launch takes LAUNCH_MS of the Worker's time. When the Driver leaves, the Worker
writes what happened to the file LOG: a JSON list of SimulatedStep, as arrays.
"""

import sys
import time
from pathlib import Path

import msgspec

from engine.executor.step import SideMessage, StartWorker, StepPlan, StepResult, WorkerReady
from engine.garbage_collector import settle_garbage_collector
from engine.worker import worker
from engine.worker.worker import Channel

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 256
SPIN_SECONDS = 0.0005  # before the end of a step: a sleep takes longer than it was asked to


class SimulatedStep(msgspec.Struct, array_like=True):
    """A step on the device. Times are seconds by the Worker's clock; `launched` and `started` are the same if the
    device had nothing to do."""

    num_decodes: int
    num_chunks: int
    launch_seconds: float
    result_seconds: float  # the Worker needs them after the device is done
    launched: float
    started: float
    ended: float


class LaunchedStep:
    """A step on its way, as `serve` holds it until its result is sent."""

    def __init__(self, plan: StepPlan, step: SimulatedStep) -> None:
        self.plan, self.step = plan, step

    def done(self) -> bool:
        return time.perf_counter() >= self.step.ended


class SimulatedRunner:
    """Takes the place of ModelRunner. Each sequence gets the same letter at every step."""

    max_in_flight = 2

    def __init__(self, step_seconds: float, launch_seconds: float) -> None:
        self.steps: list[SimulatedStep] = []
        self._step_seconds, self._launch_seconds = step_seconds, launch_seconds
        self._free_at = 0.0  # by the clock: when the device has done everything launched

    def launch(self, plan: StepPlan) -> LaunchedStep:
        began = time.perf_counter()
        while (launched := time.perf_counter()) < began + self._launch_seconds:
            pass  # as Python code that prepares a step: it holds the GIL
        started = max(launched, self._free_at)
        self._free_at = ended = started + self._step_seconds
        counts = len(plan.decodes), len(plan.chunks)
        self.steps.append(SimulatedStep(*counts, launched - began, 0.0, launched, started, ended))
        return LaunchedStep(plan, self.steps[-1])

    def result(self, launched: LaunchedStep) -> StepResult:
        """Wait as cudaEventSynchronize does: it spins, without the GIL."""
        plan, step = launched.plan, launched.step
        while (left := step.ended - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - SPIN_SECONDS))
        began = time.perf_counter()
        seq_ids = [*plan.decodes, *[chunk.seq_id for chunk in plan.chunks if chunk.sample]]
        token_ids = [ord("a") + seq_id % 26 for seq_id in seq_ids]
        result = StepResult(plan.step_id, [], {}, began - step.launched, seq_ids, token_ids)
        step.result_seconds = time.perf_counter() - began
        return result

    def take_runner(self) -> "SimulatedRunner":
        """The model of this Worker is its runner."""
        return self

    def use_idle_time(self) -> bool:
        return False

    def check_device(self) -> None:
        time.sleep(max(0.0, self._free_at - time.perf_counter()))

    def handle_message(self, message: SideMessage, send: object) -> None:
        """A simulated device holds to no grammar."""


def main() -> int:
    """Be the Worker at the other end of the socket FD."""
    step_ms, launch_ms, log = sys.argv[1:4]
    runner = SimulatedRunner(float(step_ms) / 1e3, float(launch_ms) / 1e3)

    def load(channel: Channel, message: StartWorker) -> SimulatedRunner:
        settle_garbage_collector()
        channel.send(
            WorkerReady(
                num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_SEQS * MAX_MODEL_LEN,
                vocab_size=256,
                device="simulated",
                dtype="none",
                memory={},
            )
        )
        return runner

    status = worker.main(load)
    Path(log).write_bytes(msgspec.json.encode(runner.steps))
    return status


if __name__ == "__main__":
    sys.exit(main())
