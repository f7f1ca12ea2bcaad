"""The client and the load against a server whose every byte the test writes."""

import socket
from dataclasses import replace

import pytest

from server.commands.bench.client import Connection, Endpoint
from server.commands.bench.load import Target, TargetError, find_target, run_workload, warm_up
from server.commands.bench.workloads import Call, Client, Shape, build_workload
from tests.benchmarks.stub_server import StubServer, answer, choice, event, frame, plain, usage

CALL = Call((5, 6, 7), 3)
DONE = frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def load(server, *clients, timeout=5.0):
    target = Target(Endpoint(server.base_url), "stub")
    return await run_workload("uniform", target, clients or (Client((CALL,)),), timeout)


async def failure(write, call=CALL, timeout=5.0):
    async with StubServer(write) as server:
        figures = await load(server, Client((call,)), timeout=timeout)
    assert (figures.requests, figures.failed) == (1, 1)
    assert figures.out_tok_s is None
    return figures.failures[0]


async def test_answers_are_counted():
    async with StubServer(answer) as server:
        figures = await load(server, *[Client((CALL, CALL))] * 10)
    assert (figures.requests, figures.failed, figures.output_tokens, figures.prompt_tokens) == (20, 0, 60, 60)
    assert server.connections == 10  # a client keeps its connection
    assert server.bodies[0]["prompt"] == [5, 6, 7] and server.bodies[0]["ignore_eos"] is True
    assert 0 < figures.ttft_p50 <= figures.e2e_p50 <= figures.wall_s * 1e3


async def test_every_request_gets_the_extra_fields():
    async with StubServer(answer) as server:
        target = await find_target(Endpoint(server.base_url), extra_body={"temperature": 0.7, "top_k": 20})
        await warm_up(target, 7999, 5.0)
        await run_workload("uniform", target, [Client((CALL,))], 5.0)
    assert [(body["temperature"], body["top_k"]) for body in server.bodies] == [(0.7, 20)] * 4


async def test_a_token_without_text_is_an_arrival_if_its_id_is_asked_for():
    def write(body):
        ids = ({"token_ids": [7]} if body.get("return_token_ids") else {}, {})
        for text, extra, reason in (("a", ids[0], None), ("", ids[0], None), ("b", ids[1], "length")):
            chunk = choice(0, text, reason)
            chunk["choices"][0] |= extra
            yield frame(event(chunk))
        yield frame(event(usage(3, 3))) + DONE

    gaps = []
    for asked in (False, True):
        async with StubServer(write) as server:
            client = Client((replace(CALL, return_token_ids=asked),))
            answers = []
            target = Target(Endpoint(server.base_url), "stub")
            await run_workload("uniform", target, (client,), 5.0, keep=answers.extend)
        gaps.append(len(answers[0].arrivals[0]) - 1)
    assert gaps == [1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_segments_split_anywhere(size):
    def write(body):
        raw = b"".join(answer(body))
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    async with StubServer(write) as server:
        figures = await load(server, Client((CALL, CALL)))
    assert (figures.failed, figures.output_tokens, server.connections) == (0, 6, 1)


@pytest.mark.parametrize("cut", range(1, 6))
async def test_the_terminator_may_arrive_in_two_segments(cut):
    def write(body):
        raw = b"".join(answer(body))
        yield raw[:-cut]
        yield None
        yield raw[-cut:]

    async with StubServer(write) as server:
        figures = await load(server)
    assert figures.failed == 0


async def test_a_comment_that_looks_like_the_terminator_does_not_end_the_stream():
    def write(body):
        head, *rest = answer(body)
        yield head + frame(b": ping 10\r\n\r\n")[:-2]  # the segment ends in the bytes 0 CR LF CR LF
        yield None
        yield b"\r\n" + b"".join(rest)

    async with StubServer(write) as server:
        figures = await load(server)
    assert (figures.failed, figures.output_tokens) == (0, 3)


async def test_times_are_those_of_text():
    def write(body):
        yield frame(event(choice(text="")))  # a first chunk without text is no first token
        yield None
        yield frame(event(choice()))
        yield None
        yield frame(event(choice(reason="length"))) + frame(event(usage(3, 3))) + DONE

    async with StubServer(write) as server:
        figures = await load(server)
    assert figures.ttft_p50 >= 19
    assert figures.itl_p50 >= 19
    assert figures.tpot_p50 == pytest.approx(figures.itl_p50 / 2)
    assert figures.e2e_p50 == pytest.approx(figures.ttft_p50 + figures.itl_p50)


async def test_samples_are_told_apart():
    async with StubServer(answer) as server:
        figures = await load(server, Client((Call((5,), 4, n=3, temperature=1.0),)))
    assert (figures.failed, figures.output_tokens) == (0, 12)


async def test_a_client_starts_at_its_time():
    async with StubServer(answer) as server:
        figures = await load(server, Client((CALL,)), Client((CALL,), start_at=0.15))
    assert figures.wall_s > 0.15 and figures.e2e_p99 < 140


async def test_progress_is_called_for_every_request():
    seen = []
    async with StubServer(answer) as server:
        clients = build_workload("chatbot", Shape(n=8), 0)
        figures = await run_workload(
            "chatbot", Target(Endpoint(server.base_url), "stub"), clients, 5.0, lambda: seen.append(1)
        )
    assert len(seen) == figures.requests == 8


async def test_a_truncated_stream_fails_and_the_next_request_opens_a_new_connection():
    cuts = iter([True, False])

    def write(body):
        pieces = list(answer(body))
        yield from [*pieces[:2], "cut"] if next(cuts) else pieces

    async with StubServer(write) as server:
        figures = await load(server, Client((CALL, CALL)))
    assert (figures.requests, figures.failed, server.connections) == (2, 1, 2)
    assert "closed the connection before the end" in figures.failures[0]


async def test_a_stream_without_done_fails():
    write = lambda body: [*list(answer(body))[:-1], b"0\r\n\r\n"]  # noqa: E731
    assert await failure(write) == "the stream ended without [DONE]"


async def test_missing_tokens_fail():
    write = lambda body: [frame(event(choice(reason="length"))), frame(event(usage(3, 2))), DONE]  # noqa: E731
    assert await failure(write) == "usage reports 2 output tokens, not 3 as requested"


async def test_missing_usage_fails():
    assert "None output tokens" in await failure(lambda body: [frame(event(choice(reason="length"))), DONE])


async def test_a_sample_that_never_ends_fails():
    write = lambda body: [frame(event(choice())), frame(event(usage(3, 3))), DONE]  # noqa: E731
    assert "finish_reason None" in await failure(write)


async def test_a_stop_instead_of_the_length_fails():
    write = lambda body: [frame(event(choice(reason="stop"))), frame(event(usage(3, 3))), DONE]  # noqa: E731
    assert "finish_reason 'stop', not 'length'" in await failure(write)


async def test_an_unrequested_sample_fails():
    assert "sample 1 of 1" in await failure(lambda body: [frame(event(choice(1))), DONE])


async def test_an_error_in_the_stream_fails():
    write = lambda body: [frame(event(choice())), frame(event({"error": {"message": "the Worker died"}})), DONE]  # noqa: E731
    assert "the Worker died" in await failure(write)


async def test_an_event_that_is_no_json_fails():
    assert "not JSON" in await failure(lambda body: [frame(b"data: {oops\n\n"), DONE])


async def test_broken_framing_fails_at_once():
    assert "bad chunk size" in await failure(lambda body: [b"zz\r\n", None], timeout=60.0)


async def test_a_server_that_stalls_fails_by_timeout():
    assert "no complete response in 0.1 s" in await failure(lambda body: [frame(event(choice()))], timeout=0.1)


async def test_a_refused_request_shows_the_servers_words():
    async with StubServer(answer, vocab_size=6) as server:
        figures = await load(server)
    assert figures.failures[0].startswith('status 400: {"error": {"message": "token id out')


async def test_no_server_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = Endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        exchange = await Connection(endpoint, 5.0).exchange(b"")
        assert exchange.error.startswith("cannot connect")
        with pytest.raises(TargetError, match="cannot connect"):
            await find_target(endpoint)


async def test_the_target_is_a_model_that_the_server_lists():
    async with StubServer(answer, max_model_len=777) as server:
        endpoint = Endpoint(server.base_url)
        assert await find_target(endpoint) == Target(endpoint, "stub", 777)
        assert await find_target(endpoint, "stub") == Target(endpoint, "stub", 777)
        with pytest.raises(TargetError, match="serves stub, not other"):
            await find_target(endpoint, "other")


async def test_ids_are_halved_until_the_vocabulary_holds_them():
    async with StubServer(answer, vocab_size=2500) as server:
        assert await warm_up(Target(Endpoint(server.base_url), "stub"), 7999, 5.0) == 1999
    async with StubServer(answer) as server:
        assert await warm_up(Target(Endpoint(server.base_url), "stub"), 7999, 5.0) == 7999


async def test_warm_up_does_not_hide_a_server_that_fails():
    async with StubServer(lambda body: ["cut"]) as server:
        with pytest.raises(TargetError, match="fails a small request: the server closed"):
            await warm_up(Target(Endpoint(server.base_url), "stub"), 7999, 5.0)


def test_an_endpoint_writes_whole_requests():
    endpoint = Endpoint("http://10.0.0.1:81/v1/", api_key="secret")
    head, _, body = endpoint.request("POST", "/completions", b"{}").partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /v1/completions HTTP/1.1",
        b"Host: 10.0.0.1:81",
        b"Authorization: Bearer secret",
        b"Content-Type: application/json",
        b"Content-Length: 2",
    ]
    assert body == b"{}"
    assert endpoint.address == ("10.0.0.1", 81) and endpoint.tls is None
    assert Endpoint("https://host/v1").address == ("host", 443) and Endpoint("https://host/v1").tls is not None


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http:///v1", ""])
def test_an_endpoint_wants_a_url(url):
    with pytest.raises(ValueError, match="is not a URL such as"):
        Endpoint(url)


def test_stub_plain_answers_are_framed():  # the stub's own helper: a wrong length would hang other tests
    assert plain(400, {}).endswith(b"Content-Length: 2\r\n\r\n{}")
