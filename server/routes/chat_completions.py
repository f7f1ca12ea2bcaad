"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequestError
from engine.request import Request
from engine.text.tokenizer import Tokenizer
from server.context import Served
from server.errors import ApiError
from server.http.api_keys import account_of, cache_salt, tenant_of
from server.http.body import encode_json, read_request
from server.intake.answer_form import AnswerForm, find_answer_form, prepare_answer
from server.intake.beam_search import beam_search_params
from server.intake.conversation import _name_max_completion_tokens, _sampling_params, max_tokens_of
from server.intake.generation import Generation
from server.intake.prompts import resolve_params, tokenize_and_cut_chat
from server.output.chat_chunks import ChatChunks, chat_aligner
from server.output.chat_messages import MessageChunks, message_choices
from server.output.collect import Choice, collect
from server.output.logprobs import encoded_chat_logprobs, token_names
from server.output.prompt_logprobs import PromptReports, check_size, fit_logprobs
from server.output.sse import EventStream
from server.output.stream_options import with_stream_options
from server.output.timings import asked_timings
from server.protocol import ChatCompletionRequest


async def create_chat_completion(http: HttpRequest, served: Served) -> Response:
    """Everything is validated, tokenised and admitted before a status is sent, so that errors keep theirs."""
    served.check_ready()
    request = await read_request(http, served, ChatCompletionRequest)
    served.check_request(request)
    request = served.with_model_defaults(request)
    head = served.response_head("chatcmpl", "chat.completion", request)
    if request.service_tier is not None:
        head["service_tier"] = "default"  # the one that there is
    if request.stream:
        head["object"] = "chat.completion.chunk"
    try:
        beams = beam_search_params(request, max_tokens_of(request))
        params = _sampling_params(request) if beams is None else beams.sampling_params()
        tenant = tenant_of(http.scope)
        ids, num_truncated = await tokenize_and_cut_chat(served, request, tenant, params.max_tokens)
        form = find_answer_form(served, request, ids)
        params = await resolve_params(served.driver, params if form is None else form.apply(params), tenant)
        await prepare_answer(served.driver, request, form, tenant)
        check_size(request, [ids])
        if beams is None and not request.stream:  # a stream passes them on
            room = served.driver.model.max_model_len - len(ids)
            params = fit_logprobs(params, 1, room, "top_logprobs" if request.top_logprobs else "logprobs")
        salt = cache_salt(http.scope, request.cache_salt)
        generation = Generation.admit(
            served.driver,
            [Request(f"{head['id']}-0", ids, params, request.priority, salt, "messages", beams, tenant)],
            account_of(http.scope),
            request.timeout,
        )
        if served.config.reasoning_split:  # as OpenAI says it of every chat; more where the model thinks
            generation.num_reasoning_tokens = lambda: 0
        generation.num_truncated = None if request.truncate_prompt_tokens is None else num_truncated
    except InvalidRequestError as error:
        raise _name_max_completion_tokens(error, request) from None
    if request.stream:
        chunks = _chunks(request, head, served.driver.tokenizer, ids, form, generation)
        return EventStream(
            generation,
            with_stream_options(chunks.encode, request, generation),
            lambda: chunks.ending(generation, asked_timings(served.driver, http.scope, request, head["id"])),
            served.config.keep_alive_interval,
        )
    reports = PromptReports(served.driver.tokenizer, request, [""], None, tenant)
    generation.on_prompt_logprobs = reports.add
    choices = _choices(request, served.driver.tokenizer, form, generation)
    await collect(generation, http.receive, choices)
    timings = asked_timings(served.driver, http.scope, request, head["id"])

    def encode_response() -> bytes:
        content = {
            **head,
            **({"prompt_token_ids": ids} if request.return_token_ids else {}),
            "choices": [_choice(i, choice, served.driver.tokenizer, request) for i, choice in enumerate(choices)],
            "usage": generation.usage(),
            **({} if request.prompt_logprobs is None else {"prompt_logprobs": reports.listed[0]}),
            **({} if timings is None else {"timings": timings}),
        }
        return encode_json(content)

    num_logprobs = sum(len(choice.entries) for choice in choices) * (1 + (request.top_logprobs or 0))
    body = await served.encode(tenant, num_logprobs, encode_response)
    return Response(body, media_type="application/json")


async def stored_completion(http: HttpRequest) -> Response:
    """What fetches, changes or deletes an answer by its id."""
    text = "This server stores no chat completions: keep what POST /v1/chat/completions answers."
    raise ApiError(404, text, param="completion_id", code="completion_not_found")


def _chunks(
    request: ChatCompletionRequest,
    head: dict[str, Any],
    tokenizer: Tokenizer,
    ids: list[int],
    form: AnswerForm | None,
    generation: Generation,
) -> ChatChunks:
    if form is None:
        return ChatChunks(request, head, tokenizer, ids)
    chunks = MessageChunks(request, head, tokenizer, ids, form)
    if form.splits_reasoning:
        generation.num_reasoning_tokens = lambda: chunks.num_reasoning_tokens
    return chunks


def _choices(
    request: ChatCompletionRequest, tokenizer: Tokenizer, form: AnswerForm | None, generation: Generation
) -> Sequence[Choice]:
    if form is None:
        return [Choice("", chat_aligner(request, tokenizer)) for _ in range(request.n)]
    choices = message_choices(request, tokenizer, form)
    if form.splits_reasoning:
        generation.num_reasoning_tokens = lambda: sum(choice.reader.num_reasoning_tokens for choice in choices)
    return choices


def _choice(index: int, choice: Choice, tokenizer: Tokenizer, request: ChatCompletionRequest) -> dict[str, Any]:
    names = token_names(tokenizer, request.return_tokens_as_token_ids)
    return {
        "index": index,
        "message": choice.message(),
        "logprobs": encoded_chat_logprobs(choice.entries, names) if request.logprobs else None,
        "finish_reason": choice.finished_by,
        "stop_reason": choice.stop_reason,
        **({"token_ids": choice.token_ids} if request.return_token_ids else {}),
    }
