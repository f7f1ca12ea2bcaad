"""OpenTelemetry traces: a span per prompt, with child spans for its queue, prefill and decode.

Spans are made from the RequestReport when a request has ended, so tracing adds no work per token. The exporter's own
thread sends them and drops them if the collector is too slow. Attribute names follow the semantic conventions for
generative AI and, for latencies, vLLM. A client's `traceparent` (W3C Trace Context) is the parent. No text is recorded.
"""

import logging
import os
import threading
from typing import Any

from engine.errors import ConfigError
from engine.request import Request
from engine.telemetry.request_log import RequestReport
from server.config import ServerConfig

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = "the packages for OpenTelemetry are not installed: pip install '.[otel]' in pageserve's folder"
CLOSE_SECONDS = 2.0


def make_tracer(config: ServerConfig) -> "Tracer | None":
    """The tracer, or None if no exporter is set. ConfigError if the config sets one and its packages are missing."""
    by_environment = any(os.environ.get(name) for name in ENDPOINT_VARIABLES)
    if config.otlp_traces_endpoint is None and not by_environment:
        return None
    try:
        return Tracer(config.otlp_traces_endpoint)
    except ImportError:
        if config.otlp_traces_endpoint is not None:
            raise ConfigError(f"otlp_traces_endpoint: {MISSING}.") from None
        logger.warning("no traces are sent: %s", MISSING)  # the variable may be meant for another program
        return None


class Tracer:
    """Exports spans over HTTP to `endpoint`; None: to the endpoint that the environment names."""

    def __init__(self, endpoint: str | None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME") or "pageserve"
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pageserve")

    def record(self, model: str, request: Request, report: RequestReport) -> None:
        """Makes the spans of a request to `model` that has ended."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": request.trace_parent})
        start = round(report.arrived_at * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            parent,
            kind=SpanKind.SERVER,
            start_time=start,
            attributes={**_asked(model, request), **_found(report)},
        )
        if report.finish_reason == "error":
            span.set_status(StatusCode.ERROR)
        inside, begin = set_span_in_context(span), start
        for name in ("queue", "prefill", "decode"):
            seconds = getattr(report, f"{name}_seconds")
            if seconds is not None:
                end = begin + round(seconds * 1e9)
                self._tracer.start_span(name, inside, start_time=begin).end(end)
                begin = end
        span.end(start + round(report.total_seconds * 1e9))

    def close(self) -> None:
        """Sends the remaining spans; blocks for at most CLOSE_SECONDS * 1.25. Spans not sent by then are lost."""
        # The SDK accepts a time limit here but ignores it: a collector that does not answer costs ten seconds.
        ending = threading.Thread(target=self._provider.shutdown, name="tracer-close", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # ends the retries
            ending.join(CLOSE_SECONDS / 4)


def _asked(model: str, request: Request) -> dict[str, Any]:
    params = request.params
    asked = {
        "gen_ai.provider.name": "pageserve",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _found(report: RequestReport) -> dict[str, Any]:
    found = {
        "gen_ai.response.id": report.id,
        "gen_ai.response.finish_reasons": [report.finish_reason],
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.completion_tokens,
        "gen_ai.latency.time_in_queue": report.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": report.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": report.decode_seconds,
        "gen_ai.latency.time_to_first_token": report.time_to_first_token_seconds,
        "gen_ai.latency.e2e": report.total_seconds,
        "pageserve.cached_tokens": report.cached_tokens,
        "pageserve.prefill_chunks": report.num_prefill_chunks,
        "pageserve.preemptions": report.preemptions,
        "pageserve.worker_restarts": report.worker_restarts,
        "pageserve.steps": report.steps,
        "pageserve.mean_batch_size": report.mean_batch_size,
    }
    return {name: value for name, value in found.items() if value is not None}
