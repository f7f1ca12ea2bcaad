"""Figures of a run, their medians over repeats, and the table. Times are in milliseconds unless a name ends with _s.

Definitions are those of `vllm bench serve`. TTFT: time from sending a request to its first text. ITL: each gap between
two chunks of one sample. TPOT: (end to end - TTFT) / (output tokens - 1) per request, which stays comparable if a
server packs several tokens into a chunk.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from server.commands.bench.answers import Answer

# (field, heading, decimals, True if more is better)
COLUMNS = (
    ("out_tok_s", "out tok/s", 1, True),
    ("req_s", "req/s", 2, True),
    ("ttft_p50", "TTFT p50", 1, False),
    ("ttft_p99", "p99", 1, False),
    ("itl_p50", "ITL p50", 1, False),
    ("itl_p99", "p99", 1, False),
    ("tpot_p50", "TPOT p50", 1, False),
    ("e2e_p50", "e2e p50", 0, False),
    ("e2e_p99", "p99", 0, False),
)


@dataclass(frozen=True)
class Figures:
    """One run of a workload. Rates and latencies cover the successful requests; None if there are none."""

    workload: str
    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    out_tok_s: float | None
    req_s: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    e2e_p50: float | None
    e2e_p99: float | None
    client_cpu_s: float  # processor time of this client during the run
    failures: tuple[str, ...] = field(default=())  # the first few different messages

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_figures(
    workload: str, answers: Sequence[Answer], failures: Sequence[str], wall_s: float, client_cpu_s: float
) -> Figures:
    """Statistics over the answers of one run; `failures` holds one message per failed request."""
    ttft = [(answer.first - answer.started) * 1e3 for answer in answers]
    e2e = [(answer.last - answer.started) * 1e3 for answer in answers]
    gaps = [(b - a) * 1e3 for answer in answers for times in answer.arrivals for a, b in pairwise(times)]
    tpot = [
        (answer.last - answer.first) * 1e3 / (answer.call.max_tokens - 1)
        for answer in answers
        if answer.call.max_tokens > 1
    ]
    output_tokens = sum(answer.output_tokens for answer in answers)
    return Figures(
        workload=workload,
        requests=len(answers) + len(failures),
        failed=len(failures),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        output_tokens=output_tokens,
        wall_s=wall_s,
        out_tok_s=output_tokens / wall_s if answers else None,
        req_s=len(answers) / wall_s if answers else None,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        tpot_p50=percentile(tpot, 50),
        tpot_p99=percentile(tpot, 99),
        e2e_p50=percentile(e2e, 50),
        e2e_p99=percentile(e2e, 99),
        client_cpu_s=client_cpu_s,
        failures=tuple(dict.fromkeys(failures))[:5],
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Percentile by linear interpolation between the closest ranks, as in numpy; None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def medians(runs: Sequence[Figures]) -> dict[str, float | None]:
    """The median over repeats of every column."""
    result: dict[str, float | None] = {}
    for name, *_ in COLUMNS:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        result[name] = statistics.median(values) if values else None
    return result


def ratios(ours: dict[str, float | None], peer: dict[str, float | None]) -> dict[str, float | None]:
    """Ratios of `ours` to `peer`, inverted for times: above 1 always means that `ours` is better."""
    result: dict[str, float | None] = {}
    for name, _, _, more_is_better in COLUMNS:
        top, bottom = (ours[name], peer[name]) if more_is_better else (peer[name], ours[name])
        result[name] = top / bottom if top is not None and bottom else None
    return result


def heading() -> str:
    return _line("workload", "server", [title for _, title, _, _ in COLUMNS], "failed")


def row(workload: str, server: str, runs: Sequence[Figures]) -> str:
    """One line of the table: medians over the repeats, and failed / all requests over all repeats."""
    values = medians(runs)
    cells = ["-" if values[name] is None else f"{values[name]:.{decimals}f}" for name, _, decimals, _ in COLUMNS]
    return _line(workload, server, cells, f"{sum(run.failed for run in runs)}/{sum(run.requests for run in runs)}")


def ratio_row(values: dict[str, float | None]) -> str:
    cells = ["-" if value is None else f"{value:.2f}x" for value in values.values()]
    return _line("", "ratio", cells, "")


def _line(workload: str, server: str, cells: Sequence[str], failed: str) -> str:
    return f"{workload:<9} {server:<10}" + "".join(f"{cell:>10}" for cell in cells) + f"{failed:>9}"
