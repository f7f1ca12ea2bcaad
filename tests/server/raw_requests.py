"""Requests on bare sockets, so that a test decides when and how a connection ends."""

import json
import socket
import time
from urllib.parse import urlsplit

from tests.server.live import LiveServer


def send_raw(live: LiveServer, body: dict, route="completions") -> socket.socket:
    """A request on a bare socket, so that the test decides when and how the connection ends."""
    url = urlsplit(live.url)
    raw = json.dumps(body).encode()
    connection = socket.create_connection((url.hostname, url.port))
    head = (
        f"POST /v1/{route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)
    return connection


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
