"""`pageserve serve`: starts the server from two configs, serves, drains and stops.

The port is bound first: a wrong port fails before weights load, and /health and /ready answer while they load.
Exit status: 0 after an orderly end, 1 if the engine died, 128 + the signal if a second signal cut the drain short.
Errors that make a start impossible are raised.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import anyio
import uvicorn

from engine.config import EngineConfig
from engine.errors import ConfigError, PageserveError
from engine.garbage_collector import exempt_present_objects, settle_garbage_collector
from engine.replicas.engine import Engine
from engine.replicas.replicas import make_engine
from server.app import HostedModel, create_app_of
from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from server.http.connections import Connections, backlog, raise_descriptor_limit, room_for_connections
from server.http.http_protocol import LimitedHttpProtocol
from server.http.tracing import Tracer
from server.model_settings import model_settings, served_names
from server.process.end_signals import EndSignals
from server.process.memory import keep_trimmed, set_allocator
from server.room import Room

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # longer than proxies keep idle connections (60 s), else a request may meet our close
SWEEP_SECONDS = 5.0  # interval between checks for connections whose client reads nothing
FLUSH_SECONDS = 5  # time for the last bytes to reach the clients after the engine has finished
QUIET_REQUESTS = 64  # live requests, up to which a garbage collection takes about as long as a step
STOP_SECONDS = 8.0  # time to flush and to end the Worker
FAST_STOP_SECONDS = 0.8  # STOP_SECONDS after a second signal
# Python's switch interval: how long a thread that parses or encodes may keep the GIL from the event loop. A request
# wakes the loop a dozen times, so Python's default of 5 ms would delay it by 60 ms beside large bodies of others.
SWITCH_SECONDS = 0.0005
EXAMPLE_CHAT = "Tell me a story about a fox."
EXAMPLE_PROMPT = "Once upon a time"


async def run(server_config: ServerConfig, engine_config: EngineConfig, driver: Engine | None = None) -> int:
    """Serves until a signal or a failure; returns the exit status.

    Raises ConfigError if the server cannot listen on the address, and the errors of Driver.start and wait_ready.
    """
    check_exposed(server_config)
    sys.setswitchinterval(SWITCH_SECONDS)
    set_allocator()
    descriptors = raise_descriptor_limit()
    if driver is None:
        hosted = host_models(engine_config, server_config)
    else:
        hosted = [HostedModel(driver, server_config, served_names(server_config, driver.config.model))]
    with bind(server_config.host, server_config.port, descriptors) as listener:
        return await _Service(hosted, server_config, listener, descriptors).run()


def host_models(
    engine_config: EngineConfig, server_config: ServerConfig, worker_command: tuple[str, ...] | None = None
) -> list[HostedModel]:
    """An engine for each model of the configs; at most `max_loaded` of them are awake. Raises ConfigError."""
    models = model_settings(engine_config, server_config)
    most = server_config.max_loaded
    room = Room(most) if most is not None and most < len(models) else None
    return [
        HostedModel(
            make_engine(
                one.engine,
                chat_template=one.server.chat_template,
                max_queued_requests=one.server.max_queued_requests,
                max_queued_tokens=one.server.max_queued_tokens,
                worker_command=worker_command,
                room=room,
            ),
            one.server,
            one.names,
        )
        for one in models
    ]


async def load_models(hosted: Sequence[HostedModel]) -> None:
    """Load one model after the other, because each measures the memory that is free, and the first one last: where not
    all may be awake, the last ones sleep. An error names its model."""
    anyio.get_cancelled_exc_class()  # loads anyio's part for asyncio, 11 ms that the first request would wait
    for model in reversed(hosted):
        try:
            await _load_model(model.driver)
        except PageserveError as error:
            if len(hosted) == 1:
                raise
            raise type(error)(f"model {model.names[0]}: {error}") from None


async def _load_model(driver: Engine) -> None:
    await driver.start()
    if driver.tokenizer.chat_template is not None:
        await asyncio.to_thread(driver.tokenizer.renderer.start)
    settle_garbage_collector()  # while the Worker loads; later the first request would wait for it
    await driver.wait_ready()
    exempt_present_objects()


def check_exposed(config: ServerConfig) -> None:
    """Raises ConfigError if other machines can reach the server without an API key, unless the config allows that."""
    if config.api_key or config.api_key_file is not None or config.allow_unauthenticated:
        return
    with contextlib.suppress(OSError, UnicodeError):  # `bind` reports a wrong address
        found = {info[4][0] for info in socket.getaddrinfo(config.host, None, flags=socket.AI_PASSIVE)}
        if not all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found):
            raise ConfigError(
                f"host: others can reach {config.host}, and no API key is set. Set one (--api-key-file FILE, or the "
                "variable PAGESERVE_API_KEY), or listen on 127.0.0.1, or, if a firewall or proxy checks clients, "
                "give --allow-unauthenticated (PAGESERVE_ALLOW_UNAUTHENTICATED=true)."
            )


def bind(host: str, port: int, descriptors: int = 1 << 14) -> socket.socket:
    """A listening socket; `descriptors`: number of files the process may open. ConfigError for a wrong address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a part between dots is empty or over 63 characters
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"host: {host!r} is not an address of this machine ({reason}).") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog(descriptors))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port: cannot listen on {host}:{port} ({error.strerror}). Choose another with --port, or --port 0 for any."
        ) from None
    listener.setblocking(False)
    return listener


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of an exit status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One run of the server: start, load, serve, drain, stop."""

    def __init__(
        self, hosted: list[HostedModel], config: ServerConfig, listener: socket.socket, descriptors: int
    ) -> None:
        self._hosted = hosted
        self._drivers = [model.driver for model in hosted]
        most = room_for_connections(descriptors) if config.max_connections is None else config.max_connections
        self._connections = Connections(most, config.max_connections_per_address)
        self._config = config
        self._listener = listener
        app = create_app_of(hosted, config)
        self._keys: ApiKeys = app.state.api_keys
        self._tracer: Tracer | None = app.state.tracer
        self._http = _HttpServer(
            uvicorn.Config(
                app,
                http=partial(LimitedHttpProtocol, connections_held=self._connections),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # a warning per invalid request would let any client fill the disk
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                backlog=backlog(descriptors),
            )
        )
        self._signals = EndSignals(self._drivers[0].kill)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._signals.install()  # before loading, which may take minutes
        loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # server/cli.py blocks it
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        tidying = [asyncio.create_task(work) for work in (keep_trimmed(self._is_quiet), self._sweep())]
        try:
            status = await self._load_and_serve(http)
        finally:
            for task in tidying:
                task.cancel()
            await self._stop(http)
        status = self._signals.status or status
        self._signals.end_soon(status)
        return status

    def _on_hang_up(self) -> None:
        if self._config.api_key_file is not None:
            self._keys.reload()
        else:
            logger.info("SIGHUP is ignored: there is no api_key_file to reload; SIGTERM ends the server")

    async def _load_and_serve(self, http: asyncio.Task[None]) -> int:
        if await _first(load_models(self._hosted), self._signals.first.wait(), http) != 0:
            return 0 if self._signals.first.is_set() else 1
        self._announce()
        ended_by = await _first(self._signals.first.wait(), self._wait_failed(), http)
        if ended_by != 0:
            reasons = [reason for driver in self._drivers if (reason := driver.health())]
            logger.error("the server ends: %s", "; ".join(reasons) or "the HTTP side stopped")
            return 1
        logger.info("draining for up to %g s; a second signal ends it at once", self._config.drain_timeout)
        await _first(self._drain(), self._signals.second.wait())
        return 0

    async def _drain(self) -> None:
        await asyncio.gather(*(driver.drain(self._config.drain_timeout) for driver in self._drivers))

    async def _wait_failed(self) -> None:
        """Return when every model has ended for good. While one serves, the server goes on without the others."""

        async def wait(model: HostedModel) -> None:
            error = await model.driver.wait_failed()
            if len(self._hosted) > 1:
                logger.error("the model %s has ended: %s", model.names[0], error)

        await asyncio.gather(*map(wait, self._hosted))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._connections.sweep()

    async def _stop(self, http: asyncio.Task[None]) -> None:
        """Ends the Worker. Running streams get an error, and written bytes are sent before the HTTP side ends.

        After a second signal, waits for neither.
        """
        self._http.should_exit = True
        self._http.force_exit = self._signals.second.is_set()
        ending = asyncio.gather(*(driver.stop() for driver in self._drivers), http, return_exceptions=True)
        slow = [self._signals.second.wait()] if not self._signals.second.is_set() else []
        await _first(ending, asyncio.sleep(STOP_SECONDS if slow else FAST_STOP_SECONDS), *slow)
        if not ending.done():
            self._http.force_exit = True
            ending.add_done_callback(asyncio.Future.exception)  # reads it: asyncio would log it with a traceback
            ending.cancel()
            await asyncio.wait([http], timeout=1.0)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _is_quiet(self) -> bool:
        replicas = (replica for driver in self._drivers for replica in driver.replicas)
        return sum(replica.num_live_requests for replica in replicas) <= QUIET_REQUESTS

    def _announce(self) -> None:
        """Prints the address, the models and an example command to stdout."""
        url = self._url()
        models = "\n  ".join(f"({_description(model)})" for model in self._hosted)
        between = "  " if len(self._hosted) == 1 else "\n  "
        example = self._example(url, self._hosted[0])
        print(f"pageserve is ready at {url}{between}{models}\nOpen it in a browser, or try:\n  {example}", flush=True)

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _example(self, url: str, hosted: HostedModel) -> str:
        driver, name = hosted.driver, hosted.names[0]
        body: dict[str, Any] = {"model": name}
        if driver.tokenizer.chat_template is None:
            route, body["prompt"] = "/v1/completions", EXAMPLE_PROMPT
        else:
            route, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": EXAMPLE_CHAT}]
        body |= {"max_tokens": min(200, driver.model.max_model_len // 2), "stream": True}
        if driver.model.embeds_only:
            route, body = "/v1/embeddings", {"model": name, "input": EXAMPLE_PROMPT}
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._keys else ""
        data = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl -N {url}{route}{key} -H 'Content-Type: application/json' -d {data}"


def _description(hosted: HostedModel) -> str:
    model = hosted.driver.model
    asleep = "; asleep" if hosted.driver.sleep_level else ""
    return (
        f"model {hosted.names[0]} on {model.device}, {model.dtype}; context of {model.max_model_len} tokens, "
        f"{model.num_blocks} KV blocks of {model.block_size} in {model.kv_cache_dtype}{asleep}"
    )


async def _first(*parts: Any) -> int:
    """Waits until one awaitable is done and returns its index, or raises its exception.

    Other coroutines are cancelled; tasks and futures of the caller continue.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        own = [task for task, part in zip(tasks, parts, strict=True) if task is not part and not task.done()]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
    index = next(i for i, task in enumerate(tasks) if task.done() and not task.cancelled())
    tasks[index].result()
    return index
