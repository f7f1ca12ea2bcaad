"""Two real replicas behind a real nginx with deploy/nginx.conf, restarted in turn under constant load.

Nothing may fail: every request gets its 200, every stream all its tokens, its finish_reason and [DONE]. `make test`
runs two restarts, `make rolling-restart RESTARTS=10` as many as you like.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import save_fake_checkpoint
from tests.deploy.replica import LLAMA, Replica, free_ports

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)
RESTARTS = int(os.environ.get("RESTARTS", "2"))
KINDS = ("stream", "whole", "chat", "messages")
NUM_CLIENTS = 6
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt install nginx-light)")


def render_nginx_conf(folder: Path, port: int, replica_ports: list[int]) -> Path:
    """deploy/nginx.conf itself with other addresses and another folder for temporary files."""
    text = (ROOT / "deploy/nginx.conf").read_text()
    changes = {
        "listen 8080;": f"listen 127.0.0.1:{port};",
        "/tmp/": f"{folder}/",
        "/dev/stdout": f"{folder}/access.log",
    }
    changes |= {f"replica-{i}:8000": f"127.0.0.1:{each}" for i, each in enumerate(replica_ports, start=1)}
    for old, new in changes.items():
        assert old in text, f"deploy/nginx.conf no longer says {old}"
        text = text.replace(old, new)
    conf = folder / "nginx.conf"
    conf.write_text(text)
    return conf


@contextlib.contextmanager
def nginx(folder: Path, port: int, replica_ports: list[int]):
    conf = render_nginx_conf(folder, port, replica_ports)
    user = "user root;" if os.geteuid() == 0 else ""  # the temporary folder is ours alone
    command = [NGINX, "-p", str(folder), "-c", str(conf), "-g", f"daemon off; {user}"]
    subprocess.run([*command[:-1], user, "-t"], check=True, capture_output=True)
    with (folder / "nginx.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


class Load:
    """Clients that ask again and again, streaming and not, and note what went wrong."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.running = True
        self._ended = asyncio.Event()

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        for turn in itertools.count():
            if not self.running or len(self.failures) > 10:
                return
            num_tokens = 20 + (turn * 37 + number * 61) % 180
            kind = KINDS[(turn + number) % len(KINDS)]
            try:
                await getattr(self, kind)(http, num_tokens)
                self.counts[kind] += 1
            except (httpx.HTTPError, AssertionError, ValueError, LookupError) as error:
                self.failures.append(f"{kind} of {num_tokens} tokens: {type(error).__name__}: {error}")
            self._ended.set()

    async def wait_for(self, turns: int) -> None:
        """Until so many more requests ended: a restart must always meet running ones."""
        for _ in range(turns):
            assert len(self.failures) <= 10, self.failures  # with more, the clients have left
            self._ended.clear()
            await self._ended.wait()

    async def whole(self, http: httpx.AsyncClient, num_tokens: int) -> None:
        body = {"model": "m", "prompt": "tell me", "max_tokens": num_tokens, "ignore_eos": True}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, f"{response.status_code} {response.text}"
        assert response.json()["usage"]["completion_tokens"] == num_tokens

    async def stream(self, http: httpx.AsyncClient, num_tokens: int) -> None:
        await self._read_stream(http, "/v1/completions", {"prompt": "tell me"}, num_tokens)

    async def chat(self, http: httpx.AsyncClient, num_tokens: int) -> None:
        messages = [{"role": "user", "content": "tell me"}]
        await self._read_stream(http, "/v1/chat/completions", {"messages": messages}, num_tokens)

    async def messages(self, http: httpx.AsyncClient, num_tokens: int) -> None:
        messages = [{"role": "user", "content": "tell me"}]
        body = {"model": "m", "messages": messages, "max_tokens": num_tokens, "ignore_eos": True}
        response = await http.post("/v1/messages", json=body)
        assert response.status_code == 200, f"{response.status_code} {response.text}"
        assert response.json()["usage"]["output_tokens"] == num_tokens

    async def _read_stream(self, http: httpx.AsyncClient, path: str, body: dict, num_tokens: int) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = {"model": "m", "max_tokens": num_tokens, **options, **body}
        async with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, f"{response.status_code} {await response.aread()!r}"
            body_text = (await response.aread()).decode()  # split by hand: to aiter_lines U+2028 is a line end, too
        events = [line.removeprefix("data: ") for line in body_text.split("\n") if line.startswith("data: ")]
        assert events and events[-1] == "[DONE]", f"the stream ends after {len(events)} events: {events[-1:]}"
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[-1]["usage"]["completion_tokens"] == num_tokens
        reasons = [
            choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
        ]
        assert reasons == ["length"]


async def restart_under_load(url: str, replicas: list[Replica], restarts: int) -> Load:
    load = Load(url)
    limits = httpx.Limits(max_connections=NUM_CLIENTS, max_keepalive_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        clients = [asyncio.create_task(load.client(http, number)) for number in range(NUM_CLIENTS)]
        try:
            await load.wait_for(NUM_CLIENTS)
            for number in range(restarts):
                await asyncio.to_thread(replicas[number % len(replicas)].restart)
                await load.wait_for(NUM_CLIENTS)
                print(f"restart {number + 1}: {load.counts.total()} complete, {len(load.failures)} failed", flush=True)
        finally:
            load.running = False
            await asyncio.gather(*clients)
    return load


@pytest.fixture
def replicas(tmp_path):
    model = save_fake_checkpoint(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(LLAMA))
    ports = free_ports(2)
    replicas = []
    try:
        for number, port in enumerate(ports):
            replicas.append(Replica(model, port, tmp_path / f"replica-{number}.log"))
        for replica in replicas:
            replica.wait_ready()
        yield replicas
    finally:
        statuses = [replica.stop() for replica in replicas]
    assert statuses == [0, 0]


async def test_no_request_fails_while_replicas_restart_in_turn(replicas, tmp_path):
    (port,) = free_ports(1)
    with nginx(tmp_path, port, [replica.port for replica in replicas]):
        load = await restart_under_load(f"http://127.0.0.1:{port}", replicas, RESTARTS)
    assert load.failures == []
    assert all(load.counts[kind] > 0 for kind in KINDS)
