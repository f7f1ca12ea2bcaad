"""Replicas: several equal Drivers behind one (data parallelism), each with a Worker and a KV cache of its own.

A request goes to the replica with the most of its prompt in the cache, unless another is so much less busy that it
would be done earlier there (engine/replicas/router.py). The Drivers share one event loop and one tokenizer. Whatever
happens to the Worker of one replica, the streams of the others go on.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.driver import SERVING_PHASES, Driver
from engine.errors import ConfigError, InvalidRequestError, PageserveError, QueueFullError
from engine.executor.step import Place
from engine.grammars.checker import GrammarChecker
from engine.replicas.engine import Engine
from engine.replicas.router import LIVE_COST, PrefixRouter, prefix_keys
from engine.request import Request
from engine.requests.model_info import ModelInfo
from engine.requests.stream import RequestStream
from engine.structured_output import StructuredOutput
from engine.telemetry.request_log import RequestReport
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

GRAMMAR_SECONDS = 1.0
START_COST = 4096  # tokens: a request waits about so long for a Worker that wakes or starts again. Not measured yet


def make_engine(config: EngineConfig, **options: Any) -> Engine:
    """A Driver, or with data_parallel_size several; `options` are those of Driver. Raises ConfigError."""
    return Driver(config, **options) if config.data_parallel_size == 1 else Replicas(config, **options)


class Replicas:
    """See Engine. Limits of the queue hold for all replicas together, each has an equal part."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_queued_requests: int = 1024,
        max_queued_tokens: int | None = None,
        room: Any = None,
        **options: Any,
    ) -> None:
        """The options are those of Driver."""
        if room is not None:
            raise ConfigError(
                "data_parallel_size: a model with replicas cannot sleep for another one; raise max_loaded."
            )
        size = config.data_parallel_size
        limits: dict[str, Any] = {
            "max_queued_requests": -(-max_queued_requests // size),
            "max_queued_tokens": None if max_queued_tokens is None else -(-max_queued_tokens // size),
        }
        self.config = config
        self.replicas: Sequence[Driver] = tuple(
            Driver(_config_of(config, i), place=Place(first_gpu=i * config.tensor_parallel_size), **limits, **options)
            for i in range(size)
        )
        for replica in self.replicas:
            replica.heirs = self._inherit
        self.grammars = _SharedGrammars(self.replicas)
        self._router = PrefixRouter(size)
        self._num_restarts = [0.0] * size

    # The life of a server.

    async def start(self) -> None:
        first, *others = self.replicas
        await first.start()
        for replica in others:
            await replica.start(first.tokenizer)

    async def wait_ready(self) -> None:
        """Return when all replicas can serve requests. Raises the first error of one."""
        await asyncio.gather(*(replica.wait_ready() for replica in self.replicas))

    async def wait_failed(self) -> PageserveError:
        """Return the last cause once every replica has ended for good."""
        tasks = [asyncio.create_task(replica.wait_failed()) for replica in self.replicas]
        try:
            for num_ended, task in enumerate(asyncio.as_completed(tasks), 1):
                error = await task
                logger.error("a replica has ended, %d of %d serve: %s", len(tasks) - num_ended, len(tasks), error)
        finally:
            for left in tasks:
                left.cancel()
        return error

    async def drain(self, timeout: float) -> bool:
        return all(await asyncio.gather(*(replica.drain(timeout) for replica in self.replicas)))

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    @staticmethod
    def kill() -> None:
        Driver.kill()

    async def sleep(self, level: int = 2) -> None:
        """All replicas sleep; a request then wakes those that it needs."""
        await asyncio.gather(*(replica.sleep(level) for replica in self._alive))

    async def wake(self) -> None:
        await asyncio.gather(*(replica.wake() for replica in self._alive))

    # Requests.

    def generate(self, request: Request) -> RequestStream:
        """Queue a request at the best replica; where the queue of one is full, at the next. Raises what Driver.generate
        raises; QueueFullError only if all queues are full."""
        if self.phase not in SERVING_PHASES:
            return self.replicas[0].generate(request)  # which says why not
        if any(replica.is_live(request.request_id) for replica in self.replicas):
            raise InvalidRequestError(f"A request with id {request.request_id!r} is running already.", "request_id")
        keys = prefix_keys(request.prompt_token_ids, (request.cache_salt, request.adapter))
        full: list[QueueFullError] = []
        for i in self._order(keys, request):
            replica = self.replicas[i]
            try:
                stream = replica.generate(request)
            except QueueFullError as error:
                full.append(error)
                continue
            self._router.sent(i, keys, replica.model.num_blocks * replica.model.block_size)
            return stream
        raise min(full, key=lambda error: error.retry_after)

    def _order(self, keys: Sequence[int], request: Request) -> list[int]:
        """The numbers of the replicas that serve, the best for the request first."""
        waiting = []
        for i, replica in enumerate(self.replicas):
            if replica.phase not in SERVING_PHASES:
                continue
            restarts = replica.stats.worker_restarts.values[()]
            if replica.sleep_level or restarts > self._num_restarts[i]:
                self._num_restarts[i] = restarts
                self._router.forget(i)
            work = replica.scheduler.num_waiting_tokens + LIVE_COST * replica.num_live_requests
            waiting.append((i, work + START_COST * (replica.phase != "ready")))
        return self._router.order(keys, len(request.prompt_token_ids), waiting)

    def _inherit(self, ended: Driver) -> None:
        """Let other replicas go on with the live requests of one whose Workers have died too often."""
        requests, num_moved = ended.live_requests, 0
        for request in requests:
            keys = prefix_keys(request.prompt_token_ids, (request.cache_salt, request.adapter))
            for i in self._order(keys, request):
                replica = self.replicas[i]
                if replica.take_over(request.request_id, ended):
                    self._router.sent(i, keys, replica.model.num_blocks * replica.model.block_size)
                    num_moved += 1
                    break
        if requests:
            logger.warning("other replicas go on with %d of the %d requests of one that ends", num_moved, len(requests))

    def abort(self, request_id: str) -> None:
        for replica in self.replicas:
            replica.abort(request_id)

    # Views.

    @property
    def _alive(self) -> list[Driver]:
        return [replica for replica in self.replicas if replica.health() is None]

    def health(self) -> str | None:
        """The reason why this process must be replaced: every replica has ended."""
        reasons = [replica.health() for replica in self.replicas]
        return None if None in reasons else reasons[0]

    @property
    def phase(self) -> str:
        """The phase of the replica that is best off, once all have loaded; before, the phase of one that has not."""
        phases = [replica.phase for replica in self.replicas]
        waited_for = [phase for phase in phases if phase not in (*SERVING_PHASES, "stopped")]
        return (waited_for or sorted(set(phases), key=[*SERVING_PHASES, "stopped"].index))[0]

    @property
    def model(self) -> ModelInfo:
        """The model of the replica with the shortest context, where they differ: every replica serves that."""
        models = [replica.model for replica in self.replicas]
        return min(models, key=lambda model: (model.max_model_len, model.num_blocks))

    @property
    def adapters(self) -> dict[str, str]:
        """Every replica that serves has the same; one that has ended keeps those of its end."""
        return next(iter(self._alive), self.replicas[0]).adapters

    @property
    def tokenizer(self) -> Tokenizer:
        return self.replicas[0].tokenizer

    @property
    def eos_token_ids(self) -> list[int]:
        return self.replicas[0].eos_token_ids

    @property
    def sampling_defaults(self) -> Any:
        return self.replicas[0].sampling_defaults

    @property
    def sleep_level(self) -> int:
        """1 or 2 while all replicas sleep, 0 while one is awake."""
        return min((replica.sleep_level for replica in self._alive), default=0)

    def request_report(self, request_id: str, tenant: str = "") -> RequestReport | None:
        reports = (replica.request_report(request_id, tenant) for replica in self.replicas)
        return next((report for report in reports if report is not None), None)


class _SharedGrammars:
    """Prepares an output in every Worker: the request may go to any of them. One checker serves all. A Worker that is
    later than another by GRAMMAR_SECONDS is not waited for, it may hang: if the request goes there, a step compiles the
    output."""

    def __init__(self, replicas: Sequence[Driver]) -> None:
        self._services = [replica.grammars for replica in replicas]
        for service in self._services[1:]:
            service.checker = self.checker

    @property
    def checker(self) -> GrammarChecker:
        return self._services[0].checker

    async def prepare(self, output: StructuredOutput, tenant: str = "") -> None:
        await self.checker.check(output, tenant)
        await asyncio.gather(*(service.load_vocabulary() for service in self._services))
        tasks = [asyncio.create_task(service.prepare(output, tenant)) for service in self._services]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait(tasks, timeout=GRAMMAR_SECONDS)
        finally:
            for task in tasks:
                task.cancel()  # the Worker goes on compiling
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


def _config_of(config: EngineConfig, replica: int) -> EngineConfig:
    """Two Workers cannot share the file of a disk cache."""
    if config.disk_cache is None:
        return config
    return dataclasses.replace(config, disk_cache=str(Path(config.disk_cache) / f"replica-{replica}"))
