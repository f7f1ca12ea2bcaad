"""Driver: the asyncio loop between those who ask and the Worker that computes.

The server sees requests, streams and plain values (`generate`, `drain`, `health`, `model`, `tokenizer`, the views) and
never a sequence, a block or a plan.
Everything runs on one event loop; the scheduler is touched between awaits only, so there are no locks.

The Driver is the journal: it holds every token of every live sequence, so the death of a Worker is an event and not the
end. A new one is started, all blocks are forgotten, every sequence waits again and is recomputed. What was sent stays
sent; what is sampled again comes out the same, for a draw depends on seed and position alone.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from functools import partial

from engine.checkpoint.locate import model_identity, read_eos_token_ids, resolve_model, resolve_tokenizer
from engine.checkpoint.pooling import pooling_of_model, read_pooling
from engine.checkpoint.sampling_defaults import read_sampling_defaults
from engine.config import EngineConfig
from engine.errors import (
    DeadlineError,
    EngineError,
    InvalidRequestError,
    PageserveError,
    UnavailableError,
    WorkerDiedError,
)
from engine.executor.child_process import kill_children
from engine.executor.executor import WORKER_COMMAND, Executor, NoRoomError, flush
from engine.executor.recovery import Recovery
from engine.executor.step import FetchedBlocks, GrammarPrepared, StartWorker, StepPlan, StepResult, WorkerReady
from engine.executor.step_durations import StepDurations
from engine.executor.timeouts import with_timeout
from engine.grammars.service import GrammarService, failure
from engine.memory.block_manager import BlockManager
from engine.memory.host_tier import HostTier
from engine.outputs import FinishReason
from engine.request import Request
from engine.requests.deadlines import Deadlines
from engine.requests.delivery import Delivery, LiveRequest
from engine.requests.model_info import ModelInfo, check_request, fits_still
from engine.requests.queue_limits import QueueLimits
from engine.requests.stream import RequestStream
from engine.sampling_params import check_beams
from engine.scheduling.beam_group import begin_search
from engine.scheduling.prefetch import Prefetcher
from engine.scheduling.scheduler import Scheduler
from engine.structured_output import Vocabulary
from engine.telemetry.kv_view import KVView, kv_view
from engine.telemetry.request_log import RequestLog, RequestReport
from engine.telemetry.request_timings import RequestTimings
from engine.telemetry.stats import EngineStats
from engine.telemetry.step_log import StepsView
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from engine.thinking import check_budget

logger = logging.getLogger(__name__)


SERVING_PHASES = ("ready", "restarting")  # requests are accepted; in the second they wait for the Worker
NO_ROOM_SECONDS = 1.0  # between two tries to start a Worker where the system has nothing left for one
MIN_RELOAD_SECONDS = 60.0  # before a new Worker that does not finish loading is taken for dead


class Driver:
    """Owns the scheduler, the tokenizer and the Worker process. Made, started and used on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        chat_template: str | None = None,
        max_queued_requests: int = 1024,
        max_queued_tokens: int | None = None,
        worker_command: tuple[str, ...] = WORKER_COMMAND,
    ) -> None:
        self.config = config
        self.stats = EngineStats()
        self.phase = "starting"
        self._chat_template = chat_template
        self._queue_limits = QueueLimits(max_queued_requests, max_queued_tokens)
        self._deadlines = Deadlines(self._expire)
        self._worker_command = worker_command
        self._step_durations = StepDurations()
        self._executor = Executor(worker_command, self._step_durations)
        self.grammars = GrammarService(self._vocabulary, config.grammar_timeout)
        self._recovery = Recovery(config.max_worker_restarts, config.worker_restart_window)
        self._isolated: str | None = None  # the request that runs alone
        self._in_flight: deque[StepPlan] = deque()
        self._live: dict[str, LiveRequest] = {}
        self._delivery = Delivery(self.stats)
        self._owners = self._delivery.owners
        self.request_log = RequestLog()
        self._counter = itertools.count()  # of sequence ids, which are also the order of arrival
        self._pump_scheduled = False
        self._failure: PageserveError | None = None

    async def start(self) -> None:
        """Find the checkpoint, start the Worker on it, load the tokenizer meanwhile. Raises ConfigError, ModelError."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._failed: asyncio.Future[PageserveError] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        model_dir = await asyncio.to_thread(resolve_model, self.config)
        self.eos_token_ids = read_eos_token_ids(model_dir)
        self.sampling_defaults = read_sampling_defaults(model_dir, self.config.generation_config)
        self._checkpoint_pooling = read_pooling(model_dir, self.config.pooling)
        self._start_message = StartWorker(
            self.config, str(model_dir), self.eos_token_ids, model_identity(model_dir, self.config)
        )
        await self._executor.start(self._start_message)
        try:
            tokenizer_dir = await asyncio.to_thread(resolve_tokenizer, self.config, model_dir)
            template_seconds = self.config.chat_template_timeout
            self.tokenizer = await asyncio.to_thread(Tokenizer, tokenizer_dir, self._chat_template, template_seconds)
            await asyncio.to_thread(getattr, self.tokenizer, "thinking_tags")  # takes a while, once
        except BaseException:
            await self._executor.stop()
            raise
        self._task = asyncio.create_task(self._run(), name="engine-loop")

    async def wait_ready(self) -> None:
        """Until requests can be served; raises what went wrong where that never happens."""
        await asyncio.shield(self._ready)

    async def wait_failed(self) -> PageserveError:
        """Until the engine ends for good without being asked to; returns the cause."""
        return await asyncio.shield(self._failed)

    def generate(self, request: Request) -> RequestStream:
        """Queue a request and return the stream of its outputs; it runs whether or not it is read.

        Raises at once InvalidRequestError (ContextLengthError) for what can never run, QueueFullError, and
        UnavailableError while the engine loads, drains or is dead. During a restart of the Worker requests wait.
        """
        self._require_available()
        self._queue_limits.check(self._num_waiting, self.scheduler.num_waiting_tokens, len(request.prompt_token_ids))
        if request.request_id in self._live:
            raise InvalidRequestError(f"A request with id {request.request_id!r} is running already.", "request_id")
        max_num_tokens = check_request(request, self.model)
        self.grammars.require(request.params)
        check_budget(request.params, self.tokenizer.thinking_tags)
        if request.beam_search is not None:
            check_beams(request.beam_search, self.eos_token_ids, self.model.vocab_size, self.scheduler.max_num_seqs)
        n, alike = request.params.n, request.params.greedy or not request.params.generates
        num_computed = 1 if alike and request.beam_search is None else n
        samples = [
            (request.sequence(index, next(self._counter), max_num_tokens), Detokenizer(self.tokenizer, request.params))
            for index in range(num_computed)
        ] * (n // num_computed)
        stream = RequestStream(request, samples, partial(self.abort, request.request_id))
        live = LiveRequest(stream, RequestTimings(self.stats, self._delivery.meter, len(samples)), len(samples))
        self._live[request.request_id] = live
        self._idle.clear()
        if request.timeout is not None:
            self._deadlines.start(request.request_id, request.timeout)
        first, *forks = [seq for seq, _ in samples[:num_computed]]
        for index, seq in enumerate([first, *forks]):
            self._owners[seq.seq_id] = live, range(index, n, num_computed)
        if request.beam_search is not None:
            begin_search(request.beam_search, [first, *forks], self.eos_token_ids)
            forks = []
        self._prefetcher.add(first, forks)
        self._schedule_pump()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request in any state; its blocks are free at once. A no-op for one that ended or never was."""
        live = self._live.get(request_id)
        if live is not None:
            self._end_early(live, FinishReason.ABORT)
            live.stream.wake()
            self._schedule_pump()  # its blocks may let another one in

    def health(self) -> str | None:
        """The reason why this process is of no use any more, or None. A Worker that hangs is killed, not reported."""
        return None if self._failure is None else f"the engine has ended: {self._failure}"

    @property
    def num_live_requests(self) -> int:
        return len(self._live)

    @property
    def _num_waiting(self) -> int:
        return self.scheduler.num_waiting + self._prefetcher.num_waiting

    def stats_snapshot(self) -> None:
        """Bring the gauges, and the counters that the scheduler keeps, up to date."""
        if not hasattr(self, "scheduler"):
            return
        self.stats.take_from(self.scheduler)
        self.stats.num_requests_waiting.value = self._num_waiting

    def request_report(self, request_id: str, tenant: str = "") -> RequestReport | None:
        """How a request fares, or has fared when it is among the last that ended; None for another tenant's."""
        live = self._live.get(request_id)
        if live is None:
            return self.request_log.find(request_id, tenant)
        return live.report() if live.stream.request.tenant == tenant else None

    def kv_view(self) -> KVView:
        """Every KV block and its holder (engine/telemetry/kv_view.py); UnavailableError before the model is loaded."""
        return kv_view(getattr(self, "scheduler", None), self._owners)

    def steps_view(self) -> StepsView:
        """The last steps (engine/telemetry/step_log.py); UnavailableError before the model is loaded."""
        return self.stats.steps.view(getattr(self, "scheduler", None))

    async def drain(self, timeout: float) -> bool:
        """Accept nothing more and wait up to `timeout` seconds for what runs; whether all of it finished.

        What is left then gets an error at the end of its stream.
        """
        if self._failure is None:
            self.phase = "draining"
        try:
            await with_timeout(timeout, self._idle.wait())
        except asyncio.TimeoutError:
            self._fail_all(EngineError("The server shut down before this request was finished."))
            return False
        return True

    async def stop(self) -> None:
        """End the Worker and the loop; live requests get an error. Harmless before `start` and when called again."""
        if (task := getattr(self, "_task", None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._fail_all(EngineError("The engine was stopped."))
        self.phase = "stopped"
        await self._keep_prefixes()
        await self.grammars.close()
        await self._executor.stop()
        if hasattr(self, "tokenizer"):
            self.tokenizer.close()

    @staticmethod
    def kill() -> None:
        """End the Worker and all helpers at once, from any thread, for a process that is about to end itself."""
        kill_children()

    async def _keep_prefixes(self) -> None:
        """Let the disk tier have what the pool holds, for the next server."""
        if self.config.disk_cache is not None and self._executor.ready and self._failure is None:
            await flush(self._executor, self.scheduler.plan_flush(), len(self._in_flight))

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer.to_json(), self.model.vocab_size, self.eos_token_ids)

    def _require_available(self) -> None:
        if self._failure is not None:
            raise UnavailableError(f"The engine has ended: {self._failure}")
        if self.phase not in SERVING_PHASES:
            raise UnavailableError(f"The server is not ready ({self.phase}). Try again shortly.")

    # The loop.

    async def _run(self) -> None:
        try:
            started = time.monotonic()
            self._become_ready(await self._load())
            self._load_timeout = max(MIN_RELOAD_SECONDS, 10 * (time.monotonic() - started))
            while True:
                try:
                    await self._serve()
                except WorkerDiedError as death:
                    await self._restart(death)
        except PageserveError as error:
            self._die(error)
        except Exception:
            logger.exception("the engine loop failed")
            self._die(EngineError("an internal error ended the engine loop; the log has it"))

    async def _load(self) -> WorkerReady:
        """The first Worker's answer. One that somebody kills or stops while it loads is started again; whatever else it
        dies of would come again. Raises PageserveError."""
        while True:
            try:
                return await self._executor.wait_ready(self._set_phase)
            except WorkerDiedError as death:
                if not death.from_outside:
                    raise
                self._recovery.record_death([])
                await self._bury(death)
                await self._start_worker()

    async def _serve(self) -> None:
        """Send plans and take in results until the Worker dies; raises WorkerDiedError."""
        self._set_phase("ready")
        self.grammars.attach(self._executor.send)
        if (tags := self.tokenizer.thinking_tags) is not None:
            self._executor.send(tags)
        self._pump()
        while True:  # also with nothing in flight, so that the death of an idle Worker is noticed
            message = await self._executor.receive()
            if isinstance(message, FetchedBlocks):
                self._prefetcher.fetched(message)
            elif isinstance(message, GrammarPrepared):
                self.grammars.prepared(message)
            else:
                self._process(message)
            self._pump()
            if self.scheduler.has_work and not self._in_flight:
                raise EngineError("the scheduler plans nothing although requests wait")

    def _set_phase(self, phase: str) -> None:
        if self.phase != "draining":
            self.phase = phase

    def _become_ready(self, ready: WorkerReady) -> None:
        self.model = ModelInfo.of(ready, self.config.block_size)
        self.pooling = pooling_of_model(self._checkpoint_pooling, ready.encoder)
        self.scheduler = Scheduler(
            BlockManager(
                ready.num_blocks,
                self.config.block_size,
                self.config.enable_prefix_caching and not ready.encoder,
                HostTier.of(ready, self.config.disk_cache is not None),
                self._start_message.model_identity,
            ),
            max_num_seqs=ready.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            watermark=self.config.watermark,
            admission=self.config.admission,
            eos_token_ids=self.eos_token_ids,
            whole_sequences=ready.encoder,
            step_seconds=None if ready.encoder else self.config.fair_step_seconds,
        )
        self._prefetcher = self._new_prefetcher()
        overlap = self.config.async_scheduling
        if overlap is None:  # on a CPU our own work would take cores from the Worker's threads in mid-step
            overlap = ready.device != "cpu"
        self._max_in_flight = 2 if overlap else 1
        self._set_phase("ready")
        self._ready.set_result(None)

    def _new_prefetcher(self) -> Prefetcher:
        return Prefetcher(self.scheduler, self._executor.send, self._schedule_pump)

    def _schedule_pump(self) -> None:
        """Plan at the end of this turn of the event loop, so that requests that arrive together share a step."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump_soon)

    def _pump_soon(self) -> None:
        try:
            self._pump()
        except Exception:  # nobody awaits this
            logger.exception("planning failed")
            self._task.cancel()
            self._die(EngineError("an internal error ended the engine loop; the log has it"))

    def _pump(self) -> None:
        """Send plans until the Worker has one to compute and, with async_scheduling, one more to go on with."""
        self._pump_scheduled = False
        if self._failure is not None or not self._executor.ready:
            return
        while len(self._in_flight) < self._max_in_flight and self._isolate_suspect():
            plan = self.scheduler.schedule()
            if not self._end_searches() and plan is None:  # one may have run alone, and have found that it never fits
                break
            if plan is not None:
                self._executor.send(plan)
                self._in_flight.append(plan)
                self._queue_limits.step_sent(time.monotonic())
                self._delivery.planned(plan)
                self.stats.observe_plan(plan, self.scheduler)

    def _process(self, result: StepResult) -> None:
        plan = self._in_flight.popleft() if self._in_flight else None
        if plan is None or plan.step_id != result.step_id:
            raise WorkerDiedError(f"the Worker answered step {result.step_id}, which was not the next one")
        now = time.monotonic()
        self._queue_limits.step_done(plan.num_tokens, now, bool(self._in_flight))
        self.stats.steps.done(result, now)
        touched = self._delivery.take(result, self.scheduler, plain=self._recovery.suspects_nobody)
        for live in touched:
            self._recovery.clear(live.stream.request.request_id)
            if live.num_unfinished == 0:
                self._retire(live, live.stream.finish_reason)
            live.stream.wake()
        self._end_searches()
        for seq_id, reason in result.failed.items():
            if seq_id in self._owners:
                self._fail(self._owners[seq_id][0], failure(reason))

    # The death of a Worker.

    async def _restart(self, death: PageserveError) -> None:
        """Put a new Worker in the place of a dead one. Raises EngineError when the budget is spent."""
        self._set_phase("restarting")
        self._prefetcher.close()
        self.grammars.detach()
        died_at = time.monotonic()
        while True:
            self._blame(death)
            await self._bury(death)
            try:
                ready = await self._start_when_there_is_room()
                break
            except PageserveError as error:  # it died while it loaded, or says that it cannot load now
                death = error
        num_tokens = self._recompute(ready)
        seconds = time.monotonic() - died_at
        logger.warning("the Worker runs again after %.1f s; %d tokens are computed again", seconds, num_tokens)

    async def _start_when_there_is_room(self) -> WorkerReady:
        """A lack of descriptors or memory is no death of a Worker: it does not count, and is waited out."""
        while True:
            try:
                return await self._start_again()
            except NoRoomError as error:
                logger.error("%s; trying again in %g s", error, NO_ROOM_SECONDS)
                await self._executor.stop(grace=0)
                await asyncio.sleep(NO_ROOM_SECONDS)

    async def _bury(self, death: PageserveError) -> None:
        """End what is left of a dead Worker and wait until it is time for the next. Raises EngineError when the budget
        is spent."""
        await self._executor.stop(grace=0)
        delay = self._recovery.backoff(death)
        logger.error("%s; starting it again in %g s, %d requests wait", death, delay, len(self._live))
        await asyncio.sleep(delay)

    def _blame(self, death: PageserveError) -> None:
        """Hold the death against the requests that were being computed; end the one that is proven guilty."""
        seq_ids = [seq_id for plan in self._in_flight for seq_id in plan.seq_ids]
        self._in_flight.clear()
        owners = [self._owners[seq_id][0] for seq_id in seq_ids if seq_id in self._owners]
        if isinstance(death, WorkerDiedError) and death.from_outside:
            owners = []
        for request_id in self._recovery.record_death({live.stream.request.request_id: None for live in owners}):
            logger.error("request %s ends: a Worker died of it when it ran alone (%s)", request_id, death)
            self._fail(self._live[request_id], EngineError(f"The Worker dies of this request: {death}."))

    async def _start_worker(self) -> None:
        self.stats.worker_restarts.add()
        self._executor = Executor(self._worker_command, self._step_durations)
        await self._executor.start(self._start_message)

    async def _start_again(self) -> WorkerReady:
        await self._start_worker()
        try:
            return await with_timeout(self._load_timeout, self._executor.wait_ready(lambda phase: None))
        except asyncio.TimeoutError:
            raise WorkerDiedError(f"the new Worker did not load within {self._load_timeout:.0f} s") from None

    def _recompute(self, ready: WorkerReady) -> int:
        """Let every live sequence wait for the new Worker, whose pool may differ; returns how many tokens were lost."""
        lost = [min(seq.num_computed_tokens, len(seq.token_ids)) for seq in self.scheduler.running]
        self.stats.recomputed_sequences.add(len(lost))
        self.stats.recomputed_tokens.add(sum(lost))
        self.model = ModelInfo.of(ready, self.config.block_size)
        self.scheduler.reset(
            ready.num_blocks,
            HostTier.of(ready, self.config.disk_cache is not None),
            max_num_seqs=ready.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
        )
        self._prefetcher = self._new_prefetcher()
        self._isolated = None
        for live in list(self._live.values()):
            unfinished = [seq for seq in live.stream.sequences() if seq.finish_reason is None]
            if not all(fits_still(seq, self.model) for seq in unfinished):
                self._fail(live, EngineError("The Worker came back with a KV cache too small for this request."))
        return sum(lost)

    def _isolate_suspect(self) -> bool:
        """Let a request under suspicion run alone; False while that waits for plans of others to come back."""
        suspect = self._recovery.suspect
        if suspect != self._isolated:
            if self._in_flight:  # a death now is not this one's
                return False
            self._isolated = suspect
            self.scheduler.isolate(None if suspect is None else self._live[suspect].stream.sequences())
        return True

    # Beam searches.

    def _end_searches(self) -> bool:
        """Hand over the hypotheses of beam searches that have ended, or what they failed of; whether there were any."""
        groups, self.scheduler.ended_groups = self.scheduler.ended_groups, []
        for group in groups:
            live, _ = self._owners[group.slots[0].seq_id]
            if group.error:
                self._end_early(live, FinishReason.ERROR)
                live.stream.fail(InvalidRequestError(group.error, "n"))
                continue
            self._delivery.take_search(group, self.scheduler)
            self._retire(live, live.stream.finish_reason)
            live.stream.wake()
        return bool(groups)

    # Ends.

    def _end_early(self, live: LiveRequest, reason: FinishReason) -> None:
        for seq in live.stream.sequences():
            _, indices = self._owners.pop(seq.seq_id, (live, ()))  # nothing for one that is finished
            if indices:
                self._prefetcher.release(seq)
                self.scheduler.finish(seq, reason)
                seq.finish_reason = seq.finish_reason or reason  # a slot without a hypothesis had ended without one
            for index in indices:
                live.stream.finish(index, "")
        self._retire(live, reason)

    def _expire(self, request_id: str, error: DeadlineError) -> None:
        live = self._live[request_id]
        waited = live.stream.sequences()[0].first_scheduled_time is None
        self.stats.requests_expired.add(1.0, ("waiting" if waited else "running",))
        self._end_early(live, FinishReason.ABORT)  # what it has computed is right, and others may share it
        live.stream.fail(error)
        self._schedule_pump()

    def _fail(self, live: LiveRequest, error: PageserveError) -> None:
        self._end_early(live, FinishReason.ERROR)
        live.stream.fail(error)

    def _retire(self, live: LiveRequest, reason: FinishReason) -> None:
        del self._live[live.stream.request.request_id]
        self._recovery.clear(live.stream.request.request_id)
        self.request_log.add(live.stream.request, live.report(reason))
        self._deadlines.clear(live.stream.request.request_id)
        live.timings.observe_end(reason, live.stream.request.params, live.stream.sequences())
        self._queue_limits.request_done(live.stream.num_generated_tokens)
        if not self._live:
            self._idle.set()

    def _fail_all(self, error: PageserveError) -> None:
        for live in list(self._live.values()):
            self._fail(live, error)

    def _die(self, error: PageserveError) -> None:
        self._failure = error
        self.phase = "stopped"
        self._in_flight.clear()
        self._fail_all(EngineError(f"The engine ended while this request ran: {error}."))
        self._failed.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen: whoever awaits wait_ready() gets it, and nobody need
