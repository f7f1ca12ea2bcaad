"""create_app(driver, config): the list of routes, the middleware around them, and the answers to errors."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from engine.errors import PageserveError
from engine.replicas.engine import Engine
from server.config import ServerConfig
from server.context import Models, Served, package_version
from server.errors import ApiError, error_response, from_http_status, nearest_route, refusal_reason
from server.http.api_keys import ApiKeys
from server.http.body_budget import BodyBudget
from server.http.ignored_fields import IgnoredFieldsHeader
from server.http.middleware import CLIENT_LEFT, PUBLIC_PATHS, Authentication, RequestContext
from server.http.tracing import make_tracer
from server.model_settings import served_names
from server.openapi import body_of, describe, parameters_of
from server.playground import PAGE, get_page
from server.protocol import ChatCompletionRequest, CompletionRequest
from server.protocol.anthropic.request import MessagesPrompt, MessagesRequest
from server.protocol.responses.request import ResponsePrompt, ResponseRequest
from server.routes.adapters import (
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_adapter,
    may_change_adapters,
    unload_adapter,
)
from server.routes.chat_completions import create_chat_completion, stored_completion
from server.routes.completions import create_completion
from server.routes.debug_kv import debug_kv, debug_kv_enabled, debug_steps
from server.routes.debug_requests import debug_requests
from server.routes.embeddings import EmbeddingRequest, create_embeddings
from server.routes.health import get_health, get_ready, version
from server.routes.messages import count_tokens, create_message
from server.routes.metrics import get_metrics
from server.routes.models import (
    LEVEL_PARAMETER,
    is_sleeping,
    list_models,
    retrieve_model,
    sleep_model,
    wake_model,
)
from server.routes.responses import (
    count_input_tokens,
    create_response,
    no_compaction,
    refuse_other_methods,
    stored_response,
)
from server.routes.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, detokenize, tokenize

PREFLIGHT_SECONDS = 3600  # time for which a browser keeps the answer to a preflight

Handler = Callable[[HttpRequest, Served], Awaitable[Response]]


def _always(served: Served) -> bool:
    return True


def _never(served: Served) -> bool:
    return False


def _with_debug_kv(served: Served) -> bool:
    return debug_kv_enabled(served.config)


@dataclass(frozen=True)
class HostedModel:
    """A model of the server; `config` has the settings of the server with those of the model in their place."""

    driver: Engine
    config: ServerConfig
    names: tuple[str, ...]


@dataclass(frozen=True)
class Route:
    """`methods` are separated by spaces. The body of a POST is one of the `bodies`, a JSON object. `in_schema`: whether
    /openapi.json describes the route; server/openapi.py has the answers of such routes. `parameters`: its query."""

    methods: str
    path: str
    handler: Handler
    bodies: tuple[type[BaseModel], ...] = ()
    in_schema: Callable[[Served], bool] = _always
    parameters: tuple[dict[str, Any], ...] = ()


# Starlette takes the first row whose path and method match.
ROUTES = (
    Route("POST", "/v1/completions", create_completion, (CompletionRequest,)),
    Route("POST", "/v1/chat/completions", create_chat_completion, (ChatCompletionRequest,)),
    Route("POST", "/v1/embeddings", create_embeddings, (EmbeddingRequest,)),
    Route("POST", "/v1/responses", create_response, (ResponseRequest,)),
    Route("POST", "/v1/responses/input_tokens", count_input_tokens, (ResponsePrompt,)),
    Route("POST", "/v1/messages", create_message, (MessagesRequest,)),
    Route("POST", "/v1/messages/count_tokens", count_tokens, (MessagesPrompt,)),
    Route("POST", "/tokenize", tokenize, (TokenizeTextRequest, TokenizeChatRequest)),
    Route("POST", "/detokenize", detokenize, (DetokenizeRequest,)),
    # OpenAI's routes to stored answers: the server stores none and says so.
    Route("GET DELETE", "/v1/responses/input_tokens", refuse_other_methods, in_schema=_never),
    Route("GET DELETE", "/v1/responses/{response_id}", stored_response, in_schema=_never),
    Route("POST", "/v1/responses/{response_id}/cancel", stored_response, in_schema=_never),
    Route("GET", "/v1/responses/{response_id}/input_items", stored_response, in_schema=_never),
    Route("POST", "/v1/responses/compact", no_compaction, in_schema=_never),
    Route("GET POST DELETE", "/v1/chat/completions/{completion_id}", stored_completion, in_schema=_never),
    Route("GET", "/v1/chat/completions/{completion_id}/messages", stored_completion, in_schema=_never),
    Route("POST", "/v1/models/{model:path}/sleep", sleep_model, parameters=(LEVEL_PARAMETER,)),
    Route("POST", "/v1/models/{model:path}/wake", wake_model),
    Route("POST", "/sleep", sleep_model, parameters=(LEVEL_PARAMETER,)),  # vLLM's three
    Route("POST", "/wake_up", wake_model),
    Route("GET", "/is_sleeping", is_sleeping),
    Route("POST", "/v1/load_lora_adapter", load_adapter, (LoadAdapterRequest,), may_change_adapters),
    Route("POST", "/v1/unload_lora_adapter", unload_adapter, (UnloadAdapterRequest,), may_change_adapters),
    Route("GET", "/v1/models", list_models),
    Route("GET", "/v1/models/{model:path}", retrieve_model),
    Route("GET", "/health", get_health),
    Route("GET", "/ready", get_ready),
    Route("GET", "/version", version),
    Route("GET", "/debug/requests/{id}", debug_requests),
    Route("GET", "/debug/kv", debug_kv, in_schema=_with_debug_kv),
    Route("GET", "/debug/steps", debug_steps, in_schema=_with_debug_kv),
    *(Route("GET", path, get_page, in_schema=_never) for path in PAGE),
    Route("GET", "/metrics", get_metrics),
)


def create_app(driver: Engine, config: ServerConfig) -> FastAPI:
    """The HTTP side over one model. While it still loads, /v1 answers 503."""
    return create_app_of([HostedModel(driver, config, served_names(config, driver.config.model))], config)


def create_app_of(hosted: Sequence[HostedModel], config: ServerConfig) -> FastAPI:
    """The HTTP side over several models: a request's `model` picks one, the first serves requests without a name.

    `config` has the settings of the server. The app has no documentation pages (they would load scripts from other
    sites); /openapi.json describes the routes.
    """
    models, now, counts, refused = Models(), int(time.time()), Counter[tuple[str, int]](), Counter[str]()
    for model in hosted:
        Served(model.driver, model.config, model.names, now, models, counts, refused)
    served = next(iter(models))
    app = FastAPI(title="pageserve", version=package_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    for route in ROUTES:
        _add_route(app, route, served)
    known_paths = frozenset(route.path for route in ROUTES if "{" not in route.path) | {app.openapi_url or ""}
    _add_error_handlers(app, served, known_paths)
    _add_middleware(app, config, served, known_paths)
    bodies = [kind for route in ROUTES if route.in_schema(served) for kind in route.bodies]
    app.openapi = describe(app, config, bodies, served.models)  # type: ignore[method-assign]
    return app


def _add_route(app: FastAPI, route: Route, served: Served) -> None:
    """Register a row. A row with GET alone also answers HEAD (RFC 9110, section 9.1); uvicorn leaves the body out."""

    async def endpoint(http: HttpRequest) -> Response:
        return await route.handler(http, served)

    methods, in_schema = route.methods.split(), route.in_schema(served)
    extra = body_of(route.bodies) if route.bodies else parameters_of(route.path, route.parameters)
    options: dict[str, Any] = {"response_class": Response, "name": route.handler.__name__}
    app.add_api_route(
        route.path, endpoint, methods=methods, openapi_extra=extra, include_in_schema=in_schema, **options
    )
    if methods == ["GET"]:
        app.add_api_route(route.path, endpoint, methods=["HEAD"], include_in_schema=False, **options)


def _add_error_handlers(app: FastAPI, served: Served, known_paths: Collection[str]) -> None:
    async def answer(http: HttpRequest, error: Exception) -> Response:
        if reason := refusal_reason(error):
            served.refused[reason] += 1
        return _error_answer(error, http.scope, known_paths)

    for error_type in (PageserveError, ApiError, HTTPException, ClientDisconnect):
        app.add_exception_handler(error_type, answer)


def _add_middleware(app: FastAPI, config: ServerConfig, served: Served, known_paths: frozenset[str]) -> None:
    """The innermost first. `app.state` keeps the keys for reloads, and the tracer for the end of the server."""
    app.state.api_keys = ApiKeys(config)
    app.state.tracer = make_tracer(config)
    if app.state.tracer is not None:
        for one in served.models:
            for replica in one.driver.replicas:
                replica.request_log.listeners.append(partial(app.state.tracer.record, one.names[0]))
    app.add_middleware(
        Authentication,
        keys=app.state.api_keys,
        public_paths=PUBLIC_PATHS | {"/metrics"} if config.public_metrics else PUBLIC_PATHS,
        refused=served.refused,
        budget=BodyBudget(config.max_bytes_in_flight, config.max_bytes_in_flight_per_key),
        traced=app.state.tracer is not None,
    )
    if config.ignore_unknown_fields:
        app.add_middleware(IgnoredFieldsHeader)
    if config.allowed_origins:  # a preflight has no key, so CORS stands outside of Authentication
        app.add_middleware(CORSMiddleware, **cors_options(config))
    app.add_middleware(
        RequestContext, drivers=served.models.drivers, counts=served.http_counts, known_paths=known_paths
    )


def cors_options(config: ServerConfig) -> dict[str, Any]:
    """The options of CORSMiddleware. All headers are allowed: keys travel in headers, never in cookies."""
    anything = {"allow_headers": ["*"], "expose_headers": ["*"], "max_age": PREFLIGHT_SECONDS}
    return {"allow_origins": config.allowed_origins, "allow_methods": ["GET", "POST"], **anything}


def _error_answer(error: Exception, scope: Scope, known_paths: Collection[str]) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)  # the client is gone
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # HEAD is a route of its own: see _add_route
        error = from_http_status(error.status_code, headers, nearest_route(scope["path"], known_paths))
    return error_response(error, scope)
