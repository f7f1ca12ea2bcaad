"""The model's own sampling for what a request leaves out: on every API, in /v1/models, in commands and offline."""

import json

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from server.commands.generate import SAMPLING_FLAGS, sampling_params_of
from server.protocol import answers as described
from tests.checkpoints import save_fake_checkpoint
from tests.server.live import MODEL, LiveServer, chat_body, completion_body

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = save_fake_checkpoint(tmp_path_factory.mktemp("defaults") / "model")
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS | {"eos_token_id": 257, "do_sample": True}))
    return folder


@pytest.fixture(scope="module")
def live(checkpoint):
    with LiveServer(checkpoint) as live:
        yield live


@pytest.fixture
def asked(live, monkeypatch):
    """The sampling parameters that the engine gets."""
    seen, generate = [], live.driver.generate

    def watched(request):
        seen.append(request)
        return generate(request)

    monkeypatch.setattr(live.driver, "generate", watched)
    return seen


def sampling(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in DEFAULTS}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_request_omits_is_the_models(live, asked, path, stream):
    given = {"temperature": 0.3, "min_p": None}
    with live.client() as client:
        for fields in ({}, given):
            body = {"model": MODEL, "stream": stream} | BODIES[path] | fields
            assert client.post(path, json=body).status_code == 200
    first, second = (sampling(request.params) for request in asked)
    assert first == DEFAULTS and second == DEFAULTS | {"temperature": 0.3}


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_says_holds_even_where_it_is_openais_default(live, asked, path):
    with live.client() as client:
        assert client.post(path, json={"model": MODEL} | BODIES[path] | OPENAI).status_code == 200
    assert sampling(asked[0].params) == OPENAI


def test_responses_echo_what_is_in_effect(live):
    with live.client() as client:
        for fields, temperature in (({}, 0.6), ({"temperature": 0.2}, 0.2)):
            body = {"model": MODEL} | BODIES["/v1/responses"] | fields
            answer = client.post("/v1/responses", json=body).json()
            assert (answer["temperature"], answer["top_p"]) == (temperature, 0.9)


def test_beam_search_samples_nothing(live, asked):
    with live.client() as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            body = {"model": MODEL, "use_beam_search": True, "n": 2} | BODIES[path]
            assert client.post(path, json=body).status_code == 200
    assert [sampling(request.params) for request in asked] == [OPENAI | {"temperature": 0.0}] * 2


def test_models_show_them(live, client):
    with live.client() as own:
        models = own.get("/v1/models").json()
    described.ModelList.model_validate(models)
    assert [model["default_sampling_params"] for model in models["data"]] == [DEFAULTS] * 2
    without = client.get(f"/v1/models/{MODEL}").json()
    assert without["default_sampling_params"] == OPENAI, "a checkpoint without the file"


def test_they_can_be_switched_off(checkpoint, live):
    with LiveServer(checkpoint, engine={"generation_config": "openai"}) as other, other.client() as client:
        assert client.get(f"/v1/models/{MODEL}").json()["default_sampling_params"] == OPENAI
        answer = client.post("/v1/responses", json={"model": MODEL} | BODIES["/v1/responses"]).json()
        assert (answer["temperature"], answer["top_p"]) == (1.0, 1.0)
        fingerprint = client.post("/v1/completions", json=completion_body()).json()["system_fingerprint"]
    with live.client() as client:
        assert client.post("/v1/chat/completions", json=chat_body()).json()["system_fingerprint"] != fingerprint


def test_offline_none_stands_for_them_and_what_is_given_is_complete(checkpoint, live):
    llm = LLM.__new__(LLM)
    llm.driver = live.driver
    assert sampling(llm.get_default_sampling_params()) == DEFAULTS
    given = [None, SamplingParams(temperature=0.2)]
    found = [_params(llm, each) for each in given]
    assert sampling(found[0]) == DEFAULTS and sampling(found[1]) == OPENAI | {"temperature": 0.2}


def _params(llm: LLM, given: SamplingParams | None) -> SamplingParams:
    (params,) = llm._params(given, 1)
    return params


def test_flags_of_generate_win_over_them():
    options = {"stop": None, "sampling_seed": None, "temperature": 0.0, "n": 2}
    params = sampling_params_of(options, DEFAULTS)
    assert sampling(params) == DEFAULTS | {"temperature": 0.0} and params.n == 2
    assert set(DEFAULTS) - {"repetition_penalty"} <= set(SAMPLING_FLAGS)
