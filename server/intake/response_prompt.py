"""The prompt of /v1/responses: the request as a chat, with truncation: "auto" without its oldest turns."""

from functools import partial

from engine.errors import InvalidRequestError
from server.context import Served
from server.intake.prompts import tokenize_chat
from server.protocol import ChatCompletionRequest
from server.protocol.responses.request import ResponsePrompt


async def tokenize_response_prompt(
    served: Served, request: ResponsePrompt, tenant: str, max_tokens: int | None, counts: bool = False
) -> tuple[ChatCompletionRequest, list[int]]:
    """The chat and the token ids of its prompt. Errors name the fields of a chat request.

    With truncation: "auto" the prompt loses the fewest turns from its beginning that make it fit, never the last turn.
    Bisection finds the number: each try costs a tokenisation.
    """
    if request.truncation != "auto":
        chat = await served.convert(tenant, request.to_chat)
        return chat, await tokenize_chat(served, chat, tenant, counts)
    longest = served.driver.model.max_model_len - (max_tokens or 1)
    low, high = 0, max(0, request.num_turns - 1)
    middle = 0  # most prompts fit without a cut
    while low < high:
        chat = await served.convert(tenant, partial(request.to_chat, middle))
        fits = await _fits(served, chat, tenant, longest)
        low, high = (low, middle) if fits else (middle + 1, high)
        middle = (low + high) // 2
    chat = await served.convert(tenant, partial(request.to_chat, low))
    return chat, await tokenize_chat(served, chat, tenant, counts)


async def _fits(served: Served, chat: ChatCompletionRequest, tenant: str, longest: int) -> bool:
    try:
        return len(await tokenize_chat(served, chat, tenant)) <= longest
    except InvalidRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
