"""The plots of benchmarks/memory.py, one PNG per claim. Needs matplotlib (the extra `bench`)."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]

BLUE, LIGHT_BLUE, ORANGE, GREY, LIGHT_GREY = "#2b6cb0", "#90cdf4", "#dd6b20", "#a0aec0", "#e2e8f0"
PARTS = (
    ("tokens", "tokens", BLUE),
    ("reserved", "reserved for later tokens", LIGHT_BLUE),
    ("internal", "reserved or allocated, never used", ORANGE),
    ("external", "free, too small or held back", LIGHT_GREY),
)


def draw(results: dict[str, list[Row]], folder: Path) -> list[Path]:
    """Write memory-*.png into `folder`; returns their paths."""
    figures = {
        "waste": draw_waste(results["waste"]),
        "sharing": draw_sharing(results["sharing"]),
        "chat": draw_chat(results["chat"]),
        "block-sizes": draw_block_sizes(results["block_sizes"]),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"memory-{name}.png")
        figure.savefig(paths[-1], dpi=100)
    return paths


def draw_waste(rows: list[Row]) -> Figure:
    figure, panels = _panels(10, 3.6, names := _values(rows, "lengths"))
    for axes, name in zip(panels, names, strict=True):
        own = [row for row in reversed(rows) if row["lengths"] == name]
        left = [0.0] * len(own)
        for part, label, color in PARTS:
            widths = [100 * row[part] for row in own]
            axes.barh([row["scheme"] for row in own], widths, left=left, color=color, label=label, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for index, row in enumerate(own):
            axes.text(102, index, f"{100 * row['tokens']:.0f} %", va="center", color=BLUE, fontsize=9)
        axes.set_xlim(0, 100)
        axes.set_xlabel("KV memory, % of the pool")
    panels[1].set_yticklabels([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def draw_sharing(rows: list[Row]) -> Figure:
    figure, panels = _panels(10, 3.8, names := _values(rows, "lengths"))
    methods = _values(rows, "method")
    for axes, name in zip(panels, names, strict=True):
        for index, (method, color) in enumerate(zip(methods, (BLUE, ORANGE), strict=True)):
            own = [row for row in rows if row["lengths"] == name and row["method"] == method]
            places = [place + 0.4 * (index - 0.5) for place in range(len(own))]
            axes.bar(places, [100 * row["saved"] for row in own], width=0.38, color=color, label=method)
            paper = [(x, row["paper_percent"]) for x, row in zip(places, own, strict=True) if row["paper_percent"]]
            label = "paper (widths 2 and 6)" if index else None
            axes.plot(*zip(*paper, strict=True), "kD", markersize=5, label=label)
        widths = _values(rows, "width")
        axes.set_xticks(range(len(widths)), [str(width) for width in widths])
        axes.set_xlabel("samples or beams per request")
        axes.set_ylim(0, 100)
    panels[0].set_ylabel("blocks saved by sharing, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def draw_chat(rows: list[Row]) -> Figure:
    figure, (axes,) = _panels(6, 3.8, ["Chats with one system prompt"])
    places, times = [row["system_tokens"] for row in rows], [row["times_less"] for row in rows]
    axes.plot(places, times, "o-", color=BLUE)
    for place, value in zip(places, times, strict=True):
        axes.annotate(f"{value:.1f}", (place, value), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(5, color=GREY, linestyle="--", linewidth=1)
    axes.text(places[0], 5.15, "claim: 5 times", color="#4a5568", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_ylim(0, max(6.0, *times) * 1.15)
    axes.set_xlabel("system prompt, tokens")
    axes.set_ylabel("times less KV memory than unshared")
    return figure


def draw_block_sizes(rows: list[Row]) -> Figure:
    figure, (left, right) = _panels(10, 3.6, ["Waste in last blocks", "Prompts of a chat, prefix cache on"])
    sizes = [row["block_size"] for row in rows]
    wastes = [name for name in rows[0] if name.startswith("waste ")]
    for name, color in zip(wastes, (BLUE, ORANGE), strict=True):
        left.plot(sizes, [100 * row[name] for row in rows], "o-", color=color, label=name.removeprefix("waste "))
    left.axhline(4, color=GREY, linestyle="--", linewidth=1, label="claim: 4 %")
    left.set_ylabel("% of held blocks")
    left.legend(frameon=False, fontsize=9)
    times = [row["computed_per_needed"] for row in rows]
    right.plot(sizes, times, "o-", color=BLUE)
    right.set_ylabel("times that a new token is computed")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("tokens per block")
        axes.set_ylim(bottom=0)
    right.set_ylim(top=1.15 * max(times))
    return figure


def _panels(width: float, height: float, titles: list[str]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, panels


def _values(rows: list[Row], name: str) -> list[Any]:
    """The distinct values of a column, in order."""
    return list(dict.fromkeys(row[name] for row in rows))
