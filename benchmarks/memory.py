#!/usr/bin/env python3
"""Measures the KV cache memory that paging and sharing save: every claim of the field, on the real block manager.

    python -m benchmarks.memory [--quick] [--speed] [--out FOLDER] [--no-plots]

Drives the Scheduler and the BlockManager step by step, with a Worker that computes nothing and ends each sequence at a
length drawn beforehand with a fixed seed: the figures are counts, the same on every machine. Only the beams are drawn
by a model, the bundled one in fp32. Prints a table, the claim beside each figure, and writes memory.json and the plots
to the folder. --speed also measures the bundled model by block size: that one is a time.
"""

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]  # run as a script, this folder is not installed

from benchmarks.contiguous import BuddyPool, FirstFitPool, contiguous_shares  # noqa: E402
from benchmarks.memory_beams import BeamEngine  # noqa: E402
from benchmarks.memory_load import (  # noqa: E402
    ALPACA,
    MAX_MODEL_LEN,
    POOL_SLOTS,
    SHAREGPT,
    Lognormal,
    Shares,
    chat,
    paged,
    sharing,
)
from server.commands.bench.report import describe, machine  # noqa: E402

DISTRIBUTIONS = (SHAREGPT, ALPACA)
WIDTHS = (2, 4, 6)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

# Kwon et al. 2023. Figure 2: tokens in % of the KV memory. Section 6.3: saved in % for the widths 2 and 6.
PAPER_TOKENS = {"reserve max_model_len": 20.4, "reserve power of two": 26.8, "reserve oracle": 38.2, "paging": 96.3}
METHODS = {"sampling": "parallel sampling", "beams": "beams of the bundled model"}
PAPER_SAVED = {
    ("sampling", SHAREGPT.name): {2: 16.2, 6: 30.5},
    ("sampling", ALPACA.name): {2: 6.1, 6: 9.8},
    ("beams", SHAREGPT.name): {2: 44.3, 6: 66.3},
    ("beams", ALPACA.name): {2: 37.6, 6: 55.2},
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is run. Requests and searches are those of ShareGPT-like lengths; of the shorter Alpaca-like, more."""

    num_requests: int
    num_searches: int  # beam searches of the bundled model, for each width
    num_users: int
    num_turns: int
    system_tokens: tuple[int, ...]
    block_sizes: tuple[int, ...] = BLOCK_SIZES

    def load(self, lengths: Lognormal) -> list[Any]:
        return lengths.load(self.num_requests * (6 if lengths is ALPACA else 1))

    def searches(self, lengths: Lognormal) -> list[Any]:
        return lengths.load(self.num_searches * (4 if lengths is ALPACA else 1))


FULL = Size(1000, 40, 100, 20, (512, 1024, 2048, 4096, 8192))
QUICK = Size(240, 24, 25, 8, (1024, 4096), (1, 16, 128))


def measure_waste(size: Size) -> list[Row]:
    """The use of the pool's slots: contiguous reservations, their best case, and paging."""
    rows = []
    for lengths in DISTRIBUTIONS:
        load = size.load(lengths)
        for scheme, kind, pool in (
            ("reserve max_model_len", "max", BuddyPool(POOL_SLOTS)),
            ("reserve power of two", "pow2", BuddyPool(POOL_SLOTS)),
            ("reserve oracle", "oracle", BuddyPool(POOL_SLOTS)),
            ("oracle, first fit", "oracle", FirstFitPool(POOL_SLOTS)),
        ):
            shares = contiguous_shares(kind, pool, POOL_SLOTS, load, MAX_MODEL_LEN)
            rows.append(_waste_row(lengths, scheme, shares))
        shares, num_preemptions = paged(load)
        rows.append(_waste_row(lengths, "paging", shares) | {"num_preemptions": num_preemptions})
    return rows


def _waste_row(lengths: Lognormal, scheme: str, shares: Shares) -> Row:
    paper = PAPER_TOKENS.get(scheme) if lengths is SHAREGPT else None
    figures = asdict(shares) | {"waste": shares.waste, "waste_of_held": shares.waste_of_held}
    return {"lengths": lengths.name, "scheme": scheme, **figures, "paper_tokens": paper}


def measure_sharing(size: Size) -> list[Row]:
    """`saved` per method and width."""
    beams, rows = BeamEngine(), []
    for lengths in DISTRIBUTIONS:
        for method, load, saved in (
            ("sampling", lengths.load(size.num_requests), sharing),
            ("beams", size.searches(lengths), beams.sharing),
        ):
            for width in WIDTHS:
                row = {"lengths": lengths.name, "method": METHODS[method], "width": width, "saved": saved(load, width)}
                rows.append(row | {"paper_percent": PAPER_SAVED[method, lengths.name].get(width)})
    return rows


def measure_chat(size: Size) -> list[Row]:
    """One system prompt for all users, by its length."""
    rows = []
    for system_tokens in size.system_tokens:
        figures = chat(size.num_users, size.num_turns, system_tokens)
        rows.append({"system_tokens": system_tokens, **asdict(figures), "times_less": figures.times_less})
    return rows


def measure_block_sizes(size: Size) -> list[Row]:
    """Waste in last blocks, and what of the prompts of a small chat was found, or computed again, by block size."""
    rows = []
    for block_size in size.block_sizes:
        row: Row = {"block_size": block_size}
        for lengths in DISTRIBUTIONS:
            row[f"waste {lengths.name}"] = paged(size.load(lengths), block_size)[0].waste_of_held
        figures = chat(20, 10, 1000, block_size)
        row["hit_rate"] = figures.hit_rate
        row["computed_per_needed"] = figures.prompt_tokens_computed / figures.prompt_tokens_needed
        rows.append(row)
    return rows


def measure(size: Size, speed: bool) -> dict[str, list[Row]]:
    results = {}
    for name, function in (
        ("waste", measure_waste),
        ("sharing", measure_sharing),
        ("chat", measure_chat),
        ("block_sizes", measure_block_sizes),
    ):
        started = time.perf_counter()
        results[name] = function(size)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if speed:
        from benchmarks.memory_speed import measure_speed

        results["speed"] = measure_speed()
    return results


def print_tables(results: dict[str, list[Row]]) -> None:
    _print_waste(results["waste"])
    _print_sharing(results["sharing"])
    _print_chat(results["chat"])
    _print_block_sizes(results["block_sizes"])
    if "speed" in results:
        print("\nBundled model: output tokens/s by block size, median of the runs")
        _print_row(*(f"{row['block_size']:>8}" for row in results["speed"]))
        _print_row(*(f"{row['tokens_per_s']:8.0f}" for row in results["speed"]))


def _print_waste(rows: list[Row]) -> None:
    print("\nKV memory, % of the pool (claim: 60-80 % wasted by reservation, under 4 % by paging)")
    head = f"{'tokens':>8}{'reserved':>10}{'unused':>8}{'free':>7}{'waste':>7}{'requests at once':>18}"
    print(f"{'':15}{'':23}{head}{'paper: tokens':>15}")
    for row in rows:
        parts = [100 * row[name] for name in ("tokens", "reserved", "internal", "external", "waste")]
        shares = [f"{value:{width}.1f}" for value, width in zip(parts, (8, 10, 8, 7, 7), strict=True)]
        paper = f"{_or_blank(row['paper_tokens']):>15}"
        _print_row(f"{row['lengths']:15}{row['scheme']:23}", *shares, f"{row['num_running']:18.0f}", paper)


def _print_sharing(rows: list[Row]) -> None:
    print("\nBlocks saved by sharing, % of what the tables would need without it")
    print(f"{'':15}{'':32}{'width':>6}{'saved':>7}{'paper':>7}")
    for row in rows:
        saved = f"{row['width']:6}{100 * row['saved']:7.1f}{_or_blank(row['paper_percent']):>7}"
        _print_row(f"{row['lengths']:15}{row['method']:32}", saved)


def _print_chat(rows: list[Row]) -> None:
    print("\nMany users, one system prompt (claim: at least 5 times less memory, prefill computed once)")
    head = f"{'system prompt':>14}{'blocks':>9}{'unshared':>10}{'times less':>12}{'prompt tokens':>15}{'computed':>10}"
    print(f"{head}{'system prompt computed':>24}")
    for row in rows:
        blocks = f"{row['used']:9.0f}{row['logical']:10.0f}{row['times_less']:12.1f}"
        tokens = f"{row['prompt_tokens']:15}{row['prompt_tokens_computed']:10}{row['system_computed']:18.2f} times"
        _print_row(f"{row['system_tokens']:14}", blocks, tokens)


def _print_block_sizes(rows: list[Row]) -> None:
    print(
        "\nBlock sizes: waste in last blocks, % of what is held; of the prompts of a chat, % found in the prefix cache"
    )
    print("and how often a new token is computed")
    names = [name for name in rows[0] if name.startswith("waste ")]
    head = (f"{name.removeprefix('waste '):>15}" for name in names)
    _print_row(f"{'block size':>11}", *head, f"{'found':>8}{'computed':>10}")
    for row in rows:
        waste = (f"{100 * row[name]:15.1f}" for name in names)
        _print_row(f"{row['block_size']:11}", *waste, f"{100 * row['hit_rate']:8.1f}{row['computed_per_needed']:10.2f}")


def _print_row(*cells: str) -> None:
    print("".join(cells))


def _or_blank(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 where the plots cannot be drawn, which is said before anything is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a minute instead of several; figures move by a few percent"
    )
    parser.add_argument(
        "--speed", action="store_true", help="also the speed of the bundled model by block size, minutes"
    )
    parser.add_argument("--no-plots", action="store_true", help="table and JSON only: needs no matplotlib")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "bench" / "memory", help="folder for the files")
    options = parser.parse_args(argv)
    if not options.no_plots and importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is missing: pip install '.[bench]' for the plots, or add --no-plots.", file=sys.stderr)
        return 2
    started = time.perf_counter()
    results = measure(QUICK if options.quick else FULL, options.speed)
    print_tables(results)
    print(f"\n{describe(machine())}; {time.perf_counter() - started:.0f} s")
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"quick": options.quick, **asdict(QUICK if options.quick else FULL), "pool_slots": POOL_SLOTS}
    lengths = [asdict(distribution) for distribution in DISTRIBUTIONS]
    document = {"machine": machine(), "settings": settings, "lengths": lengths, **results}
    (options.out / "memory.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not options.no_plots:
        from benchmarks.memory_plots import draw

        draw(results, options.out)
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
