"""Thousands of hostile requests beside a greedy stream: no 5xx, the stream's bytes are the same, memory is flat.

FUZZ_CASES sets the number (150 in `make test`, 5,000 in `make fuzz`), FUZZ_SEED what is drawn. Every field of
/openapi.json meets every hostile value, beside connections that trickle, flood, lie about lengths and leave.
"""

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections import Counter
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.fuzz_cases import Case, Schema, big_bodies, cases, raw_attacks
from tests.server.left_behind import children, left_behind, memory_mib, settled
from tests.server.serving import serving_process

NUM_CASES = int(os.environ.get("FUZZ_CASES", "80"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
QUICK = NUM_CASES < 2000
NUM_TRICKLES = 20
WARM_UP_ROUNDS = 3
# MiB, and the share of what there was after the warm-up: one body of 30 MB may be kept, and the Worker has its linear
# layers compiled for some hundred lengths more before their cache is full (PRIMITIVES_KEPT).
MAX_GROWTH = 80.0, 0.1
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server():
    options = ["--num-blocks", "600", "--max-num-seqs", "24", "--max-model-len", "512", "--max-n", "8"]
    options += ["--dtype", "float32", "--batch-invariant"]  # else the victim's bits depend on who shares its batch
    with serving_process(*options) as found:
        yield found


class Fuzzer:
    """`statuses` counts the answers; `bad` has the cases that were not answered as they must be."""

    def __init__(self, base_url: str, client: httpx.AsyncClient, model: str) -> None:
        self.base_url, self.client, self.model = base_url, client, model
        self.statuses: Counter[int] = Counter()
        self.bad: list[str] = []
        self.num_attacks = 0

    async def send(self, route: str, body: bytes, what: str) -> None:
        """One request; a stream is read to its end."""
        try:
            response = await self.client.post(route, content=body, headers=JSON)
        except httpx.TransportError as error:
            self.bad.append(f"{what}: {error!r}")
            return
        self.statuses[response.status_code] += 1
        if problem := judge(response):
            self.bad.append(f"{what}: {problem}")

    async def attack(self, what: str, pieces: list[bytes]) -> None:
        """Send, take what comes within a moment, and drop the connection."""
        self.num_attacks += 1
        url = urlsplit(self.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        received = b""
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            for piece in pieces:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 1.0)
            received = await asyncio.wait_for(reader.read(65536), 0.2)
        writer.transport.abort()
        if received.startswith(b"HTTP/1.1 5"):
            self.bad.append(f"{what}: {received[:200]!r}")

    async def trickle(self) -> None:
        """Slowloris: a head, or a body, a byte at a time, until the server has had enough."""
        url = urlsplit(self.base_url)
        for text in itertools.cycle((b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"x-a: 1\r\n" * 99, _SLOW_BODY)):
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection(url.hostname, url.port)
                try:
                    for byte in text:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(0.1)
                finally:
                    writer.transport.abort()


_SLOW_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
)
_SLOW_BODY = _SLOW_HEAD + b" " * 999


def judge(response: httpx.Response) -> str:
    """The fault of an answer; "" if it has none."""
    text = response.text
    if response.status_code >= 500:
        return f"{response.status_code} {text[:300]}"
    if response.status_code >= 400:
        error = response.json().get("error", {})
        anthropics = response.url.path.startswith("/v1/messages")
        fields = {"message", "type"} if anthropics else {"message", "type", "param", "code"}
        right = fields <= set(error) and isinstance(error["message"], str)
        return "" if right and len(text) < 3000 else f"not an error as its API has it: {text[:300]}"
    if response.headers["content-type"].startswith("text/event-stream"):
        if "not finished within its timeout" in text:  # which the case had asked for
            return ""
        ends = ("[DONE]", '"type":"message_stop"', '"type":"response.completed"', '"type":"response.incomplete"')
        whole = any(end in text for end in ends)
        return "" if whole and '"error":{' not in text else f"broken stream {text[-300:]}"
    json.loads(text)
    return ""


async def victim_text(client: httpx.AsyncClient, model: str) -> bytes:
    body = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 120, "ignore_eos": True}
    texts = []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "priority": -1}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
        assert line == "data: [DONE]" or not line
    return "".join(texts).encode()


async def fuzz(base_url: str, pids: list[int]) -> tuple[Fuzzer, set[bytes], int, list[list[float]]]:
    """(fuzzer, what the victim has said, how often, memory after the warm-up and after each tenth).

    The warm-up: every big body and every attack, so that all caches, pools and heaps have the size that they keep.
    """
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        schema = Schema((await client.get("/openapi.json")).json())
        assert {"/v1/completions", "/v1/chat/completions"} <= set(schema.fields), schema.fields.keys()
        assert ("temperature",) in schema.fields["/v1/completions"]
        fuzzer, said, done = Fuzzer(base_url, client, model), {await victim_text(client, model)}, asyncio.Event()
        memory: list[list[float]] = []
        num_victims = 0

        async def victim() -> None:
            nonlocal num_victims
            while not done.is_set():
                said.add(await victim_text(client, model))
                num_victims += 1

        trickles = [asyncio.create_task(fuzzer.trickle()) for _ in range(NUM_TRICKLES)]
        running = asyncio.create_task(victim())
        drawn = cases(schema, model, SEED, NUM_CASES)
        if not QUICK:
            for _ in range(WARM_UP_ROUNDS):
                await _one_part(fuzzer, list(itertools.islice(cases(schema, model, SEED + 1, 200), 200)), 0)
        for tenth in range(10):
            memory.append([memory_mib(pid) for pid in pids])
            await _one_part(fuzzer, list(itertools.islice(drawn, NUM_CASES // 10)), tenth)
        memory.append([memory_mib(pid) for pid in pids])
        done.set()
        await running
        for task in trickles:
            task.cancel()
        await asyncio.gather(*trickles, return_exceptions=True)
        return fuzzer, said, num_victims, memory


async def _one_part(fuzzer: Fuzzer, part: list[Case], tenth: int) -> None:
    """Some cases, eight at a time, with attacks among them; big bodies one at a time, all of them in a long run."""
    slots = asyncio.Semaphore(8)

    async def one(case: Case) -> None:
        async with slots:
            await fuzzer.send(case.route, case.body, f"case {case.number} of seed {SEED}, {case.what}")

    some = raw_attacks(fuzzer.model) if not QUICK or tenth in (2, 7) else ()
    attacks = [fuzzer.attack(what, pieces) for what, pieces in some]
    await asyncio.gather(*map(one, part), *attacks)
    for number, (what, body) in enumerate(big_bodies(fuzzer.model)):
        if number == tenth or (not QUICK and tenth % 3 == 0):
            await fuzzer.send("/v1/completions", body, what)


def test_fuzz(server):
    base_url, process = server
    started = time.monotonic()
    with httpx.Client(base_url=base_url, timeout=60) as client:
        client.post("/v1/completions", json={"model": "bundled", "prompt": "a"})  # threads that stay from now on
        baseline = left_behind(client, process)
        fuzzer, said, num_victims, memory = asyncio.run(fuzz(base_url, [process.pid, *children(process.pid)]))
        found = settled(client, process, baseline)
        assert client.get("/health").status_code == 200
    total, seconds = fuzzer.statuses.total() + fuzzer.num_attacks + NUM_TRICKLES, time.monotonic() - started
    print(f"\n{total} cases in {seconds:.0f} s: {dict(fuzzer.statuses)}, {fuzzer.num_attacks} attacks")
    print(f"{num_victims} victims, {len(said)} text(s); left behind {found}, before {baseline}")
    print(
        "MiB of Driver and Worker after the warm-up and each tenth:", [[round(mib) for mib in each] for each in memory]
    )
    assert not fuzzer.bad, fuzzer.bad[:20]
    assert fuzzer.statuses.total() >= NUM_CASES and len(said) == 1 and num_victims >= 1
    assert found["running"] == found["waiting"] == found["blocks"] == 0
    assert found["tasks"] <= baseline["tasks"] + 2
    if not QUICK:
        grown = [late - early for early, late in zip(memory[0], memory[-1], strict=True)]
        most = [MAX_GROWTH[0] + MAX_GROWTH[1] * early for early in memory[0]]
        assert all(map(float.__le__, grown, most)), f"grown by {grown} MiB of {memory[0]}"
        assert fuzzer.statuses[200] > NUM_CASES / 5, "most of the cases are refused at the door"


def test_cases_are_repeated_by_their_seed():
    content = {"application/json": {"schema": {"$ref": "#/x/A"}}}
    openapi = {
        "paths": {"/v1/completions": {"post": {"requestBody": {"content": content}}}},
        "components": {"schemas": {"A": {"properties": {"prompt": {}, "stop": {"anyOf": [{"items": {}}]}}}}},
    }
    schema = Schema(openapi)
    assert schema.fields == {"/v1/completions": [("prompt",), ("stop", 0), ("stop",)]}
    first, again, other = (list(cases(schema, "m", seed, 400)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({case.body for case in first}) > 200
