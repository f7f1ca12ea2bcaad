"""`python -m tests.benchmarks.planted_faults`: gpu_check at toy size with a fault of each kind in each part.

In five runs a case of every part hangs, meets an illegal address, raises, runs out of memory and ends its process. Each
other case of each part must come to its end. Under ten minutes on two cores that do nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import DEFAULT

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "planted_site"
SECONDS = 3000

# Two cases of each part that has several, not the last ones; the only case of the others.
CASES = {
    "limits": ("limits: copy", "limits: read"),
    "decode": ("Llama-3-8B: decode 1 x 32", "Qwen3-0.6B: decode 3 x 32"),
    "prefill": ("Llama-3-8B: prefill 24", "Llama-3-8B: mixed 3 x 32 + 8"),
    "serving": ("Qwen3-0.6B: nano-vllm workload", "memory of the card at work"),
    "users": ("Llama-2-7B, 100 users",),
    "peers": ("Qwen3-0.6B: transformers one by one", "Qwen3-0.6B: transformers static batch"),
    "attention": ("decode 1 x 64", "prefill 1 x 16 of 16"),
    "graphs": ("a cache above 2^31 elements", "graph against eager, 1 rows"),
    "linears": ("packed gate_up 1 rows", "cublas down 2 rows"),
    "tests": ("tests on the device",),
    "kernels": ("rms_norm + residual 2 rows", "copy_blocks 2 blocks"),
    "http": ("Qwen3-0.6B: over HTTP",),
    "drafts": ("draft model",),
}
# Each run plants a kind of fault in the first case of a part, one in the second, and one in an only case.
RUNS = (("hang", "illegal", "hang"), ("exception", "oom", "illegal"), ("kill", "hang", "exception"),
        (None, None, "oom"), (None, None, "kill"))  # fmt: skip
# Cases that have nothing to measure without an earlier one of the same process.
FOLLOWERS = {"Qwen3-0.6B: nano-vllm workload": {"device idle"}}

Document = dict[str, Any]


def run_planted(folder: Path, plants: Mapping[str, str], *arguments: str) -> tuple[Document, str]:
    """gpu_check --tiny with faults: (its JSON, what it printed). Its exit status is not checked."""
    environment = {**os.environ, "GPU_CHECK_PLANTS": json.dumps(plants),
                   "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))}  # fmt: skip
    environment.pop("OUT", None)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--seconds", str(SECONDS),
               "--json", str(folder), "--log", str(folder / "log"), *arguments]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text(encoding="utf-8")), done.stdout + done.stderr


def cases_of(record: list[dict[str, Any]], kind: str) -> set[str]:
    return {line["case"] for line in record if line["kind"] == kind}


def problems(document: Document, plants: Mapping[str, str]) -> list[str]:
    """Each planted case must have failed, and each other case must have ended."""
    found = []
    allowed = set(plants).union(*(FOLLOWERS.get(case, set()) for case in plants))
    for part, record in document["parts"].items():
        failed, ended = cases_of(record, "failed"), cases_of(record, "end")
        begun = cases_of(record, "begin")
        found += [f"{part}: {case} failed as well" for case in failed - allowed]
        found += [f"{part}: {case} did not fail" for case in begun & set(plants) - failed]
        found += [f"{part}: {case} has no end" for case in begun - ended - failed]
    missing = set(plants) - {case for record in document["parts"].values() for case in cases_of(record, "failed")}
    return found + [f"{case} was not run" for case in missing]


def planted(cases: tuple[str, ...], kinds: tuple[str | None, ...]) -> dict[str, str | None]:
    """The fault of each case of a part in a run; None: the part is left whole."""
    return {cases[0]: kinds[2]} if len(cases) == 1 else dict(zip(cases, kinds, strict=False))


def main() -> int:
    """Exit status 1 where a fault cost more than its own case."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    assert set(CASES) == set(DEFAULT), "each part has a case here"
    found, reached = [], []
    for turn, kinds in enumerate(RUNS):
        plants = {case: kind for cases in CASES.values() for case, kind in planted(cases, kinds).items() if kind}
        parts = [part for part, cases in CASES.items() if set(cases) & set(plants)]
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            document, _ = run_planted(Path(folder), plants, "--parts", " ".join(parts))
        wrong = problems(document, plants)
        reached.append({case for record in document["parts"].values() for case in cases_of(record, "begin")})
        ended = sum(len(cases_of(record, "end")) for record in document["parts"].values())
        print(f"run {turn + 1}: {len(plants)} faults, {ended} other cases ended, {time.monotonic() - started:.0f} s",
              *wrong, sep="\n  ", flush=True)  # fmt: skip
        found += wrong
    whole = reached[: len(RUNS) - 2]  # the runs of all parts
    lost = [set.union(*whole) - cases - {case for row in FOLLOWERS.values() for case in row} for cases in whole]
    found += [f"run {turn + 1}: {case} was not reached" for turn, cases in enumerate(lost) for case in sorted(cases)]
    print("\n".join(found) or f"each of five kinds of faults in each of {len(CASES)} parts cost its own case")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
