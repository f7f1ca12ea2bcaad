"""OpenTelemetry traces, as a collector gets them."""

import http.server
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.tracing import make_tracer
from tests.mortal import MORTAL
from tests.server.live import LiveServer, completion_body
from tests.server.serving import wait_until_ready

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra `otel` is not installed"
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP; `spans` has (span, its attributes)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.spans: list = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def wait_for(self, count: int) -> list:
        end = time.monotonic() + 20
        while len(self.spans) < count and time.monotonic() < end:
            time.sleep(0.01)
        return self.spans


class CollectorHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        message = trace_service.ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            service = {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"]
            assert service == "pageserve"
            for scope in resource.scope_spans:
                self.server.spans += [
                    (span, {item.key: item.value for item in span.attributes}) for span in scope.spans
                ]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_request_is_a_span_with_its_three_parts(folder, collector):
    with (
        LiveServer(folder, "--step-seconds", "0.01", otlp_traces_endpoint=collector.url) as live,
        live.client() as client,
    ):
        answer = client.post(
            "/v1/completions",
            json=completion_body(prompt="secret", max_tokens=5, n=2, temperature=0.7),
            headers={"traceparent": PARENT},
        ).json()
        spans = collector.wait_for(4)
    by_name = {span.name: (span, attributes) for span, attributes in spans}
    assert set(by_name) == {"llm_request", "queue", "prefill", "decode"} and len(spans) == 4
    request, found = by_name["llm_request"]
    assert {span.trace_id.hex() for span, _ in spans} == {TRACE_ID}
    assert request.parent_span_id.hex() == "b7ad6b7169203331"
    assert found["gen_ai.response.id"].string_value == f"{answer['id']}-0"
    assert found["gen_ai.usage.input_tokens"].int_value == 6
    assert found["gen_ai.usage.output_tokens"].int_value == 10
    assert found["gen_ai.request.choice.count"].int_value == 2
    assert found["gen_ai.latency.e2e"].double_value >= 0.05
    assert found["pageserve.steps"].int_value == 5
    parts = [by_name[name][0] for name in ("queue", "prefill", "decode")]
    assert all(part.parent_span_id == request.span_id for part in parts)
    assert request.start_time_unix_nano == parts[0].start_time_unix_nano
    for before, after in pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert abs(parts[-1].end_time_unix_nano - request.end_time_unix_nano) < 1000
    assert abs(request.end_time_unix_nano / 1e9 - time.time()) < 60
    assert "secret" not in str(spans)


@pytest.mark.parametrize("parent", [None, "", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é"])
def test_without_a_good_parent_a_trace_of_its_own(folder, collector, parent):
    headers = {} if parent is None else {"traceparent": parent.encode("latin-1")}
    with LiveServer(folder, otlp_traces_endpoint=collector.url) as live, live.client() as client:
        for _ in range(2):
            assert (
                client.post("/v1/completions", json=completion_body(max_tokens=1), headers=headers).status_code == 200
            )
        roots = [span for span, _ in collector.wait_for(8) if span.name == "llm_request"]
    assert len({span.trace_id for span in roots}) == 2 and not any(span.parent_span_id for span in roots)


def test_a_collector_that_is_gone_disturbs_nobody(folder):
    with LiveServer(folder, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as live, live.client() as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=completion_body()).status_code == 200
    end = time.monotonic() + 20
    while any("Otel" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < end, "something goes on behind it"
        time.sleep(0.01)


def test_a_collector_that_never_answers_does_not_hold_up_the_end(folder):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        with LiveServer(folder, otlp_traces_endpoint=endpoint) as live, live.client() as client:
            assert client.post("/v1/completions", json=completion_body()).status_code == 200
            start = time.monotonic()
            live.app.state.tracer.close()
            assert time.monotonic() - start < 6, "the SDK alone takes ten seconds"


def test_none_unless_an_exporter_is_set(monkeypatch):
    assert make_tracer(ServerConfig()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracer = make_tracer(ServerConfig())
    assert tracer is not None
    tracer.close()


def test_without_the_packages(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: .* pip install '\.\[otel\]'"):
        make_tracer(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:9"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9")
    assert make_tracer(ServerConfig()) is None and "no traces are sent" in caplog.text


def test_what_is_left_goes_out_when_the_server_ends(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
    command = [*MORTAL, sys.executable, "-m", "server.cli", "serve", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().split()[4]
    with httpx.Client(base_url=url) as client:
        wait_until_ready(client, process)
        client.post("/v1/completions", json={"model": "pageserve", "prompt": "Once", "max_tokens": 3})
    assert collector.spans == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.stdout.close()
    assert len(collector.spans) == 4
