"""GET /v1/models and /v1/models/{id}; for administrators POST /v1/models/{id}/sleep and /wake, and vLLM's /sleep ..."""

import time
from typing import Any

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.replicas.engine import Engine
from server.context import Models, Served
from server.errors import invalid, speaks_anthropic
from server.http.body import encode_json

MAX_PAGE, DEFAULT_PAGE = 1000, 20  # models in a page of Anthropic's list
LEVELS = {"1": 1, "2": 2}
DEFAULT_LEVEL = "1"  # vLLM's
LEVEL_PARAMETER = {
    "name": "level",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "enum": [1, 2], "default": int(DEFAULT_LEVEL)},
}


async def list_models(http: HttpRequest, served: Served) -> Response:
    """OpenAI's list; Anthropic's clients get Anthropic's list, in pages."""
    models = served.models
    models.check_ready()
    if speaks_anthropic(http.scope):
        return _json(_page(models, http.query_params))
    return _json(
        {
            "object": "list",
            "data": [_model(one, name) for one in models if one.accepts_requests for name in one.listed_names],
        }
    )


async def retrieve_model(http: HttpRequest, served: Served) -> Response:
    """One model; 404 model_not_found for a name that is not served. Names may hold slashes."""
    name = http.path_params["model"]
    if not name:
        raise HTTPException(404)  # the path of the list with an extra slash
    served = served.models.find(name)
    served.check_ready()
    return _json(_anthropic_model(served, name) if speaks_anthropic(http.scope) else _model(served, name))


async def sleep_model(http: HttpRequest, served: Served) -> Response:
    """Free the model's device memory. `level` 1 keeps the weights in host memory, 2 ends the Worker."""
    served = _asked(http, served)
    level = LEVELS.get(http.query_params.get("level", DEFAULT_LEVEL))
    if level is None:
        raise invalid("level must be 1 (keep the weights in host memory) or 2 (keep nothing).", "level")
    await served.driver.sleep(level)
    return _state(served.driver)


async def wake_model(http: HttpRequest, served: Served) -> Response:
    """Load the model again; answers once it is ready."""
    served = _asked(http, served)
    await served.driver.wake()
    return _state(served.driver)


async def is_sleeping(http: HttpRequest, served: Served) -> Response:
    """vLLM's question, of the first model or that of `?model=`."""
    served = served.models.named(http) or served
    return _json({"is_sleeping": served.driver.sleep_level > 0})


def _asked(http: HttpRequest, served: Served) -> Served:
    """The model of the path or of `?model=`; without either, the first. Raises ApiError 403 for a key that is no
    administrator's, 404 for an unknown model, and UnavailableError."""
    http.state.caller.check_admin()
    served = served.models.named(http) or served
    served.check_ready()
    return served


def _state(driver: Engine) -> Response:
    return _json({"state": driver.phase, "level": driver.sleep_level})


def _model(served: Served, name: str) -> dict[str, Any]:
    """OpenAI's four keys; vLLM's: `root` is the loaded checkpoint, max_model_len is in tokens; and ours: the sampling
    defaults and the `state` ("ready", "sleeping", ...). The `parent` of an adapter is its base model."""
    adapter = served.adapters.get(name) if name not in served.names else None
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "pageserve",
        "root": adapter or served.driver.config.model or served.names[0],
        "parent": None if adapter is None else served.names[0],
        "max_model_len": served.driver.model.max_model_len,
        "default_sampling_params": served.driver.sampling_defaults.as_dict(),
        "state": served.driver.phase,
    }


def _page(models: Models, query: QueryParams) -> dict[str, Any]:
    """A page of the list. `has_more` looks in the direction of the query, backwards with before_id."""
    names = tuple(name for served in models if served.accepts_requests for name in served.listed_names)
    limit = _page_size(query.get("limit", ""))
    begin = _place(names, query, "after_id", -1) + 1
    end = _place(names, query, "before_id", len(names))
    if backwards := "before_id" in query:
        begin = max(begin, end - limit)
    page = names[begin : min(end, begin + limit)]
    return {
        "data": [_anthropic_model(models.find(name), name) for name in page],
        "has_more": begin > 0 if backwards else begin + len(page) < end,
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _page_size(text: str) -> int:
    if not text:
        return DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_PAGE):
        raise invalid(f"limit must be an integer from 1 to {MAX_PAGE}.", "limit")
    return int(text)


def _place(names: tuple[str, ...], query: QueryParams, param: str, default: int) -> int:
    if param not in query:
        return default
    if query[param] not in names:
        raise invalid(f"{param} must be the id of a model of the list.", param)
    return names.index(query[param])


def _anthropic_model(served: Served, name: str) -> dict[str, Any]:
    longest = served.driver.model.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(served.created)),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(encode_json(content), media_type="application/json")
