"""Stand: the application on the cluster, clients that check every answer, and a bare server beside it."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
from ray import serve

from engine.config import EngineConfig
from server.commands.ray.config import RayConfig
from server.commands.ray.deployments import build
from server.commands.ray.replica import free_port
from server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DIED = re.compile(r"died after (\d+) tokens")
START_SECONDS = 120.0


class Stand:
    """`deploy` places the application; `url` is its address."""

    def __init__(self, model: str, arguments: dict) -> None:
        self.model, self.arguments = model, dict(arguments)
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self._deployed: object = None

    def deploy(self, least: int, most: int, **server: object) -> None:
        """Deploy or update; `server`: settings that differ, so that replicas are replaced. Returns when it runs."""
        if self._deployed == (least, most, server):
            return  # Ray Serve replaces every replica, whatever has changed
        self._deployed = least, most, server
        arguments = {**self.arguments, **server}
        engine_names = EngineConfig.__dataclass_fields__.keys()
        engine = EngineConfig(model=self.model, **{k: v for k, v in arguments.items() if k in engine_names})
        rest = {k: v for k, v in arguments.items() if k not in engine_names}
        config = ServerConfig(served_model_name=("m",), **rest)
        ray_config = RayConfig(
            min_replicas=least,
            max_replicas=most,
            queued_tokens_per_replica=2000,
            upscale_delay=1.0,
            downscale_delay=6.0,
        )
        serve.run(build(engine, config, ray_config), name="pageserve")

    async def replicas(self, http: aiohttp.ClientSession) -> list[str]:
        async with http.get(f"{self.url}/metrics/targets") as response:
            assert response.status == 200, await response.text()
            return (await response.json())[0]["targets"]

    async def wait_for_replicas(self, http: aiohttp.ClientSession, number: int, seconds: float) -> float:
        begun = time.monotonic()
        found: list[str] = []
        while time.monotonic() - begun < seconds:
            with contextlib.suppress(aiohttp.ClientError, AssertionError, LookupError):
                found = await self.replicas(http)
                if len(found) == number:
                    return time.monotonic() - begun
            await asyncio.sleep(0.25)
        raise AssertionError(f"{found} after {seconds} s, not {number} replicas")

    @contextlib.asynccontextmanager
    async def bare(self):
        """The address of a `pageserve serve` process with the settings of a replica."""
        port = free_port("127.0.0.1")
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.arguments.items()]
        command = [sys.executable, "-m", "server.cli", "serve", self.model, "--served-model-name", "m", *flags]
        process = await asyncio.create_subprocess_exec(
            *command, "--port", str(port), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            async with aiohttp.ClientSession() as http:
                deadline = time.monotonic() + START_SECONDS
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(f"http://127.0.0.1:{port}/ready") as response:
                            if response.status == 200:
                                break
                    assert time.monotonic() < deadline and process.returncode is None, "the bare server does not start"
                    await asyncio.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


def server_pid(address: str) -> int:
    """The process that serves at host:port, found by its command line."""
    port = address.rpartition(":")[2].encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"server.commands.ray.child" in words and port in words:
                    return int(folder.name)
    raise AssertionError(f"no process serves at {address}")


def parent_of(pid: int) -> int:
    """The actor of a server, the raylet of an actor."""
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


class Load:
    """Clients that ask again and again. `cut` counts streams that ended with the error of a dead replica."""

    def __init__(self, url: str, http: aiohttp.ClientSession, tokens: int = 60) -> None:
        self.url, self.http, self.tokens = url, http, tokens
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.running = True

    async def client(self, number: int) -> None:
        turn = number
        while self.running:
            turn += 1
            kind = "stream" if turn % 2 else "whole"
            try:
                kind = await getattr(self, kind)(f"client {number} turn {turn} " + "words " * (turn % 7))
                self.counts[kind] += 1
            except (aiohttp.ClientError, AssertionError, ValueError, LookupError, asyncio.TimeoutError) as error:
                self.failures.append(f"{kind}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    def _body(self, prompt: str, **more: object) -> dict:
        return {"model": "m", "prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, **more}

    async def whole(self, prompt: str) -> str:
        async with self.http.post(f"{self.url}/v1/completions", json=self._body(prompt)) as response:
            text = await response.text()
            assert response.status == 200, f"{response.status} {text[:300]}"
            assert json.loads(text)["usage"]["completion_tokens"] == self.tokens
        return "whole"

    async def stream(self, prompt: str) -> str:
        body = self._body(prompt, stream=True, return_token_ids=True)
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, f"{response.status} {(await response.text())[:300]}"
            text = (await response.read()).decode()
        assert ": tokens" not in text, "the ingress left its counts in the stream"
        events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        count = sum(len(choice.get("token_ids") or ()) for chunk in chunks for choice in chunk.get("choices", ()))
        if chunks and "error" in chunks[-1]:
            error = chunks[-1]["error"]
            assert error["code"] == "replica_died" and count > 0, error
            assert int(DIED.search(error["message"])[1]) == count, f"{count} tokens came, but: {error['message']}"
            return "cut"
        assert events[-1:] == ["[DONE]"] and count == self.tokens, f"{count} tokens, then {events[-1:]}"
        return "stream"


@contextlib.asynccontextmanager
async def load(stand: Stand, clients: int, tokens: int = 60):
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        it = Load(stand.url, http, tokens)
        tasks = [asyncio.create_task(it.client(number)) for number in range(clients)]
        try:
            yield it
        finally:
            it.running = False
            await asyncio.gather(*tasks)
