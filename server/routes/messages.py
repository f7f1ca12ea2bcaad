"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same chat."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequestError
from server.context import Served
from server.errors import new_id
from server.http.body import encode_json
from server.http.caller import Caller
from server.intake.context_edits import edited_prompt
from server.intake.conversation import admit_prompt
from server.intake.form_finder import splits_thinking
from server.left_out import left_out_headers
from server.output.collect import collect
from server.output.message_output import MessageAnswer, error_event
from server.output.sse import EventStream
from server.output.timings import find_timings
from server.protocol import ChatCompletionRequest
from server.protocol.anthropic.request import MessagesPrompt, MessagesRequest, in_our_terms


async def create_message(http: HttpRequest, served: Served) -> Response:
    """Validate, tokenise and admit the chat before a status is sent, so that errors keep their status."""
    request, served = await served.read(http, MessagesRequest)
    caller: Caller = http.state.caller
    message_id = new_id("msg_")
    try:
        prompt = await edited_prompt(served, request, caller.tenant)
        chat = limit_thinking(served, prompt.chat, request)
        conversation = await admit_prompt(served, caller, chat, prompt.token_ids, message_id)
    except InvalidRequestError as error:
        raise in_our_terms(error) from None
    timings = partial(find_timings, served.driver, caller.tenant, message_id)
    answer = MessageAnswer(request, message_id, conversation, timings, prompt.applied)
    headers = left_out_headers(request.left_out)
    if request.stream:
        stream = EventStream(conversation.generation, answer.encode, answer.ending, served.config, failure=error_event)
        stream.headers.update(headers)
        return stream
    await collect(conversation.generation, http.receive, [answer])
    return Response(encode_json(answer.result()), media_type="application/json", headers=headers)


async def count_tokens(http: HttpRequest, served: Served) -> Response:
    """Count the tokens of a message's prompt."""
    request, served = await served.read(http, MessagesPrompt)
    try:
        prompt = await edited_prompt(served, request, http.state.caller.tenant)
    except InvalidRequestError as error:
        raise in_our_terms(error) from None
    count: dict[str, Any] = {"input_tokens": len(prompt.token_ids)}
    if prompt.applied is not None:
        count["context_management"] = {"original_input_tokens": prompt.num_original_tokens}
    headers = left_out_headers(request.left_out)
    return Response(encode_json(count), media_type="application/json", headers=headers)


def limit_thinking(served: Served, chat: ChatCompletionRequest, request: MessagesRequest) -> ChatCompletionRequest:
    """`chat` with the thinking budget of `request`, where the model's thinking can be limited.

    Clients send a budget to every model, so a model without thinking ignores the budget.
    """
    if request.thinking is None or request.thinking.budget_tokens is None or not splits_thinking(served):
        return chat
    return chat.model_copy(update={"thinking_token_budget": request.thinking.budget_tokens})
