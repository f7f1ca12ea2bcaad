"""GrammarChecker: decides whether a structured output compiles within the limits, in helper processes (killable).

Runs on the Driver's side, without torch and llguidance. Verdicts are cached: a second check of the same output costs
nothing, and equal concurrent checks of a tenant run once. Tenants take turns and share the places in the queue.
"""

import asyncio
import re
import signal
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from engine.errors import STOPPED, EngineError, InvalidRequestError, QueueFullError, UnavailableError
from engine.executor.child_process import connect, spawn
from engine.executor.fair_slots import FairSlots
from engine.executor.frames import read_frame
from engine.executor.process_state import OomKills, ProcessStoppedError, stopped_at, unless_stopped
from engine.executor.step import encode_frame
from engine.executor.timeouts import with_timeout
from engine.structured_output import StructuredOutput, Vocabulary

HELPER_COMMAND = (sys.executable, "-m", "engine.grammars.checker_process")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
NUM_HELPERS = 2
MAX_VERDICTS = 4096
MAX_WAITING = 128  # checks that wait or run; each tenant may use an equal share
# The time limit counts processor time: a busy machine must not make it fail. A helper without an answer after this many
# times the limit, in wall-clock time, is killed.
WALL_CLOCK_FACTOR = 20.0
LOAD_SECONDS = 120.0  # to start the process, import and load the vocabulary
MAX_ATTEMPTS = 5  # helpers that one check may use up, if something outside kills or stops them
PLACE = re.compile(r"\$((?:\.\w+|\[\d+\]|\['(?:[^'\\]|\\.)*'\])+): ")  # the path at the start of a verdict
MAX_PLACE = 100  # characters
TOO_COSTLY = "it takes too much time or memory to compile: make it smaller or less ambiguous"


class HelperDiedError(Exception):
    """The helper was killed: by its limits, by this process, or from outside.

    `from_outside`: another process stopped it, or killed it while the kernel had enough memory. The grammar did not
    cause it.
    """

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside


class GrammarHelper:
    """One checking process, from its start to its end."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._oom_kills = OomKills()

    async def start(self, vocabulary: Vocabulary, cpu_seconds: float) -> str:
        """Start the process and load the vocabulary; returns "", or the reason why no grammar can be compiled with this
        vocabulary. Raises HelperDiedError, OSError."""
        self._process, ours = spawn(self._command, str(cpu_seconds), environment=ONE_THREAD)
        self._reader, self._writer = await connect(ours)
        return await self.ask(vocabulary, LOAD_SECONDS)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_usable(self) -> bool:
        """False if the process has ended or is stopped: use another helper."""
        assert self._process is not None, "start() comes first"
        return self._process.poll() is None and stopped_at(self._process.pid) is None

    async def ask(self, message: StructuredOutput | Vocabulary, seconds: float) -> str:
        """Send a message; returns the fault that the helper found, or "". Raises HelperDiedError if the helper dies or
        sends no answer for `seconds`."""
        assert self._process is not None, "start() comes first"
        try:
            self._writer.write(encode_frame(message))
            return await with_timeout(seconds, unless_stopped(self._process.pid, self._answer()))
        except ProcessStoppedError as error:
            raise HelperDiedError(str(error), from_outside=True) from None
        except asyncio.TimeoutError:
            raise HelperDiedError(f"no answer within {seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            killed = await asyncio.to_thread(self._was_killed)
            raise HelperDiedError(str(error), from_outside=killed) from None

    def _was_killed(self) -> bool:
        """True if another process killed the helper: none of its limits ends in SIGKILL, except the kernel's OOM
        killer."""
        assert self._process is not None
        try:
            status = self._process.wait(1.0)  # the socket closes shortly before the process can be reaped
        except subprocess.TimeoutExpired:
            return False
        return status == -signal.SIGKILL and self._oom_kills.number == 0

    async def _answer(self) -> str:
        return msgspec.msgpack.decode(await read_frame(self._reader), type=str)

    async def stop(self) -> bool:
        """Kill the process if there is one; it has no state to save. True if its time limit had already ended it."""
        if self._process is None:
            return False
        if hasattr(self, "_writer"):
            self._writer.close()
        self._process.kill()
        return await asyncio.to_thread(self._process.wait) == -signal.SIGPROF


class GrammarChecker:
    """Made and used on one event loop. The first check starts the first helper."""

    def __init__(
        self,
        vocabulary: Callable[[], Awaitable[Vocabulary]],
        cpu_seconds: float,
        *,
        command: tuple[str, ...] = HELPER_COMMAND,
        num_helpers: int = NUM_HELPERS,
    ) -> None:
        self._vocabulary = vocabulary
        self._cpu_seconds = cpu_seconds
        self._command = command
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._checks: dict[tuple[str, bytes], asyncio.Task[str]] = {}  # (tenant, digest): each tenant has its own turn
        self._idle: list[GrammarHelper] = []
        self._busy: set[GrammarHelper] = set()
        self._slots = FairSlots(num_helpers)

    async def check(self, output: StructuredOutput, tenant: str = "") -> None:
        """Return once the output is known to compile. Raises InvalidRequestError if it does not compile, QueueFullError
        if too many checks wait, EngineError if the helpers fail, UnavailableError after `close`. The `param` of an
        InvalidRequestError is structured_output, followed by the place in the schema if the verdict names one.

        If the caller is cancelled, the check runs on and its verdict is cached.
        """
        key = tenant, output.digest()
        verdict = self.verdict(output)
        if verdict is None:
            if (task := self._checks.get(key)) is None:
                if not self._has_place_for(tenant):
                    raise QueueFullError("Too many new grammars wait to be compiled. Try again later.", 5.0)
                task = self._checks[key] = asyncio.create_task(self._find_verdict(key, output))
            try:
                verdict = await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():  # by close(), and not the caller
                    raise UnavailableError(STOPPED) from None
                raise
        if verdict:
            kind = "schema" if output.kind.startswith("json") else output.kind
            found = PLACE.match(verdict)
            place = found[1] if found and len(found[1]) <= MAX_PLACE else ""
            raise InvalidRequestError(f"the {kind} cannot be used: {verdict}", f"structured_output{place}")

    def verdict(self, output: StructuredOutput) -> str | None:
        """The fault of the output; "" if it compiles; None if there is no cached verdict."""
        key = output.digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    @property
    def helper_pids(self) -> list[int | None]:
        return [helper.pid for helper in (*self._idle, *self._busy)]

    async def close(self) -> None:
        tasks = list(self._checks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        helpers, self._idle = [*self._idle, *self._busy], []
        await asyncio.gather(*(helper.stop() for helper in helpers))

    def _has_place_for(self, tenant: str) -> bool:
        waiting = Counter(name for name, _ in self._checks)
        return waiting[tenant] < max(1, MAX_WAITING // len({*waiting, tenant}))

    async def _find_verdict(self, key: tuple[str, bytes], output: StructuredOutput) -> str:
        tenant, digest = key
        try:
            async with self._slots.hold(tenant):
                verdict = self.verdict(output)  # another tenant may have asked for the same
                if verdict is None:
                    verdict = await self._ask(output)
        finally:
            del self._checks[key]
        self._verdicts[digest] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, output: StructuredOutput) -> str:
        """Check an output with a helper. If the helper dies of anything but its time limit, try once more; helpers that
        were killed or stopped from outside do not count. EngineError after MAX_ATTEMPTS helpers."""
        num_deaths = 0
        for _ in range(MAX_ATTEMPTS):
            try:
                helper = await self._take_helper()
            except HelperDiedError:  # killed or stopped from outside while it loaded
                continue
            try:
                verdict = await helper.ask(output, WALL_CLOCK_FACTOR * self._cpu_seconds)
            except HelperDiedError as death:
                num_deaths += not death.from_outside
                if await self._drop(helper) or num_deaths == 2:
                    return TOO_COSTLY
            except BaseException:
                await self._drop(helper)
                raise
            else:
                self._busy.discard(helper)
                self._idle.append(helper)
                return verdict
        raise EngineError("the processes that compile grammars are killed or stopped again and again from outside")

    async def _take_helper(self) -> GrammarHelper:
        """Move an idle helper, else a new one, to the busy ones.

        InvalidRequestError if the model's vocabulary cannot be used for grammars, EngineError if the helper does not
        start, HelperDiedError if it was killed or stopped from outside while it loaded.
        """
        while self._idle:
            helper = self._idle.pop()
            self._busy.add(helper)
            if helper.is_usable:
                return helper
            await self._drop(helper)
        vocabulary = await self._vocabulary()
        helper = GrammarHelper(self._command)
        self._busy.add(helper)
        try:
            refusal = await helper.start(vocabulary, self._cpu_seconds)
        except (HelperDiedError, OSError) as error:
            await self._drop(helper)
            if isinstance(error, HelperDiedError) and error.from_outside:
                raise
            raise EngineError(f"the process that compiles grammars does not start: {error}") from None
        if refusal:
            await self._drop(helper)
            raise InvalidRequestError(f"this model cannot produce structured output: {refusal}", "structured_output")
        return helper

    async def _drop(self, helper: GrammarHelper) -> bool:
        """Stop a helper. True if its time limit had already ended it."""
        timed_out = await helper.stop()
        self._busy.discard(helper)
        return timed_out
