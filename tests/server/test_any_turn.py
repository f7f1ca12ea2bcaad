"""A client may leave, and a handler be cancelled, in any turn of the event loop: nothing is held, nothing goes on."""

import asyncio
import json

import pytest

from server.app import create_app
from server.config import ServerConfig
from tests.engine.driving import running_driver
from tests.server.live import MODEL, chat_body, completion_body

MAX_TURNS = 100  # a request takes 10 to 50 on a quiet machine
REQUESTS = {
    "several prompts": ("/v1/completions", completion_body(prompt=["hello", "other"], n=2)),
    "a stream": ("/v1/completions", completion_body(stream=True)),
    "a beam search": ("/v1/completions", completion_body(n=2, use_beam_search=True, temperature=0)),
    "a form": ("/v1/chat/completions", chat_body(response_format={"type": "json_object"})),
    "a stream of samples": ("/v1/chat/completions", chat_body(stream=True, n=2)),
    "a response": ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 8}),
    "a stream of events": ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 8, "stream": True}),
    "a message": ("/v1/messages", chat_body(stream=True)),
    "embeddings": ("/v1/embeddings", {"model": MODEL, "input": ["one", "two"]}),
}


class Asked:
    """One request at the ASGI app itself."""

    def __init__(self, app, path, body):
        self.sent = []
        self._body = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._left = asyncio.Event()
        headers = [(b"host", b"here"), (b"authorization", b"Bearer key"), (b"content-type", b"application/json")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "headers": headers, "client": ("here", 1)}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._body:
            return self._body.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await asyncio.sleep(0)
        self.sent.append(message)

    def end(self, how):
        if "left" in how:
            self._left.set()
        if "cancelled" in how:
            self.task.cancel()


@pytest.mark.parametrize("how", ["left", "cancelled", "left and cancelled"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_nothing_is_held(folder, name, how):
    path, body = REQUESTS[name]
    async with running_driver(folder) as driver:
        app = create_app(driver, ServerConfig(served_model_name=(MODEL,), api_key=("key",), max_concurrent_requests=1))
        await Asked(app, *REQUESTS["a stream"]).task  # the first one starts a task that serves all streams
        before = asyncio.all_tasks()
        for turn in range(MAX_TURNS):
            asked = Asked(app, path, body)
            for _ in range(turn):
                await asyncio.sleep(0)
            in_time = not asked.task.done()
            asked.end(how)
            await asyncio.wait([asked.task], timeout=10)
            assert asked.task.done(), f"it hangs, ended in turn {turn}"
            assert not driver.num_live_requests, f"it goes on, ended in turn {turn}"
            if not in_time:
                break
            refused = bool(asked.sent) and asked.sent[0]["status"] == 503  # no answer had begun
            assert asked.task.cancelled() or refused or how != "cancelled"
        assert turn > 5
        undisturbed = Asked(app, path, body)
        await undisturbed.task
        assert undisturbed.sent[0]["status"] == 200 and not undisturbed.sent[-1].get("more_body")
        await asyncio.sleep(0.05)
        assert not driver.scheduler.has_work and len(driver.scheduler.block_manager.free_blocks) == 256
        assert asyncio.all_tasks() == before
