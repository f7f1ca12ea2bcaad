"""Bad input, field by field: one short 400 that names the field, while streams beside it go on undisturbed.

The rows are in tests/server/bad_input/; the app answers in this process. Cases over a socket are in test_errors.py.
"""

import json

import pytest

from tests.server.anthropic_messages import assert_error as assert_anthropic_error
from tests.server.anthropic_messages import body as message_body
from tests.server.bad_input.generation import CHAT, COMPLETIONS
from tests.server.bad_input.messages import MESSAGES
from tests.server.bad_input.responses import RESPONSES
from tests.server.bad_input.texts import DETOKENIZE, EMBEDDINGS, TOKENIZE
from tests.server.in_process import InProcessClient
from tests.server.live import JSON, MODEL, assert_error, chat_body, completion_body

GOOD = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": completion_body(),
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 8, "seed": 1},
    "/v1/messages": message_body(),
    "/v1/embeddings": {"model": MODEL, "input": "hello"},
    "/tokenize": {},
    "/detokenize": {},
}
TABLE = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/embeddings": EMBEDDINGS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
FIELDS = [(path, field) for path, rows in TABLE.items() for field in dict.fromkeys(row.field for row in rows)]


@pytest.fixture(scope="module")
def app(server, victim):
    return InProcessClient(server)


def post(app, path, fields):
    return app.post(path, json.dumps(GOOD[path] | fields), JSON)


@pytest.mark.parametrize("path, field", FIELDS)
def test_a_bad_field_is_named(app, path, field):
    for row in (row for row in TABLE[path] if row.field == field):
        response = post(app, path, row.fields)
        message = assert_error(response, 400, row.param, row.code)
        param = response.json()["error"]["param"]
        assert param.split(".")[0].split("[")[0] == field, (row, param)
        assert (row.words or field) in message, (row, message)
        assert path != "/v1/responses" or ("messages" not in message and "response_format" not in message)


@pytest.mark.parametrize("field", dict.fromkeys(next(iter(fields)) for fields, _ in MESSAGES))
def test_a_bad_field_of_a_message_begins_the_error(app, field):
    for fields, start in MESSAGES:
        if next(iter(fields)) == field:
            message = assert_anthropic_error(post(app, "/v1/messages", fields), 400, "invalid_request_error", start)
            assert "function" not in message.split(" ")[0]


IMAGES = {
    "/v1/chat/completions": ("messages", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
    "/v1/responses": ("input", {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}),
    "/v1/messages": ("messages", {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}),
}


@pytest.mark.parametrize("path", IMAGES)
def test_an_image_is_refused_with_its_place_and_the_reason(app, path):
    field, image = IMAGES[path]
    response = post(app, path, {field: [{"role": "user", "content": [image]}]})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"{field}[0].content[0].type" in message and "this server takes text only" in message
