"""Measures how long a device that takes time idles between two decode steps, while real processes serve it.

    python -m benchmarks.device_idle [--step-ms 1 2 4 8 16 30] [--batch 1 64 256] [--steps 400] [--json FILE]

The Driver, its scheduler and streams, the messages, the Worker process and its step loop are those of a server; only
the device is simulated (benchmarks/simulated_device.py). Idle time is what lies between the end of a step and the start
of the next, by the device's own clock, in steps where all sequences decode.

`driver` is the CPU time of the Driver's process per step, which includes the readers of the streams, and `launch` is
the Worker's time per step: the launch, and the making of the result. A step can hide both if they take no longer
together than the step: then the aim is less than 0.05 ms before 99 % of the steps. If they take longer, the aim is the
least mean idle time that is possible. Two plans are under way at most, so every second launch waits for a result,
(driver + launch - step) / 2 on average; or the Driver alone is slower than the device. Such a row may exceed the least
by a tenth of the step, because the Driver's time varies. `turnaround` is the time from the end of a step to the launch
of the plan that answers its result: the device idles if it exceeds the step.

The last line says the mean idle time and the share of the steps; the exit status is 1 if a row misses its aim.

Other programs on the machine make idle time of their own. `chrt -f 50` before the command keeps them away.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from benchmarks.simulated_device import BLOCK_SIZE, SimulatedStep
from engine.config import EngineConfig
from engine.driver import Driver
from engine.garbage_collector import settle_garbage_collector
from engine.request import Request
from engine.requests.stream import RequestStream
from engine.sampling_params import SamplingParams
from server.commands.bench.report import describe, machine
from server.process import event_loop

IDLE_MS, SHARE = 0.05, 0.99  # the aim: less than so many ms before so many of the steps
TOLERANCE = 0.1  # share of a step
PROMPT_TOKENS = 100
WARM_UP_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Milliseconds, and shares of the steps."""

    step: float
    batch: int
    num_steps: int
    idle: float  # mean
    idle_p99: float
    short: float  # share of the steps before which the device idled less than IDLE_MS
    driver: float  # mean
    launch: float  # median
    turnaround: float  # median

    @property
    def must_hide(self) -> bool:
        """True if the Driver's and the Worker's work fits into a step."""
        return self.driver + self.launch <= self.step

    @property
    def least(self) -> float:
        """The mean idle time that cannot be avoided."""
        return max(0.0, (self.driver + self.launch - self.step) / 2, self.driver - self.step)

    @property
    def meets(self) -> bool:
        if self.must_hide:
            return self.short >= SHARE
        return self.idle <= self.least + max(IDLE_MS, TOLERANCE * self.step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1, 2, 4, 8, 16, 30], help="times of a step")
    parser.add_argument("--launch-ms", type=float, default=0.2, help="the Worker's time for a launch")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], help="sequences that decode together")
    parser.add_argument("--steps", type=int, default=400, help="per row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    options = parser.parse_args()
    facts = machine()
    print(describe(facts), flush=True)
    print(f"device idle before a decode step, ms; a launch takes {options.launch_ms:g} ms")
    names = "driver", "launch", "turnaround", "aim"
    print(f"{'step':>6}{'seqs':>6}{'mean':>9}{'p99':>9}{'< 0.05':>9}" + "".join(f"{name:>11}" for name in names))
    rows = []
    for batch in options.batch:
        for step_ms in options.step_ms:
            rows.append(row := measure(step_ms, options.launch_ms, batch, options.steps))
            aim = f"{SHARE:.0%}" if row.must_hide else f"{row.least:.3f}"
            print(
                f"{step_ms:6g}{batch:6d}{row.idle:9.3f}{row.idle_p99:9.3f}{row.short:9.2%}{row.driver:11.3f}"
                f"{row.launch:11.3f}{row.turnaround:11.3f}{aim:>11}{'' if row.meets else '  missed'}",
                flush=True,
            )
    if options.json:
        settings = {"steps": options.steps, "launch_ms": options.launch_ms}
        found = {"machine": facts, "settings": settings, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return summarize(rows)


def summarize(rows: list[Row]) -> int:
    """Print the last line; returns the exit status."""
    missed = [row for row in rows if not row.meets]
    count = sum(row.num_steps for row in rows)
    idle = sum(row.idle * row.num_steps for row in rows) / count
    idling = 1 - sum(row.short * row.num_steps for row in rows) / count
    verdict = f"{len(missed)} of {len(rows)} rows miss their aim" if missed else "every row meets its aim"
    print(f"mean idle {idle:.3f} ms; {idling:.1%} of {count} steps began {IDLE_MS} ms or more late; {verdict}")
    return 1 if missed else 0


def measure(step_ms: float, launch_ms: float, batch: int, num_steps: int) -> Row:
    """Serve `batch` sequences that decode together for `num_steps` steps, by a Worker process of their own."""
    with tempfile.TemporaryDirectory(prefix="pageserve-device-idle-") as folder:
        log = Path(folder) / "steps.json"
        command = sys.executable, "-m", "benchmarks.simulated_device", str(step_ms), str(launch_ms), str(log)
        driver_ms = event_loop.run(_decode(command, batch, num_steps)) * 1e3
        steps = msgspec.json.decode(log.read_bytes(), type=list[SimulatedStep])
    return row_of(steps, step_ms, batch, num_steps, driver_ms)


def row_of(steps: list[SimulatedStep], step_ms: float, batch: int, num_steps: int, driver_ms: float) -> Row:
    """The figures of the steps in which all sequences decode, the first WARM_UP_STEPS left out."""
    decodes = [i for i, step in enumerate(steps) if step.num_decodes == batch and not step.num_chunks]
    chosen = decodes[WARM_UP_STEPS : WARM_UP_STEPS + num_steps]
    idle = [(steps[i].started - steps[i - 1].ended) * 1e3 for i in chosen]
    return Row(
        step=step_ms,
        batch=batch,
        num_steps=len(idle),
        idle=statistics.fmean(idle),
        idle_p99=statistics.quantiles(idle, n=100)[-1],
        short=sum(ms < IDLE_MS for ms in idle) / len(idle),
        driver=driver_ms,
        launch=statistics.median((steps[i].launch_seconds + steps[i].result_seconds) * 1e3 for i in chosen),
        turnaround=statistics.median((steps[i].launched - steps[i - 2].ended) * 1e3 for i in chosen),
    )


async def _decode(command: tuple[str, ...], batch: int, num_steps: int) -> float:
    """The Driver's CPU seconds per step."""
    driver = Driver(EngineConfig(block_size=BLOCK_SIZE), worker_command=command, max_queued_requests=batch + 1)
    await driver.start()
    try:
        await driver.wait_ready()
        settle_garbage_collector()
        num_tokens = num_steps + WARM_UP_STEPS + 4
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        streams = [driver.generate(Request(f"r{i}", _prompt(i), params)) for i in range(batch)]
        readers = [asyncio.create_task(_read(stream)) for stream in streams[1:]]
        while streams[0].num_generated_tokens < WARM_UP_STEPS:
            await anext(streams[0])
        started, num_read = time.process_time(), streams[0].num_generated_tokens
        await _read(streams[0])
        seconds = time.process_time() - started
        await asyncio.gather(*readers)
    finally:
        await driver.stop()
    return seconds / (num_tokens - num_read)


async def _read(stream: RequestStream) -> None:
    async for _ in stream:
        pass


def _prompt(number: int) -> list[int]:
    """Lengths differ, so that blocks are full at different steps."""
    return [ord("a") + (number + i) % 26 for i in range(PROMPT_TOKENS + number % BLOCK_SIZE)]


if __name__ == "__main__":
    sys.exit(main())
