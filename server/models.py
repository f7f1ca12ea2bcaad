"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.responses import Response

from server.served import Served
from server.sse import encode_json


def list_models(served: Served) -> Response:
    served.check_ready()
    return _json({"object": "list", "data": [_model(served, name) for name in served.names]})


def retrieve_model(served: Served, name: str) -> Response:
    """404 model_not_found for a name that is not served. Names may hold slashes."""
    served.check_ready()
    served.check_model(name)
    return _json(_model(served, name))


def _model(served: Served, name: str) -> dict[str, Any]:
    """OpenAI's four keys, then vLLM's: `root` is what was loaded, max_model_len is in tokens."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "pageserve",
        "root": served.driver.config.model or served.names[0],
        "parent": None,
        "max_model_len": served.driver.model.max_model_len,
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(encode_json(content), media_type="application/json")
