"""API keys: deny by default, on what the router sees."""

import hashlib
import json
import pickle
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from server.http.middleware import PUBLIC_PATHS
from server.routes.debug_kv import debug_kv_enabled
from server.serve import check_exposed
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
    assert ("the request has none" in message) == (not headers.keys() & {"authorization", "x-api-key"})


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", f"/v1/models/{MODEL}", "/v1/completions", "/version", "/openapi.json", "/nope", "/docs"),
        *("/health/", "/healthz", "/HEALTH", "/ready;x", "/metrics/x"),
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
        ("GET //health HTTP/1.1", "x"),
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


def test_probes_need_no_key_and_metrics_do_unless_they_are_public(anonymous, folder):
    assert [anonymous.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200, 200, 401]
    assert "sk-" not in anonymous.get("/metrics", headers=bearer(KEYS[0])).text
    with LiveServer(folder, api_key=KEYS, public_metrics=True) as live, live.client() as client:
        assert [client.get(path).status_code for path in ("/metrics", "/v1/models", "/version")] == [200, 401, 401]
        assert 'pageserve:requests_refused_total{reason="unauthorized"} 2.0' in client.get("/metrics").text


def test_every_route_is_shut(guarded, anonymous):
    """All there are, so that a new one cannot be forgotten."""
    paths = {route.path for route in guarded.app.routes} - PUBLIC_PATHS
    assert len(paths) >= 7
    for path in paths:
        for method in ("GET", "POST"):
            response = anonymous.request(method, re.sub(r"\{.*\}", "x", path))
            if path.startswith("/v1/messages"):
                assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
            else:
                assert_error(response, 401)


def test_who_tries_keys_by_the_hundred_is_answered_slowly_and_others_at_once(guarded, anonymous):
    """400 wrong keys: the server answers 100 at once and the others at 200 a second."""

    def refuse(number: int) -> None:
        with guarded.client() as client:
            for i in range(20):
                assert client.get("/v1/models", headers=bearer(f"sk-{number}-{i}")).status_code == 401

    start = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        refusing = [pool.submit(refuse, number) for number in range(20)]
        waits = []
        while not all(job.done() for job in refusing):
            asked = time.monotonic()
            assert anonymous.get("/v1/models", headers=bearer(KEYS[0])).status_code == 200
            waits.append(time.monotonic() - asked)
            time.sleep(0.05)
    assert [job.result() for job in refusing] == [None] * 20
    assert 1.2 < time.monotonic() - start < 5.0
    assert sorted(waits)[len(waits) // 2] < 0.1, "a valid key waits for none of them"


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


def key_file(tmp_path, text: str):
    path = tmp_path / "keys.txt"
    path.write_text(text)
    return path


def test_keys_from_a_file_with_names_comments_digests_and_a_reload(folder, tmp_path):
    digest = hashlib.sha256(b"sk-hashed==").hexdigest()
    path = key_file(tmp_path, f"# all of them\n\nsk-plain=\nalice\tsk-alice  weight=2 # hers\nbob sha256:{digest}\n")
    with LiveServer(folder, api_key=("sk-flag",), api_key_file=str(path)) as live, live.client() as client:

        def works(*keys: str) -> list[bool]:
            return [client.get("/v1/models", headers=bearer(key)).status_code == 200 for key in keys]

        assert works("sk-flag", "sk-plain=", "sk-alice", "sk-hashed==") == [True] * 4
        assert works("alice", digest, f"sha256:{digest}", "weight=2", "# all of them") == [False] * 5
        assert b"sk-alice" not in pickle.dumps(vars(live.app.state.api_keys.find(b"sk-alice").key))
        path.write_text("carol sk-carol\n")
        live.call(live.app.state.api_keys.reload)
        assert works("sk-flag", "sk-carol", "sk-alice", "sk-plain=") == [True, True, False, False]
        path.write_text("one two three\n")
        live.call(live.app.state.api_keys.reload)
        assert works("sk-flag", "sk-carol") == [True, True], "a wrong file changes nothing"


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no key"),
        ("# only this\n", "holds no key"),
        ("sk-a\na b c\n", "line 2: must be `KEY` or `NAME KEY`"),
        ("na/me sk-a\n", "line 1: the name may hold"),
        ("sk-a weight=0\n", "weight must be a number above 0, at most 1000, not '0'"),
        ("sk-a weight=nan\n", "weight must be a number above 0"),
        ("sk-a requests-per-minute=many\n", "requests-per-minute must be a whole number above 0, or none, not 'many'"),
        ("sk-a min-priority=none\n", "min-priority must be a whole number"),
        ("sk-a weight=1 weight=2\n", "line 1: weight is set twice"),
        # Not a key called weigth=2 that belongs to somebody called sk-a:
        (
            "sk-a weigth=2\n",
            "line 1: unknown setting; did you mean weight? The settings are weight, min-priority",
        ),
        (
            "sk-a requests_per_minute=60 weight=2\n",
            "line 1: unknown setting; did you mean requests-per-minute?",
        ),
        ("alice sk-a weigt=2\n", "line 1: unknown setting; did you mean weight?"),
        ("sk-a colour=2\n", "line 1: unknown setting; the settings are weight, min-priority"),
        ("alice sk_a=b c\n", "line 1: must be `KEY` or `NAME KEY`"),
        ("alice sk-a\nsk-b\ncarol sk-a\n", "line 3: this key is in line 1, too"),
        ("bob sha256:6ca13d52\n", "line 1: behind sha256: must be 64 hexadecimal digits"),
        ("alice sk-a requests-per-hour=3\n", "line 1: unknown setting; did you mean requests-per-minute?"),
    ],
)
def test_a_wrong_key_file_is_refused_without_repeating_a_key(tmp_path, text, said):
    config = ServerConfig(api_key_file=str(key_file(tmp_path, text)))
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        ApiKeys(config)
    assert "sk-a" not in str(caught.value)


def test_a_digest_that_was_cut_is_no_key():
    with pytest.raises(ConfigError, match="api_key: behind sha256: must be 64"):
        ApiKeys(ServerConfig(api_key=("sha256:6ca13d52",)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_server_that_others_can_reach_needs_a_key(host, tmp_path):
    with pytest.raises(ConfigError, match=r"--api-key-file FILE.*127\.0\.0\.1.*--allow-unauthenticated"):
        check_exposed(ServerConfig(host=host))
    for fix in ({"api_key": ("sk",)}, {"api_key_file": "f"}, {"allow_unauthenticated": True}):
        check_exposed(ServerConfig(host=host, **fix))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_it_needs_none(host):
    check_exposed(ServerConfig(host=host))


def test_a_key_file_may_hold_several_tenants_so_blocks_are_not_shown(tmp_path):
    assert not debug_kv_enabled(ServerConfig(api_key_file=str(key_file(tmp_path, "sk-a\n"))))


@pytest.mark.parametrize("mode, warned", [(0o600, False), (0o640, False), (0o604, True), (0o644, True)])
def test_a_key_file_that_everybody_can_read_is_told(tmp_path, caplog, mode, warned):
    path = tmp_path / "the keys"
    path.write_text("sk-secret\n")
    path.chmod(mode)
    assert len(ApiKeys(ServerConfig(api_key_file=str(path)))) == 1
    assert (f"chmod 600 '{path}'" in caplog.text) == warned and "sk-secret" not in caplog.text
