"""Limits on the logprobs of one response: a response that holds millions of them would fill the memory."""

from collections.abc import Sequence

import msgspec

from engine.sampling_params import SamplingParams
from server.errors import invalid
from server.protocol import GenerationRequest

MAX_REPORTED = 1 << 20  # logprobs in one response; some 40 bytes of JSON each


def check_prompt_logprobs(request: GenerationRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raise InvalidRequestError where a response would hold too many logprobs of prompt tokens.

    Each choice of the response repeats the logprobs of its prompt.
    """
    if (k := request.num_prompt_logprobs) is None:
        return
    total = request.n * sum(map(len, prompts)) * (1 + k)
    if total > MAX_REPORTED:
        raise invalid(
            f"The response would hold {total} logprobs of prompt tokens; at most {MAX_REPORTED} are sent at once. "
            "Lower n, the number of logprobs or of prompts.",
            "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs",
        )


def fit_logprobs(params: SamplingParams, num_prompts: int, room: int, param: str) -> SamplingParams:
    """`params` for a response that holds all logprobs of generated tokens, at most `room` tokens for each prompt.

    A max_tokens that the client left out shrinks to the limit; a larger one raises InvalidRequestError naming `param`.
    """
    if params.logprobs is None:
        return params
    for_each_token = num_prompts * params.n * (1 + params.logprobs)
    most, tokens = MAX_REPORTED // for_each_token, room if params.max_tokens is None else min(room, params.max_tokens)
    if tokens <= most:
        return params
    if params.max_tokens is None and most:
        return msgspec.structs.replace(params, max_tokens=most)
    raise invalid(
        f"The response could hold {tokens * for_each_token} logprobs of generated tokens; at most {MAX_REPORTED} are "
        "sent at once. Lower max_tokens, n, the number of logprobs or of prompts, or set stream: true.",
        param,
    )
