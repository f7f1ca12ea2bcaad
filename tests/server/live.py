"""A live server for tests: real uvicorn on a free port, the real Driver, a Worker process whose device is fake.

It runs on an event loop of its own in a thread, so that a client which blocks cannot stop it.
"""

import asyncio
import json
import sys
import threading
from functools import partial
from pathlib import Path

import httpx
import uvicorn

from engine.config import EngineConfig
from engine.request import Request
from server.app import create_app_of
from server.config import ServerConfig
from server.http.connections import Connections
from server.http.http_protocol import LimitedHttpProtocol
from server.serve import bind, host_models
from tests.fake_device import expected_tokens

MODEL = "org/fake-model"
JSON = {"content-type": "application/json"}
SECONDS = 60.0  # at most, for what takes a quiet machine a moment


class LiveServer:
    def __init__(self, folder: Path, *worker_options: str, engine: dict | None = None, wait=True, **settings) -> None:
        """`settings` are those of ServerConfig, `engine` those of EngineConfig, the rest goes to tests.fake_worker."""
        self.config = ServerConfig(**({"served_model_name": (MODEL, "alias"), "port": 0} | settings))
        model = "" if self.config.models else str(folder)
        engine_config = EngineConfig(model=model, load_format="dummy", **(engine or {}))
        command = (sys.executable, "-m", "tests.fake_worker", *worker_options)
        self.hosted = host_models(engine_config, self.config, command)
        self.driver = self.hosted[0].driver
        self._wait = wait
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        assert self._started.wait(SECONDS), "the server did not start"
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_) -> None:
        self.call(self._stop)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def call(self, function):
        """Run a plain function, or a coroutine function, on the server's loop."""

        async def run():
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SECONDS)

    def usage(self) -> dict[str, float]:
        """Gauges that are zero when no request is live."""

        def read():
            self.driver.stats_snapshot()
            scheduler = self.driver.scheduler
            return {
                "live": self.driver.num_live_requests,
                "waiting": self.driver.stats.num_requests_waiting.value,
                "running": len(scheduler.running),
                "blocks": scheduler.block_manager.usage,
            }

        return self.call(read)

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Until no request, sequence or block is held; fails after `seconds`."""
        poll = threading.Event()
        for _ in range(int(seconds / 0.01)):
            if not any(self.usage().values()):
                return
            poll.wait(0.01)
        raise AssertionError(f"still held: {self.usage()}")

    def aborts(self) -> float:
        return self.call(lambda: self.driver.stats.request_success.values["abort",])

    def connections(self) -> int:
        return self.call(lambda: len(self._server.server_state.connections))

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.app = create_app_of(self.hosted, self.config)
        self.connections_held = Connections(
            self.config.max_connections or 1000, self.config.max_connections_per_address
        )
        http = partial(LimitedHttpProtocol, connections_held=self.connections_held)
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, http=http, ws="none", lifespan="off", log_config=None, server_header=False)
        )
        self._server.config.timeout_graceful_shutdown = 2
        self._ended = asyncio.Event()
        serving = asyncio.create_task(self._server.serve(sockets=[self.listener]))
        try:
            for model in reversed(self.hosted):
                await model.driver.start()
                if self._wait:
                    await model.driver.wait_ready()
            self._started.set()
            await self._ended.wait()
        finally:
            await asyncio.gather(*(model.driver.stop() for model in self.hosted))
            self._server.should_exit = True
            await serving
            if self.app.state.tracer is not None:  # its thread goes on otherwise, and draws random numbers
                await asyncio.to_thread(self.app.state.tracer.close)

    def _stop(self) -> None:
        self._ended.set()


def requests_of(live: LiveServer, monkeypatch) -> list[Request]:
    """The requests that the Driver is given from now on, as they come."""
    seen, generate = [], live.driver.generate
    monkeypatch.setattr(live.driver, "generate", lambda request: (seen.append(request), generate(request))[1])
    return seen


def client_address(response: httpx.Response) -> tuple[str, int]:
    """Tells connections apart: the client's address and port."""
    return response.extensions["network_stream"].get_extra_info("client_addr")


def chat_body(**fields) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1} | fields


def completion_body(**fields) -> dict:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 8, "seed": 1} | fields


def events(raw: str) -> list[dict | str]:
    """The data of each event, decoded; checks the framing byte for byte. Comments come as their text."""
    assert raw.endswith("\n\n")
    found: list[dict | str] = []
    for frame in raw[:-2].split("\n\n"):
        assert "\n" not in frame
        if frame.startswith(":"):
            found.append(frame)
            continue
        assert frame.startswith("data: ")
        found.append("[DONE]" if frame == "data: [DONE]" else json.loads(frame[6:]))
    return found


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The envelope with its four keys and their types; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert isinstance(error["code"], str) or (error["code"] is None and status not in (400, 404))
    assert len(response.content) < 700, "an error never repeats the input"
    assert response.headers["x-request-id"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error["message"]


def expected_text(prompt: bytes | list[int], seed: int, num_tokens: int, index: int = 0) -> str:
    """The answer of the fake device to a prompt, by an unbatched oracle: sample `index` of a seed."""
    own_seed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return bytes(expected_tokens(list(prompt), own_seed, num_tokens)).decode()


def chat_prompt(text: str) -> list[int]:
    """The ids of chat_body()'s template around one user message."""
    return [256, *f"user\n{text}".encode(), 257, *b"\n", 256, *b"assistant\n"]
