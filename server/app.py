"""create_app(driver, config): the routes and what stands around them."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from engine.driver import Driver
from engine.errors import PageserveError
from server.config import ServerConfig
from server.context import Served, package_version
from server.errors import ApiError, error_response, from_http_status, nearest_route, refusal_reason
from server.http.api_keys import ApiKeys
from server.http.body_budget import BodyBudget
from server.http.ignored_fields import IgnoredFieldsHeader
from server.http.middleware import CLIENT_LEFT, PUBLIC_PATHS, Authentication, RequestContext
from server.http.tracing import TraceContext, make_tracer
from server.openapi import body_of, describe
from server.playground import add_playground_routes
from server.protocol import ChatCompletionRequest, CompletionRequest
from server.protocol.anthropic.request import MessagesPrompt, MessagesRequest
from server.protocol.responses.request import ResponsePrompt, ResponseRequest
from server.routes import health, metrics, models
from server.routes.chat_completions import create_chat_completion, stored_completion
from server.routes.completions import create_completion
from server.routes.debug_kv import add_debug_routes
from server.routes.debug_requests import debug_request
from server.routes.embeddings import EmbeddingRequest, create_embeddings
from server.routes.messages import count_tokens, create_message
from server.routes.responses import count_input_tokens, create_response, stored_response
from server.routes.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, detokenize, tokenize

DEFAULT_MODEL_NAME = "pageserve"
PREFLIGHT_SECONDS = 3600  # for so long a browser need not ask again


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """The names of the model in the API: as configured, else the folder or hub id as it was given (vLLM's rule)."""
    return config.served_model_name or (model or DEFAULT_MODEL_NAME,)


def create_app(driver: Driver, config: ServerConfig) -> FastAPI:
    """The whole HTTP side over a Driver, which may still be loading: /v1 then answers 503.

    There are no documentation pages (they would load scripts from elsewhere); /openapi.json describes the routes.
    """
    served = Served(driver, config, served_names(config, driver.config.model), int(time.time()))
    keys, refused = ApiKeys(config), Counter[str]()
    app = FastAPI(title="pageserve", version=package_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_posts(app, served)
    _add_stateless_answers(app)
    _add_status_routes(app, served)
    app.state.api_keys = keys  # for whoever reloads them

    http_counts: Counter[tuple[str, int]] = Counter()
    page = metrics.MetricsPage(metrics.make_registry(driver, served.names[0], http_counts, refused))

    async def get_metrics() -> Response:
        return await page.get()

    app.add_api_route("/metrics", get_metrics, response_class=Response)
    _add_heads(app)
    known_paths = frozenset(route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path)

    async def answer(request: Request, error: Exception) -> Response:
        if reason := refusal_reason(error):
            refused[reason] += 1
        return _answer(error, request.scope, known_paths)

    for error_type in (PageserveError, ApiError, HTTPException, ClientDisconnect):
        app.add_exception_handler(error_type, answer)
    public_paths = PUBLIC_PATHS | {"/metrics"} if config.public_metrics else PUBLIC_PATHS
    budget = BodyBudget(config.max_bytes_in_flight, config.max_bytes_in_flight_per_key)
    app.add_middleware(Authentication, keys=keys, public_paths=public_paths, refused=refused, budget=budget)
    if config.ignore_unknown_fields:
        app.add_middleware(IgnoredFieldsHeader)
    if (tracer := make_tracer(config, served.names[0])) is not None:
        driver.request_log.listeners.append(tracer.record)
        app.add_middleware(TraceContext)
    app.state.tracer = tracer  # for whoever ends the server
    if config.allowed_origins:  # a preflight has no key, so this is outside of Authentication
        app.add_middleware(CORSMiddleware, **cors_options(config))
    app.add_middleware(RequestContext, driver=driver, counts=http_counts, known_paths=known_paths)  # last, so outermost
    app.openapi = describe(app, config, [kind for *_, kinds in POSTS for kind in kinds], served.names[0])  # type: ignore[method-assign]
    return app


def cors_options(config: ServerConfig) -> dict[str, Any]:
    """Any header may be sent and read: keys go in headers, never in cookies, which are not allowed."""
    anything = {"allow_headers": ["*"], "expose_headers": ["*"], "max_age": PREFLIGHT_SECONDS}
    return {"allow_origins": config.allowed_origins, "allow_methods": ["GET", "POST"], **anything}


Handler = Callable[[Request, Served], Awaitable[Response]]
# What takes a JSON object: path, handler, and the request models, of which the body is one.
POSTS: tuple[tuple[str, Handler, tuple[type[BaseModel], ...]], ...] = (
    ("/v1/completions", create_completion, (CompletionRequest,)),
    ("/v1/chat/completions", create_chat_completion, (ChatCompletionRequest,)),
    ("/v1/embeddings", create_embeddings, (EmbeddingRequest,)),
    ("/v1/responses", create_response, (ResponseRequest,)),
    ("/v1/responses/input_tokens", count_input_tokens, (ResponsePrompt,)),
    ("/v1/messages", create_message, (MessagesRequest,)),
    ("/v1/messages/count_tokens", count_tokens, (MessagesPrompt,)),
    ("/tokenize", tokenize, (TokenizeTextRequest, TokenizeChatRequest)),
    ("/detokenize", detokenize, (DetokenizeRequest,)),
)


def _add_posts(app: FastAPI, served: Served) -> None:
    for path, handler, kinds in POSTS:
        options: dict[str, Any] = {"methods": ["POST"], "response_class": Response, "name": handler.__name__}
        app.add_api_route(path, _route(handler, served), openapi_extra=body_of(kinds), **options)


def _add_stateless_answers(app: FastAPI) -> None:
    """A 404 that says why, where OpenAI has routes to what it stored."""
    path = "/v1/responses/{response_id}"
    app.add_api_route("/v1/responses/input_tokens", _post_only, methods=["GET", "DELETE"], include_in_schema=False)
    for stored, methods in ((path, ["GET", "DELETE"]), (f"{path}/cancel", ["POST"]), (f"{path}/input_items", ["GET"])):
        app.add_api_route(stored, stored_response, methods=methods, include_in_schema=False)
    app.add_api_route("/v1/responses/compact", _no_compaction, methods=["POST"], include_in_schema=False)
    path = "/v1/chat/completions/{completion_id}"
    app.add_api_route(path, stored_completion, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    app.add_api_route(f"{path}/messages", stored_completion, methods=["GET"], include_in_schema=False)


async def _post_only() -> Response:
    raise HTTPException(405, headers={"Allow": "POST"})  # it is no response of that name


async def _no_compaction() -> Response:
    message = "Conversations are not compacted here: send the items as they are, or truncation: 'auto'."
    raise ApiError(404, message, code="not_found")


def _route(handler: Handler, served: Served) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await handler(request, served)

    return route


def _add_status_routes(app: FastAPI, served: Served) -> None:
    async def list_models(request: Request) -> Response:
        return models.list_models(served, request)

    async def retrieve_model(request: Request, model: str) -> Response:
        return models.retrieve_model(served, request, model)

    async def get_health() -> Response:
        return health.health(served.driver)

    async def get_ready() -> Response:
        return health.ready(served.driver)

    async def version() -> dict[str, str]:
        return {"version": package_version()}

    app.add_api_route("/v1/models", list_models, response_class=Response)
    app.add_api_route("/v1/models/{model:path}", retrieve_model, response_class=Response)
    app.add_api_route("/health", get_health, response_class=Response)
    app.add_api_route("/ready", get_ready, response_class=Response)

    async def debug_requests(request: Request, id: str) -> Response:
        return debug_request(request, served.driver, id)

    app.add_api_route("/version", version)
    app.add_api_route("/debug/requests/{id}", debug_requests, response_class=Response)
    add_debug_routes(app, served)
    add_playground_routes(app)


def _add_heads(app: FastAPI) -> None:
    """HEAD wherever there is GET (RFC 9110, section 9.1); uvicorn leaves the body out."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            options: dict[str, Any] = {"response_class": route.response_class, "include_in_schema": False}
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], **options)


def _answer(error: Exception, scope: Scope, known_paths: Collection[str]) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)  # nobody reads it
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # a route of its own, see _add_heads
        error = from_http_status(error.status_code, headers, nearest_route(scope["path"], known_paths))
    return error_response(error, scope)
