"""POST /v1/responses: OpenAI's newer API over the same chat. Stateless: what was answered cannot be fetched again."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequestError
from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from engine.text.tokenizer import Tokenizer
from server.context import Served
from server.errors import ApiError, error_object, new_id
from server.http.api_keys import tenant_of
from server.http.body import convert, encode_json, read_request
from server.intake.conversation import Conversation, admit
from server.intake.prompts import tokenize_chat
from server.output.collect import collect
from server.output.left_out import headers_of_left_out
from server.output.logprobs import Entry, LogprobAligner
from server.output.response_output import EventWriter, ResponseOutput
from server.output.sse import EventStream
from server.output.stream_options import with_obfuscation
from server.output.timings import asked_timings
from server.protocol import ChatCompletionRequest
from server.protocol.responses.request import ResponsePrompt, ResponseRequest
from server.protocol.responses.response_tools import CustomTool, FunctionTool, HostedTool, NamespaceTool, Tool
from server.tools.events import Event

NOT_STORED = "This server stores no responses: keep what POST /v1/responses answers."


async def create_response(http: HttpRequest, served: Served) -> Response:
    """Everything is validated, tokenised and admitted before a status is sent, so that errors keep theirs."""
    served.check_ready()
    request = await read_request(http, served, ResponseRequest)
    served.check_model(request.model)
    request = served.with_model_defaults(request)
    response_id = new_id("resp_")
    try:
        chat, ids = await _tokenize(served, request, tenant_of(http.scope), request.max_output_tokens)
        chat.check_limits(served.config)
        asked = await admit(served, http.scope, chat, ids, response_id)
    except InvalidRequestError as error:
        raise request.in_our_terms(error) from None
    timings = partial(asked_timings, served.driver, http.scope, request, response_id)
    answer = ResponseAnswer(request, response_id, served.driver.tokenizer, asked, timings)
    left_out = headers_of_left_out(request.left_out)
    if request.stream:
        stream = EventStream(
            asked.generation,
            with_obfuscation(answer.encode) if request.include_obfuscation else answer.encode,
            answer.ending,
            served.config.keep_alive_interval,
            opening=answer.opening(),
            failure=answer.failure,
        )
        stream.headers.update(left_out)
        return stream
    await collect(asked.generation, http.receive, [answer])
    return Response(encode_json(answer.result()), media_type="application/json", headers=left_out)


async def count_input_tokens(http: HttpRequest, served: Served) -> Response:
    """How many tokens the prompt of a request would have."""
    served.check_ready()
    request = await read_request(http, served, ResponsePrompt)
    if request.model is not None:
        served.check_model(request.model)
    try:
        _, ids = await _tokenize(served, request, tenant_of(http.scope), None, counts=True)
    except InvalidRequestError as error:
        raise request.in_our_terms(error) from None
    content = {"object": "response.input_tokens", "input_tokens": len(ids)}
    headers = headers_of_left_out(request.left_out)
    return Response(encode_json(content), media_type="application/json", headers=headers)


async def stored_response(http: HttpRequest) -> Response:
    """What fetches, cancels or deletes an answer by its id."""
    raise ApiError(404, NOT_STORED, param="response_id", code="response_not_found")


async def _tokenize(
    served: Served, request: ResponsePrompt, tenant: str, max_tokens: int | None, counts: bool = False
) -> tuple[ChatCompletionRequest, list[int]]:
    """The chat and its prompt. With truncation: "auto", as few turns as needed are dropped from its beginning, but
    never the last; what they are is found by bisection, since each try costs a tokenisation."""
    if request.truncation != "auto":
        chat = await convert(served, tenant, request.to_chat)
        return chat, await tokenize_chat(served, chat, tenant, counts)
    longest = served.driver.model.max_model_len - (max_tokens or 1)
    low, high = 0, max(0, request.num_turns - 1)
    middle = 0  # most fit as they are
    while low < high:
        fits = await _fits(served, await convert(served, tenant, partial(request.to_chat, middle)), tenant, longest)
        low, high = (low, middle) if fits else (middle + 1, high)
        middle = (low + high) // 2
    chat = await convert(served, tenant, partial(request.to_chat, low))
    return chat, await tokenize_chat(served, chat, tenant, counts)


async def _fits(served: Served, chat: ChatCompletionRequest, tenant: str, longest: int) -> bool:
    try:
        return len(await tokenize_chat(served, chat, tenant)) <= longest
    except InvalidRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return False


class ResponseAnswer:
    """One answer: collected into `result`, or told by the events of a stream."""

    def __init__(
        self,
        request: ResponseRequest,
        response_id: str,
        tokenizer: Tokenizer,
        asked: Conversation,
        timings: Callable[[], list[dict[str, Any]] | None],
    ) -> None:
        self._generation, self._reader, self._timings = asked.generation, asked.reader, timings
        self._events = EventWriter(request.stream)
        tools = request.tool_set.by_chat_name
        self._output = ResponseOutput(self._events, tokenizer, tools, request.encrypts_reasoning)
        self._aligner = LogprobAligner(tokenizer, True, visible=asked.visible_token_ids) if request.logprobs else None
        self._entries: list[Entry] = []
        self._finish_reason: FinishReason | None = None
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._settings = _settings(request)

    def add(self, sample: CompletionOutput) -> None:
        if self._aligner is not None:
            self._entries += self._aligner.take(sample)
        for part in self._reader.feed(sample):
            self._take(part)
        if sample.finish_reason is not None:
            self._finish_reason = sample.finish_reason
            cut = self._is_cut or self._reader.unfinished  # a stop token may stand within a call
            self._output.finish("incomplete" if cut else "completed", self._entries)

    def _take(self, part: Event) -> None:
        """Logprobs are those of the text: what belongs to calls and reasoning is left out."""
        entries, self._entries = self._entries, []
        self._output.take(part, entries)

    def opening(self) -> bytes:
        for state in ("created", "in_progress"):
            self._events.write(f"response.{state}", response=self._response("in_progress"))
        return self._events.take()

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        for sample in output.outputs:
            self.add(sample)
        return self._events.take()

    def ending(self) -> bytes:
        response = self.result()
        self._events.write(f"response.{response['status']}", response=response)
        return self._events.take()

    def failure(self, error: ApiError) -> bytes:
        """OpenAI's two events: the error itself, and the response that failed."""
        about = error_object(error)
        self._events.write("error", code=about["code"], message=about["message"], param=about["param"])
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._response("failed", error={"code": code, "message": about["message"]})
        self._events.write("response.failed", response=failed)
        return self._events.take()

    def result(self) -> dict[str, Any]:
        """The whole of it, once it has ended."""
        known: dict[str, Any] = {"usage": self._usage()}
        if (timings := self._timings()) is not None:
            known["timings"] = timings
        if self._is_cut:
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, **known)
        return self._response("completed", completed_at=int(time.time()), **known)

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason is FinishReason.LENGTH

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        unknown = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, **self._settings, "output": self._output.items, **unknown, **known}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _shown(tool: Tool) -> dict[str, Any]:
    """A tool of an answer: functions have all their fields."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump() | {"strict": bool(tool.strict)}
    fields = tool.model_dump(exclude={"format", "tools"}, exclude_none=True)
    if isinstance(tool, CustomTool):
        fields["format"] = tool.format.model_dump()
    if isinstance(tool, NamespaceTool):
        fields |= {"description": tool.description or "", "tools": [_shown(inner) for inner in tool.tools]}
    return fields


def _settings(request: ResponseRequest) -> dict[str, Any]:
    """The fields of a response that say what was asked for; those about what this server has not are null."""
    tools = [_shown(tool) for tool in request.tools if not isinstance(tool, HostedTool)]
    verbosity = {} if request.text.verbosity is None else {"verbosity": request.text.verbosity}
    limit = {} if request.reasoning.max_tokens is None else {"max_tokens": request.reasoning.max_tokens}
    return {
        "model": request.model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_logprobs": request.top_logprobs,
        "text": {"format": request.text.format, **verbosity},
        "tools": tools,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_tool_calls": request.max_tool_calls,
        "reasoning": {"effort": request.reasoning.effort, "summary": None, **limit},
        "truncation": request.truncation,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": "default",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }
