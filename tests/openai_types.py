"""Every answer and stream frame that passes by is held against openai-python's own types, strictly.

`CheckedTransport` and `CheckedAsyncTransport` go into the http client of openai-python, langchain-openai or litellm. A
field that a type does not know must be on the written list of ours, EXTRAS.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

# Name of the client's type -> fields of ours that it does not know, most of them vLLM's and only there when asked for.
EXTRAS: dict[str, set[str]] = {
    "Model": {"root", "parent", "max_model_len", "default_sampling_params", "state"},
    "ChatCompletion": {"timings", "prompt_token_ids", "prompt_logprobs"},
    "ChatCompletionChunk": {"timings", "prompt_token_ids"},
    "Completion": {"timings", "obfuscation"},
    "CompletionChoice": {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"},
    "Choice": {"stop_reason", "token_ids"},
    "ChatCompletionMessage": {"reasoning_content"},
    "ChoiceDelta": {"reasoning_content"},
    "PromptTokensDetails": {"truncated_tokens"},
    "Response": {"store"},  # OpenAI documents it and answers with it
    "ResponseCustomToolCall": {"status"},  # the same
    "ToolChoiceCustom": {"namespace"},  # ours: two namespaces may have a tool of one name
    "ToolChoiceFunction": {"namespace"},
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},  # of earlier versions of the type
}
# Path -> types of an answer and of a frame.
TYPES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/completions": (Completion, Completion),
    "/v1/embeddings": (CreateEmbeddingResponse, None),
    "/v1/responses": (Response, ResponseStreamEvent),
}


class Checks:
    """Counts what was checked, so that a test cannot pass because nothing was."""

    def __init__(self) -> None:
        self.answers = self.frames = self.errors = 0

    def check(self, path: str, response: httpx.Response, body: bytes) -> None:
        if response.status_code >= 400:
            self.errors += 1
            check_error(json.loads(body))
        elif response.headers["content-type"].startswith("text/event-stream"):
            self.frames += check_frames(path, body)
        elif path.startswith("/v1/"):
            self.answers += 1
            check_answer(path, json.loads(body))


def check_error(body: dict[str, Any]) -> None:
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    ErrorObject.model_validate(body["error"], strict=True)


def check_answer(path: str, body: dict[str, Any]) -> None:
    if path == "/v1/models":
        assert set(body) == {"object", "data"} and body["object"] == "list"
        for model in body["data"]:
            validate(Model, model)
    elif path.startswith("/v1/models/"):
        validate(Model, body)
    else:
        validate(TYPES[path][0], forgotten_by_the_types(path, body))


def check_frames(path: str, body: bytes) -> int:
    """How many frames there were. A stream that the client left may end within one, which is then not looked at."""
    whole, _, _ = body.rpartition(b"\n\n")
    frames = [frame for frame in whole.split(b"\n\n") if frame and not frame.startswith(b":")]
    for frame in frames:
        data = next(line[6:] for line in frame.split(b"\n") if line.startswith(b"data: "))
        if data == b"[DONE]":
            assert frame is frames[-1], "nothing comes after [DONE]"
            continue
        value = json.loads(data)
        if "error" in value and "type" not in value:
            check_error(value)
        else:
            validate(TYPES[path][1], forgotten_by_the_types(path, value))
    return len(frames)


def forgotten_by_the_types(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Without what OpenAI sends, too, and its types forget: null as the finish_reason of a completion's chunk, nulls of
    a prompt's first token, base64 for vectors."""
    if path == "/v1/embeddings":
        return body | {"data": [row | {"embedding": []} for row in body["data"] if row["embedding"]]}
    if path != "/v1/completions":
        return body
    return body | {"choices": [_choice(choice) for choice in body["choices"]]}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = choice["logprobs"]
    if logprobs is not None:
        assert len({len(column) for column in logprobs.values()}) == 1, "columns of one length"
        nulls = {
            name: logprobs[name][1:] for name in ("token_logprobs", "top_logprobs") if logprobs[name][:1] == [None]
        }
        logprobs = logprobs | nulls
    return choice | {"finish_reason": choice["finish_reason"] or "stop", "logprobs": logprobs}


def validate(kind: Any, value: Any) -> None:
    """Strictly: no coercion, and nothing that neither the type nor EXTRAS knows."""
    adapter = TypeAdapter(kind)
    check_extras(adapter.validate_json(json.dumps(value), strict=True))


def check_extras(value: Any) -> None:
    if isinstance(value, BaseModel):
        unknown = set(value.model_extra or ()) - EXTRAS.get(type(value).__name__, set())
        assert not unknown, f"{type(value).__name__} does not know {sorted(unknown)}, nor does EXTRAS"
        for name in type(value).model_fields:
            check_extras(getattr(value, name))
    elif isinstance(value, list):
        for entry in value:
            check_extras(entry)


class CheckedTransport(httpx.HTTPTransport):
    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks = checks

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Recorded(response.stream, self._checks, request.url.path, response)
        return response


class CheckedAsyncTransport(httpx.AsyncHTTPTransport):
    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks = checks

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _AsyncRecorded(response.stream, self._checks, request.url.path, response)
        return response


class _Recorded(httpx.SyncByteStream):
    """The body as it passes; checked when the client closes it."""

    def __init__(self, stream: httpx.SyncByteStream, checks: Checks, path: str, response: httpx.Response) -> None:
        self._stream, self._checks, self._path, self._response = stream, checks, path, response
        self._body = bytearray()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._body += chunk
            yield chunk

    def close(self) -> None:
        self._stream.close()
        if self._body:
            self._checks.check(self._path, self._response, bytes(self._body))


class _AsyncRecorded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, checks: Checks, path: str, response: httpx.Response) -> None:
        self._stream, self._checks, self._path, self._response = stream, checks, path, response
        self._body = bytearray()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._body += chunk
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
        if self._body:
            self._checks.check(self._path, self._response, bytes(self._body))
