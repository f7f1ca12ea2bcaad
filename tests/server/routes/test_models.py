"""/v1/models in both forms: OpenAI's is in test_status.py; Anthropic's clients get theirs, and their errors."""

import anthropic
import openai
import pytest
from anthropic.types import ErrorResponse, ModelInfo

from server.protocol.anthropic.message_answers import AnthropicModel, AnthropicModelList
from tests.server.live import MODEL, LiveServer, assert_error

PATH = "/v1/models"
ANTHROPIC = {"anthropic-version": "2023-06-01"}
NAMES = [MODEL, "alias"]


def listed(client, query: str = "") -> dict:
    answer = client.get(PATH + query, headers=ANTHROPIC)
    assert answer.status_code == 200, answer.text
    AnthropicModelList.model_validate(answer.json())
    return answer.json()


def test_anthropics_client_lists_and_finds_models(server):
    options = {"base_url": server.url, "api_key": "none", "max_retries": 0, "_strict_response_validation": True}
    with anthropic.Anthropic(**options) as api:
        assert [model.id for model in api.models.list(limit=1)] == NAMES, "page by page"
        model = api.models.retrieve(MODEL)
        assert (model.type, model.display_name, model.max_input_tokens) == ("model", MODEL, 512)
        with pytest.raises(anthropic.NotFoundError) as error:
            api.models.retrieve("other")
        assert ErrorResponse.model_validate(error.value.body).error.type == "not_found_error"


def test_a_model_is_the_same_in_both_forms(client):
    ours = client.get(f"{PATH}/{MODEL}").json()
    theirs = client.get(f"{PATH}/{MODEL}", headers=ANTHROPIC).json()
    AnthropicModel.model_validate(theirs)
    assert theirs == listed(client)["data"][0]
    assert ModelInfo.model_validate(theirs).created_at.timestamp() == ours["created"]
    ours_alone = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "default_sampling_params"}
    assert set(ours) == ours_alone | {"state"}


@pytest.mark.parametrize(
    "query, names, more",
    [
        ("", NAMES, False),
        ("?limit=1", NAMES[:1], True),
        (f"?limit=1&after_id={MODEL}", NAMES[1:], False),
        ("?after_id=alias", [], False),
        ("?before_id=alias", NAMES[:1], False),
        ("?before_id=alias&limit=1", NAMES[:1], False),
        (f"?before_id={MODEL}", [], False),
        (f"?after_id={MODEL}&before_id=alias", [], True),
    ],
)
def test_pages(client, query, names, more):
    page = listed(client, query)
    assert [model["id"] for model in page["data"]] == names
    assert page["has_more"] is more
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "limit=²", "limit=00000020", "after_id=x", "before_id="]
)
def test_a_page_that_cannot_be(client, query):
    answer = client.get(f"{PATH}?{query}", headers=ANTHROPIC)
    assert answer.status_code == 400
    error = ErrorResponse.model_validate(answer.json()).error
    assert error.type == "invalid_request_error" and error.message.startswith(query.partition("=")[0])


def test_keys_come_as_each_client_sends_them(folder):
    with LiveServer(folder, api_key=("sesame",)) as live, live.client() as client:
        key = {"x-api-key": "sesame"}
        assert client.get(PATH, headers=key | ANTHROPIC).status_code == 200
        assert_error(client.get(PATH, headers=key), 401)
        refused = client.get(PATH, headers={"x-api-key": "other"} | ANTHROPIC)
        assert refused.status_code == 401
        assert ErrorResponse.model_validate(refused.json()).error.type == "authentication_error"
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="sesame", max_retries=0) as api:
            assert api.models.list().data[0].object == "model"


def test_a_slash_too_many_is_no_model_without_a_name(client):
    assert "did you mean /v1/models?" in assert_error(client.get("/v1/models/"), 404)
