"""The proof of the journal: real server, real Worker, the bundled model in fp32, over HTTP.

Many live streams; the Worker is killed (kill -9) three times at random moments and then stopped (SIGSTOP) once. The
moments are told by what the streams have received, so that a fast machine is not done before the last. Every stream
completes, with the very bytes of an undisturbed run. JOURNAL_STREAMS sets how many (8 in `make test`, 64 in
`make journal`, which prints the figures).

In bf16 (`make journal` does both) a recomputed context may differ in its last bits, so the text after a death may be
another one, as good. What was sent stays sent: there, each sample must have exactly the tokens that it asked for.
"""

import asyncio
import os
import random
import re
import signal
import subprocess
import time

import httpx
import pytest

from tests.server.left_behind import gauge, metrics
from tests.server.serving import serving_process
from tests.server.streams import MAX_TOKENS, WORKER, Stream, body, children_of, wait_for

NUM_STREAMS = int(os.environ.get("JOURNAL_STREAMS", "8"))
SEED = int(os.environ.get("JOURNAL_SEED", str(random.getrandbits(32))))
DTYPES = os.environ.get("JOURNAL_DTYPES", "float32").split(",")
FAULTS = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
STEP_TIMEOUT = 1.5
OPTIONS = ["--device", "cpu", "--step-timeout", str(STEP_TIMEOUT), "--keep-alive-interval", "0.5"]

SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")


@pytest.fixture(scope="module", params=DTYPES)
def server(request):
    """(base URL, process, dtype)"""
    with serving_process("--dtype", request.param, *OPTIONS) as (url, process):
        yield url, process, request.param


async def run_streams(base_url: str, model: str, disturb=None) -> list[Stream]:
    streams = [Stream(body(i, model)) for i in range(NUM_STREAMS)]
    limits = httpx.Limits(max_connections=NUM_STREAMS + 4)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:
        tasks = [asyncio.create_task(stream.read(client)) for stream in streams]
        if disturb is not None:
            tasks.append(asyncio.create_task(disturb(client, streams)))
        await asyncio.gather(*tasks)
    return streams


class Disturbance:
    """Hits the Worker once in each fifth of the answers, the last left alone; notes what streams and probes show."""

    def __init__(self, process: subprocess.Popen, rng: random.Random) -> None:
        self._process, self._rng = process, rng
        self.num_live: list[int] = []  # streams that were hit, for each fault
        self.pauses: list[float] = []  # seconds from the fault to ready again

    async def __call__(self, client: httpx.AsyncClient, streams: list[Stream]) -> None:
        await self._wait_until_all_flow(streams)
        total = sum(stream.body.get("n", 1) * MAX_TOKENS for stream in streams)
        for i, fault in enumerate(FAULTS):
            moment = (i + self._rng.random()) / (len(FAULTS) + 1) * total
            await self._wait_until_received(streams, moment)
            self.num_live.append(sum(not stream.done for stream in streams))
            os.kill(children_of(self._process)[WORKER], fault)
            await self._wait_for_restart(client, i + 1)

    async def _wait_until_all_flow(self, streams: list[Stream]) -> None:
        seen = {id(stream): stream.num_chunks for stream in streams}

        async def all_flow() -> bool:
            return all(stream.done or stream.num_chunks > seen[id(stream)] + 2 for stream in streams)

        await wait_for(all_flow)

    async def _wait_until_received(self, streams: list[Stream], num_chunks: float) -> None:
        """A chunk holds a token, or a few where a stream is read late; a stream that ended counts as read whole."""

        async def received() -> bool:
            whole = (stream.body.get("n", 1) * MAX_TOKENS for stream in streams if stream.done)
            return sum(whole) + sum(stream.num_chunks for stream in streams if not stream.done) >= num_chunks

        await wait_for(received)

    async def _wait_for_restart(self, client: httpx.AsyncClient, num_restarts: int) -> None:
        hit = time.monotonic()

        async def ready_again() -> bool:
            assert (await client.get("/health")).status_code == 200
            text = (await client.get("/metrics")).text
            found = re.search(r"^pageserve:worker_restarts_total\S* (\S+)$", text, re.M)
            return float(found[1]) == num_restarts and (await client.get("/ready")).status_code == 200

        await wait_for(ready_again)
        self.pauses.append(time.monotonic() - hit)


def report(disturbed: list[Stream], undisturbed: list[Stream], disturbance: Disturbance, found: dict) -> str:
    pairs = zip(disturbed, undisturbed, strict=True)
    return (
        f"{sum(stream.done for stream in disturbed)} of {NUM_STREAMS} streams complete, "
        f"{sum(stream.outcome() == calm.outcome() for stream, calm in pairs)} byte-identical to the undisturbed run "
        f"(seed {SEED})\n"
        f"streams live at each fault: {disturbance.num_live}; "
        f"from the fault to ready again: {', '.join(f'{pause:.1f} s' for pause in disturbance.pauses)}\n"
        f"longest pause of a stream: {max(stream.longest_pause for stream in disturbed):.1f} s, undisturbed "
        f"{max(stream.longest_pause for stream in undisturbed):.1f} s; "
        f"keep-alive comments: {sum(stream.comments for stream in disturbed)}\n"
        f"restarts: {gauge(found, 'pageserve:worker_restarts_total'):.0f}, "
        f"sequences recomputed: {gauge(found, 'pageserve:recomputed_sequences_total'):.0f}, "
        f"tokens recomputed: {gauge(found, 'pageserve:recomputed_tokens_total'):.0f}, "
        f"generated: {sum(stream.usage['completion_tokens'] for stream in disturbed)}"
    )


def check_tokens(stream: Stream) -> None:
    """Nothing lost, nothing twice, as far as counts can say."""
    body, num_samples = stream.body, stream.body.get("n", 1)
    assert len(stream.texts) == len(stream.reasons) == num_samples
    if "stop" not in body:
        assert stream.usage["completion_tokens"] == MAX_TOKENS * num_samples
        assert set(stream.reasons.values()) == {("length", None)}
    if "logprobs" in body:
        assert len(stream.tokens[0]) == stream.usage["completion_tokens"]
        assert SPECIAL_TOKEN.sub("", "".join(stream.tokens[0])) == stream.texts[0]


def test_every_stream_lives_through_the_deaths_of_the_worker(server):
    base_url, process, dtype = server
    with httpx.Client(base_url=base_url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        undisturbed = asyncio.run(run_streams(base_url, model))
        disturbance = Disturbance(process, random.Random(SEED))
        disturbed = asyncio.run(run_streams(base_url, model, disturbance))
        found = metrics(client)
    print(f"{dtype}: {report(disturbed, undisturbed, disturbance, found)}")
    for stream, calm in zip(disturbed, undisturbed, strict=True):
        assert stream.done
        check_tokens(stream)
        if dtype == "float32":
            assert stream.outcome() == calm.outcome(), stream.body
    assert gauge(found, "pageserve:worker_restarts_total") == len(FAULTS)
    assert min(disturbance.num_live) > NUM_STREAMS // 2, "the faults came too late to show anything"
    assert sum(stream.comments for stream in disturbed) > 0
    assert gauge(found, "vllm:kv_cache_usage_perc") == gauge(found, "vllm:num_requests_waiting") == 0
