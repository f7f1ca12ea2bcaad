"""Bodies, answers and events of /v1/messages; answers are checked against the types of Anthropic's client."""

import json

import pydantic
from anthropic.types import ErrorResponse, RawMessageStreamEvent

from tests.server.live import MODEL

PATH = "/v1/messages"


EVENT = pydantic.TypeAdapter(RawMessageStreamEvent)


HELLO = [{"role": "user", "content": "hello"}]


def body(**fields) -> dict:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": 1} | fields


def assert_error(response, status: int, kind: str, start: str = "") -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"type", "error"} and set(response.json()["error"]) == {"type", "message"}
    error = ErrorResponse.model_validate(response.json()).error
    assert error.type == kind and error.message.startswith(start), error
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return error.message


def frames(raw: str) -> list[dict]:
    """The data of each event; checks the framing and the types."""
    found = []
    for frame in raw[:-2].split("\n\n"):
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        found.append(event)
    return found
