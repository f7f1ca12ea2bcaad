"""Attacks on a live server, with another key and /health beside them: a table of what each did, with limits.

    python -m tests.attacks [--only NAME] [--list] [--json FILE]

Each attack has a server of its own (the bundled model, two API keys) and is timed by probes in processes of their own:
how long the other key waited, how long /health was silent, memory and descriptors before, at the peak and some seconds
after, and how long the server took to end at a second signal while the attack was repeated. The probes go before all
others on the processor, the attack after: see tests/attacks/probe.py and attacker.py. `late` is how late the probes
themselves woke up; where that is near a limit, the machine had no time, and the run says little.

Exit status 1 where a limit was missed, 2 where no attack has the name.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

from tests.attacks.frame import Attack, load_attacks
from tests.attacks.measure import Limits, Result
from tests.attacks.stand import run

LINE = "{:34} {:>4} {:>6} {:>6} {:>7} {:>8} {:>18} {:>14} {:>6} {:>6}  {}"
HEADINGS = "attack,item,quiet,p50,worst,/health,driver MB,files,exit,late,".split(",")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="NAME", help="the attacks whose name holds this, or an item")
    parser.add_argument("--list", action="store_true", help="name the attacks and say what they do")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--quiet", type=float, default=2.0, metavar="S", help="seconds before an attack")
    parser.add_argument("--after", type=float, default=10.0, metavar="S", help="seconds for memory to come back")
    parser.add_argument("--most-mb", type=float, default=6000.0, help="a server that takes more memory is ended")
    options = parser.parse_args()
    chosen = [one for one in load_attacks().values() if options.only in one.name or options.only == str(one.item)]
    chosen.sort(key=lambda one: (one.item, one.name))
    if not chosen:
        print(f"no attack has {options.only!r} in its name; see --list", file=sys.stderr)
        return 2
    if options.list:
        for one in chosen:
            print(f"{one.item:3} {one.name:34} {(one.function.__doc__ or '').strip().splitlines()[0]}")
        return 0
    results = run_all(chosen, options)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    missed = [result.name for result in results if result.faults]
    print(f"{len(results) - len(missed)} of {len(results)} held" + (f"; not: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


def run_all(attacks: list[Attack], options: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    print(LINE.format(*HEADINGS, "(ms but for MB, files and exit)"), flush=True)
    print(limits_line(Limits()), flush=True)
    with tempfile.TemporaryDirectory(prefix="pageserve-attacks-") as name:
        for one in attacks:
            try:
                result = run(one, Path(name) / one.name, options.quiet, options.after, options.most_mb)
            except RuntimeError as error:
                print(f"{one.name:34} {one.item:4} could not be run: {error}")
                raise SystemExit(1) from None
            result.judge(one.limits)
            print(show(result), flush=True)
            results.append(result)
    return results


def limits_line(limits: Limits) -> str:
    return LINE.format(
        "limits",
        "",
        "",
        f"x{limits.other_key_p50_ratio:g}",
        f"{limits.other_key_worst_ms:g}",
        f"{limits.health_worst_ms:g}",
        f"+{limits.memory_left_mb:g}",
        f"+{limits.descriptors_left}",
        f"{limits.exit_seconds:g}",
        "",
        "",
    )


def show(result: Result) -> str:
    times = [result.quiet.p50_ms, result.other_key.p50_ms, result.other_key.worst_ms, result.health.worst_ms]
    samples = result.before, result.peak, result.after
    return LINE.format(
        result.name,
        result.item,
        *(f"{value:.0f}" for value in times),
        " ".join(f"{one.driver_mb:.0f}" for one in samples),
        " ".join(str(one.descriptors) for one in samples),
        f"{result.exit_seconds:.1f}",
        f"{1000 * max(result.other_key.late, result.health.late):.0f}",
        "; ".join(result.faults) or "held",
    )


def as_json(results: list[Result]) -> dict:
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "limits": vars(Limits()),
        "attacks": {result.name: result.as_json() for result in results},
    }


if __name__ == "__main__":
    sys.exit(main())
