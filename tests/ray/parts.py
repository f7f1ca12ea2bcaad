"""The parts of `make ray`. Each returns its figures and raises AssertionError for a figure out of bounds."""

import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import time
from collections import Counter

import aiohttp

from tests.ray.stand import Stand, load, parent_of, server_pid

CLIENTS = 8
FLOOD = 24  # clients with long prompts: more than two replicas run at once
SHARED_TOKENS = 1000
STREAM_TOKENS = 128
MOST_RATIO = 1.3  # time per chunk, through Ray against a bare server
MOST_FIRST_MS = 10.0  # time to first token, through Ray beyond a bare server
LEAST_AFFINITY = 0.9


def words(seed: int, count: int) -> list[int]:
    """Token ids of a prompt."""
    return [100 + value for value in random.Random(seed).choices(range(4000), k=count)]


async def autoscale(stand: Stand) -> dict:
    """One replica becomes two while tokens wait, and one again afterwards; no request fails."""
    await asyncio.to_thread(stand.deploy, 1, 2)
    answers: list[int] = []
    running = True

    async def flood(http: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while running:
            turn += 1
            answers.append(await _long(http, stand.url, 1000 * number + turn))

    async with aiohttp.ClientSession() as http:
        await stand.wait_for_replicas(http, 1, 60)
        queue = [asyncio.create_task(flood(http, number)) for number in range(FLOOD)]
        try:
            up = await stand.wait_for_replicas(http, 2, 90)
        finally:
            running = False
            await asyncio.gather(*queue)
        async with load(stand, 2) as clients:
            down = await stand.wait_for_replicas(http, 1, 90)
            await asyncio.sleep(1)
    assert not clients.failures, clients.failures[:5]
    assert set(answers) == {200}, Counter(answers)
    num_answers = clients.counts.total() + len(answers)
    return {"seconds_up": round(up, 1), "seconds_down": round(down, 1), "answered": num_answers}


async def _long(http: aiohttp.ClientSession, url: str, seed: int) -> int:
    body = {"model": "m", "prompt": words(seed, 600), "max_tokens": 150, "ignore_eos": True}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def prefixes(stand: Stand) -> dict:
    """Requests that share 1000 tokens reach the replica that computed them, beside other requests."""
    await asyncio.to_thread(stand.deploy, 2, 2)
    hits, cached, places = 0, [], set()
    async with aiohttp.ClientSession() as http:
        await stand.wait_for_replicas(http, 2, 90)

        async def ask(prefix: int, tail: int) -> tuple[str, int]:
            prompt = words(1000 + prefix, SHARED_TOKENS) + words(tail, 40)
            body = {"model": "m", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            async with http.post(f"{stand.url}/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                details = answer["usage"].get("prompt_tokens_details") or {}
                return response.headers["x-pageserve-replica"], details.get("cached_tokens", 0)

        async with load(stand, 3):
            holders = {prefix: (await ask(prefix, 0))[0] for prefix in range(12)}
            places = set(holders.values())
            turns = [(prefix, tail) for tail in range(1, 9) for prefix in holders]
            random.Random(1).shuffle(turns)
            for start in range(0, len(turns), 4):
                group = turns[start : start + 4]
                for (prefix, _), (replica, num) in zip(
                    group, await asyncio.gather(*(ask(*turn) for turn in group)), strict=True
                ):
                    hits += replica == holders[prefix]
                    cached.append(num)
    share = hits / len(turns)
    assert len(places) == 2, "all prefixes went to one replica"
    assert share >= LEAST_AFFINITY, f"{share:.0%} reached the holder of their prefix"
    reused = sum(num >= SHARED_TOKENS - 16 for num in cached) / len(cached)
    assert reused >= LEAST_AFFINITY, f"{reused:.0%} found their prefix in the cache"
    return {"requests": len(turns), "reached_holder": round(share, 3), "found_in_cache": round(reused, 3)}


async def overhead(stand: Stand) -> dict:
    """Time per token and to the first one, through Ray and on a bare server, in turns. A chunk may hold several tokens
    where a reader is slow, so chunks are not counted."""
    await asyncio.to_thread(stand.deploy, 1, 1)
    gaps: dict[str, list[float]] = {"bare": [], "ray": []}
    firsts: dict[str, list[float]] = {"bare": [], "ray": []}
    async with aiohttp.ClientSession() as http, stand.bare() as bare:
        await stand.wait_for_replicas(http, 1, 90)
        urls = {"bare": bare, "ray": stand.url}
        for turn in range(34):
            for name, url in urls.items():
                first, gap = await _timed(http, url, turn)
                if turn >= 4:
                    firsts[name].append(first)
                    gaps[name].append(gap)
    ratio = statistics.median(gaps["ray"]) / statistics.median(gaps["bare"])
    more_ms = (statistics.median(firsts["ray"]) - statistics.median(firsts["bare"])) * 1000
    figures = {
        "token_us": {name: round(statistics.median(each) * 1e6) for name, each in gaps.items()},
        "token_ratio": round(ratio, 3),
        "first_token_ms": {name: round(statistics.median(each) * 1e3, 2) for name, each in firsts.items()},
        "first_token_more_ms": round(more_ms, 2),
    }
    assert ratio <= MOST_RATIO and more_ms <= MOST_FIRST_MS, figures
    return figures


async def _timed(http: aiohttp.ClientSession, url: str, seed: int) -> tuple[float, float]:
    """Seconds to the first token, and per token after it, of a stream."""
    body = {"model": "m", "prompt": words(seed, 30), "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    begun = time.perf_counter()
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        count = 0
        first = last = begun
        async for data in response.content.iter_any():
            last = time.perf_counter()
            if not count:
                first = last
            count += data.count(b"data: {")
    assert count > STREAM_TOKENS // 4, f"{count} chunks: too few to show what a chunk costs"
    return first - begun, (last - first) / (STREAM_TOKENS - 1)


async def killed(stand: Stand) -> dict:
    """A server and, later, an actor die under load: only streams that were running end early, with their count."""
    await asyncio.to_thread(stand.deploy, 2, 2)
    async with aiohttp.ClientSession() as http:
        await stand.wait_for_replicas(http, 2, 90)
        async with load(stand, CLIENTS, tokens=200) as clients:
            await asyncio.sleep(2)
            address = (await stand.replicas(http))[0]
            os.kill(server_pid(address), signal.SIGKILL)
            await asyncio.sleep(2)
            await stand.wait_for_replicas(http, 2, 90)
            await asyncio.sleep(2)
            os.kill(parent_of(server_pid((await stand.replicas(http))[0])), signal.SIGKILL)
            await asyncio.sleep(2)
            await stand.wait_for_replicas(http, 2, 90)
    assert not clients.failures, clients.failures[:5]
    assert clients.counts["cut"] > 0, "no stream was running on the replicas that died"
    assert clients.counts["cut"] <= 2 * CLIENTS, clients.counts
    return dict(clients.counts)


async def update(stand: Stand) -> dict:
    """Every replica is replaced, under load, and no request fails."""
    await asyncio.to_thread(stand.deploy, 2, 2)
    async with aiohttp.ClientSession() as http:
        await stand.wait_for_replicas(http, 2, 90)
        before = set(await stand.replicas(http))
        async with load(stand, CLIENTS, tokens=100) as clients:
            await asyncio.to_thread(stand.deploy, 2, 2, max_stop=5)
            await stand.wait_for_replicas(http, 2, 90)
            after = set(await stand.replicas(http))
            await asyncio.sleep(1)
    assert not before & after, (before, after)
    assert not clients.failures, clients.failures[:5]
    assert clients.counts["cut"] == 0, clients.counts
    return dict(clients.counts)


async def disconnect(stand: Stand) -> dict:
    """A client that leaves a stream frees its row on the replica."""
    await asyncio.to_thread(stand.deploy, 1, 1)
    async with aiohttp.ClientSession() as http:
        await stand.wait_for_replicas(http, 1, 90)
        (address,) = await stand.replicas(http)
        body = {"model": "m", "prompt": "go on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with http.post(f"{stand.url}/v1/completions", json=body) as response:
            for _ in range(5):
                await response.content.readany()
            assert await _running(http, address) == 1
            begun = time.monotonic()
            response.close()
        while await _running(http, address):
            assert time.monotonic() - begun < 5, "the replica still computes for a client that left"
        seconds = time.monotonic() - begun
        await asyncio.sleep(0.1)
        task = asyncio.create_task(_long(http, stand.url, 5))  # not streamed
        while not await _running(http, address):
            assert not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        begun = time.monotonic()
        while await _running(http, address):
            assert time.monotonic() - begun < 0.5, "the replica still computes for a client that left"
    return {"seconds_until_free": round(seconds, 3)}


async def _running(http: aiohttp.ClientSession, address: str) -> int:
    async with http.get(f"http://{address}/metrics") as response:
        page = await response.text()
    return int(float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", page, re.MULTILINE)[1]))


async def metrics(stand: Stand) -> dict:
    """Prometheus finds every replica by http_sd, and each has its own metrics."""
    await asyncio.to_thread(stand.deploy, 2, 2)
    async with aiohttp.ClientSession() as http:
        await stand.wait_for_replicas(http, 2, 90)
        async with load(stand, 4) as clients:
            await asyncio.sleep(2)
        done = []
        for address in await stand.replicas(http):
            async with http.get(f"http://{address}/metrics") as response:
                assert response.status == 200 and response.content_type == "text/plain"
                page = await response.text()
            found = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.MULTILINE)
            done.append(int(sum(map(float, found))))
    assert not clients.failures, clients.failures[:5]
    assert len(done) == 2 and all(done) and sum(done) >= clients.counts.total(), (done, clients.counts)
    return {"requests_by_replica": done}


CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell me of a fox."}],
    "temperature": 0,
    "max_tokens": 24,
}
TEXT = {"model": "m", "prompt": "The fox", "temperature": 0, "max_tokens": 24}
ITEMS = {"model": "m", "input": "The fox", "temperature": 0, "max_output_tokens": 24}
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: tuple[tuple[str, str, dict | None], ...] = (
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "n": 2} | USAGE),
    ("POST", "/v1/completions", TEXT | {"logprobs": 2}),
    ("POST", "/v1/completions", TEXT | {"stream": True, "prompt": ["a fox", "a dog"]}),
    ("POST", "/v1/responses", ITEMS | {"stream": True}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages", CHAT | {"stream": True}),
    ("POST", "/tokenize", {"model": "m", "prompt": "a fox"}),
    ("POST", "/v1/completions", TEXT | {"max_tokens": -1}),
    ("POST", "/v1/completions", TEXT | {"stream": True, "n": 2, "best_of": 1}),
    ("POST", "/v1/chat/completions", CHAT | {"model": "other"}),
    ("POST", "/v1/nothing", {}),
    ("GET", "/v1/completions", None),
    ("GET", "/v1/models/m", None),
    ("GET", "/version", None),
    ("GET", "/health", None),
)
CHANGING = re.compile(
    r'"(?:id|item_id|created|created_at|completed_at|sequence_number|obfuscation|signature)":(?:"[^"]*"|\d+)'
    r"|(?:resp|msg|req|rs)[-_]\w+"
)


async def surface(stand: Stand) -> dict:
    """Every API gives the same bytes as a bare server, ids and times aside."""
    await asyncio.to_thread(stand.deploy, 1, 1)
    async with aiohttp.ClientSession() as http, stand.bare() as bare:
        await stand.wait_for_replicas(http, 1, 90)
        for method, path, body in REQUESTS:
            answers = []
            for url in (bare, stand.url):
                async with http.request(method, url + path, json=body) as response:
                    text = CHANGING.sub("", await response.text())
                    events = re.sub(r"\n\n: keep-alive", "", text)
                    names = {name.lower() for name in response.headers} - {"x-pageserve-replica", "server"}
                    if "event-stream" in response.content_type:  # an event may hold more or fewer tokens
                        events = text_of(events)
                    answers.append((response.status, response.content_type, names, events))
                    assert len(response.headers.getall("x-request-id")) == 1
            bare_answer, ray_answer = answers
            assert bare_answer == ray_answer, f"{method} {path} {body}:\n{bare_answer}\n{ray_answer}"
    return {"requests": len(REQUESTS)}


def text_of(events: str) -> tuple[str, list[str], str]:
    """(all text, the kinds of events in order without repetition, the last event) of a stream."""
    text = "".join(re.findall(r'"(?:content|text|delta)":"((?:[^"\\\\]|\\\\.)*)"', events))
    kinds = [line for line in events.split("\n") if line.startswith("event: ")]
    kinds = [kind for number, kind in enumerate(kinds) if number == 0 or kinds[number - 1] != kind]
    return "".join(sorted(text)), kinds, events.rstrip().rpartition("\n\n")[2]


async def placement(stand: Stand) -> dict:
    """Two replicas are on two nodes. A replica of two ranks is a STRICT_PACK group and answers."""
    import ray

    await asyncio.to_thread(stand.deploy, 2, 2)
    async with aiohttp.ClientSession() as http:
        await stand.wait_for_replicas(http, 2, 90)
        raylets = {parent_of(parent_of(server_pid(address))) for address in await stand.replicas(http)}
        assert len(raylets) == 2, raylets
        await asyncio.to_thread(stand.deploy, 1, 1, tensor_parallel_size=2)
        await stand.wait_for_replicas(http, 1, 90)
        assert await _long(http, stand.url, 1) == 200
    groups = [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]
    assert [each["strategy"] for each in groups] == ["STRICT_PACK"], groups
    assert groups[0]["bundles"] == {0: {"CPU": 2.0}}, groups
    return {"nodes": len(raylets), "bundle": groups[0]["bundles"][0]}


async def keys(stand: Stand) -> dict:
    """With API keys, replicas and ingress need one, and autoscaling still reads its metrics."""
    from ray import serve

    await asyncio.to_thread(stand.deploy, 1, 1, api_key=("k1", "k2"))
    statuses = []
    async with aiohttp.ClientSession() as http:
        for path in ("/v1/models", "/metrics/targets", "/health"):
            for headers in ({}, {"Authorization": "Bearer k2"}, {"Authorization": "Bearer wrong"}):
                async with http.get(stand.url + path, headers=headers) as response:
                    statuses.append(response.status)
    assert statuses == [401, 200, 401] * 2 + [200] * 3, statuses
    replica = serve.get_deployment_handle("Replica", "pageserve")
    found = await asyncio.to_thread(lambda: replica.record_autoscaling_stats.remote().result(timeout_s=10))
    assert set(found) == {"queued_tokens", "kv_usage"}, found
    return {}


PARTS = {
    "disconnect": disconnect,
    "surface": surface,
    "overhead": overhead,
    "autoscale": autoscale,
    "prefixes": prefixes,
    "metrics": metrics,
    "placement": placement,
    "killed": killed,
    "update": update,
    "keys": keys,
}
