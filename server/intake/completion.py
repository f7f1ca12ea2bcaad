"""Completion: a request of /v1/completions that was admitted. Its prompts are texts or token ids, maybe several."""

from dataclasses import dataclass

import msgspec

from engine.replicas.engine import Engine
from engine.sampling_params import SamplingParams
from engine.text.fill_in_middle import FillInMiddle
from engine.text.tokenizer import EncodedPart, Tokenizer
from server.context import Served
from server.errors import invalid
from server.http.caller import Caller, EnginePrompt
from server.intake.beam_search import beam_search_params
from server.intake.constraints import compile_output, resolve_banned_tokens, structured_output_field
from server.intake.generation import Generation
from server.intake.logprob_limits import check_prompt_logprobs, fit_logprobs
from server.intake.prompts import Truncation, check_num_ids, check_vocabulary, encode_texts, truncation_of
from server.protocol import CompletionRequest, parse_prompts

DEFAULT_MAX_TOKENS = 16  # OpenAI's
CHARS = 4  # estimated characters per token, to tell short work from long

Prompts = list[str] | list[list[int]]


@dataclass(frozen=True)
class Completion:
    """`token_ids` are those of each prompt; `echoes` the text of each prompt to repeat, empty without `echo`."""

    generation: Generation
    token_ids: list[list[int]]
    echoes: list[str]


async def admit_completion(served: Served, caller: Caller, request: CompletionRequest, response_id: str) -> Completion:
    """Tokenise the prompts and queue them. Raises InvalidRequestError naming the field, and what Driver.generate
    raises."""
    driver, tenant = served.driver, caller.tenant
    max_tokens = _max_tokens(request)
    beams = beam_search_params(request, max_tokens)
    params = request.sampling_params(max_tokens, _num_logprobs(request)) if beams is None else beams.sampling_params()
    if params.bad_words or params.allowed_token_ids is not None:
        params = await resolve_banned_tokens(driver, params, tenant)
    prompts = parse_prompts(request.prompt, served.config.max_prompts)
    _check_queue(served, request, len(prompts), 1 if beams or params.greedy or not params.generates else params.n)
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    truncation = _truncation(driver, request, prompts)
    parts, echoes = await _tokenize(driver, request, prompts, names, truncation, tenant)
    ids, num_truncated = _truncate(driver, parts, truncation)
    check_prompt_logprobs(request, ids)
    if beams is None and request.logprobs is not None and not request.stream:  # a stream sends logprobs at once
        params = fit_logprobs(params, len(ids), driver.model.max_model_len - min(map(len, ids)), "logprobs")
    await compile_output(driver, params.structured_output, structured_output_field(request), tenant)
    engine_prompts = [
        EnginePrompt(prompt_ids, _fit_default(served, request, params, prompt_ids), name)
        for prompt_ids, name in zip(ids, names, strict=True)
    ]
    queued = caller.requests(response_id, engine_prompts, request, beams, served.adapter_of(request.model))
    return Completion(Generation.admit(driver, queued, caller.limiter, num_truncated), ids, echoes)


def _max_tokens(request: CompletionRequest) -> int:
    return DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens


def _num_logprobs(request: CompletionRequest) -> int | None:
    """Alternatives to each generated token. Ranking samples needs their logprobs even if the client asks for none."""
    return 0 if request.logprobs is None and request.ranks_samples else request.logprobs


def _check_queue(served: Served, request: CompletionRequest, num_prompts: int, num_sequences: int) -> None:
    """Refuse a request that even an idle server could not queue: after a 429 the client would send it for ever.

    `num_sequences` are those of a prompt; the queue accepts the last prompt where it has room for one sequence.
    """
    limit = served.config.max_queued_requests
    if (num_prompts - 1) * num_sequences >= limit:
        name = "prompt" if num_prompts > limit else "best_of" if request.ranks_samples else "n"
        message = f"{num_prompts} prompts with {num_sequences} samples each are more than the queue holds ({limit}): "
        raise invalid(message + "send fewer at a time, or start the server with --max-queued-requests.", name)


async def _tokenize(
    driver: Engine,
    request: CompletionRequest,
    prompts: Prompts,
    names: list[str],
    truncation: Truncation | None,
    tenant: str,
) -> tuple[list[EncodedPart], list[str]]:
    """(token ids of each prompt, the text of each to repeat: empty unless `echo` is set)."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    tokens = [prompt for prompt in prompts if isinstance(prompt, list)]
    if texts:
        parts = await _encode_texts(driver, request, texts, names, truncation, tenant)
    else:
        parts = await _read_token_ids(driver, request, tokens, names, truncation, tenant)
    if not request.echo:
        return parts, [""] * len(parts)
    if not texts:
        size = CHARS * sum(map(len, tokens))
        texts = await driver.tokenizer.run(
            tenant, size, _decode_all, driver.tokenizer, tokens, request.skip_special_tokens
        )
    return parts, texts


async def _encode_texts(
    driver: Engine,
    request: CompletionRequest,
    texts: list[str],
    names: list[str],
    truncation: Truncation | None,
    tenant: str,
) -> list[EncodedPart]:
    reading = None if truncation is None else truncation.reading
    framed = [_with_suffix(driver.tokenizer, request.suffix, text) for text in texts]
    encoded = await encode_texts(driver, framed, names, request.add_special_tokens, tenant, reading)
    return [part if part.token_ids else EncodedPart(_new_document(driver)) for part in encoded]


async def _read_token_ids(
    driver: Engine,
    request: CompletionRequest,
    prompts: list[list[int]],
    names: list[str],
    truncation: Truncation | None,
    tenant: str,
) -> list[EncodedPart]:
    for prompt_ids, name in zip(prompts, names, strict=True):
        check_num_ids(driver, len(prompt_ids), name, truncation is not None)
        check_vocabulary(prompt_ids, driver.model.vocab_size, name)
    if not request.suffix:
        return [EncodedPart(prompt_ids) for prompt_ids in prompts]
    suffix = (await encode_texts(driver, [request.suffix], ["suffix"], False, tenant))[0].token_ids
    return [EncodedPart(_fill_in_middle(driver.tokenizer).ids(prompt, suffix)) for prompt in prompts]


def _new_document(driver: Engine) -> list[int]:
    """The token ids of an empty prompt; none where the model has no such token, and the engine refuses the prompt."""
    separator = driver.tokenizer.document_separator
    return driver.eos_token_ids[:1] if separator is None else [separator]


def _with_suffix(tokenizer: Tokenizer, suffix: str | None, prompt: str) -> str:
    return _fill_in_middle(tokenizer).text(prompt, suffix) if suffix else prompt


def _fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle:
    if tokenizer.fill_in_middle is None:
        message = "suffix is not supported: this model has no tokens to fill in the middle of a text."
        raise invalid(message, "suffix", "unsupported_value")
    return tokenizer.fill_in_middle


def _decode_all(tokenizer: Tokenizer, prompts: list[list[int]], skip_special_tokens: bool) -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens) for ids in prompts]


def _truncation(driver: Engine, request: CompletionRequest, prompts: Prompts) -> Truncation | None:
    if request.truncate_prompt_tokens is None:
        return None
    if request.suffix or request.echo:
        name = "suffix" if request.suffix else "echo"
        raise invalid(f"{name} may not be combined with truncate_prompt_tokens.", name, "unsupported_value")
    from_text = isinstance(prompts[0], str) and request.add_special_tokens
    num_kept = len(driver.tokenizer.document_start) if from_text else 0
    return truncation_of(driver, request, _max_tokens(request), num_kept)


def _truncate(
    driver: Engine, parts: list[EncodedPart], truncation: Truncation | None
) -> tuple[list[list[int]], int | None]:
    """(the truncated prompts, the number of tokens cut off from all of them; None without truncation)."""
    if truncation is None:
        return [part.token_ids for part in parts], None
    cut = [truncation.cut(driver, part) for part in parts]
    return [ids for ids, _ in cut], sum(num_cut for _, num_cut in cut)


def _fit_default(served: Served, request: CompletionRequest, params: SamplingParams, ids: list[int]) -> SamplingParams:
    """The default of max_tokens shrinks to the rest of the context; an explicit max_tokens that is too large fails."""
    room = served.driver.model.max_model_len - len(ids)
    if request.max_tokens is not None or not 0 < room < DEFAULT_MAX_TOKENS:
        return params
    return msgspec.structs.replace(params, max_tokens=room)
