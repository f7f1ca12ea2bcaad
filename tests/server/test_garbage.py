"""Objects of a request are freed by reference counts: a full garbage collection stops all streams while it visits every
object of the server."""

import gc
import http.client
import json
from collections import Counter
from urllib.parse import urlsplit

import pytest

from tests.server.live import completion_body

REQUESTS = 20
MOST_EACH = 10  # asyncio's own transport; uvloop has none


@pytest.mark.parametrize("stream", [True, False])
def test_an_answered_request_leaves_no_reference_cycles(server, stream):
    body = json.dumps(completion_body(stream=stream, max_tokens=20))

    def ask():
        for _ in range(REQUESTS):
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200 and response.read()
            connection.close()

    ask()
    server.wait_idle(10)
    gc.collect()
    gc.disable()
    try:
        ask()
        server.wait_idle(10)
        gc.set_debug(gc.DEBUG_SAVEALL)
        found = gc.collect()
        kinds = Counter(type(thing).__qualname__ for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert found <= MOST_EACH * REQUESTS, kinds.most_common(20)
