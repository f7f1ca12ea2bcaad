"""Records a part's measurements line by line in a file: the records survive the process that made them."""

import contextlib
import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASE_SECONDS = 60.0  # a case that takes longer hangs
DEVICE_BROKEN = 3  # exit status: the device answers nothing any more, a new process must go on
MESSAGE_LENGTH = 600


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure's `on` ("value" or "share") must be at least, or at most, a number."""

    text: str
    least: float | None = None
    most: float | None = None
    on: str = "value"

    def judge(self, value: float, share: float | None) -> dict[str, Any]:
        """{"goal", "met", "by"}: by is how far beyond the goal (missed: short of it), as a share of the goal; None for
        a figure that is not a number, or 0."""
        number = value if self.on == "value" else share
        bound = self.least if self.least is not None else self.most
        assert bound, "a goal has one bound, which is not 0"
        if number is None or number != number:
            return {"goal": self.text, "met": False, "by": None}
        if not number:
            return {"goal": self.text, "met": self.least is None, "by": None}
        ratio = number / bound if self.least is not None else bound / number
        return {"goal": self.text, "met": ratio >= 1, "by": abs(ratio - 1)}


def at_least(number: float, on: str = "value", text: str = "") -> Goal:
    return Goal(text or f">= {_number(number, on)}", least=number, on=on)


def at_most(number: float, on: str = "value", text: str = "") -> Goal:
    return Goal(text or f"<= {_number(number, on)}", most=number, on=on)


def _number(number: float, on: str) -> str:
    return f"{number:.0%}" if on == "share" else f"{number:g}"


class Recorder:
    """Appends to the record of one part. Cases that an earlier process of the part finished, or died in, are left out.

    `lost` is what to say of the case that such a process died in; `cut` says that the case itself is not to blame,
    because the part's time ran out: a later call repeats it. `patience` multiplies what cases may take.
    """

    def __init__(
        self, path: Path, lost: str = "the process ended in it", patience: float = 1.0, cut: bool = False
    ) -> None:
        self._path = path
        self._patience = patience
        self._deadlines: list[float] = []  # deadlines of the running cases, the outermost first
        self._cases: list[str] = []  # the running cases, the outermost first
        lines = read_record(path)
        self._done = finished_cases(lines)
        self._failed = {line["case"] for line in lines if line["kind"] == "failed"}
        self._skipped = {(line["name"], line["reason"]) for line in lines if line["kind"] == "skipped"}
        for line in lines:
            if line["kind"] == "begin" and line["case"] not in self._done:
                self._done.add(line["case"])
                self._failed.add(line["case"])
                self._write("failed", case=line["case"], reason=lost, **({"cut": True} if cut else {}))

    @staticmethod
    def restore(path: Path, lines: Iterable[dict[str, Any]]) -> None:
        """Write the record of an earlier call, for a Recorder to go on from."""
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def is_done(self, name: str) -> bool:
        """Whether an earlier process of the part, or an earlier call, ran this case."""
        return name in self._done

    def has_failed(self, name: str) -> bool:
        """Whether it failed then, or in this process."""
        return name in self._failed

    def case(self, name: str, measure: Callable[[], object], seconds: float = CASE_SECONDS) -> None:
        """Run `measure`, which records figures. Its exception is recorded and ends the case, not the part.

        Cases may be nested. After `seconds` the process writes its stacks and exits. It
        exits, too, with DEVICE_BROKEN, when the device has failed in a way that only a new process survives.
        """
        if name not in self._done:
            with self._recorded(name, seconds):
                measure()

    async def case_async(
        self, name: str, measure: Callable[[], Awaitable[object]], seconds: float = CASE_SECONDS
    ) -> None:
        """The same for a coroutine."""
        if name not in self._done:
            with self._recorded(name, seconds):
                await measure()

    @contextlib.contextmanager
    def _recorded(self, name: str, seconds: float) -> Iterator[None]:
        self._done.add(name)
        self._write("begin", case=name)
        self._cases.append(name)
        print(f"[{time.strftime('%H:%M:%S')}] {name}", flush=True)
        started = time.perf_counter()
        self._deadlines.append(started + seconds * self._patience)
        self._watch()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            self._failed.add(name)
            self._write("failed", case=name, reason=_summary(error))
            if device_is_broken():
                sys.exit(DEVICE_BROKEN)
        else:
            self._write("end", case=name, seconds=round(time.perf_counter() - started, 2))
        finally:
            self._cases.pop()
            self._deadlines.pop()
            self._watch()

    def _watch(self) -> None:
        """End the process at the first deadline of the cases under way."""
        faulthandler.cancel_dump_traceback_later()
        if self._deadlines:
            faulthandler.dump_traceback_later(max(0.01, min(self._deadlines) - time.perf_counter()), exit=True)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        share: float | None = None,
        of: str = "",
        goal: Goal | None = None,
        **detail: Any,
    ) -> None:
        """One row of the table: `share` is of the limit or bound that `of` names; the rest is for the JSON."""
        judged = goal.judge(value, share) if goal else {}
        self._write("figure", name=name, value=value, unit=unit, share=share, of=of, **judged, detail=detail,
                    **self._case())  # fmt: skip

    def skip(self, name: str, reason: str) -> None:
        """Say why something is not measured here, once."""
        if (name, reason) not in self._skipped:
            self._skipped.add((name, reason))
            self._write("skipped", name=name, reason=reason, **self._case())

    def give_up(self, name: str, reason: str) -> None:
        """Say that the rest of the part is not measured. A later call runs it."""
        self._write("failed", case=name, reason=reason, cut=True)

    def _case(self) -> dict[str, str]:
        """The innermost case under way, to which a line belongs."""
        return {"case": self._cases[-1]} if self._cases else {}

    def _write(self, kind: str, **fields: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


def read_record(path: Path) -> list[dict[str, Any]]:
    """The lines so far; a last line that a killed process did not finish is dropped."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def finished_cases(lines: Iterable[dict[str, Any]]) -> set[str]:
    """Names of the cases that ended or failed."""
    return {line["case"] for line in lines if line["kind"] in ("end", "failed")}


def kept_lines(lines: list[dict[str, Any]], again: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The lines of a record that a later call goes on from: those of cases that ended or failed.

    Cases that the end of the part's time cut are dropped with their figures, and run again; so is each case whose name
    contains one of the words in `again` ("failed": each case that failed), and each line of no case.
    """
    dropped = {line["case"] for line in lines if line["kind"] == "failed" and line.get("cut")}
    words = set(again)
    if "failed" in words:
        dropped |= {line["case"] for line in lines if line["kind"] == "failed"}
    words.discard("failed")
    keep = {name for name in finished_cases(lines) - dropped if not any(word in name for word in words)}
    return [line for line in lines if line.get("case") in keep]


def device_is_broken() -> bool:
    """Whether a CUDA error sticks: after an illegal access every call of the process fails."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _summary(error: Exception) -> str:
    """The error and where it was raised, in one line or a few."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:]))
    text = f"{type(error).__name__}: {error}"
    if len(text) > MESSAGE_LENGTH:
        text = text[: MESSAGE_LENGTH // 2] + " ... " + text[-MESSAGE_LENGTH // 2 :]
    return f"{text} ({where})"
