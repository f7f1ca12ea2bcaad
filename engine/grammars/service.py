"""GrammarService: what the Driver does about structured outputs before a request that has one may run.

First a process that can be killed checks it (engine/grammars/checker.py); then the Worker compiles it, in a thread
beside its steps, so that no stream waits for that. From then on the state of the grammar lives in the Worker, where
the next mask is needed as soon as a token is sampled; after preemption, or a Worker's death, the tokens bring it back.
Before both, tenants take turns: who asks for many has others wait for one of them, not for all.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from engine.errors import EngineError, InvalidRequestError, PageserveError
from engine.executor.fair_slots import FairSlots
from engine.executor.step import GrammarPrepared, PrepareGrammar
from engine.grammars.checker import GrammarChecker
from engine.sampling_params import SamplingParams
from engine.structured_output import MAX_IN_WORKER, NOT_MATCHED, StructuredOutput, Vocabulary

# Of those in the Worker, the ones asked for last: fewer than it keeps, since its order is that of when they were used.
MAX_KNOWN = MAX_IN_WORKER // 2
MAX_SENT = 4  # that the Worker compiles, or will next; it takes them in order, whoever asked

Send = Callable[[PrepareGrammar | Vocabulary], None]


def failure(reason: str) -> PageserveError:
    """What ends a sequence of which the Worker says `reason`: a form that leads nowhere is its author's mistake."""
    message = f"This request could not be finished: {reason}."
    return InvalidRequestError(message) if reason.startswith(NOT_MATCHED) else EngineError(message)


class GrammarService:
    """Made and used on the Driver's event loop."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cpu_seconds: float) -> None:
        """`vocabulary` is called in a thread, once, when the first structured output is asked for."""
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self.checker = GrammarChecker(self._get_vocabulary, cpu_seconds)
        self._send: Send | None = None
        self._in_worker: OrderedDict[bytes, None] = OrderedDict()
        self._sent: dict[bytes, asyncio.Future[str]] = {}
        self._slots = FairSlots(MAX_SENT)
        self._tasks: dict[tuple[str, bytes], asyncio.Task[str]] = {}  # by tenant: nobody waits in another's queue

    async def prepare(self, output: StructuredOutput, tenant: str = "") -> None:
        """To be awaited before the request is handed to the Driver.

        Raises InvalidRequestError for what cannot be served, with what is wrong; QueueFullError while too many wait.
        """
        await self.checker.check(output, tenant)
        digest = output.digest()
        if digest in self._in_worker:
            self._in_worker.move_to_end(digest)
            return
        key = tenant, digest
        if (task := self._tasks.get(key)) is None:
            task = self._tasks[key] = asyncio.create_task(self._have_compiled(key, output))
        if error := await asyncio.shield(task):  # a caller that leaves does not make the Worker stop
            raise EngineError(f"the Worker could not compile what was checked before: {error}")

    def require(self, params: SamplingParams) -> None:
        """Fail closed: InvalidRequestError for what was not prepared."""
        output = params.structured_output
        if output is not None and self.checker.verdict(output) != "":
            raise InvalidRequestError("structured_output was not prepared: await prepare() first.", "structured_output")

    def attach(self, send: Send) -> None:
        """A Worker is ready. It gets the vocabulary before any plan, if there was ever need of it."""
        self._send = send
        if self._vocabulary is not None:
            send(self._vocabulary)

    def detach(self) -> None:
        """The Worker is gone."""
        self._send = None
        self._in_worker.clear()
        for digest in list(self._sent):
            self._sent.pop(digest).set_result("")

    def prepared(self, message: GrammarPrepared) -> None:
        if not message.error:
            self._in_worker[message.digest] = None
        if len(self._in_worker) > MAX_KNOWN:
            self._in_worker.popitem(last=False)
        if (answer := self._sent.pop(message.digest, None)) is not None:
            answer.set_result(message.error)

    async def close(self) -> None:
        self.detach()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.checker.close()

    async def _have_compiled(self, key: tuple[str, bytes], output: StructuredOutput) -> str:
        """What the Worker found wrong with it, or ""."""
        tenant, digest = key
        try:
            async with self._slots.take(tenant):
                if self._send is None or digest in self._in_worker:  # without a Worker, the next one compiles it
                    return ""
                if digest not in self._sent:
                    self._sent[digest] = asyncio.get_running_loop().create_future()
                    self._send(PrepareGrammar(output))
                return await self._sent[digest]
        finally:
            del self._tasks[key]

    async def _get_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            vocabulary = await asyncio.to_thread(self._make_vocabulary)
            if self._vocabulary is None:
                self._vocabulary = vocabulary
                if self._send is not None:
                    self._send(vocabulary)
        return self._vocabulary
