"""What /v1/responses and /v1/messages share: both ask a chat, and read its answer as a sequence of parts."""

from dataclasses import dataclass

from starlette.types import Scope

from engine.errors import InvalidRequestError
from engine.request import Request
from engine.sampling_params import SamplingParams
from server.context import Served
from server.errors import invalid
from server.http.api_keys import account_of, cache_salt, tenant_of
from server.intake.answer_form import find_answer_form, prepare_answer
from server.intake.generation import Generation
from server.intake.prompts import resolve_params
from server.output.prompt_logprobs import fit_logprobs
from server.protocol import ChatCompletionRequest
from server.tools.message_reader import MessageReader


@dataclass(frozen=True)
class Conversation:
    """A chat that was admitted. `reader` turns its outputs into parts; `visible_token_ids` are for its logprobs."""

    generation: Generation
    reader: MessageReader
    visible_token_ids: tuple[int, ...] = ()


async def admit(
    served: Served, scope: Scope, request: ChatCompletionRequest, ids: list[int], response_id: str
) -> Conversation:
    """Queue a chat of one sample whose prompt is `ids`; errors name the fields of a chat request."""
    max_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = request.sampling_params(request.max_completion_tokens, max_logprobs)
    form = find_answer_form(served, request, ids)
    salt, tenant = cache_salt(scope, request.cache_salt), tenant_of(scope)
    params = await resolve_params(served.driver, params if form is None else form.apply(params), tenant)
    await prepare_answer(served.driver, request, form, tenant)
    params = fit_logprobs(params, 1, served.driver.model.max_model_len - len(ids), "top_logprobs")
    queued = Request(f"{response_id}-0", ids, params, request.priority, salt, "messages", None, tenant)
    reader = MessageReader(None, None) if form is None else form.reader()
    generation = Generation.admit(served.driver, [queued], account_of(scope), request.timeout)
    generation.num_reasoning_tokens = lambda: reader.num_reasoning_tokens
    return Conversation(generation, reader, () if form is None else form.visible_token_ids)


def max_tokens_of(request: ChatCompletionRequest) -> int | None:
    """max_completion_tokens wins over the older max_tokens; neither means the rest of the context."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _sampling_params(request: ChatCompletionRequest) -> SamplingParams:
    max_tokens = max_tokens_of(request)
    if max_tokens == 0 and request.prompt_logprobs is None:
        raise invalid("max_tokens must be at least 1, but for prompt_logprobs alone.", "max_tokens")
    if not request.logprobs:
        return request.sampling_params(max_tokens, None)
    return request.sampling_params(max_tokens, request.top_logprobs or 0)


def check_ranges(request: ChatCompletionRequest) -> None:
    """Raise InvalidRequestError for what a chat would be refused for before its prompt is looked at."""
    try:
        _sampling_params(request)
    except InvalidRequestError as error:
        raise _name_max_completion_tokens(error, request) from None


def _name_max_completion_tokens(error: InvalidRequestError, request: ChatCompletionRequest) -> InvalidRequestError:
    """The engine knows one name for the limit; an error names the one that the client sent."""
    if error.param != "max_tokens" or request.max_completion_tokens is None:
        return error
    return InvalidRequestError(
        str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens", error.code
    )
