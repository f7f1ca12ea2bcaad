#!/usr/bin/env python3
"""One or two OpenAI-compatible servers under the same load, in turns: A B A B.

    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --peer http://127.0.0.1:9000/v1
    python benchmarks/serve.py --command "pageserve serve --model DIR --port {port}" \\
        --peer-command "vllm serve DIR --port {port} --dtype bfloat16" --json benchmarks/results/vllm.json

With --command and --peer-command the benchmark starts the servers itself and pauses one (SIGSTOP to all its processes)
while the other is measured, so that they cannot disturb each other; it reports start-up time, memory and processor time
as well. With --url they run on their own, and an idle one should be really idle.
Without --url and --command, ours is this checkout's own server: of the bundled model, or of --model.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]  # run as a script, this folder is not installed

from benchmarks.processes import ServerProcess  # noqa: E402
from server.commands.bench.client import Endpoint  # noqa: E402
from server.commands.bench.command import (  # noqa: E402
    add_load_options,
    caption,
    fit_shape,
    load_facts,
    positive,
    print_failures,
    run_once,
    runnable,
    whole_number,
)
from server.commands.bench.figures import Figures, heading, medians, ratio_row, ratios, row  # noqa: E402
from server.commands.bench.load import Target, TargetError, find_target, warm_up  # noqa: E402
from server.commands.bench.report import describe, machine, write_json  # noqa: E402
from server.commands.bench.workloads import Shape  # noqa: E402
from server.process import event_loop  # noqa: E402


@dataclass
class Side:
    """One of the compared servers. `process` is None where it runs on its own."""

    name: str
    process: ServerProcess | None
    target: Target
    facts: dict[str, Any]
    runs: list[Figures] = field(default_factory=list)
    cpu_seconds: list[float | None] = field(default_factory=list)

    def pause(self) -> None:
        if self.process is not None:
            self.process.pause()

    def of(self, workload: str) -> list[Figures]:
        return [run for run in self.runs if run.workload == workload]

    def rows(self) -> list[dict[str, Any]]:
        """The runs for the JSON."""
        pairs = zip(self.runs, self.cpu_seconds, strict=True)
        return [{"server": self.name, **run.as_dict(), "server_cpu_s": seconds} for run, seconds in pairs]


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when every request was answered in full, 1 when one was not, 2 when nothing could be measured."""
    options = _parser().parse_args(argv)
    started: list[ServerProcess] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the handler below then stops the started servers
    try:
        return event_loop.run(_compare(options, started))
    except (TargetError, ValueError, RuntimeError) as error:
        print(f"benchmarks/serve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        for process in started:
            process.stop()


async def _compare(options: argparse.Namespace, started: list[ServerProcess]) -> int:
    sides, max_token_id = [], options.max_token_id
    for name, where in _wanted(options):
        side, max_token_id = await _bring_up(name, where, options, max_token_id, started)
        side.pause()
        sides.append(side)
    shape = fit_shape(options, max_token_id, [side.target.max_model_len for side in sides])
    names = runnable(options.workload, shape, print)
    for workload in names:
        for repeat in range(options.repeats):
            for side in sides:
                await _measure(side, workload, shape, options, repeat)
    _print_table(sides, names, options)
    if options.json is not None:
        servers = {side.name: side.facts for side in sides}
        write_json(options.json, load_facts(options, shape), servers, [run for side in sides for run in side.rows()])
    return 1 if any(run.failed for side in sides for run in side.runs) else 0


def _wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(name, URL or command) of each server, ours first."""
    model = f"--model {shlex.quote(options.model)} " if options.model else ""
    own = f"{shlex.quote(sys.executable)} -m server.cli serve {model}--host 127.0.0.1 --port {{port}}"
    ours = options.url or options.command or own
    peer = options.peer or options.peer_command
    return [("ours", ours), ("peer", peer)] if peer else [("ours", ours)]


async def _bring_up(
    name: str, where: str, options: argparse.Namespace, max_token_id: int, started: list[ServerProcess]
) -> tuple[Side, int]:
    """Start the server if it is a command, and wait until it has answered a first few requests."""
    process, start = None, time.monotonic()
    if not where.startswith(("http://", "https://")):
        process = ServerProcess(where, options.log_dir / f"{name}.log")
        started.append(process)
    endpoint = Endpoint(where if process is None else process.base_url, options.api_key)
    while True:
        try:
            target = await find_target(endpoint, extra_body=options.extra_body)
            max_token_id = await warm_up(target, max_token_id, options.start_timeout)
            break
        except TargetError as error:
            if process is None or time.monotonic() - start > options.start_timeout:
                raise TargetError(f"{name}: {error}") from None
            process.check_alive()
            await asyncio.sleep(0.1)
    facts: dict[str, Any] = {"model": target.model, "max_model_len": target.max_model_len}
    if process is not None:
        facts |= {"ready_s": round(time.monotonic() - start, 2), "memory_mib": round(process.memory_mib())}
    print(f"{name}: {target.model}, {facts}" if process else f"{name}: {target.model} at {where}", flush=True)
    return Side(name, process, target, facts), max_token_id


async def _measure(side: Side, workload: str, shape: Shape, options: argparse.Namespace, repeat: int) -> None:
    if side.process is not None:
        side.process.resume()
    await warm_up(side.target, shape.max_token_id, options.timeout)  # wakes caches and clocks after a pause
    before = side.process.cpu_seconds() if side.process is not None else 0.0
    label = f"{workload} {repeat + 1}/{options.repeats} {side.name}"
    seed = options.seed + repeat
    run = await run_once(workload, side.target, shape, seed=seed, timeout=options.timeout, label=label)
    side.runs.append(run)
    if side.process is None:
        side.cpu_seconds.append(None)
        return
    side.process.check_alive()
    side.cpu_seconds.append(round(side.process.cpu_seconds() - before, 3))
    side.facts["memory_mib"] = max(side.facts["memory_mib"], round(side.process.memory_mib()))
    side.process.pause()


def _print_table(sides: list[Side], names: list[str], options: argparse.Namespace) -> None:
    print_failures([run for side in sides for run in side.runs])
    print(f"{describe(machine())}; {caption(options)}")
    for side in sides:
        print(f"{side.name}: {', '.join(f'{key} {value}' for key, value in side.facts.items())}")
    print(heading())
    for name in names:
        for index, side in enumerate(sides):
            print(row("" if index else name, side.name, side.of(name)))
        if len(sides) == 2:
            print(ratio_row(ratios(medians(sides[0].of(name)), medians(sides[1].of(name)))))
    if len(sides) == 2:
        print("ratio: above 1 is better for ours, in every column")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours = parser.add_mutually_exclusive_group()
    ours.add_argument("--url", help="our server, already running")
    ours.add_argument("--command", help="starts our server; holds {port}")
    ours.add_argument("--model", help="the model of this checkout's own server (default: the bundled model)")
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--peer", metavar="URL", help="the other server, already running")
    peer.add_argument("--peer-command", metavar="COMMAND", help="starts the other server; holds {port}")
    parser.add_argument("--repeats", type=whole_number, default=3, help="runs of each workload on each (default 3)")
    parser.add_argument("--start-timeout", type=positive, default=600.0, help="seconds a server may take (default 600)")
    parser.add_argument(
        "--log-dir", type=Path, default=ROOT / ".cache" / "bench", help="folder for the servers' output"
    )
    add_load_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
