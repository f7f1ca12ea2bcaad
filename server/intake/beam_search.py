"""Beam search over HTTP: `use_beam_search: true`, with vLLM's names. `n` hypotheses are searched and returned.

The search is deterministic and uses the model's own distribution. Fields that would change the distribution, or need
tokens to be final before the end, are refused. A field without effect on the result (`seed`) is accepted.
"""

from engine.errors import InvalidRequestError
from engine.sampling_params import BeamSearchParams
from engine.thinking import FIELD
from server.errors import invalid
from server.protocol import GenerationRequest

# Field -> the values that change nothing for beam search; older clients send temperature 0.
NEUTRAL = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
# `logprobs: true` is allowed: logprobs of the returned tokens are known. Alternatives (a number) are not kept.
REFUSED = (
    "logit_bias",
    "stop",
    "logprobs",
    "top_logprobs",
    "response_format",
    "structured_outputs",
    "bad_words",
    "allowed_token_ids",
    "tools",
)


def beam_search_params(request: GenerationRequest, max_tokens: int | None) -> BeamSearchParams | None:
    """The search that the request asks for, or None. Raises InvalidRequestError naming the field."""
    if not request.use_beam_search:
        _refuse_without_beams(request)
        return None
    if request.stream:
        message = "stream must be false with use_beam_search: no hypothesis is final before the search has ended."
        raise invalid(message, "stream", "unsupported_value")
    if request.num_samples != request.n:
        raise invalid("best_of must equal n with use_beam_search: n is the beam width.", "best_of", "unsupported_value")
    for name, neutral in NEUTRAL.items():
        if getattr(request, name) not in neutral:
            raise _not_with_beams(name)
    for name in REFUSED:
        if (value := getattr(request, name, None)) and value is not True:
            raise _not_with_beams(name)
    if getattr(request, "thinking_budget", None) is not None:
        raise _not_with_beams(FIELD)
    if request.num_prompt_logprobs is not None:
        raise _not_with_beams("logprobs" if request.prompt_logprobs is None else "prompt_logprobs")
    try:
        return BeamSearchParams(
            beam_width=request.n,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=tuple(request.stop_token_ids),
            length_penalty=request.length_penalty,
            early_stopping=request.early_stopping,
            skip_special_tokens=request.skip_special_tokens,
            include_stop_str_in_output=request.include_stop_str_in_output,
        )
    except InvalidRequestError as error:
        if error.param != "beam_width":
            raise
        raise invalid(str(error).replace("beam_width", "n (the beam width)"), "n") from None


def _refuse_without_beams(request: GenerationRequest) -> None:
    for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(request, name) != default:
            raise invalid(f"{name} has a meaning only with use_beam_search: true.", name, "unsupported_value")


def _not_with_beams(name: str) -> InvalidRequestError:
    return invalid(f"{name} is not supported with use_beam_search: leave it out.", name, "unsupported_value")
