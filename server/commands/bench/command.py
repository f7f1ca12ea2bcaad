"""The `pageserve bench` command: sends the workloads to one running server; shows progress and a table."""

import argparse
import json
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from server.commands.bench.answers import LOAD_FIELDS, Answer
from server.commands.bench.client import Endpoint
from server.commands.bench.figures import Figures, heading, row
from server.commands.bench.load import Target, TargetError, find_target, run_workload, warm_up
from server.commands.bench.report import describe, machine, write_json
from server.commands.bench.workloads import WORKLOADS, Shape, build_workload
from server.process import event_loop

WARM_UP_TIMEOUT = 300.0  # seconds; a server may compile at its first requests


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Exit status: 0 if every request was answered in full, 1 if not, 2 if the server cannot be
    measured."""
    options = argparse.Namespace(**_parser().read(sys.argv[1:] if argv is None else argv))
    if options.plot is not None and find_spec("matplotlib") is None:  # fail before the run, not after it
        print("pageserve bench: --plot needs matplotlib: pip install '.[bench]' in pageserve's folder", file=sys.stderr)
        return 2
    try:
        for flag, path in (("--json", options.json), ("--plot", options.plot)):
            if path is not None:
                _check_writable(flag, path)
        return event_loop.run(_bench(options))
    except (TargetError, ValueError) as error:
        print(f"pageserve bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _check_writable(flag: str, path: Path) -> None:
    """Raise ValueError if the file cannot be written; a file that is there keeps its content."""
    exists = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{flag}: cannot write {path}: {error.strerror}") from None
    if not exists:
        path.unlink()


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the load, which benchmarks/serve.py has as well."""
    from server.commands.client_options import add_api_key  # imports the engine, which the load does not need

    parser.add_argument(
        "--workload",
        type=workload_names,
        default="all",
        metavar="NAME,...",
        help=f"of {', '.join(WORKLOADS)}; all: each",
    )
    parser.add_argument("--n", type=whole_number, default=64, help="size of a workload in requests (default 64)")
    parser.add_argument("--rate", type=positive, default=4.0, help="arrivals per second of mixed (default 4)")
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10**6),
        help="seed of the prompts' token ids; default: random, so that no run finds prompts of another in a prefix "
        "cache",
    )
    parser.add_argument(
        "--extra-body",
        type=extra_body,
        default={},
        metavar="JSON",
        help="""fields for every request, such as '{"temperature": 0.7, "top_k": 20}'""",
    )
    parser.add_argument("--timeout", type=positive, default=900.0, help="seconds until a request counts as failed")
    parser.add_argument("--max-token-id", type=whole_number, default=7999, help="largest token id in prompts")
    add_api_key(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every run to this file")


def extra_body(text: str) -> dict[str, Any]:
    """Checks a JSON object that sets no field of the load itself."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"this is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError('this is no JSON object: give fields of a request, as {"top_k": 20}')
    if taken := [name for name in fields if name in LOAD_FIELDS]:
        raise argparse.ArgumentTypeError(f"the load sets {', '.join(taken)} itself: leave it out")
    return fields


def workload_names(text: str) -> str:
    """Checks names with commas between them, or "all"."""
    for name in text.split(","):
        if name not in ("all", *WORKLOADS):
            raise argparse.ArgumentTypeError(f"{name!r} is not a workload; there are {', '.join(WORKLOADS)}, and all")
    return text


def selected(workload: str) -> tuple[str, ...]:
    """The workloads that --workload names."""
    names = workload.split(",")
    return WORKLOADS if "all" in names else tuple(dict.fromkeys(names))


async def run_once(
    name: str,
    target: Target,
    shape: Shape,
    *,
    seed: int,
    timeout: float,
    label: str,
    keep: Callable[[Sequence[Answer]], None] = lambda answers: None,
) -> Figures:
    """Run one workload; on a terminal, show a live line with finished requests, rate and remaining time."""
    clients = build_workload(name, shape, seed)
    total = sum(len(client.calls) for client in clients)
    with tqdm(total=total, desc=label, unit="req", leave=False, disable=None, mininterval=0.5) as bar:
        advance: Callable[[], None] = bar.update
        return await run_workload(name, target, clients, timeout, advance, keep)


def caption(options: argparse.Namespace) -> str:
    repeats = f"medians of {options.repeats} runs" if options.repeats > 1 else "one run"
    extra = f", with {json.dumps(options.extra_body)}" if options.extra_body else ""
    return f"times in ms, n {options.n}, seed {options.seed}, {repeats}{extra}"


def fit_shape(options: argparse.Namespace, max_token_id: int, lengths: list[int | None]) -> Shape:
    """The size of the load, within the context length and vocabulary of every server's model."""
    known = [length for length in lengths if length is not None]
    return Shape(options.n, options.rate, max_token_id, min(known) if known else None)


def runnable(workload: str, shape: Shape, say: Callable[[str], None]) -> list[str]:
    """The workloads that fit the model's context; `say` reports the others. ValueError if --workload names one."""
    names = []
    for name in selected(workload):
        try:
            build_workload(name, shape, 0)
            names.append(name)
        except ValueError as error:
            if workload != "all":
                raise
            say(f"skipped: {error}")
    return names


async def _bench(options: argparse.Namespace) -> int:
    target = await _reach(options)
    max_token_id = await warm_up(target, options.max_token_id, WARM_UP_TIMEOUT)
    shape = fit_shape(options, max_token_id, [target.max_model_len])
    print(f"{target.model} at {target.endpoint.base_url}; {describe(machine())}")
    print(caption(options))
    print(heading(), flush=True)
    runs: list[Figures] = []
    answers: dict[str, list[Answer]] = {}
    for name in runnable(options.workload, shape, print):
        repeats = [
            await run_once(
                name,
                target,
                shape,
                seed=options.seed + repeat,
                timeout=options.timeout,
                label=f"{name} {repeat + 1}",
                keep=answers.setdefault(name, []).extend,
            )
            for repeat in range(options.repeats)
        ]
        runs += repeats
        print(row(name, target.model[:10], repeats), flush=True)
    print_failures(runs)
    if options.json is not None:
        servers = {target.model: {"base_url": target.endpoint.base_url, "max_model_len": target.max_model_len}}
        write_json(
            options.json,
            load_facts(options, shape),
            servers,
            [{"server": target.model, **run.as_dict()} for run in runs],
        )
    if options.plot is not None:
        _draw(options.plot, answers, f"{target.model} at {target.endpoint.base_url}; {describe(machine())}")
    return 1 if any(run.failed for run in runs) else 0


def _draw(path: Path, answers: dict[str, list[Answer]], title: str) -> None:
    from server.commands.bench.plots import draw  # imports matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    draw({name: kept for name, kept in answers.items() if kept}, title).savefig(path, dpi=100)


async def _reach(options: argparse.Namespace) -> Target:
    from server.commands.client_options import api_url

    endpoint = Endpoint(api_url(options.base_url), options.api_key)
    try:
        return await find_target(endpoint, options.model, options.extra_body)
    except TargetError as error:
        raise TargetError(f"{error}. Start a server with `pageserve serve`, or name one with --base-url.") from None


def load_facts(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """The load that was sent, for the JSON: the effective options without paths and keys."""
    return {
        "n": shape.n,
        "rate": shape.rate,
        "seed": options.seed,
        "repeats": options.repeats,
        "max_token_id": shape.max_token_id,
        "max_model_len": shape.max_model_len,
        "extra_body": options.extra_body,
    }


def print_failures(runs: list[Figures]) -> None:
    for message in dict.fromkeys(f"{run.workload}: {text}" for run in runs for text in run.failures):
        print(f"failed: {message}", file=sys.stderr)


def _parser() -> Any:
    from engine.command_line import Parser
    from server.commands.client_options import DEFAULT_BASE_URL

    parser = Parser("bench", "", "Measure a running OpenAI-compatible server: throughput and latency.")
    parser.add_argument("--base-url", default=DEFAULT_BASE_URL, help="default: %(default)s")
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--repeats", type=whole_number, default=1, help="runs per workload; the table shows medians")
    add_load_options(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="PATH", help="draw rate and latencies of every workload (PNG, SVG)"
    )
    return parser


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
