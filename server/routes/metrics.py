"""GET /metrics: the engine's metrics for Prometheus, under vLLM's names where vLLM has the same metric."""

import asyncio
import time
from collections import Counter as CountBy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.driver import Driver
from engine.errors import UnavailableError
from engine.replicas.engine import Engine
from engine.telemetry.stats import Counter, Gauge, Histogram
from server.context import Served, package_version
from server.process.standard_streams import STREAMS, lines_dropped

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Metrics with the name and the meaning of vLLM, so vLLM's dashboards and autoscalers work. The rest is ours.
VLLM_NAMES = frozenset(
    {
        "cache_config_info",
        "e2e_request_latency_seconds",
        "engine_sleep_state",
        "generation_tokens",
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "kv_cache_usage_perc",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_to_first_token_seconds",
    }
)
GATHER_SECONDS = 0.01  # requests that come in this time get the same page
LABELS = ("model_name", "engine")
REFUSALS = (
    "unauthorized",
    "key_concurrent",
    "key_requests",
    "key_tokens",
    "queue_requests",
    "queue_tokens",
    "key_bytes",
    "bytes",
)


class EngineCollector(Collector):
    """Reads EngineStats when Prometheus scrapes; keeps no copy."""

    def __init__(
        self, drivers: Mapping[str, Engine], http_counts: CountBy[tuple[str, int]], refused: CountBy[str]
    ) -> None:
        """`drivers` has the first name of each model, the label of its metrics."""
        self._drivers = drivers
        self._http_counts = http_counts
        self._refused = refused

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise the registry would collect once at start, before there are metrics

    def collect(self) -> Iterator[Metric]:
        replicas = self._replicas
        for driver in replicas.values():
            driver.stats_snapshot()
        # Every replica has the same metrics in the same order; a family holds those of all models.
        for metrics in zip(*(driver.stats.metrics() for driver in replicas.values()), strict=True):
            yield _family(list(zip(replicas, metrics, strict=True)))
        yield self._sleep_state()
        if (info := self._cache_config()).samples:
            yield info
        yield from self._adapters()
        yield self._http_requests()
        yield self._requests_refused()
        yield self._lines_dropped()
        tasks = GaugeMetricFamily("pageserve:asyncio_tasks", "Tasks on the event loop; each open stream has a few.")
        tasks.add_metric((), len(asyncio.all_tasks()))
        yield tasks
        info = GaugeMetricFamily("pageserve:build_info", "Version of the server.", labels=("version",))
        info.add_metric((package_version(),), 1)
        yield info

    @property
    def _replicas(self) -> dict[tuple[str, str], Driver]:
        """The replicas of all models, by their labels: as vLLM, `engine` is the number of the replica."""
        return {
            (name, str(number)): replica
            for name, engine in self._drivers.items()
            for number, replica in enumerate(engine.replicas)
        }

    def _sleep_state(self) -> Metric:
        help = "1 for the present state: awake, weights_offloaded (level 1) or discard_all (level 2)."
        gauge = GaugeMetricFamily("vllm:engine_sleep_state", help, labels=(*LABELS, "sleep_state"))
        for labels, driver in self._replicas.items():
            for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
                gauge.add_metric((*labels, state), level == driver.sleep_level)
        return gauge

    def _cache_config(self) -> Metric:
        keys = ("cache_dtype", "block_size", "num_gpu_blocks")
        name, help = "vllm:cache_config_info", "The KV cache: element type, tokens per block, blocks on the device."
        info = GaugeMetricFamily(name, help, labels=(*LABELS, *keys))
        for labels, driver in self._replicas.items():
            with suppress(UnavailableError):  # there is no cache before the model is loaded
                model = driver.model
                values = (model.kv_cache_dtype, model.block_size, model.num_blocks)
                info.add_metric((*labels, *map(str, values)), 1)
        return info

    def _adapters(self) -> Iterator[Metric]:
        """vLLM's info of adapters, whose value is the time, and the sequences of each adapter."""
        name, help = "vllm:lora_requests_info", "Names of the LoRA adapters of running and of waiting sequences."
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily(name, help, labels=(*LABELS, *names))
        help = "Sequences of each LoRA adapter, by state."
        counts = GaugeMetricFamily("pageserve:lora_sequences", help, labels=(*LABELS, "adapter", "state"))
        for labels, driver in self._replicas.items():
            if not driver.config.serves_adapters:
                continue
            running, waiting = driver.adapter_counts()
            info.add_metric((*labels, str(driver.config.max_loras), ",".join(running), ",".join(waiting)), time.time())
            for state, found in (("running", running), ("waiting", waiting)):
                for adapter in driver.adapters:
                    counts.add_metric((*labels, adapter, state), found.get(adapter, 0))
        yield from (metric for metric in (info, counts) if metric.samples)

    def _http_requests(self) -> Metric:
        family = CounterMetricFamily("pageserve:http_requests", "HTTP responses begun.", labels=("route", "code"))
        for (route, status), count in self._http_counts.items():
            family.add_metric((route, str(status)), count)
        return family

    def _requests_refused(self) -> Metric:
        help = "Valid requests that were refused, by the limit that was reached."
        family = CounterMetricFamily("pageserve:requests_refused", help, labels=("reason",))
        for reason in REFUSALS:
            family.add_metric((reason,), self._refused[reason])
        return family

    def _lines_dropped(self) -> Metric:
        help = "Log lines that were dropped because no process read them or writing failed."
        family = CounterMetricFamily("pageserve:log_lines_dropped", help, labels=("stream",))
        for stream in STREAMS.values():
            family.add_metric((stream,), lines_dropped[stream])
        return family


def _family(models: Sequence[tuple[tuple[str, str], Counter | Gauge | Histogram]]) -> Metric:
    """One metric of all models, each with its labels."""
    _, first = models[0]
    name = ("vllm:" if first.name in VLLM_NAMES else "pageserve:") + first.name
    family: Any
    if isinstance(first, Counter):
        family = CounterMetricFamily(name, first.help, labels=(*LABELS, *first.label_names))
    elif isinstance(first, Gauge):
        family = GaugeMetricFamily(name, first.help, labels=LABELS)
    else:
        family = HistogramMetricFamily(name, first.help, labels=LABELS)
    for labels, metric in models:
        if isinstance(metric, Counter):
            for more, value in metric.values.items():
                family.add_metric((*labels, *more), value)
        elif isinstance(metric, Gauge):
            family.add_metric(labels, metric.value)
        else:
            bounds = [*map(str, metric.bounds), "+Inf"]
            family.add_metric(labels, list(zip(bounds, accumulate(metric.counts), strict=True)), metric.sum)
    found: Metric = family
    return found


def make_registry(
    drivers: Mapping[str, Engine], http_counts: CountBy[tuple[str, int]], refused: CountBy[str]
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(drivers, http_counts, refused))
    return registry


class MetricsPage:
    """Makes one page for all requests of GATHER_SECONDS: a page costs the event loop milliseconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._waiting: asyncio.Future[bytes] | None = None

    async def get(self) -> Response:
        if self._waiting is None:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            loop.call_later(GATHER_SECONDS, self._make)
        return Response(await asyncio.shield(self._waiting), headers={"content-type": CONTENT_TYPE})

    def _make(self) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        try:
            waiting.set_result(generate_latest(self._registry))
        except Exception as error:
            waiting.set_exception(error)


def _metrics_page(served: Served) -> MetricsPage:
    drivers = {one.names[0]: one.driver for one in served.models}
    return MetricsPage(make_registry(drivers, served.http_counts, served.refused))


async def get_metrics(http: HttpRequest, served: Served) -> Response:
    """The page of metrics, as Prometheus reads it."""
    return await served.once(_metrics_page).get()
