"""GrammarService: prepares the structured output of a request before the Driver may run the request.

First a helper process checks the output (engine/grammars/checker.py). Then the Worker compiles it in a thread beside
its steps, so no stream waits. From then on the Worker holds the state of the grammar, because it needs the next mask as
soon as a token is sampled; after preemption, or a restart of the Worker, the state is rebuilt from the tokens. Tenants
take turns at both stages: a tenant with many grammars delays another tenant by one of them, not by all.
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

# Grammars that the Driver counts as compiled. Fewer than the Worker keeps: the Worker evicts by last use in a sequence,
# the Driver by last request, and the Driver must never count an evicted one.
MAX_KNOWN = MAX_IN_WORKER // 2
MAX_SENT = 4  # grammars that the Worker compiles or has in its queue, which has no turns by tenant

Send = Callable[[PrepareGrammar | Vocabulary], None]


def failure(reason: str) -> PageserveError:
    """The error that ends a sequence after the Worker reported `reason`. A grammar with a dead end is the client's
    mistake."""
    message = f"This request could not be finished: {reason}."
    return InvalidRequestError(message) if reason.startswith(NOT_MATCHED) else EngineError(message)


class GrammarService:
    """Create and use on the Driver's event loop."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cpu_seconds: float) -> None:
        """`vocabulary` is called once, in a thread, for the first structured output."""
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self.checker = GrammarChecker(self.load_vocabulary, cpu_seconds)
        self._send: Send | None = None
        self._in_worker: OrderedDict[bytes, None] = OrderedDict()
        self._sent: dict[bytes, asyncio.Future[str]] = {}
        self._slots = FairSlots(MAX_SENT)
        self._tasks: dict[tuple[str, bytes], asyncio.Task[str]] = {}  # (tenant, digest): each tenant has its own turn

    async def prepare(self, output: StructuredOutput, tenant: str = "") -> None:
        """Check and compile the output. Await this before the request goes to the Driver.

        Raises InvalidRequestError, which names the fault, for an output that cannot be served; QueueFullError while too
        many checks wait.
        """
        await self.checker.check(output, tenant)
        digest = output.digest()
        if digest in self._in_worker:
            self._in_worker.move_to_end(digest)
            return
        key = tenant, digest
        if (task := self._tasks.get(key)) is None:
            task = self._tasks[key] = asyncio.create_task(self._have_compiled(key, output))
        if error := await asyncio.shield(task):  # the Worker goes on compiling if the caller is cancelled
            raise EngineError(f"the Worker could not compile a grammar that was checked before: {error}")

    def require(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if the request's output was not prepared."""
        output = params.structured_output
        if output is not None and self.checker.verdict(output) != "":
            raise InvalidRequestError("structured_output was not prepared: await prepare() first.", "structured_output")

    def attach(self, send: Send) -> None:
        """A Worker is ready. Send it the vocabulary, if any grammar was ever asked for, before the first plan."""
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
        """Have the Worker compile the output; returns its error, or ""."""
        tenant, digest = key
        try:
            async with self._slots.hold(tenant):
                if self._send is None or digest in self._in_worker:  # without a Worker, the next one compiles it
                    return ""
                if digest not in self._sent:
                    self._sent[digest] = asyncio.get_running_loop().create_future()
                    self._send(PrepareGrammar(output))
                return await self._sent[digest]
        finally:
            del self._tasks[key]

    async def load_vocabulary(self) -> Vocabulary:
        """The vocabulary, which the Worker needs before its first grammar and gets here."""
        if self._vocabulary is None:
            vocabulary = await asyncio.to_thread(self._make_vocabulary)
            if self._vocabulary is None:
                self._vocabulary = vocabulary
                if self._send is not None:
                    self._send(vocabulary)
        return self._vocabulary
