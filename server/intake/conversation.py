"""Conversation: a chat that was admitted. /v1/chat/completions, /v1/responses and /v1/messages all ask a chat."""

from dataclasses import dataclass

from engine.errors import InvalidRequestError
from engine.sampling_params import BeamSearchParams, SamplingParams
from server.context import Served
from server.errors import invalid
from server.http.caller import Caller, EnginePrompt
from server.intake.answer_form import AnswerForm
from server.intake.beam_search import beam_search_params
from server.intake.form_finder import prepare_answer_form
from server.intake.generation import Generation
from server.intake.logprob_limits import check_prompt_logprobs, fit_logprobs
from server.intake.prompts import tokenize_and_cut_chat, tokenize_prediction
from server.protocol import ChatCompletionRequest
from server.tools.message_reader import MessageReader


@dataclass(frozen=True)
class Conversation:
    """`token_ids` are those of the prompt. `form`: the form of the answer; None: plain text."""

    generation: Generation
    token_ids: list[int]
    form: AnswerForm | None

    @property
    def visible_token_ids(self) -> tuple[int, ...]:
        """Special tokens that stand in the text of the answer."""
        return () if self.form is None else self.form.visible_token_ids

    def reader(self) -> MessageReader:
        """A reader that turns the outputs of one sample into parts."""
        return MessageReader(None, None) if self.form is None else self.form.reader()


async def admit_chat(served: Served, caller: Caller, request: ChatCompletionRequest, response_id: str) -> Conversation:
    """Tokenise a chat and queue it. Raises InvalidRequestError naming the field, and what Driver.generate raises."""
    try:
        params, beams = _generation_params(request)
        ids, num_truncated = await tokenize_and_cut_chat(served, request, caller.tenant, params.max_tokens)
        truncated = None if request.truncate_prompt_tokens is None else num_truncated
        logprobs_field = "top_logprobs" if request.top_logprobs else "logprobs"
        prompt, form = await _prepare(served, caller, request, params, ids, logprobs_field)
        queued = caller.requests(response_id, [prompt], request, beams, served.adapter_of(request.model))
        return Conversation(Generation.admit(served.driver, queued, caller.limiter, truncated), ids, form)
    except InvalidRequestError as error:
        raise _name_max_completion_tokens(error, request) from None


async def admit_prompt(
    served: Served, caller: Caller, request: ChatCompletionRequest, ids: list[int], response_id: str
) -> Conversation:
    """Queue a chat whose prompt is `ids` already. Errors name the fields of a chat request."""
    params, _ = _generation_params(request)
    prompt, form = await _prepare(served, caller, request, params, ids, "top_logprobs")
    queued = caller.requests(response_id, [prompt], request, adapter=served.adapter_of(request.model))
    return Conversation(Generation.admit(served.driver, queued, caller.limiter), ids, form)


async def _prepare(
    served: Served,
    caller: Caller,
    request: ChatCompletionRequest,
    params: SamplingParams,
    ids: list[int],
    logprobs_field: str,
) -> tuple[EnginePrompt, AnswerForm | None]:
    """The prompt with parameters that hold the answer to its form and to the limits of one response; the form."""
    form, params = await prepare_answer_form(served, request, params, ids, caller.tenant)
    if request.prompt_logprobs is not None:
        check_prompt_logprobs(request, [ids])
    whole = not request.stream and not request.use_beam_search  # a stream sends logprobs at once
    if params.logprobs is not None and whole:
        params = fit_logprobs(params, 1, served.driver.model.max_model_len - len(ids), logprobs_field)
    prediction = await tokenize_prediction(served, request, caller.tenant)
    return EnginePrompt(ids, params, "messages", prediction), form


def max_tokens_of(request: ChatCompletionRequest) -> int | None:
    """max_completion_tokens wins over the older max_tokens; neither means the rest of the context."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def check_ranges(request: ChatCompletionRequest) -> None:
    """Raise InvalidRequestError for values that admission would refuse before it reads the prompt."""
    try:
        _sampling_params(request)
    except InvalidRequestError as error:
        raise _name_max_completion_tokens(error, request) from None


def _generation_params(request: ChatCompletionRequest) -> tuple[SamplingParams, BeamSearchParams | None]:
    beams = beam_search_params(request, max_tokens_of(request))
    return (_sampling_params(request), None) if beams is None else (beams.sampling_params(), beams)


def _sampling_params(request: ChatCompletionRequest) -> SamplingParams:
    max_tokens = max_tokens_of(request)
    if max_tokens == 0 and request.prompt_logprobs is None:
        raise invalid("max_tokens must be at least 1, but for prompt_logprobs alone.", "max_tokens")
    if not request.logprobs:
        return request.sampling_params(max_tokens, None)
    return request.sampling_params(max_tokens, request.top_logprobs or 0)


def _name_max_completion_tokens(error: InvalidRequestError, request: ChatCompletionRequest) -> InvalidRequestError:
    """The same error naming the limit that the client sent: the engine knows one name for the limit."""
    if error.param != "max_tokens" or request.max_completion_tokens is None:
        return error
    return InvalidRequestError(
        str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens", error.code
    )
