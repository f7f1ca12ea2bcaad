"""The table and the JSON. No torch here."""

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.names import NANO, QWEN, WAYS
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.record import at_least

NAME_WIDTH = 56

Record = list[dict[str, Any]]


def with_ratios(records: dict[str, Record]) -> dict[str, Record]:
    """The records, and one more of how many times faster the engine is than transformers."""
    ours = _value(records.get("serving", []), NANO)
    lines: Record = []
    for way, times in WAYS:
        theirs = _value(records.get("peers", []), f"{QWEN}: transformers {way}")
        if ours and theirs:
            judged = at_least(times).judge(ours / theirs, None)
            lines.append({"kind": "figure", "name": f"{NANO} / transformers {way}", "value": ours / theirs, "unit": "x",
                          "share": None, "of": "", **judged, "detail": {}})  # fmt: skip
    return {**records, "ratios": lines} if lines else records


def _value(record: Record, name: str) -> float | None:
    return next((line["value"] for line in record if line["kind"] == "figure" and line["name"] == name), None)


def write_json(path: Path, facts: dict[str, Any], records: dict[str, Record]) -> None:
    """Everything so far; replaced as a whole, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "parts": records}, indent=1)
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def file_name(card: str, tiny: bool) -> str:
    """2026-11-21-gpu-check-nvidia-h100-80gb-hbm3.json"""
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") or ("tiny" if tiny else "no-card")
    return f"{time.strftime('%Y-%m-%d')}-gpu-check-{slug}.json"


def table(records: dict[str, Record]) -> Iterator[str]:
    """All parts, then what failed or was left out, then the goals again: the end of the output says it all."""
    titles = {part.name: part.title for part in PARTS} | {"ratios": "Against transformers"}
    for name, record in records.items():
        figures = [line for line in record if line["kind"] == "figure"]
        if figures:
            yield f"\n{titles[name]}"
            yield from map(_row, figures)
    yield from _trouble(records)
    goals = [line for record in records.values() for line in record if line.get("goal")]
    if goals:
        met = sum(bool(line["met"]) for line in goals)
        yield f"\nGoals: {met} of {len(goals)} met"
        yield from map(_row, goals)


def _trouble(records: dict[str, Record]) -> Iterator[str]:
    lines = [(part, line) for part, record in records.items() for line in record]
    skipped = [(part, line) for part, line in lines if line["kind"] == "skipped"]
    failed = [(part, line) for part, line in lines if line["kind"] == "failed"]
    if skipped:
        yield "\nSkipped"
        yield from (f"  {line['name']}: {line['reason']}" for _, line in skipped)
    if failed:
        yield "\nFAILED"
        yield from (f"  {part}: {line['case']}: {line['reason']}" for part, line in failed)


def _row(line: dict[str, Any]) -> str:
    share = "" if line["share"] is None else f"{line['share']:.0%}"
    text = f"  {line['name'][:NAME_WIDTH]:<{NAME_WIDTH}}{_number(line['value']):>10} {line['unit']:<8}{share:>6}"
    text += f" {line['of']:<7}" if line["of"] else " " * 8
    if not line.get("goal"):
        return text.rstrip()
    by = "" if line["by"] is None else f" by {line['by']:.0%}"
    return f"{text} {line['goal']}: {'met' if line['met'] else 'MISSED'}{by}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
