"""Caller: the engine's requests carry the key's tenant, weight, priority bound, cache salt and trace."""

import pytest

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from server.errors import ApiError
from server.http.caller import Caller, EnginePrompt
from server.http.rate_limits import Limits, RateLimiter
from server.protocol import CompletionRequest

PARAMS = SamplingParams()
PROMPTS = [EnginePrompt([1, 2, 3], PARAMS, "prompt[0]"), EnginePrompt([4], PARAMS, "prompt[1]")]


def asked(**fields):
    return CompletionRequest(model="m", prompt="x", **fields)


def caller(limits=None, **fields):
    return Caller(RateLimiter(limits or Limits()), **fields)


def test_requests_are_complete_when_they_are_made():
    sender = caller(tenant="ab", weight=2.0, min_priority=-1, trace_parent="00-1-2-01")
    first, second = sender.requests("cmpl-1", PROMPTS, asked(priority=-1, timeout=3.0, cache_salt="mine"))
    assert (first.request_id, second.request_id) == ("cmpl-1-0", "cmpl-1-1")
    assert (first.prompt_token_ids, first.prompt_param) == ([1, 2, 3], "prompt[0]")
    for request in (first, second):
        assert (request.tenant, request.weight, request.priority, request.timeout) == ("ab", 2.0, -1, 3.0)
        assert (request.cache_salt, request.trace_parent) == ("2:abmine", "00-1-2-01")


def test_a_more_urgent_priority_than_the_key_allows_is_refused():
    with pytest.raises(InvalidRequestError, match="at least 0") as caught:
        caller(min_priority=0).requests("id", PROMPTS, asked(priority=-1))
    assert caught.value.param == "priority"
    assert caller().requests("id", PROMPTS, asked(priority=-1))[0].priority == -1


def test_the_tokens_of_all_prompts_count_and_their_limit_comes_before_the_priority():
    sender = caller(Limits(tokens_per_minute=3), min_priority=0)
    sender.limiter.use_tokens(3)
    with pytest.raises(ApiError) as caught:
        sender.requests("id", PROMPTS, asked(priority=-1))
    assert caught.value.status == 429


@pytest.mark.parametrize(("tenant", "salt", "expected"), [("", "", ""), ("", "s", "0:s"), ("ab", "", "2:ab")])
def test_no_salt_of_a_client_reaches_the_blocks_of_another_key(tenant, salt, expected):
    fields = {"cache_salt": salt} if salt else {}
    assert caller(tenant=tenant).requests("id", PROMPTS, asked(**fields))[0].cache_salt == expected
    assert expected != caller(tenant="a").requests("id", PROMPTS, asked(cache_salt="b"))[0].cache_salt
