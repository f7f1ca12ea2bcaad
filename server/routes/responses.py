"""POST /v1/responses: OpenAI's newer API over the same chat. Stateless: clients cannot fetch an answer again."""

from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequestError
from server.context import Served
from server.errors import ApiError, new_id
from server.http.body import encode_json
from server.http.caller import Caller
from server.intake.conversation import admit_prompt
from server.intake.response_prompt import tokenize_response_prompt
from server.left_out import left_out_headers
from server.output.collect import collect
from server.output.response_answer import ResponseAnswer
from server.output.sse import EventStream
from server.output.stream_options import with_stream_options
from server.output.timings import find_timings
from server.protocol.responses.request import ResponsePrompt, ResponseRequest

NOT_STORED = "This server stores no responses: keep the answer of POST /v1/responses."


async def create_response(http: HttpRequest, served: Served) -> Response:
    """Validate, tokenise and admit the chat before a status is sent, so that errors keep their status."""
    request, served = await served.read(http, ResponseRequest)
    caller: Caller = http.state.caller
    response_id = new_id("resp_")
    try:
        limit = request.max_output_tokens
        chat, ids = await tokenize_response_prompt(served, request, caller.tenant, limit)
        chat.check_limits(served.config)
        conversation = await admit_prompt(served, caller, chat, ids, response_id)
    except InvalidRequestError as error:
        raise request.in_our_terms(error) from None
    timings = partial(find_timings, served.driver, caller.tenant, response_id)
    answer = ResponseAnswer(request, response_id, served.driver.tokenizer, conversation, timings)
    headers = left_out_headers(request.left_out)
    if request.stream:
        stream = EventStream(
            conversation.generation,
            with_stream_options(answer.encode, None, request.include_obfuscation),
            answer.ending,
            served.config,
            opening=answer.opening(),
            failure=answer.failure,
        )
        stream.headers.update(headers)
        return stream
    await collect(conversation.generation, http.receive, [answer], num_logprobs=request.top_logprobs)
    return Response(encode_json(answer.result()), media_type="application/json", headers=headers)


async def count_input_tokens(http: HttpRequest, served: Served) -> Response:
    """Count the tokens of a request's prompt."""
    request, served = await served.read(http, ResponsePrompt)
    try:
        _, ids = await tokenize_response_prompt(served, request, http.state.caller.tenant, None, counts=True)
    except InvalidRequestError as error:
        raise request.in_our_terms(error) from None
    content = {"object": "response.input_tokens", "input_tokens": len(ids)}
    headers = left_out_headers(request.left_out)
    return Response(encode_json(content), media_type="application/json", headers=headers)


async def stored_response(http: HttpRequest, served: Served) -> Response:
    """Answer requests for a stored response: the server stores none."""
    raise ApiError(404, NOT_STORED, param="response_id", code="response_not_found")


async def refuse_other_methods(http: HttpRequest, served: Served) -> Response:
    """Answer GET /v1/responses/input_tokens, which would otherwise look like a response of that id."""
    raise HTTPException(405, headers={"Allow": "POST"})


async def no_compaction(http: HttpRequest, served: Served) -> Response:
    """Answer POST /v1/responses/compact: the server compacts no conversations."""
    message = "This server compacts no conversations: send all items, or truncation: 'auto'."
    raise ApiError(404, message, code="not_found")
