"""The command: runs the parts, each in a process of its own, within the time; writes JSON after each; table last."""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import carry, report
from benchmarks.gpu_check.card import card_facts
from benchmarks.gpu_check.parts import DEFAULT, NAMES, PARTS, Part, Setting, select
from benchmarks.gpu_check.record import Recorder, finished_cases, kept_lines, read_record
from benchmarks.gpu_check.verdicts import verdicts
from benchmarks.gpu_check.wheels import install_wheels, missing_wheels

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 570.0
MIN_SECONDS = 5.0  # with less left a part is not begun
MAX_STARTS = 8  # processes per part: if a case ends the process, the next process continues after that case
PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "msgspec", "pytest", "fastapi", "uvicorn")
LOG_LINES = 12
GRACE_SECONDS = 3.0  # for what a part started to end by itself


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when every case ran, whether or not goals are met; 1 when one failed; 2 for wrong arguments."""
    options = option_parser().parse_args(argv)
    if options.run_part:
        setting = Setting(options.tiny, options.folder, options.until, options.patience)
        return _run_part(options.run_part, setting, options.lost)
    if options.ready:
        return _ready()
    try:
        parts = select(options.parts.replace(",", " ").split() or DEFAULT)
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    lacking = sorted({name for part in parts for name in part.missing(options.tiny)})
    if lacking and not options.tiny and not list((ROOT / ".gpu-wheels").glob("*.whl")) and not options.without:
        print(
            f"gpu-check: {', '.join(lacking)} missing here and .gpu-wheels is empty: run `make gpu-wheels` where there "
            "is a network and bring .gpu-wheels along, or skip the parts that need them by --without-missing",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(options, Path(folder))
        try:
            check.resume(options.resume, options.again.replace(",", " ").split())
        except ValueError as error:
            print(f"gpu-check: {error}", file=sys.stderr)
            return 2
        return check.run(parts)


class Check:
    """One run of the check."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._deadline = time.monotonic() + options.seconds
        # A busy CPU may pause a toy run; a GPU that is paid for may not hang.
        patience = options.patience or (10.0 if options.tiny else 1.0)
        self._setting = Setting(options.tiny, folder, patience=patience)
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                             "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}  # fmt: skip
        card = card_facts()
        self._facts = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "tiny": options.tiny, "card": card,
                       "machine": _machine(), "commit": _commit(), "arguments": sys.argv[1:]}  # fmt: skip
        local = ROOT / ".cache" / "gpu-check"
        where = options.json or carry.out_folder() or (local if options.tiny else RESULTS)
        self._json = where / report.file_name(card.get("name", ""), options.tiny)
        self.log_path = options.log or (carry.out_folder() or local) / "log"
        self.records: dict[str, report.Record] = {}

    def resume(self, where: Path | None, again: list[str]) -> None:
        """Take over what an earlier call measured, but for cases whose names contain a word of `again`. ValueError if
        there is no result of this card."""
        if where is None:
            return
        card = self._facts["card"].get("name", "")
        path, document = carry.earlier_result(where, card, self._setting.tiny)
        self._facts["resumed"] = {
            "file": path.name,
            **{key: document.get(key) for key in ("date", "commit", "resumed")},
        }
        for name in NAMES:
            lines = kept_lines(document["parts"].get(name, []), again)
            if lines:
                Recorder.restore(self._setting.record_path(name), lines)
                self.records[name] = lines
        if document.get("limits") and finished_cases(self.records.get("limits", [])):
            (self._setting.folder / "limits.json").write_text(json.dumps(document["limits"]), encoding="utf-8")
        count = sum(len(finished_cases(lines)) for lines in self.records.values())
        print(f"{path}: {count} cases are not run again", flush=True)

    def run(self, parts: list[Part]) -> int:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_text("", encoding="utf-8")
        installed = install_wheels(ROOT / ".gpu-wheels", self._setting.folder / "site", PARTS)
        if installed:
            sys.path.insert(0, str(installed))
            self._environment["PYTHONPATH"] = _joined(str(installed), os.environ.get("PYTHONPATH"))
        self._facts["packages"] = _versions()
        if not self._setting.tiny:
            self._environment["TRITON_CACHE_DIR"] = str(carry.cache_folder())
            restored = carry.restore_cache(carry.CARRIED / carry.ARCHIVE, carry.cache_folder())
            print(f"Triton's cache: {restored} files brought along", flush=True)
        print(f"{self._facts['card'].get('name', 'no NVIDIA card')}, {self._facts['machine']}", flush=True)
        interrupted = False
        try:
            for index, part in enumerate(parts):
                reserved = sum(later.seconds for later in parts[index + 1 :])
                self.run_part(part, max(self._left() - reserved, min(max(part.seconds, part.at_most), self._left())))
                self._write()
        except KeyboardInterrupt:
            interrupted = True
        records = self._write()
        if not self._setting.tiny and (out := carry.out_folder()):
            carry.save_cache(carry.cache_folder(), out / carry.ARCHIVE)
        print("\n".join(report.table(records)))
        print("\n".join(verdicts(records)))
        print(f"\n{self._json}; what the parts printed: {self.log_path}")
        failed = any(line["kind"] == "failed" for record in records.values() for line in record)
        return 130 if interrupted else int(failed)

    def _write(self) -> dict[str, report.Record]:
        """The JSON, replaced after each part: a call that is ended early keeps what its parts measured."""
        limits = self._setting.folder / "limits.json"
        if limits.is_file():
            self._facts["limits"] = json.loads(limits.read_text(encoding="utf-8"))
        records = report.with_ratios(self.records)
        report.write_json(self._json, self._facts, records)
        return records

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def run_part(self, part: Part, seconds: float) -> None:
        """Run one part, again behind the case that ended it, until it is through or its time is up."""
        path, until = self._setting.record_path(part.name), time.monotonic() + seconds
        if missing := part.missing(self._setting.tiny):
            wheels = "make gpu-wheels fetches what the engine needs" if "msgspec" in missing else "not installed here"
            Recorder(path).skip(part.title, f"{', '.join(missing)} missing ({wheels})")
        elif seconds < MIN_SECONDS:
            Recorder(path).skip(part.title, "no time is left")
        else:
            self._start_until_through(part, path, until)
        self.records[part.name] = read_record(path)

    def _start_until_through(self, part: Part, path: Path, until: float) -> None:
        lost = ""
        for _ in range(MAX_STARTS):
            before = len(read_record(path))
            print(f"{part.name}: {until - time.monotonic():.0f} s at most", flush=True)
            status = self.start_part(part, until, lost)
            if status == 0:
                return
            lost = _why(status, part)
            over = time.monotonic() > until - MIN_SECONDS
            if over or len(read_record(path)) == before:
                break
        recorder = Recorder(path, lost, cut=time.monotonic() > until - MIN_SECONDS)  # names the case under way
        with contextlib.suppress(OSError):
            tail = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            recorder.give_up(f"the part {part.name}", f"{lost}. Last lines: {' | '.join(tail)}")

    def start_part(self, part: Part, until: float, lost: str) -> int | None:
        """The exit status of one process of the part, None if its time ran out. All its children end with it."""
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--run-part", part.name, "--folder",
                   str(self._setting.folder), "--until", str(until), "--lost", lost,
                   "--patience", str(self._setting.patience),
                   *(["--tiny"] if self._setting.tiny else [])]  # fmt: skip
        with self.log_path.open("a", encoding="utf-8") as log:
            print(f"==== {part.name}", file=log, flush=True)
            process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True)  # fmt: skip
            try:
                return process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            finally:
                end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started: a load generator stops its server when it is asked to, not when killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            process.poll()  # reaps it: a group of none is gone
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a device may hold a process that was killed
        process.wait(GRACE_SECONDS)


def _why(status: int | None, part: Part) -> str:
    if status is None:
        return f"the time of the part {part.name} ran out"
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return {1: "it took too long, or the process failed", 3: "the device failed"}.get(status, f"exit status {status}")


def _run_part(name: str, setting: Setting, lost: str) -> int:
    """Run one part, in the part's own process. It leaves without teardown: threads of others may never end."""
    part = next(part for part in PARTS if part.name == name)
    part.run(Recorder(setting.record_path(name), lost or "the process ended in it", setting.patience), setting)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _ready() -> int:
    """Say what a call on a bare machine would lack, before the machine is asked for."""
    missing = missing_wheels(ROOT / ".gpu-wheels")
    if missing:
        print(f"gpu-check: .gpu-wheels lacks {', '.join(missing)}: run `make gpu-wheels`", file=sys.stderr)
        return 1
    archive = carry.CARRIED / carry.ARCHIVE
    print(f".gpu-wheels is complete; Triton's cache: {archive if archive.is_file() else 'none (a first call)'}")
    return 0


def _machine() -> dict[str, Any]:
    return {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}


def _versions() -> dict[str, str]:
    return dict(_installed())


def _installed() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _commit() -> str:
    """The commit of this checkout; "" without git or its folder."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(filter(None, paths))


def option_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--parts", default="", metavar="NAMES", help=f"of {', '.join(NAMES)}; default: "
                        f"{', '.join(DEFAULT)}")  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on from an earlier call's result: the "
                        "file, or a folder, whose newest result of this card counts")  # fmt: skip
    parser.add_argument("--again", default="", metavar="WORDS", help="with --resume: repeat each case whose name "
                        "contains one of these words; failed: each case that failed")  # fmt: skip
    parser.add_argument("--ready", action="store_true", help="only say what a bare machine would lack")
    parser.add_argument("--without-missing", dest="without", action="store_true",
                        help="skip parts whose packages are missing, in place of failing at once")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="DIR", help="folder for the JSON (default $OUT, else "
                        "benchmarks/results)")  # fmt: skip
    parser.add_argument("--log", type=Path, metavar="FILE", help="the parts' output (default $OUT/log, else .cache)")
    parser.add_argument("--patience", type=float, default=0.0, help="multiplies the time limits of cases")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (default %(default)g)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU: does the program itself work?")
    parser.add_argument("--run-part", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--lost", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
