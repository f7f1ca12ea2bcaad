"""EngineStats: the engine's metrics as plain numbers. server/routes/metrics.py shows them to Prometheus.

Names and meanings are vLLM's if vLLM has the same metric (VLLM_NAMES in that file), so its dashboards, alerts and
autoscalers work unchanged.
"""

from bisect import bisect_left
from collections.abc import Iterator

from engine.executor.step import StepPlan
from engine.outputs import FinishReason
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.step_log import StepLog

_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_LONG_LATENCY = (*_LATENCY, 960.0, 1920.0, 7680.0)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_LONG_FIRST_TOKEN = (*_FIRST_TOKEN, 80.0, 160.0, 640.0, 2560.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_BATCH_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Counter:
    """A count that only rises. `values` maps label values, in the order of `label_names`, to the count."""

    def __init__(self, name: str, help: str, label_names: tuple[str, ...] = ()) -> None:
        self.name, self.help, self.label_names = name, help, label_names
        self.values: dict[tuple[str, ...], float] = {} if label_names else {(): 0.0}

    def add(self, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Gauge:
    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self.value = 0.0


class Histogram:
    """`counts[i]` is the number of values in (bounds[i - 1], bounds[i]]; the last one has no upper bound."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def total(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class EngineStats:
    """The metrics of one Driver. Times are in seconds, sizes in tokens."""

    def __init__(self) -> None:
        self.num_requests_running = Gauge("num_requests_running", "Sequences in the running batch.")
        self.num_requests_waiting = Gauge("num_requests_waiting", "Sequences that wait to be scheduled.")
        self.num_tokens_waiting = Gauge("num_tokens_waiting", "Prompt tokens of sequences that wait to be scheduled.")
        self.kv_cache_usage_perc = Gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is 100 percent.")
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of requests whose prompt was computed.")
        self.generation_tokens = Counter("generation_tokens", "Generated tokens.")
        self.prefix_cache_queries = Counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_cache_hits = Counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.host_tier_offloads = Counter("host_tier_offloads", "KV blocks moved to host memory.")
        self.host_tier_loads = Counter("host_tier_loads", "KV blocks brought back from host memory.")
        self.spec_decode_num_drafts = Counter("spec_decode_num_drafts", "Drafts verified.")
        self.spec_decode_num_draft_tokens = Counter("spec_decode_num_draft_tokens", "Tokens of verified drafts.")
        self.spec_decode_num_accepted_tokens = Counter(
            "spec_decode_num_accepted_tokens", "Tokens of drafts that were right."
        )
        self.num_preemptions = Counter("num_preemptions", "Sequences preempted.")
        self.worker_restarts = Counter("worker_restarts", "Workers started in place of one that died or hung.")
        self.recomputed_sequences = Counter("recomputed_sequences", "Sequences that lost their KV cache with a Worker.")
        self.recomputed_tokens = Counter("recomputed_tokens", "Computed tokens that were lost with a Worker.")
        self.admissions_delayed = Counter("admissions_delayed", "Sequences kept waiting by the prediction alone.")
        self.request_success = Counter("request_success", "Requests that ended, by reason.", ("finished_reason",))
        for reason in FinishReason:
            self.request_success.add(0.0, (reason.value,))
        self.requests_expired = Counter(
            "requests_expired", "Requests whose own timeout was over, by state.", ("state",)
        )
        for state in ("waiting", "running"):
            self.requests_expired.add(0.0, (state,))
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LONG_FIRST_TOKEN
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "Between two tokens of a sample.", _PER_TOKEN
        )
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds", "Mean of a request, first token left out.", _PER_TOKEN
        )
        self.e2e_latency = Histogram("e2e_request_latency_seconds", "From arrival to the end.", _LONG_LATENCY)
        self.queue_time = Histogram("request_queue_time_seconds", "From arrival to the first step.", _LONG_LATENCY)
        self.inference_time = Histogram(
            "request_inference_time_seconds", "From the first step to the end.", _LONG_LATENCY
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _LONG_LATENCY
        )
        self.decode_time = Histogram("request_decode_time_seconds", "From the first token to the end.", _LONG_LATENCY)
        self.request_prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = Histogram("request_generation_tokens", "Tokens made for a request.", _TOKENS)
        self.params_n = Histogram("request_params_n", "Samples asked for.", _SAMPLES)
        self.params_max_tokens = Histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self.iteration_tokens = Histogram("iteration_tokens_total", "Tokens computed in a step.", _BATCH_TOKENS)
        self.steps = StepLog()

    def observe_plan(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Count a plan that was sent to the Worker."""
        self.iteration_tokens.observe(plan.num_tokens)
        self.steps.sent(plan, scheduler)

    def read_scheduler(self, scheduler: Scheduler, num_waiting: int, asleep: bool) -> None:
        """Copy the gauges and counters that the scheduler and its block manager keep.

        `num_waiting` counts sequences, those that wait for the disk included. `asleep`: the pool is freed, and what ran
        waits to be recomputed; the scheduler learns that at the wake.
        """
        blocks, paused = scheduler.block_manager, scheduler.running if asleep else ()
        self.num_requests_running.value = len(scheduler.running) - len(paused)
        self.num_requests_waiting.value = num_waiting + len(paused)
        self.num_tokens_waiting.value = scheduler.num_waiting_tokens + sum(seq.num_tokens for seq in paused)
        self.kv_cache_usage_perc.value = 0.0 if asleep else blocks.usage
        self.num_preemptions.values[()] = scheduler.num_preemptions
        drafts = scheduler.drafts
        self.spec_decode_num_drafts.values[()] = drafts.num_drafts
        self.spec_decode_num_draft_tokens.values[()] = drafts.num_draft_tokens
        self.spec_decode_num_accepted_tokens.values[()] = drafts.num_accepted_tokens
        self.admissions_delayed.values[()] = scheduler.admission.num_delayed
        self.prefix_cache_queries.values[()] = blocks.num_prefix_queries
        self.prefix_cache_hits.values[()] = blocks.num_prefix_hits
        if (tier := blocks.host_tier) is not None:
            self.host_tier_offloads.values[()] = tier.num_offloads
            self.host_tier_loads.values[()] = tier.num_loads

    def metrics(self) -> Iterator[Counter | Gauge | Histogram]:
        return (metric for metric in vars(self).values() if isinstance(metric, Counter | Gauge | Histogram))
