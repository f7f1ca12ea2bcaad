"""Requests that the end of the server cancels: a proxy must be able to tell that no work was started."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from server.http.middleware import RequestContext

START = {"type": "http.response.start", "status": 200, "headers": []}


async def cancelled(path, starts):
    """The messages that a cancelled request sends, and whether the cancellation went on to the caller."""
    sent = []

    async def app(scope, receive, send):
        if starts:
            await send(START | {"headers": []})
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    counts = Counter()
    context = RequestContext(app, [SimpleNamespace(phase="stopped")], counts, frozenset({path}))
    task = asyncio.create_task(context({"type": "http", "path": path, "headers": []}, None, send))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert sum(counts.values()) == 1
    return sent, task.cancelled()


@pytest.mark.parametrize("path, kind", [("/v1/completions", "server_error"), ("/v1/messages", "overloaded_error")])
async def test_a_request_without_an_answer_is_a_503(path, kind):
    (start, body), raised = await cancelled(path, starts=False)
    headers = dict(start["headers"])
    assert (start["status"], raised) == (503, False)
    assert headers[b"retry-after"] == b"1" and headers[b"connection"] == b"close" and headers[b"x-request-id"]
    error = json.loads(body["body"])["error"]
    assert error["type"] == kind and "Send the request again" in error["message"]


async def test_an_answer_that_has_begun_is_cut():
    sent, raised = await cancelled("/v1/completions", starts=True)
    assert [message["type"] for message in sent] == ["http.response.start"] and raised
