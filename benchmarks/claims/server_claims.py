"""Claims about many users of a server, over HTTP."""

import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.claims.row import Row
from benchmarks.processes import ServerProcess
from server.commands.bench.client import Endpoint
from server.commands.bench.figures import Figures
from server.commands.bench.load import Target, TargetError, find_target, run_workload, warm_up
from server.commands.bench.workloads import FIRST_TOKEN_ID, Call, Client
from server.process import event_loop

LOGS = Path(".cache/bench")
TIMEOUT = 900.0  # seconds of a request
USERS, TURNS = 100, 20
MANY = 1000


@contextmanager
def server(name: str, flags: str) -> Iterator[tuple[ServerProcess, Target, int]]:
    """A server of this checkout that answers: (process, target, largest token id)."""
    command = f"{shlex.quote(sys.executable)} -m server.cli serve --host 127.0.0.1 --port {{port}} {flags}"
    process = ServerProcess(command, LOGS / f"claims-{name}.log")
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                target = event_loop.run(find_target(Endpoint(process.base_url, None)))
                max_token_id = event_loop.run(warm_up(target, 7999, TIMEOUT))
                break
            except TargetError:
                process.check_alive()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield process, target, max_token_id
    finally:
        process.stop()


def run(name: str, target: Target, clients: Sequence[Client]) -> Figures:
    """One run of a load. RuntimeError where a request failed: a figure of the others would be none."""
    figures = event_loop.run(run_workload(name, target, clients, TIMEOUT))
    if figures.failed:
        raise RuntimeError(f"{name}: {figures.failed} of {figures.requests} requests failed: {figures.failures[0]}")
    return figures


class TokenIds:
    """Random prompts, other ones with each call."""

    def __init__(self, max_token_id: int) -> None:
        self._rng, self._most = random.Random(0), max_token_id

    def draw(self, count: int) -> tuple[int, ...]:
        low = min(FIRST_TOKEN_ID, self._most // 2)
        return tuple(self._rng.randint(low, self._most) for _ in range(count))


def hundred_users(model: Path, repeats: int) -> list[Row]:
    """The time per token of the slowest of 100 users beside that of the median user. Each sends five requests."""
    flags = f"--model {model} --dtype bfloat16 --max-num-seqs {USERS}"
    with server("users", flags) as (_, target, max_token_id):
        ids, runs = TokenIds(max_token_id), []
        for _ in range(repeats + 1):
            clients = [
                Client(tuple(Call(ids.draw(128), 64) for _ in range(5)), start_at=i / USERS) for i in range(USERS)
            ]
            runs.append(run("100 users", target, clients))
    middle = sorted(runs[1:], key=lambda figures: figures.tpot_p99 or 0.0)[repeats // 2]
    first_token = f"first token {middle.ttft_p50:.0f} ms, P99 {middle.ttft_p99:.0f}"
    note = f"{model.name}, {middle.out_tok_s:.0f} tokens/s, {first_token}"
    p50, p99 = _known(middle.tpot_p50), _known(middle.tpot_p99)
    return [Row(f"{USERS} users: P99 per token", "ms per token", p99, p50, "P50", 2.0, at_most=True, note=note)]


def many_turns(model: Path) -> list[Row]:
    """Requests per second of 100 users with 20 turns each, who send their whole history, with and without the prefix
    cache."""
    rates, first = {}, {}
    for name, flag in (("cached", ""), ("not cached", "--no-enable-prefix-caching")):
        with server("turns", f"--model {model} --dtype bfloat16 --max-num-seqs {USERS} {flag}") as (_, target, most):
            ids = TokenIds(most)
            system = ids.draw(384)
            figures = run("20 turns", target, [Client(_turns(ids, system)) for _ in range(USERS)])
        rates[name], first[name] = _known(figures.req_s), _known(figures.ttft_p50)
    note = f"{model.name}, first token {first['cached']:.0f} ms against {first['not cached']:.0f}"
    claim = f"{USERS} users x {TURNS} turns"
    return [Row(claim, "requests/s", rates["cached"], rates["not cached"], "no prefix cache", 1.0, note=note)]


def _turns(ids: TokenIds, history: tuple[int, ...]) -> tuple[Call, ...]:
    calls = []
    for _ in range(TURNS):
        history += ids.draw(24)
        calls.append(Call(history, 16))
        history += ids.draw(16)
    return tuple(calls)


def a_thousand(repeats: int) -> list[Row]:
    """1,000 requests at once on the bundled model: every one must be answered; the slowest of their gaps between tokens
    beside the median, and the server's memory after the last round beside that after the second. By then every block of
    the small pool has been used once. Tokens without text make no chunk unless the client asks for token ids."""
    flags = f"--max-num-seqs {MANY} --max-queued-requests {MANY} --kv-cache-memory 192MiB"
    with server("thousand", flags) as (process, target, max_token_id):
        ids, runs, memory = TokenIds(max_token_id), [], []
        for _ in range(repeats + 1):
            calls = [Call(ids.draw(32), 64, return_token_ids=True) for _ in range(MANY)]
            runs.append(run("1,000 requests", target, [Client((call,)) for call in calls]))
            memory.append(process.memory_mib())
    middle = sorted(runs[1:], key=lambda figures: figures.itl_p99 or 0.0)[repeats // 2]
    note = f"bundled model, all answered, {middle.out_tok_s:.0f} tokens/s, first token P99 {middle.ttft_p99:.0f} ms"
    p50, p99 = _known(middle.itl_p50), _known(middle.itl_p99)
    return [
        Row(f"{MANY} requests: P99 between tokens", "ms", p99, p50, "P50", 2.0, at_most=True, note=note),
        Row(f"{MANY} requests: memory", "MiB", memory[-1], memory[1], "second round", 1.05, at_most=True,
            note=f"after {len(runs)} rounds"),
    ]  # fmt: skip


def _known(value: float | None) -> float:
    assert value is not None, "run() raises where no request succeeded"
    return value
