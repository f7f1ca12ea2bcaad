"""POST /v1/chat/completions."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.context import Served
from server.errors import ApiError
from server.http.body import encode_json
from server.http.caller import Caller
from server.intake.conversation import Conversation, admit_chat
from server.output.chat_chunks import ChatChunks
from server.output.chat_messages import MessageChunks, chat_choices
from server.output.collect import collect
from server.output.logprobs import chat_logprobs, token_names
from server.output.prompt_logprobs import PromptReports
from server.output.sse import EventStream
from server.output.stream_options import Encode, with_stream_options
from server.output.timings import Timings, find_timings
from server.protocol import ChatCompletionRequest


async def create_chat_completion(http: HttpRequest, served: Served) -> Response:
    """Validate, tokenise and admit the chat before a status is sent, so that errors keep their status."""
    request, served = await served.read(http, ChatCompletionRequest)
    caller: Caller = http.state.caller
    head = served.response_head("chatcmpl", "chat.completion", request.model)
    if request.service_tier is not None:
        head["service_tier"] = "default"  # the only tier
    chat = await admit_chat(served, caller, request, head["id"])
    timings = partial(find_timings, served.driver, caller.tenant, head["id"])
    if request.stream:
        return _stream(served, request, head | {"object": "chat.completion.chunk"}, chat, timings)
    return await _collect(http, served, request, head, chat, timings)


async def stored_completion(http: HttpRequest, served: Served) -> Response:
    """Answer requests for a stored chat completion: the server stores none."""
    text = "This server stores no chat completions: keep the answer of POST /v1/chat/completions."
    raise ApiError(404, text, param="completion_id", code="completion_not_found")


def _stream(
    served: Served, request: ChatCompletionRequest, head: dict[str, Any], chat: Conversation, timings: Timings
) -> Response:
    tokenizer, ids = served.driver.tokenizer, chat.token_ids
    if chat.form is None:
        chunks = ChatChunks(request, head, tokenizer, ids)
    else:
        chunks = MessageChunks(request, head, tokenizer, ids, chat.form)

    def usage() -> dict[str, Any]:
        return _usage(served, chat, chunks.num_reasoning_tokens)

    encode: Encode = chunks.encode
    if request.stream_options is not None:
        running_usage = usage if request.includes_running_usage else None
        encode = with_stream_options(encode, running_usage, request.include_obfuscation)
    ending = partial(chunks.ending, usage, timings)
    text_frame = chunks.text_frame if encode == chunks.encode else None
    return EventStream(chat.generation, encode, ending, served.config, text_frame=text_frame)


async def _collect(
    http: HttpRequest,
    served: Served,
    request: ChatCompletionRequest,
    head: dict[str, Any],
    chat: Conversation,
    timings: Timings,
) -> Response:
    tokenizer, tenant = served.driver.tokenizer, http.state.caller.tenant
    reports = PromptReports(tokenizer, request, [""], None, tenant)
    choices = chat_choices(request, tokenizer, chat.form)
    num_logprobs = request.top_logprobs or 0
    await collect(chat.generation, http.receive, choices, reports.add, num_logprobs)
    names = token_names(tokenizer, request.return_tokens_as_token_ids)
    reported = {"timings": timings()} if request.return_timings else {}

    def encode_response() -> bytes:
        content = {
            **head,
            **({"prompt_token_ids": chat.token_ids} if request.return_token_ids else {}),
            "choices": [
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": chat_logprobs(choice.entries, names) if request.logprobs else None,
                    "finish_reason": choice.finished_by,
                    "stop_reason": choice.stop_reason,
                    **({"token_ids": choice.token_ids} if request.return_token_ids else {}),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": _usage(served, chat, sum(choice.num_reasoning_tokens for choice in choices)),
            **({} if request.prompt_logprobs is None else {"prompt_logprobs": reports.listed[0]}),
            **reported,
        }
        return encode_json(content)

    num_reported = sum(len(choice.entries) for choice in choices) * (1 + num_logprobs)
    body = await served.encode(tenant, num_reported, encode_response)
    return Response(body, media_type="application/json")


def _usage(served: Served, chat: Conversation, num_reasoning_tokens: int) -> dict[str, Any]:
    """OpenAI reports reasoning tokens of every chat; --no-reasoning-split leaves the field out."""
    return chat.generation.usage(num_reasoning_tokens if served.config.reasoning_split else None)
