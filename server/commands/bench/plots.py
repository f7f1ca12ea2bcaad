"""The plot of `pageserve bench`: one row per workload. Needs matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from itertools import pairwise

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from server.commands.bench.answers import Answer

BLUE = "#2b6cb0"
NUM_BINS = 40


def draw(answers: dict[str, list[Answer]], title: str) -> Figure:
    """Draw chunks per second and the distributions of TTFT and ITL. `answers`: workload -> answers of all repeats."""
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text in an SVG
    figure = Figure(figsize=(11, 0.6 + 2.5 * max(1, len(answers))), layout="constrained")
    figure.suptitle(title, fontsize=9)
    rows = figure.subplots(max(1, len(answers)), 3, squeeze=False)
    for (name, kept), (rate, ttft, itl) in zip(answers.items(), rows, strict=False):
        _draw_rate(rate, kept)
        rate.set_title(name, loc="left", fontweight="bold")
        _draw_shares(ttft, [(answer.first - answer.started) * 1e3 for answer in kept], "time to first token (ms)")
        gaps = [(b - a) * 1e3 for answer in kept for times in answer.arrivals for a, b in pairwise(times)]
        _draw_shares(itl, gaps, "between two tokens (ms)")
    return figure


def _draw_rate(axes: Axes, answers: Sequence[Answer]) -> None:
    """Draw arrived chunks per second; the repeats follow one another on the time axis."""
    start = min(answer.started for answer in answers)
    times = [moment - start for answer in answers for sample in answer.arrivals for moment in sample]
    width = max(times) / NUM_BINS
    axes.hist(times, bins=NUM_BINS, weights=[1 / width] * len(times), color=BLUE)
    axes.set(xlabel="seconds into the run", ylabel="chunks/s", ylim=(0, None))


def _draw_shares(axes: Axes, values: Sequence[float], label: str) -> None:
    """Draw the share of values up to x, with the median and the 99th percentile marked."""
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    if not values:
        return
    axes.ecdf(values, color=BLUE)
    for share in (0.5, 0.99):
        axes.axhline(share, color="#a0aec0", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, None)
