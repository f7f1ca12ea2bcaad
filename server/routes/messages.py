"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same chat."""

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequestError
from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from server.context import Served
from server.errors import ApiError, anthropic_error, new_id
from server.http.api_keys import tenant_of
from server.http.body import encode_json, read_request
from server.intake.answer_form import splits_thinking
from server.intake.context_edits import edited_prompt
from server.intake.conversation import Conversation, admit
from server.output.collect import collect
from server.output.message_output import MessageOutput, frame
from server.output.sse import EventStream
from server.output.timings import asked_timings
from server.protocol import ChatCompletionRequest
from server.protocol.anthropic.request import MessagesPrompt, MessagesRequest, in_our_terms


async def create_message(http: HttpRequest, served: Served) -> Response:
    """Everything is validated, tokenised and admitted before a status is sent, so that errors keep theirs."""
    served.check_ready()
    request = await read_request(http, served, MessagesRequest)
    served.check_model(request.model)
    request = served.with_model_defaults(request)
    message_id = new_id("msg_")
    try:
        prompt = await edited_prompt(served, request, tenant_of(http.scope))
        chat = limit_thinking(served, prompt.chat, request)
        asked = await admit(served, http.scope, chat, prompt.token_ids, message_id)
    except InvalidRequestError as error:
        raise in_our_terms(error) from None
    timings = partial(asked_timings, served.driver, http.scope, request, message_id)
    answer = MessageAnswer(request, message_id, asked, timings, prompt.applied)
    if request.stream:
        interval = served.config.keep_alive_interval
        return EventStream(asked.generation, answer.encode, answer.ending, interval, failure=_error_event)
    await collect(asked.generation, http.receive, [answer])
    return Response(encode_json(answer.result()), media_type="application/json")


async def count_tokens(http: HttpRequest, served: Served) -> Response:
    """How many tokens the prompt of a message would have."""
    served.check_ready()
    request = await read_request(http, served, MessagesPrompt)
    served.check_model(request.model)
    try:
        prompt = await edited_prompt(served, request, tenant_of(http.scope))
    except InvalidRequestError as error:
        raise in_our_terms(error) from None
    count: dict[str, Any] = {"input_tokens": len(prompt.token_ids)}
    if prompt.applied is not None:
        count["context_management"] = {"original_input_tokens": prompt.num_original_tokens}
    return Response(encode_json(count), media_type="application/json")


def limit_thinking(served: Served, chat: ChatCompletionRequest, request: MessagesRequest) -> ChatCompletionRequest:
    """With the budget of the request, where the model's thinking can be limited: clients send one to every model."""
    if request.thinking is None or request.thinking.budget_tokens is None or not splits_thinking(served):
        return chat
    return chat.model_copy(update={"thinking_token_budget": request.thinking.budget_tokens})


def _error_event(error: ApiError) -> bytes:
    return frame(b"error", error=anthropic_error(error))


class MessageAnswer:
    """One answer: collected into `result`, or told by the events of a stream."""

    def __init__(
        self,
        request: MessagesRequest,
        message_id: str,
        asked: Conversation,
        timings: Callable[[], list[dict[str, Any]] | None],
        applied_edits: list[dict[str, Any]] | None,
    ) -> None:
        self._generation, self._reader, self._timings = asked.generation, asked.reader, timings
        self._output = MessageOutput(request.stream, request.shows_thinking)
        self._applied_edits = applied_edits
        self._started = False
        self._finish_reason: FinishReason | None = None
        self._stop_sequence: str | None = None
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": request.model}

    def add(self, sample: CompletionOutput) -> None:
        self._take(sample)

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The first event comes with the first token: only then is known how much of the prompt was cached."""
        events = b"" if self._started else frame(b"message_start", message=self._message())
        self._started = True
        return events + b"".join(self._take(sample) for sample in output.outputs)

    def _take(self, sample: CompletionOutput) -> bytes:
        events = b"".join(self._output.take(part) for part in self._reader.feed(sample))
        if sample.finish_reason is None:
            return events
        self._finish_reason = sample.finish_reason
        self._stop_sequence = sample.stop_reason if isinstance(sample.stop_reason, str) else None
        return events + self._output.finish()

    def ending(self) -> bytes:
        whole = self.result()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        rest = {name: whole[name] for name in ("usage", "context_management", "timings") if name in whole}
        return frame(b"message_delta", delta=delta, **rest) + frame(b"message_stop")

    def result(self) -> dict[str, Any]:
        """The whole of it, once it has ended."""
        message, timings = self._message(), self._timings()
        if self._applied_edits is not None:
            message["context_management"] = {"applied_edits": self._applied_edits}
        return message if timings is None else message | {"timings": timings}

    def _message(self) -> dict[str, Any]:
        """As much as there is of it."""
        end = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return {**self._head, "content": self._output.blocks, **end, "usage": self._usage()}

    @property
    def _stop_reason(self) -> str | None:
        if self._finish_reason is None:
            return None
        if self._finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.finish_reason == "tool_calls" else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """What was found in the cache does not count among input_tokens there."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reader.num_reasoning_tokens},
        }
