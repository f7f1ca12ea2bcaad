"""/v1/embeddings through the official client and byte by byte, on a decoder and on an encoder."""

import asyncio
import base64
import json
import struct
import threading
import time

import httpx
import numpy as np
import openai
import pytest

from engine.sampling_params import Pooling
from tests.fake_device import HIDDEN_SIZE, expected_vector
from tests.server.live import JSON, MODEL, LiveServer, assert_error, chat_body, completion_body, expected_text

TEXTS = ["hello", "a longer text, of more than one block of tokens", "ü", "hello"]
LAST = Pooling("last")


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def encoder(folder):
    with LiveServer(folder, "--encoder", engine={"max_num_batched_tokens": 600}) as live:
        yield live


def body(**fields) -> dict:
    return {"model": MODEL, "input": "hello"} | fields


def embed(client, **fields) -> dict:
    response = client.post("/v1/embeddings", json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def vectors(answer: dict) -> list[list[float]]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


def expected(text: str | list[int], pooling: Pooling = LAST) -> list[float]:
    return expected_vector(list(text.encode()) if isinstance(text, str) else text, pooling)


def test_the_official_client_decodes_base64_by_default(api):
    answer = api.embeddings.create(model=MODEL, input=TEXTS)
    assert answer.object == "list" and answer.model == MODEL
    assert [entry.object for entry in answer.data] == ["embedding"] * 4
    assert [entry.index for entry in answer.data] == [0, 1, 2, 3]
    for text, entry in zip(TEXTS, answer.data, strict=True):
        assert entry.embedding == expected(text)
    count = sum(len(text.encode()) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == count


def test_float_and_base64_hold_the_same_numbers(api):
    as_float = api.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    as_base64 = api.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64")
    for one, other in zip(as_float.data, as_base64.data, strict=True):
        packed = base64.b64decode(other.embedding)
        assert list(struct.unpack(f"<{HIDDEN_SIZE}f", packed)) == one.embedding
        assert abs(np.linalg.norm(one.embedding) - 1) < 1e-6


async def test_the_async_client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        answers = await asyncio.gather(*[api.embeddings.create(model=MODEL, input=text) for text in TEXTS])
    assert [answer.data[0].embedding for answer in answers] == [expected(text) for text in TEXTS]


def test_the_answer_byte_by_byte(client):
    response = client.post("/v1/embeddings", json=body(input=["hello", "ab"], encoding_format="base64", user="me"))
    assert response.headers["content-type"] == "application/json"
    codes = [base64.b64encode(struct.pack(f"<{HIDDEN_SIZE}f", *expected(text))).decode() for text in ("hello", "ab")]
    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": code} for i, code in enumerate(codes)],
        "model": MODEL,
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


@pytest.mark.parametrize(
    "given, ids",
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [0], [259, 257]], [[97, 98], [0], [259, 257]]),
    ],
)
def test_the_four_shapes_of_input(client, given, ids):
    answer = embed(client, input=given)
    assert vectors(answer) == [expected(one) for one in ids]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_dimensions_cut_and_normalise_again(api):
    answer = api.embeddings.create(model=MODEL, input="hello", dimensions=3)
    (entry,) = answer.data
    assert entry.embedding == expected("hello", Pooling("last", dimensions=3))
    whole = np.array(expected("hello"))[:3]
    np.testing.assert_allclose(entry.embedding, whole / np.linalg.norm(whole), rtol=1e-6)


def test_other_errors(client):
    assert_error(client.post("/v1/embeddings", json=body(model="other")), 404, "model", "model_not_found")
    assert_error(client.get("/v1/embeddings"), 405)
    assert_error(client.post("/v1/embeddings", content=b"[]", headers=JSON), 400)


def test_the_longest_text_and_cutting_longer_ones(client):
    assert vectors(embed(client, input="x" * 512)) == [expected("x" * 512)]
    assert_error(client.post("/v1/embeddings", json=body(input="x" * 513)), 400, "input", "context_length_exceeded")
    for given in ("x" * 100_000, [120] * 1000):
        answer = embed(client, input=given, truncate_prompt_tokens=-1)
        assert vectors(answer) == [expected("x" * 512)] and answer["usage"]["prompt_tokens"] == 512
    answer = embed(client, input=["abcdef", "ab"], truncate_prompt_tokens=4)
    assert vectors(answer) == [expected("abcd"), expected("ab")]


def test_embeddings_share_steps_and_cache_with_streams(server, client):
    """Chunked prompts, prefix hits and a generation beside them change nothing."""
    prompt = "the same beginning, which fills some blocks of the cache, " * 5
    text = client.post("/v1/completions", json=completion_body(prompt=prompt)).json()["choices"][0]["text"]
    assert vectors(embed(client, input=[prompt + "a", prompt])) == [expected(prompt + "a"), expected(prompt)]
    assert client.post("/v1/completions", json=completion_body(prompt=prompt)).json()["choices"][0]["text"] == text
    server.wait_idle()


def test_the_mean_reads_every_position(folder):
    """Chunks of 64 tokens, a pool that several texts do not fit at once, equal texts one after the other."""
    engine = {"pooling": "mean", "max_num_batched_tokens": 64, "num_blocks": 40, "max_model_len": 512}
    texts = [f"{'common start ' * 20}{i}" for i in range(12)] * 2
    with LiveServer(folder, engine=engine) as live, live.client() as client:
        assert vectors(embed(client, input=texts)) == [expected(text, Pooling("mean")) for text in texts]
        live.wait_idle()


def test_an_encoder_embeds_and_generates_nothing(encoder):
    texts = ["one", "x" * 512, "three", "y" * 300]
    with encoder.client() as client:
        assert vectors(embed(client, input=texts * 5)) == [expected(text, Pooling("mean")) for text in texts * 5]
        formed = completion_body(structured_outputs={"regex": "[a-z]+"})
        requests = [("/v1/completions", completion_body()), ("/v1/completions", formed)]
        for path, request in (*requests, ("/v1/chat/completions", chat_body())):
            message = assert_error(client.post(path, json=request), 400, "model", "model_not_supported")
            assert "/v1/embeddings" in message
        assert client.get("/debug/kv").status_code == 200
    encoder.wait_idle()


def test_thousands_of_texts_do_not_hold_up_others(folder):
    """2,048 texts in one request, in many steps; a chat that comes after them is answered long before their end."""
    with LiveServer(folder, "--step-seconds", "0.02", engine={"max_num_seqs": 16}, max_queued_requests=64) as live:
        done: dict[str, float] = {}

        def run(name, function) -> None:
            function()
            done[name] = time.monotonic()

        def embed_all() -> None:
            with live.client() as client:
                answer = embed(client, input=[f"text {i}" for i in range(2048)])
                assert vectors(answer)[::300] == [expected(f"text {i}") for i in range(0, 2048, 300)]

        def complete() -> None:
            with live.client() as client:
                answer = client.post("/v1/completions", json=completion_body()).json()
                assert answer["choices"][0]["text"] == expected_text(b"hello", 1, 8)

        threads = [threading.Thread(target=run, args=("embeddings", embed_all))]
        threads[0].start()
        while not live.usage()["running"]:
            time.sleep(0.005)
        for i in range(5):
            threads.append(threading.Thread(target=run, args=(f"completion {i}", complete)))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
        assert len(done) == 6 and max(done, key=done.__getitem__) == "embeddings"
        assert live.driver.stats.iteration_tokens.total > 2048 / 16
        live.wait_idle()


def test_a_client_that_leaves_takes_its_texts_with_it(folder):
    with LiveServer(folder, "--step-seconds", "0.05", engine={"max_num_seqs": 4}) as live:
        with live.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/embeddings", json=body(input=["some text"] * 500), timeout=0.3)
        live.wait_idle()
        assert live.driver.stats.iteration_tokens.total < 60


def test_a_text_that_cannot_be_computed_is_a_500_and_others_are_fine(folder):
    with LiveServer(folder, "--fail-on-token", "33") as live, live.client() as client:
        assert_error(client.post("/v1/embeddings", json=body(input=["fine", "bad!", "fine"])), 500)
        live.wait_idle()
        assert vectors(embed(client, input=["fine"])) == [expected("fine")]


def test_a_worker_that_dies_changes_nothing(folder, tmp_path):
    options = ("--die-at-step", "4", "--lives", str(tmp_path / "lives"), "--faults-in", "1")
    with LiveServer(folder, *options, engine={"max_num_seqs": 4}) as live, live.client() as client:
        texts = [f"text {i}" for i in range(40)]
        assert vectors(embed(client, input=texts)) == [expected(text) for text in texts]
        assert live.driver.stats.worker_restarts.values[()] == 1
        live.wait_idle()


def test_a_full_queue_is_a_429_before_anything_is_computed(folder):
    with LiveServer(folder, "--step-seconds", "0.2", engine={"max_num_seqs": 1}, max_queued_requests=1) as live:
        with live.client() as client:
            threads = []
            for state in ("running", "waiting"):  # one after the other: both at once would be one too many
                post = {"args": ("/v1/completions",), "kwargs": {"json": completion_body()}}
                threads.append(threading.Thread(target=client.post, **post))
                threads[-1].start()
                end = time.monotonic() + 20
                while live.usage()[state] < 1:
                    assert time.monotonic() < end
                    time.sleep(0.01)
            response = client.post("/v1/embeddings", json=body())
            assert_error(response, 429)
            assert int(response.headers["retry-after"]) >= 1
            for thread in threads:
                thread.join(30)


def test_prompt_tokens_are_counted(server, client):
    before = server.driver.stats.prompt_tokens.values[()]
    embed(client, input=["abc", "de"])
    assert server.driver.stats.prompt_tokens.values[()] == before + 5


def test_the_api_is_described(client):
    schema = json.loads(client.get("/openapi.json").content)
    ref = schema["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert ref.endswith("/EmbeddingRequest") and "EmbeddingRequest" in schema["components"]["schemas"]
