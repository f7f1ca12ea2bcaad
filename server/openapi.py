"""/openapi.json: the requests and answers of every route. A new route needs a row in ANSWERS, or a test fails."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.config import ServerConfig
from server.context import Models
from server.errors import is_anthropics
from server.http.ignored_fields import HEADER
from server.http.middleware import PUBLIC_PATHS
from server.protocol import answers
from server.protocol.anthropic import message_answers
from server.protocol.responses import response_answers
from server.protocol.strict import Strict

OPENAPI = "3.2.0"  # the first version that can describe the events of a stream
REF = "#/components/schemas/{model}"
STATUSES = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    403: "The API key is no administrator's.",
    404: "The model or the request does not exist.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8.",
    429: "Too many requests. Try again after Retry-After seconds.",
    500: "The server failed; its log has the details under the x-request-id.",
    503: "The server is loading, draining or has ended; no work was started. Try again after Retry-After seconds.",
}
OF_POSTS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
OF_GETS = (401, 500, 503)
OF_ADMIN_POSTS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
OF_ADMIN = (400, 401, 403, 404, 429, 500, 503)
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
IGNORED_FIELDS = {
    HEADER.decode(): {"schema": {"type": "string"}, "description": "unknown fields of the request, which were ignored"}
}
RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}


@dataclass(frozen=True)
class Answers:
    """Answers of a route. `body`: model of a 200 (None: plain text). `event`: model of each event of a stream; with
    `done` the stream ends with `[DONE]`. `errors`: other statuses. `failure`: model of a 503; `envelope`: model of the
    other errors."""

    body: type[BaseModel] | None
    event: type[BaseModel] | None = None
    errors: tuple[int, ...] = OF_GETS
    failure: type[BaseModel] = answers.ErrorEnvelope
    envelope: type[BaseModel] = answers.ErrorEnvelope
    done: bool = True

    @property
    def models(self) -> tuple[type[BaseModel], ...]:
        return tuple(model for model in (self.body, self.event, self.failure, self.envelope) if model is not None)


ANSWERS: dict[str, Answers] = {
    "/v1/completions": Answers(answers.Completion, answers.CompletionChunk, OF_POSTS),
    "/v1/chat/completions": Answers(answers.ChatCompletion, answers.ChatCompletionChunk, OF_POSTS),
    "/v1/responses": Answers(response_answers.ResponseObject, response_answers.ResponseEvent, OF_POSTS, done=False),
    "/v1/responses/input_tokens": Answers(response_answers.InputTokens, errors=OF_POSTS),
    "/v1/messages": Answers(
        message_answers.AnthropicMessage,
        message_answers.MessageEvent,
        OF_POSTS,
        failure=message_answers.AnthropicErrorEnvelope,
        envelope=message_answers.AnthropicErrorEnvelope,
        done=False,
    ),
    "/v1/messages/count_tokens": Answers(
        message_answers.TokenCount,
        errors=OF_POSTS,
        failure=message_answers.AnthropicErrorEnvelope,
        envelope=message_answers.AnthropicErrorEnvelope,
    ),
    "/v1/embeddings": Answers(answers.Embeddings, errors=OF_POSTS),
    "/tokenize": Answers(answers.Tokens, errors=OF_POSTS),
    "/detokenize": Answers(answers.Text, errors=OF_POSTS),
    "/v1/models": Answers(message_answers.EitherModelList),
    "/v1/models/{model}": Answers(message_answers.EitherModel, errors=(401, 404, 500, 503)),
    "/v1/models/{model}/sleep": Answers(answers.ModelState, errors=OF_ADMIN),
    "/v1/models/{model}/wake": Answers(answers.ModelState, errors=OF_ADMIN),
    "/sleep": Answers(answers.ModelState, errors=OF_ADMIN),
    "/wake_up": Answers(answers.ModelState, errors=OF_ADMIN),
    "/v1/load_lora_adapter": Answers(None, errors=OF_ADMIN_POSTS),
    "/v1/unload_lora_adapter": Answers(None, errors=OF_ADMIN_POSTS),
    "/is_sleeping": Answers(answers.IsSleeping, errors=(401, 500)),
    "/health": Answers(answers.Health, errors=(500, 503), failure=answers.Unhealthy),
    "/ready": Answers(answers.Ready, errors=(500, 503), failure=answers.NotReady),
    "/version": Answers(answers.Version, errors=(401, 500)),
    "/metrics": Answers(None, errors=(401, 500)),
    "/debug/kv": Answers(answers.KVBlocks),
    "/debug/steps": Answers(answers.LastSteps),
    "/debug/requests/{id}": Answers(answers.RequestTimings, errors=(401, 404, 500, 503)),
}
# An itemSchema describes each event of a stream; x-event-schema describes the JSON in the event's data.
EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
# Bodies that work unchanged once the name of the model is added.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16},
    "/v1/embeddings": {"input": ["A fox.", "A hen."]},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "Hello!"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello!"}]},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [3, 4, 5]},
}
GENERATE = ("CompletionRequest", "ChatCompletionRequest")
# Limits that start options set: (model, field, key of the schema, option).
LIMITS = (
    *[(kind, "n", "maximum", "max_n") for kind in GENERATE],
    *[(kind, "prompt_logprobs", "maximum", "max_top_logprobs") for kind in GENERATE],
    ("CompletionRequest", "best_of", "maximum", "max_best_of"),
    ("CompletionRequest", "logprobs", "maximum", "max_logprobs"),
    ("ChatCompletionRequest", "top_logprobs", "maximum", "max_top_logprobs"),
)


def body_of(kinds: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    """openapi_extra of a route: handlers read the body themselves, with a limit and off the loop."""
    refs = [_ref(kind) for kind in kinds]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parameters_of(path: str, query: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """openapi_extra of a route with a parameter in its path or `query`: handlers read the parameters themselves."""
    found = re.search(r"{(\w+)", path)
    parameters = list(query)
    if found is not None:
        schema = {"type": "string", "title": found[1].title()}
        parameters.append({"name": found[1], "in": "path", "required": True, "schema": schema})
    return {"parameters": parameters} if parameters else {}


def describe(
    app: FastAPI, config: ServerConfig, kinds: list[type[BaseModel]], models: Models
) -> Callable[[], dict[str, Any]]:
    """The function for `app.openapi`. It makes the document once all `models` have loaded, whose limits are in it, and
    before at each call. `kinds`: models of the bodies. Examples name the first of `models`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        document = _document(app, config, kinds, models)
        if models.all_accept_requests:
            app.openapi_schema = document
        return document

    return openapi


def _document(app: FastAPI, config: ServerConfig, kinds: list[type[BaseModel]], served: Models) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, openapi_version=OPENAPI, routes=app.routes)
    needs_key = bool(config.api_key or config.api_key_file)
    schemas = _schemas(config, kinds, served)
    document["components"] = {"schemas": schemas, **({"securitySchemes": SECURITY} if needs_key else {})}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe_answers(operation, ANSWERS[path])
            if config.ignore_unknown_fields and method == "post":
                for response in operation["responses"].values():
                    response["headers"] = response.get("headers", {}) | IGNORED_FIELDS
            if path in EXAMPLES:
                operation["requestBody"]["content"]["application/json"]["example"] = {
                    "model": served.names[0],
                    **EXAMPLES[path],
                }
            if needs_key and path not in PUBLIC_PATHS:
                names = SECURITY if is_anthropics(path) else ("bearer",)
                operation["security"] = [{name: []} for name in names]
            else:
                operation["responses"].pop("401", None)
    _drop_unused(schemas, document["paths"])
    return document


def _schemas(config: ServerConfig, kinds: list[type[BaseModel]], served: Models) -> dict[str, Any]:
    """The schemas of bodies and answers by name, with the limits of this server."""
    models: list[type[BaseModel]] = [*kinds, answers.ErrorEnvelope]
    models += [model for row in ANSWERS.values() for model in row.models]
    _, found = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=REF)
    schemas: dict[str, Any] = found["$defs"]
    for kind, name, key, option in LIMITS:
        _set_limit(schemas[kind]["properties"][name], key, getattr(config, option))
    for kind, name, value in _limits_of(served):
        _set_limit(schemas[kind]["properties"][name], "maximum", value)
    if config.ignore_unknown_fields:
        _open(schemas, Strict)
    return schemas


def _limits_of(served: Models) -> list[tuple[str, str, int]]:
    """(model, field, maximum) of the fields that the models limit; nothing before all models have loaded."""
    if not served.all_accept_requests:
        return []
    models = [driver.model for driver in served.drivers]
    return [
        ("DetokenizeRequest", "tokens", max(model.vocab_size for model in models) - 1),
        ("EmbeddingRequest", "truncate_prompt_tokens", max(model.max_model_len for model in models)),
    ]


def _drop_unused(schemas: dict[str, Any], paths: Any) -> None:
    """Remove the schemas to which no route leads: internal models that pydantic lists too."""
    used: set[str] = set()
    new = set(_references(paths))
    while new:
        used |= new
        new = {name for known in new for name in _references(schemas[known])} - used
    for name in schemas.keys() - used:
        del schemas[name]


def _references(part: Any) -> Iterator[str]:
    """The names of the schemas to which `part` refers."""
    if isinstance(part, dict) and isinstance(part.get("$ref"), str):
        yield part["$ref"].rpartition("/")[2]
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for value in inner:
        yield from _references(value)


def _open(schemas: dict[str, Any], kind: type[BaseModel]) -> None:
    """Allows further fields in the schemas of request objects."""
    for part in kind.__subclasses__():
        schemas.get(part.__name__, {}).pop("additionalProperties", None)
        _open(schemas, part)


def _set_limit(field: dict[str, Any], key: str, value: int) -> None:
    for schema in (field, field.get("items", {}), *field.get("anyOf", ())):
        if schema.get("type") == "integer":
            schema[key] = value


def _describe_answers(operation: dict[str, Any], row: Answers) -> None:
    text = {"text/plain": {"schema": {"type": "string"}}}
    content: dict[str, Any] = text if row.body is None else {"application/json": {"schema": _ref(row.body)}}
    if row.event is not None:
        ending = "then `[DONE]`, which follows no ErrorEnvelope." if row.done else "named by its type."
        description = f"`data` is JSON as x-event-schema says, {ending}"
        event = {**EVENT, "description": description}
        content["text/event-stream"] = {"itemSchema": event, "x-event-schema": _ref(row.event)}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in row.errors:
        model: Mapping[str, Any] = _ref(row.failure if status == 503 else row.envelope)
        response = {"description": STATUSES[status], "content": {"application/json": {"schema": model}}}
        responses[str(status)] = response | ({"headers": RETRY_AFTER} if status in (429, 503) else {})
    operation["responses"] = responses


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REF.format(model=model.__name__)}
