"""Web pages of other origins: allowed where the operator named them, with and without keys."""

import httpx
import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from tests.server.live import LiveServer, chat_body

PAGE, KEY = "https://app.example.com", "sk-key"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}


@pytest.fixture(scope="module")
def client(folder):
    with (
        LiveServer(folder, allowed_origins=(PAGE, "http://localhost:5173"), api_key=(KEY,)) as live,
        live.client() as found,
    ):
        yield found


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    return client.options("/v1/chat/completions", headers={"origin": origin, **ASKS})


def test_a_preflight_needs_no_key(client):
    answer = preflight(client, PAGE)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert answer.headers["x-request-id"].startswith("req-")


def test_other_origins_are_not_let_in(client):
    for origin in ("https://app.example.com.evil.example", "https://evil.example", "null"):
        assert preflight(client, origin).status_code == 400
        answer = client.get("/v1/models", headers={"origin": origin, "authorization": f"Bearer {KEY}"})
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_reads_streams_and_errors(client):
    headers = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
    streamed = client.post("/v1/chat/completions", json=chat_body(stream=True), headers=headers)
    assert streamed.status_code == 200 and streamed.text.rstrip().endswith("data: [DONE]")
    refused = client.post("/v1/chat/completions", json=chat_body(), headers={"origin": PAGE})
    assert refused.status_code == 401
    for answer in (streamed, refused):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_all_origins(folder):
    with LiveServer(folder, allowed_origins=("*",)) as live, live.client() as client:
        answer = client.get("/v1/models", headers={"origin": PAGE})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


def test_without_the_option_nothing_is_said(folder):
    with LiveServer(folder) as live, live.client() as client:
        assert preflight(client, PAGE).status_code == 405
        assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": PAGE}).headers


@pytest.mark.parametrize(
    "origin", ["app.example.com", "https://app.example.com/", "https://a b", "https://*.example.com"]
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match="allowed_origins"):
        ServerConfig(allowed_origins=(origin,))
