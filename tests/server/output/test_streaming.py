"""Every frame of a stream, byte for byte: order, keys, usage, samples, silence and failure."""

import json
import time

import httpx
import pytest

from server.http.http_protocol import ChunkWriter
from server.intake.generation import Generation
from tests.server.live import (
    MODEL,
    LiveServer,
    chat_body,
    chat_prompt,
    client_address,
    completion_body,
    events,
    expected_text,
)

CHAT_HEAD = {"id", "object", "created", "model", "system_fingerprint", "choices"}


def stream(client, route, body) -> list:
    response = client.post(route, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    return events(response.text)


def chat_stream(client, **fields) -> list:
    return stream(client, "/v1/chat/completions", chat_body(**fields))


def completion_stream(client, **fields) -> list:
    return stream(client, "/v1/completions", completion_body(**fields))


def test_headers_of_a_stream(client):
    response = client.post("/v1/chat/completions", json=chat_body(stream=True))
    headers = response.headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"].startswith("req-")
    assert "content-length" not in headers
    assert response.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("route, make_body", [
    ("/v1/completions", completion_body), ("/v1/chat/completions", chat_body)
])  # fmt: skip
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_chunks_of_bare_text_equal_those_of_whole_outputs(client, route, make_body, options):
    """A proxy that counts tokens gets the latter."""
    body = make_body(stream=True, max_tokens=40, seed=3, stream_options=options)
    client.post(route, json=body)  # so that both of the others find the prompt in the prefix cache
    found = []
    for headers in ({}, {"x-pageserve-count-tokens": "1"}):
        answer = client.post(route, json=body, headers=headers)
        chunks = [chunk for chunk in events(answer.text) if isinstance(chunk, dict)]
        texts = []
        for chunk in chunks:
            chunk.update(id="", created=0)
            for choice in chunk["choices"]:
                part = choice.get("delta", choice)
                texts += [part.pop(key) for key in ("text", "content") if key in part]
        assert len(chunks) > 10
        frames = [json.dumps(chunk) for chunk in chunks]  # keys in their order; a late reader gets fewer frames
        found.append(("".join(texts), [frame for i, frame in enumerate(frames) if frame not in frames[:i]]))
    assert found[0] == found[1]


def test_a_stream_counts_its_tokens_for_a_proxy_that_asks(client):
    body = completion_body(stream=True, n=2, return_token_ids=True)
    text = client.post("/v1/completions", json=body, headers={"x-pageserve-count-tokens": "1"}).text
    counted = 0
    *parts, end = text.split(": tokens ")
    for number, part in enumerate(parts):
        num_before, _, data = part.partition("\n\n") if number else ("0", "", part)
        assert int(num_before) == counted
        counted += sum(len(choice["token_ids"]) for chunk in events(data) for choice in chunk["choices"])
    assert counted > 0 and end == f"{counted}\n\ndata: [DONE]\n\n"
    assert ": tokens" not in client.post("/v1/completions", json=body).text


def test_a_chat_is_a_role_then_text_then_a_finish_reason(client):
    *chunks, done = chat_stream(client)
    assert done == "[DONE]"
    for chunk in chunks:
        assert set(chunk) == CHAT_HEAD, "no usage key unless it is asked for"
        assert chunk["object"] == "chat.completion.chunk" and chunk["model"] == MODEL
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
        (choice,) = chunk["choices"]
        assert {"index", "delta", "logprobs", "finish_reason"} <= set(choice)
        assert choice["index"] == 0 and choice["logprobs"] is None
    assert chunks[0]["id"].startswith("chatcmpl-")
    first, *texts, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(set(text["delta"]) == {"content"} and text["delta"]["content"] for text in texts)
    assert "".join(text["delta"]["content"] for text in texts) == expected_text(chat_prompt("hello"), 1, 8)
    assert last["delta"] == {} and last["finish_reason"] == "length"
    assert [choice["finish_reason"] for choice in (first, *texts)] == [None] * (len(texts) + 1)


def test_usage_is_null_until_a_last_chunk_without_choices(client):
    *chunks, last, done = chat_stream(client, stream_options={"include_usage": True, "include_obfuscation": True})
    assert done == "[DONE]"
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    assert set(last) == CHAT_HEAD | {"usage"} and last["choices"] == []
    prompt_tokens = len(chat_prompt("hello"))
    cached = last["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert 0 <= cached < prompt_tokens
    assert last["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": prompt_tokens + 8,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("stream_of", [chat_stream, completion_stream])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"return_token_ids": True, "stop": "e"}], ids=str)
def test_obfuscation_pads_every_chunk_with_a_choice(client, stream_of, fields):
    options = {"include_usage": True, "include_obfuscation": True}
    *padded, usage, done = stream_of(client, stream_options=options, **fields)
    assert done == "[DONE]" and usage["choices"] == [] and "obfuscation" not in usage
    sizes = {len(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n") for chunk in padded}
    assert {size % 64 for size in sizes} == {0}
    assert all(chunk["obfuscation"].isalnum() or not chunk["obfuscation"] for chunk in padded)
    assert len({chunk.pop("obfuscation") for chunk in padded}) > 1
    for plain_options in ({"include_usage": True}, {"include_usage": True, "include_obfuscation": False}):
        plain = stream_of(client, stream_options=plain_options, **fields)[:-2]
        assert joined(plain) == joined(padded) and all("obfuscation" not in chunk for chunk in plain)


def joined(chunks):
    """The text of each choice of a stream, and its finish_reason."""
    found = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        before, _ = found.get(choice["index"], ("", None))
        found[choice["index"]] = before + text, choice["finish_reason"]
    return found


def test_a_completion_ends_with_its_finish_reason(client):
    *chunks, done = completion_stream(client)
    assert done == "[DONE]"
    assert all(set(chunk) == CHAT_HEAD and chunk["object"] == "text_completion" for chunk in chunks)
    assert chunks[0]["id"].startswith("cmpl-")
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == expected_text(b"hello", 1, 8)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert all(choice["logprobs"] is None for choice in choices)


def test_prompts_times_samples_interleave_by_index(client):
    prompts = ["one", "two", "three"]
    *chunks, usage, _ = completion_stream(client, prompt=prompts, n=2, stream_options={"include_usage": True})
    texts, finished = [""] * 6, [0] * 6
    order = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        finished[choice["index"]] += choice["finish_reason"] is not None
        order.append(choice["index"])
    assert texts == [expected_text(prompt.encode(), 1, 8, index) for prompt in prompts for index in (0, 1)]
    assert finished == [1] * 6
    assert order != sorted(order), "samples take turns"
    assert usage["usage"]["prompt_tokens"] == 11, "a prompt counts once, whatever n is"
    assert usage["usage"]["completion_tokens"] == 48


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True, "n": 2}, {"stop": "e"}], ids=str)
def test_usage_so_far_in_every_chunk(client, fields):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for stream in (chat_stream, completion_stream):
        *chunks, last, done = stream(client, stream_options=options, **fields)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] >= counts[0] > 0
        assert all(chunk["choices"] and chunk["usage"].keys() == last["usage"].keys() for chunk in chunks)
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
        assert chunks[-1]["choices"][0]["finish_reason"] and done == "[DONE]"


def test_each_sample_of_a_chat_has_one_role_and_one_finish(client):
    *chunks, _ = chat_stream(client, n=3)
    per_index = [[c["choices"][0] for c in chunks if c["choices"][0]["index"] == i] for i in range(3)]
    for i, choices in enumerate(per_index):
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == expected_text(chat_prompt("hello"), 1, 8, i)


def test_streamed_and_whole_answers_are_the_same(client):
    body = completion_body(prompt=["a", "b"], n=2, logprobs=1, max_tokens=5)
    whole = client.post("/v1/completions", json=body).json()["choices"]
    texts = [""] * 4
    logprobs = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in range(4)]
    for chunk in stream(client, "/v1/completions", body)[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        for key, values in choice["logprobs"].items():
            logprobs[choice["index"]][key] += values
    assert texts == [choice["text"] for choice in whole]
    assert logprobs == [choice["logprobs"] for choice in whole]
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]


def test_chat_logprobs_come_with_their_text(client):
    *chunks, _ = chat_stream(client, logprobs=True, top_logprobs=2)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if choice["delta"].get("content"):
            assert set(choice["logprobs"]) == {"content", "refusal"}
            content = choice["logprobs"]["content"]
            assert bytes(b for entry in content for b in entry["bytes"]).decode() == choice["delta"]["content"]
            for entry in content:
                assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
                assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
        else:
            assert choice["logprobs"] is None


def test_a_stop_string_ends_the_text_before_it_and_is_named(client):
    text = expected_text(b"hello", 1, 40)
    stop = text[5:7]
    *chunks, _ = completion_stream(client, max_tokens=40, stop=[stop, "never"], logprobs=0)
    choices = [chunk["choices"][0] for chunk in chunks]
    sent = "".join(choice["text"] for choice in choices)
    assert sent == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop" and choices[-1]["stop_reason"] == stop
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == sent, "tokens of the stop string are not reported"


def test_echo_repeats_the_prompt_once_per_sample(client):
    *chunks, _ = completion_stream(client, prompt=["hé", "b"], n=2, echo=True)
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    expected = [p + expected_text(p.encode(), 1, 8, i) for p in ("hé", "b") for i in (0, 1)]
    assert texts == expected
    whole = client.post("/v1/completions", json=completion_body(prompt=[104, 105], echo=True)).json()
    assert whole["choices"][0]["text"] == "hi" + expected_text(b"hi", 1, 8)


def test_silence_is_broken_by_comments(folder):
    with LiveServer(folder, "--step-seconds", "0.35", keep_alive_interval=0.1) as live, live.client() as client:
        found = stream(client, "/v1/chat/completions", chat_body(max_tokens=2))
    first_chunk = next(i for i, event in enumerate(found) if isinstance(event, dict))
    assert found[:first_chunk] and set(found[:first_chunk]) == {": keep-alive"}, "during the prefill, too"
    assert found[-1] == "[DONE]" and ": keep-alive" in found[first_chunk:]


def test_a_queued_request_has_its_headers_and_comments_at_once(folder):
    options = {"keep_alive_interval": 0.1, "engine": {"max_num_seqs": 1}}
    with LiveServer(folder, "--step-seconds", "0.02", **options) as live, live.client() as client:
        with client.stream("POST", "/v1/completions", json=completion_body(stream=True, max_tokens=300)) as running:
            first = running.iter_bytes()  # httpx closes a response whose iterator is dropped
            next(first)
            start = time.monotonic()
            with client.stream("POST", "/v1/completions", json=completion_body(stream=True)) as queued:
                assert queued.status_code == 200 and time.monotonic() - start < 3.0  # the other one takes six
                chunks = queued.iter_bytes()
                assert [next(chunks), next(chunks)] == [b": keep-alive\n\n"] * 2
                assert live.usage()["waiting"] == 1
        live.wait_idle()


def test_a_stream_interval_makes_fewer_chunks_of_the_same_text(folder):
    prompt = b"hello"
    with LiveServer(folder, "--step-seconds", "0.002", stream_interval=8) as live, live.client() as client:
        *chunks, done = completion_stream(client, prompt="hello", max_tokens=30, return_token_ids=True)
        whole = client.post("/v1/completions", json=completion_body(prompt="hello", max_tokens=30)).json()
        *chat, _ = chat_stream(client, max_tokens=30, n=2)
    choices = [chunk["choices"][0] for chunk in chunks]
    _, *between, last = sizes = [len(choice["token_ids"]) for choice in choices]
    assert done == "[DONE]" and sum(sizes) == 30
    assert between and min(between) >= 8 and last >= 1, "a chunk has more where the server got to it later"
    assert "".join(choice["text"] for choice in choices) == expected_text(prompt, 1, 30) == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 30
    texts = ["", ""]
    for chunk in chat:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == [expected_text(chat_prompt("hello"), 1, 30, i) for i in (0, 1)]
    assert len(chat) <= 2 * len(["role", 1, 8, 8, 8, 5, "finish"])


def test_a_whole_answer_is_read_in_large_parts(folder, monkeypatch):
    """To hand over a token alone costs several times as much as the token."""
    sizes, note = [], Generation.note

    def record(generation, i, output):
        sizes.append(sum(len(sample.token_ids) for sample in output.outputs))
        note(generation, i, output)

    monkeypatch.setattr(Generation, "note", record)
    with LiveServer(folder, "--step-seconds", "0.002") as live, live.client() as client:
        client.post("/v1/completions", json=completion_body(max_tokens=30)).raise_for_status()
    assert sum(sizes) == 30 and len(sizes) == 2


def test_a_streamed_answer_comes_token_by_token(folder):
    """A reader that is late gets several."""
    with LiveServer(folder, "--step-seconds", "0.002") as live, live.client() as client:
        chunks = completion_stream(client, max_tokens=30)
    assert 16 <= sum(1 for chunk in chunks if isinstance(chunk, dict) and chunk["choices"][0]["text"]) <= 30


@pytest.mark.parametrize("interval", [1, 100])
def test_an_error_event_comes_after_all_text_before_it(folder, interval):
    text = expected_text(b"hello", 1, 20)
    last = next(i for i in range(10, 20) if text[i] not in text[:i])  # to compute the token after it fails
    options = {"stream_interval": interval}
    with LiveServer(folder, "--fail-on-token", str(ord(text[last])), **options) as live, live.client() as client:
        *chunks, error = completion_stream(client, prompt="hello", max_tokens=40)
    assert set(error) == {"error"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[: last + 1]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_no_comment_while_data_flows(client):
    assert not [event for event in completion_stream(client, max_tokens=200) if isinstance(event, str)][:-1]


@pytest.mark.parametrize("route, body", [("chat/completions", chat_body), ("completions", completion_body)])
def test_a_failure_after_the_headers_is_an_error_event_and_no_done(folder, route, body):
    prompt = chat_prompt("hello") if route.startswith("chat") else list(b"hello")
    third = expected_text(prompt, 1, 3).encode()[-1]
    with LiveServer(folder, "--fail-on-token", str(third)) as live, live.client() as client:
        found = stream(client, f"/v1/{route}", body(max_tokens=40))
        assert "[DONE]" not in found
        assert set(found[-1]) == {"error"} and set(found[-1]["error"]) == {"message", "type", "param", "code"}
        assert found[-1]["error"]["type"] == "server_error"
        assert "finite" not in found[-1]["error"]["message"], "the log has the internal error"
        reasons = [event["choices"][0]["finish_reason"] for event in found[:-1]]
        assert set(reasons) <= {None}, "neither abort nor error is ever shown as a finish_reason"
        response = client.post(f"/v1/{route}", json=body(max_tokens=40))
        assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert stream(client, "/v1/completions", completion_body(prompt="other", max_tokens=1))[-1] == "[DONE]"


def test_one_failing_prompt_ends_all_of_its_request(folder):
    third = expected_text(b"hello", 1, 3).encode()[-1]
    with LiveServer(folder, "--fail-on-token", str(third), "--step-seconds", "0.002") as live:
        with live.client() as client:
            found = stream(client, "/v1/completions", completion_body(prompt=["hello"] * 4, max_tokens=400))
            assert "error" in found[-1]
        live.wait_idle()


def test_chunks_are_valid_json_for_any_text(client):
    odd = 'quote " backslash \\ newline \n NUL \0 emoji 🦊 sep \u2028'
    *chunks, _ = completion_stream(client, prompt=odd, echo=True, max_tokens=1)
    assert chunks[0]["choices"][0]["text"].startswith(odd)
    response = client.post("/v1/completions", json=completion_body(prompt=odd, echo=True, max_tokens=1))
    assert json.loads(response.content)["choices"][0]["text"].startswith(odd)


def test_a_slow_reader_gets_everything(server):
    """Chunks that pile up are joined, never lost."""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=completion_body(stream=True, max_tokens=400)) as response,
    ):
        raw = b""
        for piece in response.iter_raw(64):
            raw += piece
            if len(raw) < 2000:
                time.sleep(0.01)
    choices = [event["choices"][0] for event in events(raw.decode())[:-1]]
    assert "".join(choice["text"] for choice in choices) == expected_text(b"hello", 1, 400)


def test_pipelined_connections_are_reused(server):
    with httpx.Client(base_url=server.url) as client:
        addresses = set()
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=completion_body(stream=True)) as response:
                addresses.add(client_address(response))
                assert events(response.read().decode())[-1] == "[DONE]"
        assert len(addresses) == 1


def test_chunks_that_bypass_the_middleware_say_the_same(server, monkeypatch):
    written, write = [], ChunkWriter.write

    def counted(writer, body):
        written.append(body)
        write(writer, body)

    monkeypatch.setattr(ChunkWriter, "write", counted)
    texts, body = [], completion_body(max_tokens=40, stream=True)
    for _ in range(2):
        chunks = events(httpx.post(f"{server.url}/v1/completions", json=body).text)
        texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]))
        monkeypatch.setattr(ChunkWriter, "ready", False)  # all of the second answer goes through `send`
    assert texts[0] == texts[1] and written
