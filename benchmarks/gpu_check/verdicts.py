"""One line for each goal of a run on a card: met, or missed by how much, and which operator owes it. No torch here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_check.names import LLAMA, LLAMA_2, NANO, WAYS
from benchmarks.gpu_check.record import Goal, at_least, at_most

PREFILL_GOAL = "prefill_attention 1 x 8192 of 8192"

Record = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """A goal on the figure of this name; `detail`: on that number of its details instead."""

    text: str
    figure: str
    goal: Goal
    detail: str = ""


TARGETS = (
    Target("decode at batch 1: 85 % of the bandwidth bound", f"{LLAMA}: decode 1 x 1024", at_least(0.85, "share")),
    Target("decode at 64: 80 % of the per-operator floor", f"{LLAMA}: decode 64 x 1024", at_least(0.80, "share")),
    Target("decode at 256: 80 % of the per-operator floor", f"{LLAMA}: decode 256 x 1024", at_least(0.80, "share")),
    Target("nano-vllm's workload: 60 % of the bound", NANO, at_least(0.60, "share")),
    Target("nano-vllm's workload, the aim: 65 %", NANO, at_least(0.65, "share")),
    Target("prefill attention: 350 TFLOP/s (a goal for H100)", PREFILL_GOAL, at_least(350.0), "teraflops"),
    Target("host time of a step at 256: 0.7 ms", f"{LLAMA}: host time of a step, 256 sequences", at_most(0.7)),
    Target("the device idles 0.05 ms between steps", f"{NANO}: device idle", at_most(0.05)),
    Target("24 times one-by-one generate of transformers", f"{NANO} / transformers {WAYS[0][0]}", at_least(24.0)),
    Target("P99 time to first token of 100 users on a 7B: 420 ms", f"{LLAMA_2}, 100 users: first token P99",
           at_most(420.0)),
)  # fmt: skip


def verdicts(records: dict[str, Record]) -> Iterator[str]:
    """Lines for all goals of a card, also for those that were not measured."""
    figures = {line["name"]: line for record in records.values() for line in record if line["kind"] == "figure"}
    failed = {line["case"]: line["reason"] for record in records.values() for line in record
              if line["kind"] == "failed"}  # fmt: skip
    yield "\nVerdicts"
    for target in TARGETS:
        yield f"  {target.text}: {_verdict(target, figures, failed)}"


def _verdict(target: Target, figures: dict[str, Any], failed: dict[str, str]) -> str:
    line = figures.get(target.figure)
    if line is None:
        reason = failed.get(target.figure, "")
        return f"not measured{f' ({reason[:120]})' if reason else ''}"
    value = line["detail"].get(target.detail) if target.detail else line["value"]
    judged = target.goal.judge(value if value is not None else float("nan"), line["share"])
    number = (
        f"{line['share']:.0%} of the {line['of']}"
        if target.goal.on == "share" and line["share"] is not None
        else f"{value:.3g}"
    )
    if judged["met"]:
        return f"met: {number}"
    by = "" if judged["by"] is None else f" by {judged['by']:.0%}"
    return f"MISSED{by}: {number}{_owes(target.figure, line, figures)}"


def _owes(name: str, line: dict[str, Any], figures: dict[str, Any]) -> str:
    """The kind of kernels that loses most against its floor, from the profile of the same step."""
    found = re.fullmatch(r"(.*): decode (\d+) x \d+", name)
    floors = line["detail"].get("floors_us")
    if found is None or not floors:
        return ""
    model, batch = found.groups()
    ending = f", decode {batch}"
    rows = {label.removeprefix(f"{model}: ").removesuffix(ending): row["value"] for label, row in figures.items()
            if label.startswith(f"{model}: ") and label.endswith(ending) and ": kernel " not in label}  # fmt: skip
    lost = {kind: spent - floors.get(kind, 0.0) for kind, spent in rows.items()}
    if not lost:
        return ", no profile says which operator owes it"
    worst = max(lost, key=lambda kind: lost[kind])
    return f", owed by {worst}: {rows[worst]:,.0f} us, floor {floors.get(worst, 0.0):,.0f} us"
