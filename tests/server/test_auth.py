"""API keys: deny by default, on what the router sees."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.server.live import MODEL, LiveServer, assert_error, chat_body, completion_body

KEYS = ("sk-first", "sk-second-ключ")


@pytest.fixture(scope="module")
def guarded(folder):
    with LiveServer(folder, api_key=KEYS) as live:
        yield live


@pytest.fixture(scope="module")
def anonymous(guarded):
    with guarded.client() as client:
        yield client


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(anonymous, key):
    assert anonymous.get("/v1/models", headers=bearer(key)).status_code == 200
    assert anonymous.post("/v1/chat/completions", json=chat_body(), headers=bearer(key)).status_code == 200
    assert anonymous.get("/v1/models", headers={"authorization": b"bearer  " + KEYS[0].encode()}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer sk-firs"},
        {"authorization": "Bearer sk-first2"},
        {"authorization": "Bearer SK-FIRST"},
        {"authorization": "sk-first"},
        {"authorization": "Basic sk-first"},
        {"authorization": "Bearer sk-first sk-first"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "sk-first"},
        {"cookie": "authorization=Bearer sk-first"},
    ],
    ids=str,
)
def test_nothing_else_opens(anonymous, headers):
    response = anonymous.post("/v1/chat/completions", json=chat_body(), headers=headers)
    message = assert_error(response, 401, code="invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sk-" not in message


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", f"/v1/models/{MODEL}", "/v1/completions", "/version", "/openapi.json", "/nope", "/", "/docs"),
        *("/health/", "/healthz", "/HEALTH", "//health", "/ready;x", "/metrics/x"),
    ],
)
def test_every_path_is_shut_but_the_probes(anonymous, path):
    for method in ("GET", "POST", "OPTIONS"):
        assert_error(anonymous.request(method, path), 401)


def raw_status(live, request: bytes) -> int:
    url = urlsplit(live.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.settimeout(5)
        connection.sendall(request)
        return int(connection.recv(65536).split()[1])


@pytest.mark.parametrize(
    "line, host",
    [
        ("GET /v1/models HTTP/1.1", "a/health?"),
        ("GET /v1/models HTTP/1.1", "x/health#"),
        ("GET http://x/health/../v1/models HTTP/1.1", "x"),
        ("GET http://health/v1/models HTTP/1.1", "x"),
        ("GET /v1/../health HTTP/1.1", "x"),
        ("GET /health/../v1/models HTTP/1.1", "x"),
        ("GET /v1/%6dodels HTTP/1.1", "x"),
        ("GET /%2e%2e/v1/models HTTP/1.1", "x"),
        ("GET /v1/models?/health HTTP/1.1", "x"),
        ("GET /v1/models%3f/health HTTP/1.1", "x"),
        ("GET /v1/models%00/health HTTP/1.1", "x"),
    ],
)
def test_no_spelling_of_a_path_or_host_opens(guarded, line, host):
    assert raw_status(guarded, f"{line}\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()) in (400, 401)


def test_probes_and_metrics_need_no_key(anonymous):
    assert [anonymous.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
    assert "sk-" not in anonymous.get("/metrics").text


def test_keys_do_not_share_cached_prefixes(anonymous):
    """`cached_tokens` would tell one tenant what another has asked."""

    def cached(key: str, **fields) -> int:
        body = completion_body(prompt="a prompt of more than two blocks of 16 tokens " * 2, max_tokens=1, **fields)
        response = anonymous.post("/v1/completions", json=body, headers=bearer(key))
        return json.loads(response.content)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[0], cache_salt="mine") == 0
    assert cached(KEYS[0], cache_salt="mine") > 0
    assert cached(KEYS[1], cache_salt="mine") == 0


def test_the_body_is_not_read_without_a_key(guarded):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    assert raw_status(guarded, head + b"Content-Length: 1000000\r\n\r\n{") == 401
