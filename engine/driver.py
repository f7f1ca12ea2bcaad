"""Driver: the asyncio loop between the clients' requests and the Worker that computes them.

The server sees requests, streams and plain values (`generate`, `drain`, `health`, `model`, `tokenizer`, the views) and
never a sequence, a block or a plan. Everything runs on one event loop; the scheduler is touched between awaits only, so
there are no locks.

The Driver is the journal: it holds every token of every live sequence, so it outlives the death of a Worker. A new
Worker is started, all blocks are forgotten, and every sequence waits to be recomputed. Tokens that were sent stay sent;
tokens that are sampled again come out the same, because a draw depends on seed and position alone.

A model may sleep (engine/requests/sleep.py): then the Driver keeps the journal without a Worker, until a request comes.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from engine.checkpoint.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineError,
    ModelError,
    PageserveError,
    RestartsSpentError,
    UnavailableError,
    WorkerDiedError,
)
from engine.executor.step import (
    ONE_PLACE,
    AdapterLoaded,
    FetchedBlocks,
    GrammarPrepared,
    Place,
    SleepWorker,
    StartWorker,
    StepPlan,
    StepResult,
    WorkerAsleep,
    WorkerReady,
)
from engine.executor.supervisor import Supervisor
from engine.executor.timeouts import with_timeout
from engine.grammars.service import GrammarService, failure
from engine.request import Request
from engine.requests.loaded import Loaded
from engine.requests.model_info import ModelInfo, check_request
from engine.requests.sleep import Room, SleepSwitch
from engine.requests.stream import RequestStream
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.kv_view import KVView, kv_view
from engine.telemetry.request_log import RequestLog, RequestReport
from engine.telemetry.stats import EngineStats
from engine.telemetry.step_log import StepsView
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DISK_SECONDS = 30.0  # a model that is told to sleep waits no longer for reads of its disk cache
MAX_IN_FLIGHT = 2  # plans: the one that the Worker computes and the next
SLEEP_PHASES = ("sleeping", "waking")
# Requests are accepted. In every phase but "ready" they wait for the Worker; a request to a sleeping model wakes it.
SERVING_PHASES = ("ready", "restarting", *SLEEP_PHASES)


class Driver:
    """Owns the scheduler, the tokenizer and the Worker process. Made, started and used on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        chat_template: str | None = None,
        max_queued_requests: int = 1024,
        max_queued_tokens: int | None = None,
        worker_command: tuple[str, ...] | None = None,
        room: Room | None = None,
        place: Place = ONE_PLACE,
    ) -> None:
        """`worker_command` replaces the command that starts the Worker process. `room` is asked before the model
        loads, at the start and at each wake. `place` names the GPU of one of several replicas."""
        self.config = config
        self._place = place
        self.stats = EngineStats()
        self.request_log = RequestLog()
        self.phase = "starting"
        self.grammars = GrammarService(lambda: self.model.vocabulary(self.tokenizer.to_json()), config.grammar_timeout)
        self._chat_template = chat_template
        self._queue_limits = max_queued_requests, max_queued_tokens
        self.supervisor = Supervisor(
            worker_command, config.max_worker_restarts, config.worker_restart_window, self.stats.worker_restarts.add
        )
        self.recovery = self.supervisor.recovery
        self._sleep = SleepSwitch()
        self._room = room
        self._woke_at = 0.0  # time.monotonic()
        self._dozing: asyncio.Task[None] | None = None  # with sleep_after
        self._disk_timer: asyncio.TimerHandle | None = None
        self._isolated: str | None = None  # the request that runs alone
        self._in_flight: deque[StepPlan] = deque()
        # False until the scheduler knows that a new Worker has an empty pool: that is later than the Worker is ready.
        self._serves = False
        self._pump_scheduled = False
        self._tokenizer: Tokenizer | None = None
        self._owns_tokenizer = True
        self.heirs: Callable[[Driver], None] | None = None  # other replicas, which go on with the live requests
        self._loaded: Loaded | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: PageserveError | None = None

    # The life of a server.

    async def start(self, tokenizer: Tokenizer | None = None) -> None:
        """Find the checkpoint, start the Worker on it, load the tokenizer meanwhile, unless the replica before has
        loaded it. Raises ConfigError, ModelError."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._failed: asyncio.Future[PageserveError] = self._loop.create_future()
        if self._room is not None:
            await self._room.enter(self)
        self._checkpoint = checkpoint = await asyncio.to_thread(open_checkpoint, self.config)
        self.eos_token_ids = checkpoint.eos_token_ids
        self.sampling_defaults = checkpoint.sampling_defaults
        await self.supervisor.start(
            StartWorker(
                self.config,
                str(checkpoint.model_dir),
                checkpoint.eos_token_ids,
                checkpoint.identity,
                self._place,
                str(checkpoint.draft_dir or ""),
            )
        )
        self._tokenizer, self._owns_tokenizer = tokenizer, tokenizer is None
        try:
            if tokenizer is None:
                await asyncio.to_thread(self._load_tokenizer)
        except BaseException:
            await self.supervisor.executor.stop()
            raise
        self._task = asyncio.create_task(self._run(), name="engine-loop")
        if self.config.sleep_after is not None:
            self._dozing = asyncio.create_task(self._sleep_when_idle(self.config.sleep_after), name="sleep-when-idle")

    def _load_tokenizer(self) -> None:
        folder = self._checkpoint.find_tokenizer(self.config)
        self._tokenizer = Tokenizer(folder, self._chat_template, self.config.chat_template_timeout)
        _ = self._tokenizer.thinking_tags  # computed once, which takes a while
        draft_dir = self._checkpoint.draft_dir
        if draft_dir is not None and not self._tokenizer.has_tokens_of(draft_dir):
            raise ConfigError(
                f"speculative: the tokenizer of {self.config.draft_model} has other tokens than the model's; a draft "
                "model needs the same vocabulary."
            )

    async def wait_ready(self) -> None:
        """Return when requests can be served. Raises the PageserveError that ended the engine before."""
        await asyncio.shield(self._ready)

    async def wait_failed(self) -> PageserveError:
        """Return the cause when the engine ends for good without being asked to."""
        return await asyncio.shield(self._failed)

    async def drain(self, timeout: float) -> bool:
        """Accept no more requests and wait up to `timeout` seconds for the live ones. Returns True if all finished.

        The others get an error at the end of their streams.
        """
        if self._failure is None:
            self._set_phase("draining")
        if self._loaded is None:
            return True
        if self._loaded.live:
            self._ask_to_wake()  # live requests of a sleeping model are finished, too
        try:
            await with_timeout(timeout, self._loaded.live.wait_until_none())
        except asyncio.TimeoutError:
            self._fail_all(EngineError("The server shut down before this request was finished."))
            return False
        return True

    async def stop(self) -> None:
        """End the Worker and the loop; live requests get an error. Harmless before `start` and when called again."""
        served = self._serves  # else the scheduler may still believe in the pool of the Worker before this one
        tasks = [task for task in (self._dozing, self._task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(EngineError("The engine was stopped."))
        self.phase = "stopped"
        self._sleep.notify()
        if served:
            await self._keep_prefixes()
        await self.grammars.close()
        await self.supervisor.executor.stop()
        if self._tokenizer is not None and self._owns_tokenizer:
            self._tokenizer.close()

    @staticmethod
    def kill() -> None:
        """Kill the Worker and all helper processes at once, from any thread; this process is about to end itself."""
        Supervisor.kill_all()

    async def _keep_prefixes(self) -> None:
        """Write the content of the pool to the disk tier, for the next server."""
        executor = self.supervisor.executor
        if self.config.disk_cache is not None and executor.ready and self._failure is None and self._loaded is not None:
            await executor.flush(self._loaded.scheduler.plan_flush(), len(self._in_flight))

    # Requests and views.

    def generate(self, request: Request) -> RequestStream:
        """Queue a request and return the stream of its outputs; it runs whether or not it is read.

        Raises at once InvalidRequestError (ContextLengthError) for a request that can never run, QueueFullError, and
        UnavailableError while the engine loads, drains or is dead. During a restart of the Worker requests wait. A
        request wakes a model that sleeps, and waits for it.
        """
        loaded = self._require_serving()
        loaded.live.check_room(request)
        max_num_tokens = check_request(request, loaded.model)
        self.grammars.require(request.params)
        self._ask_to_wake()
        return loaded.live.register(request, max_num_tokens)

    def take_over(self, request_id: str, other: "Driver") -> bool:
        """Go on with a live request of another replica, whose Worker is gone for good; its stream stays the same.
        Returns False where that cannot be. Raises UnavailableError while this engine loads, drains or is dead."""
        loaded = self._require_serving()
        if not loaded.take_over(request_id, other._require_loaded("requests")):
            return False
        self._ask_to_wake()
        return True

    def abort(self, request_id: str) -> None:
        """End a request in any state; its blocks are free at once. Does nothing for an unknown or ended request."""
        if self._loaded is not None:
            self._loaded.live.abort(request_id)

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the LoRA adapters that requests may name, by name."""
        return {} if self._loaded is None else self._loaded.adapters.paths

    def adapter_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """The number of running and of waiting sequences of each LoRA adapter that has any, by name."""
        if self._loaded is None:
            return {}, {}
        queues = self._loaded.scheduler.running, self._loaded.scheduler.waiting
        running, waiting = (
            self._loaded.adapters.count([seq.adapter.adapter_id for seq in queue if seq.adapter]) for queue in queues
        )
        return running, waiting

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder inside lora_root; returns once requests may name it. Streams go on
        meanwhile; a model that sleeps is woken. Raises InvalidRequestError, and UnavailableError while the engine
        loads, drains or is dead."""
        adapters = self._require_serving().adapters
        self._ask_to_wake()
        await adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that use it go on. Raises what `load_adapter` raises."""
        self._require_serving().adapters.unload(name)

    def health(self) -> str | None:
        """The reason why this process must be replaced, or None. A Worker that hangs is killed, not reported."""
        return None if self._failure is None else f"the engine has ended: {self._failure}"

    @property
    def replicas(self) -> "tuple[Driver, ...]":
        """See engine/replicas/engine.py: a Driver is its own only replica."""
        return (self,)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, once `start` has returned."""
        assert self._tokenizer is not None, "start() loads it"
        return self._tokenizer

    @property
    def model(self) -> ModelInfo:
        """The model that is served, once it is ready."""
        return self._require_loaded("model limits").model

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, once the model is ready."""
        return self._require_loaded("sequences").scheduler

    @property
    def worker_pid(self) -> int | None:
        """The process id of the present Worker."""
        return self.supervisor.executor.pid

    @property
    def num_in_flight(self) -> int:
        """Plans that were sent and whose results are not back."""
        return len(self._in_flight)

    @property
    def live_requests(self) -> list[Request]:
        """All requests that were accepted and have not ended."""
        return [] if self._loaded is None else [live.request for live in self._loaded.live]

    def is_live(self, request_id: str) -> bool:
        """True for the id of a request that was accepted and has not ended."""
        return self._loaded is not None and self._loaded.live.get(request_id) is not None

    @property
    def num_live_requests(self) -> int:
        return 0 if self._loaded is None else len(self._loaded.live)

    def check_invariants(self) -> None:
        """Assert that scheduler, blocks and requests agree. For tests and simulation: O(n)."""
        if self._loaded is not None:
            self._loaded.scheduler.check_invariants()
            self._loaded.live.check_invariants()

    def stats_snapshot(self) -> None:
        """Bring the gauges, and the counters that the scheduler keeps, up to date."""
        if self._loaded is not None:
            loaded = self._loaded
            self.stats.read_scheduler(loaded.scheduler, loaded.live.num_waiting, asleep=self.sleep_level > 0)

    def request_report(self, request_id: str, tenant: str = "") -> RequestReport | None:
        """The report of a live request, or of one of the last that ended; None for another tenant's request."""
        live = None if self._loaded is None else self._loaded.live.get(request_id)
        if live is None:
            return self.request_log.find(request_id, tenant)
        return live.report() if live.request.tenant == tenant else None

    def kv_view(self) -> KVView:
        """Every KV block and its holder (engine/telemetry/kv_view.py); UnavailableError before the model is loaded."""
        loaded = self._require_loaded("KV blocks")
        return kv_view(loaded.scheduler, loaded.live.owner_of, asleep=self.sleep_level > 0)

    def steps_view(self) -> StepsView:
        """The last steps (engine/telemetry/step_log.py); UnavailableError before the model is loaded."""
        return self.stats.steps.view(self._require_loaded("steps").scheduler, asleep=self.sleep_level > 0)

    def _require_serving(self) -> Loaded:
        if self._failure is not None:
            raise UnavailableError(f"The engine has ended: {self._failure}")
        if self.phase not in SERVING_PHASES:
            raise UnavailableError(f"The server is not ready ({self.phase}). Try again shortly.")
        return self._require_loaded("sequences")

    def _require_loaded(self, name: str) -> Loaded:
        """The loaded model; UnavailableError, which says what is missing by its `name`, before."""
        if self._loaded is None:
            raise UnavailableError(f"There are no {name} before the model is loaded. Try again shortly.")
        return self._loaded

    # The loop.

    async def _run(self) -> None:
        try:
            loaded = await self._become_ready()
            while True:
                try:
                    level = await self._serve(loaded)
                    loaded = self._loaded = await self._rest(loaded, level)
                except WorkerDiedError as death:
                    loaded = self._loaded = await self._restart(loaded, death)
        except PageserveError as error:
            self._die(error)
        except Exception:
            logger.exception("the engine loop failed")
            self._die(EngineError("an internal error ended the engine loop; the log has it"))

    async def _become_ready(self) -> Loaded:
        while True:
            ready = await self.supervisor.wait_loaded(self._set_phase)
            try:
                loaded = await self._load_adapters(ready)
                break
            except WorkerDiedError as death:
                await self.supervisor.start_again(death)
        self._loaded = loaded
        self._set_phase("ready")
        self._woke_at = time.monotonic()
        self._ready.set_result(None)
        return loaded

    async def _load_adapters(self, ready: WorkerReady) -> Loaded:
        """The model of the first Worker, once the adapters that the settings name are loaded, too. Raises ModelError,
        and WorkerDiedError if the Worker dies meanwhile."""
        loaded = Loaded.of(
            ready,
            self.config,
            self._checkpoint,
            self.tokenizer,
            send=self.supervisor.send,
            wake=self._schedule_pump,
            queue_limits=self._queue_limits,
            recovery=self.recovery,
            stats=self.stats,
            log=self.request_log,
        )
        if loaded.adapters.starting:
            self._set_phase("loading adapters")
            loaded.adapters.attach(self.supervisor.send)
        while loaded.adapters.starting:
            message = await self.supervisor.executor.receive()
            assert isinstance(message, AdapterLoaded), "the Worker was asked for nothing else"
            loaded.adapters.answered(message)
            if message.error:
                raise ModelError(f"lora: {message.error}")
        return loaded

    async def _serve(self, loaded: Loaded) -> int:
        """Send plans and take in results until the Worker sleeps; returns the level. WorkerDiedError if it dies."""
        self._set_phase("ready")
        self.grammars.attach(self.supervisor.send)
        loaded.adapters.attach(self.supervisor.send)
        if loaded.model.thinking_tags is not None:
            self.supervisor.send(loaded.model.thinking_tags)
        self._serves = True
        try:
            return await self._take_results(loaded)
        finally:
            self._serves = False

    async def _take_results(self, loaded: Loaded) -> int:
        """The loop of `_serve`."""
        self._pump()
        while True:  # also with nothing in flight, so that the death of an idle Worker is noticed
            message = await self.supervisor.executor.receive()
            if isinstance(message, StepResult):
                self._process(loaded, message)
            elif isinstance(message, GrammarPrepared):
                self.grammars.prepared(message)
            elif isinstance(message, AdapterLoaded):
                loaded.adapters.answered(message)
            elif isinstance(message, WorkerAsleep):
                return self._sleep.level
            else:
                self._fetched(loaded, message)
            self._pump()
            if loaded.scheduler.has_work and not self._in_flight and not self._sleep.plans_stop:
                raise EngineError("the scheduler plans nothing although requests wait")

    def _set_phase(self, phase: str) -> None:
        if self.phase != "draining":
            self.phase = phase
        self._sleep.notify()

    def _schedule_pump(self) -> None:
        """Plan at the end of this turn of the event loop, so that requests that arrive together share a step."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump_soon)

    def _pump_soon(self) -> None:
        try:
            self._pump()
        except Exception:  # a callback of the loop: no task would raise it
            logger.exception("planning failed")
            assert self._task is not None, "start() comes first"
            self._task.cancel()
            self._die(EngineError("an internal error ended the engine loop; the log has it"))

    def _pump(self) -> None:
        """Send plans until the Worker has one to compute and, where that helps, another to go on with."""
        self._pump_scheduled = False
        loaded, executor = self._loaded, self.supervisor.executor
        if loaded is None or self._failure is not None or not (self._serves and executor.ready):
            return
        if self._sleep.plans_stop:
            self._tell_to_sleep(loaded)
            return
        scheduler, live = loaded.scheduler, loaded.live
        while self._has_room_for_plan(loaded) and self._isolate_suspect(loaded):
            plan = scheduler.schedule()
            if plan is not None:
                executor.send(plan)
                self._in_flight.append(plan)
            now = time.monotonic()
            # A beam search that ran alone and never fits leaves no plan: others may run now, so plan again.
            if not live.end_searches(now) and plan is None:
                break
            if plan is not None:
                live.plan_sent(plan, now)
                self.stats.observe_plan(plan, scheduler)

    def _has_room_for_plan(self, loaded: Loaded) -> bool:
        return not self._in_flight or (
            len(self._in_flight) < MAX_IN_FLIGHT and loaded.goes_ahead_of(self._in_flight[0])
        )

    def _process(self, loaded: Loaded, result: StepResult) -> None:
        """Let the scheduler take in a result, and hand over what is new.

        With overlapped scheduling the next plan is sent first: it must arrive while the device computes the one before.
        So it still holds a sequence whose text then turns out to end at a stop string. The token for it is dropped, as
        is the token of the plan under way.
        """
        plan = self._in_flight.popleft() if self._in_flight else None
        if plan is None or plan.step_id != result.step_id:
            raise WorkerDiedError(f"the Worker answered step {result.step_id}, which was not the next one")
        scheduler, live, now = loaded.scheduler, loaded.live, time.monotonic()
        live.step_done(plan, now, more_in_flight=bool(self._in_flight))
        self.stats.steps.done(result, now)
        fresh, vectors = scheduler.update(result), scheduler.update_vectors(result)
        # A sequence that failed must not be planned again. A request that ran alone may have ended: others may run once
        # that is recorded.
        if loaded.goes_ahead_of(plan) and not result.failed and self._isolated is None:
            self._pump()
        live.deliver(result, fresh, vectors, now)
        live.end_searches(now)
        if result.failed:
            live.fail_sequences({seq_id: failure(reason) for seq_id, reason in result.failed.items()})

    def _fetched(self, loaded: Loaded, message: FetchedBlocks) -> None:
        if loaded.prefetcher is None:
            raise WorkerDiedError("the Worker answered a fetch, but there is no disk tier")
        loaded.prefetcher.fetched(message)
        if self._sleep.fetching and not loaded.prefetcher.has_fetches:
            self._fetched_again()

    # Sleep.

    async def sleep(self, level: int = 2) -> None:
        """Free the device: at level 1 the Worker keeps the weights in host memory, at level 2 it ends. Returns once the
        model sleeps, or a request has woken it before that, or its disk cache does not answer.

        Live requests wait and go on after the wake; a new request wakes the model. Raises UnavailableError while the
        engine loads, drains or is dead.
        """
        self._require_serving()
        await self._fall_asleep(level)

    async def wake(self) -> None:
        """Wake the model and return once it is ready. Does nothing to a model that is awake. Raises UnavailableError
        while the engine loads, drains or is dead."""
        self._require_serving()
        self._ask_to_wake()
        await self._sleep.until(lambda: self._sleep.asked is not None or self.phase in ("ready", "draining", "stopped"))
        if self._failure is not None:
            self._require_serving()

    async def vacate(self) -> None:
        """Sleep at level 2 for another model. Returns as `sleep` does."""
        await self.wait_idle()
        if self._failure is None and not self.num_live_requests:
            await self._fall_asleep(2)

    async def _fall_asleep(self, level: int) -> None:
        self._sleep.set(max(level, self._sleep.level))
        self._schedule_pump()
        await self._sleep.until(lambda: self._sleep.settled or self.phase == "stopped")

    @property
    def sleep_level(self) -> int:
        """1 or 2 while the model sleeps and frees its device, 0 while it is awake or on its way."""
        return self._sleep.level if self._sleep.asleep else 0

    @property
    def idle_since(self) -> float:
        """When the last request ended or the model woke, in seconds of time.monotonic()."""
        return self._woke_at if self._loaded is None else max(self._woke_at, self._loaded.live.idle_since)

    async def wait_idle(self) -> None:
        """Return when the model is loaded and no request is live, or when the engine has ended."""
        with suppress(PageserveError):
            await self.wait_ready()
            await self._require_loaded("requests").live.wait_until_none()

    def _tell_to_sleep(self, loaded: Loaded) -> None:
        """Tell the Worker to sleep once no plan and no fetch is under way."""
        sleep = self._sleep
        if sleep.told or sleep.fetching or self._in_flight:
            return
        if loaded.prefetcher is not None:
            if loaded.prefetcher.has_fetches:
                self._disk_timer = self._disk_timer or self._loop.call_later(DISK_SECONDS, self._give_up_sleep)
                return
            loaded.prefetcher.close()
        self._stop_disk_timer()
        sleep.told, sleep.level = True, sleep.asked or 0
        has_tier = loaded.scheduler.block_manager.host_tier is not None
        kept = self.config.disk_cache is not None if sleep.level == 2 else has_tier
        self.supervisor.send(SleepWorker(sleep.level, loaded.scheduler.plan_flush() if kept else None))

    def _give_up_sleep(self) -> None:
        """Stay awake where the disk does not answer: requests would wait, too, for ever."""
        self._disk_timer = None
        if self._serves:
            logger.error("%s stays awake: disk_cache has answered no read for %g s", self._label, DISK_SECONDS)
            self._ask_to_wake()

    def _ask_to_wake(self) -> None:
        """End a sleep, or one that was asked for and has not begun. Does nothing to a model that is awake."""
        self._stop_disk_timer()
        if self._sleep.asked is not None:
            self._sleep.set(None)
            self._schedule_pump()

    def _stop_disk_timer(self) -> None:
        if self._disk_timer is not None:
            self._disk_timer.cancel()
            self._disk_timer = None

    async def _rest(self, loaded: Loaded, level: int) -> Loaded:
        """Keep the journal without a device until a wake is asked for, then go on as after the death of a Worker."""
        self.grammars.detach()
        loaded.adapters.detach()
        if loaded.prefetcher is not None:
            loaded.prefetcher.close()
        executor, started = self.supervisor.executor, time.monotonic()
        sleep = self._sleep
        await self.supervisor.rest(level)
        if self._room is not None:
            self._room.leave(self)
        sleep.asleep = True
        self._set_phase("sleeping")
        logger.info("%s sleeps at level %d; %d requests wait", self._label, level, len(loaded.live))
        while (asked := sleep.asked) is not None:
            if asked > sleep.level:
                await self.supervisor.rest(asked)
                sleep.level = asked
                sleep.notify()
            await sleep.until(lambda: sleep.asked != sleep.level)
        sleep.asleep = False
        self._set_phase("waking")
        slept = time.monotonic()
        if self._room is not None:
            await self._room.enter(self)
        ready = await self.supervisor.wake(lambda: len(loaded.live))
        self._woke_at = time.monotonic()
        logger.info("%s woke in %.1f s after %.0f s of sleep", self._label, self._woke_at - slept, slept - started)
        loaded = self._resume(loaded, ready, keep_host_tier=executor is self.supervisor.executor)
        if loaded.prefetcher is not None and loaded.prefetcher.fetch_again(loaded.scheduler.waiting):
            sleep.fetching = True
            self._loop.call_later(loaded.prefetcher.patience, self._fetched_again)
        return loaded

    def _fetched_again(self) -> None:
        """The blocks that live requests had before the sleep are in host memory, or are waited for no longer."""
        self._sleep.fetching = False
        self._schedule_pump()

    @property
    def _label(self) -> str:
        return f"the model {self.config.model}" if self.config.model else "the model"

    def _resume(self, loaded: Loaded, ready: WorkerReady, *, keep_host_tier: bool = False) -> Loaded:
        """Move to a Worker whose pool is empty; it is awake."""
        self._isolated = None
        self._sleep.end()
        return loaded.on(ready, self.config, keep_host_tier=keep_host_tier)

    async def _sleep_when_idle(self, seconds: float) -> None:
        """Let the model sleep at level 2 after `seconds` without a request."""
        await self.wait_ready()
        while True:
            await self._sleep.until(lambda: self.phase == "ready")
            await self.wait_idle()
            if (left := self.idle_since + seconds - time.monotonic()) > 0:
                await asyncio.sleep(left)
            elif self.phase == "ready" and not self.num_live_requests:
                await self.sleep()

    # The death of a Worker.

    async def _restart(self, loaded: Loaded, death: PageserveError) -> Loaded:
        """Put a new Worker in the place of a dead one. Raises EngineError when the budget of restarts is spent."""
        self._set_phase("restarting")
        if loaded.prefetcher is not None:
            loaded.prefetcher.close()
        self.grammars.detach()
        loaded.adapters.worker_died(death)
        died_at = time.monotonic()
        self._blame(loaded, death)
        ready = await self.supervisor.restart(death, lambda: len(loaded.live))
        lost = [min(seq.num_computed_tokens, len(seq.token_ids)) for seq in loaded.scheduler.running]
        self.stats.recomputed_sequences.add(len(lost))
        self.stats.recomputed_tokens.add(sum(lost))
        loaded = self._resume(loaded, ready)
        seconds = time.monotonic() - died_at
        logger.warning("the Worker runs again after %.1f s; %d tokens are computed again", seconds, sum(lost))
        return loaded

    def _blame(self, loaded: Loaded, death: PageserveError) -> None:
        """Hold the death against the requests that were being computed; end the request that is proven guilty."""
        seq_ids = [seq_id for plan in self._in_flight for seq_id in plan.seq_ids]
        self._in_flight.clear()
        for request_id in self.supervisor.record_death(death, loaded.live.owners_of(seq_ids)):
            logger.error("request %s ends: a Worker died of it when it ran alone (%s)", request_id, death)
            loaded.live.fail(loaded.live[request_id], EngineError(f"The Worker dies of this request: {death}."))

    def _isolate_suspect(self, loaded: Loaded) -> bool:
        """Let a request under suspicion run alone. Returns False while plans of other requests are under way: a death
        of the Worker could be theirs."""
        suspect = self.recovery.suspect
        if suspect != self._isolated:
            if self._in_flight:
                return False
            self._isolated = suspect
            loaded.scheduler.isolate(None if suspect is None else loaded.live[suspect].sequences)
        return True

    # The end of the engine.

    def _fail_all(self, error: PageserveError, send_again: bool = True) -> None:
        if self._loaded is not None:
            self._loaded.live.fail_all(error, send_again=send_again)
            self._loaded.adapters.fail_all(error)

    def _die(self, error: PageserveError) -> None:
        self._failure = error
        self.phase = "stopped"
        if self._room is not None:
            self._room.leave(self)
        self._sleep.notify()
        self._in_flight.clear()
        self.grammars.detach()
        may_move = isinstance(error, RestartsSpentError)  # a fault of ours would strike the next engine, too
        if may_move and self.heirs is not None:
            try:
                self.heirs(self)
            except Exception:  # every stream must end, whatever is wrong with the other replicas
                logger.exception("no other replica could go on with the requests of this one")
        self._fail_all(EngineError(f"The engine ended while this request ran: {error}."), send_again=may_move)
        self._failed.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as retrieved, or asyncio would warn if wait_ready() is never awaited
