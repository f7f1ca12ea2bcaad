"""The workloads: the same work for every server, within what the model can take."""

import json

import pytest

from server.commands.bench.answers import completion_body
from server.commands.bench.workloads import FIRST_TOKEN_ID, WORKLOADS, Shape, build_workload


def lengths(clients):
    return [[(len(call.prompt), call.max_tokens, call.n) for call in client.calls] for client in clients]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_draws_ids_and_nothing_else(name):
    first, again, other = (build_workload(name, Shape(n=16), seed) for seed in (1, 1, 2))
    assert first == again
    assert lengths(first) == lengths(other)
    assert [client.start_at for client in first] == [client.start_at for client in other]
    assert {call.prompt for client in first for call in client.calls}.isdisjoint(
        call.prompt for client in other for call in client.calls
    )


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("limit", [350, 1999])
def test_ids_stay_in_range(name, limit):
    clients = build_workload(name, Shape(n=8, max_token_id=limit), 0)
    ids = {token for client in clients for call in client.calls for token in call.prompt}
    assert max(ids) <= limit
    assert min(ids) >= min(FIRST_TOKEN_ID, limit // 2)


def test_uniform_is_all_at_once():
    clients = build_workload("uniform", Shape(n=5), 0)
    assert lengths(clients) == [[(128, 64, 1)]] * 5
    assert {client.start_at for client in clients} == {0.0}


def test_single_is_one_after_another():
    assert lengths(build_workload("single", Shape(n=96), 0)) == [[(128, 64, 1)] * 6]
    assert len(build_workload("single", Shape(n=1), 0)[0].calls) == 4


def test_parallel_samples_share_a_prompt():
    clients = build_workload("parallel", Shape(n=12), 0)
    assert lengths(clients) == [[(256, 48, 4)]] * 3
    assert all(call.temperature == 1.0 for client in clients for call in client.calls)


def test_chatbot_turns_extend_a_history_that_begins_with_a_shared_system_prompt():
    clients = build_workload("chatbot", Shape(n=12), 0)
    assert lengths(clients) == [[(408, 32, 1), (464, 32, 1), (520, 32, 1), (576, 32, 1)]] * 3
    for client in clients:
        for before, after in zip(client.calls, client.calls[1:], strict=False):
            assert after.prompt[: len(before.prompt)] == before.prompt
    assert len({client.calls[0].prompt[:384] for client in clients}) == 1
    assert len({client.calls[0].prompt for client in clients}) == 3


def test_mixed_lengths_and_arrivals():
    clients = build_workload("mixed", Shape(n=400, rate=8.0), 0)
    prompts = sorted(len(client.calls[0].prompt) for client in clients)
    outputs = sorted(client.calls[0].max_tokens for client in clients)
    assert 80 < prompts[200] < 115 and 40 < outputs[200] < 57
    assert prompts[0] >= 8 and prompts[-1] <= 900 and outputs[0] >= 4 and outputs[-1] <= 256
    assert 40 < clients[-1].start_at < 60  # 400 arrivals at 8 per second
    starts = [client.start_at for client in clients]
    assert starts == sorted(starts)


def test_mixed_fits_itself_to_the_context():
    clients = build_workload("mixed", Shape(n=400, max_model_len=256), 0)
    assert max(len(client.calls[0].prompt) + client.calls[0].max_tokens for client in clients) <= 256


def test_a_context_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match="chatbot needs a context of 608 tokens, the model's is 512"):
        build_workload("chatbot", Shape(max_model_len=512), 0)


def test_an_unknown_workload_is_an_error():
    with pytest.raises(ValueError, match="unknown workload 'burst'; there are uniform, mixed"):
        build_workload("burst", Shape(), 0)


def test_the_body_asks_for_exactly_the_tokens():
    call = build_workload("parallel", Shape(n=4), 0)[0].calls[0]
    assert json.loads(completion_body("m", call)) == {
        "model": "m",
        "prompt": list(call.prompt),
        "max_tokens": 48,
        "n": 4,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    more = json.loads(completion_body("m", call, {"temperature": 0.7, "top_k": 20}))
    assert more == json.loads(completion_body("m", call)) | {"temperature": 0.7, "top_k": 20}
