"""POST /v1/completions."""

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.driver import Driver
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.fill_in_middle import FillInMiddle
from engine.text.tokenizer import EncodedPart, Tokenizer
from server.context import Served
from server.errors import invalid
from server.http.api_keys import account_of, cache_salt, tenant_of
from server.http.body import encode_json, read_request
from server.intake.beam_search import beam_search_params
from server.intake.generation import Generation
from server.intake.prompts import (
    Truncation,
    check_num_ids,
    check_vocabulary,
    encode_texts,
    resolve_params,
    truncation_of,
)
from server.intake.structured_output import prepare, structured_output_field
from server.output.collect import Choice, collect
from server.output.completion_chunks import CompletionChunks, _aligner
from server.output.logprobs import encoded_completion_logprobs, token_names
from server.output.prompt_logprobs import PromptReports, check_size, fit_logprobs
from server.output.sse import EventStream
from server.output.stream_options import with_stream_options
from server.output.timings import asked_timings
from server.protocol import CompletionRequest, parse_prompts

DEFAULT_MAX_TOKENS = 16  # OpenAI's
CHARS = 4  # of a token, to tell short work from long


async def create_completion(http: HttpRequest, served: Served) -> Response:
    """Everything is validated, tokenised and admitted before a status is sent, so that errors keep theirs."""
    served.check_ready()
    request = await read_request(http, served, CompletionRequest)
    served.check_request(request)
    request = served.with_model_defaults(request)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    beams = beam_search_params(request, max_tokens)
    params = request.sampling_params(max_tokens, _num_logprobs(request)) if beams is None else beams.sampling_params()
    tenant = tenant_of(http.scope)
    params = await resolve_params(served.driver, params, tenant)
    prompts = parse_prompts(request.prompt, served.config.max_prompts)
    _check_queue(served, request, len(prompts), 1 if beams or params.greedy or not params.generates else params.n)
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    truncation = _truncation(served.driver, request, prompts)
    parts, echoes = await _tokenize(served.driver, request, prompts, names, truncation, tenant)
    ids, num_truncated = _truncate(served.driver, parts, truncation)
    check_size(request, ids)
    if beams is None and request.logprobs is not None and not request.stream:  # a stream passes them on
        room = served.driver.model.max_model_len - min(map(len, ids))
        params = fit_logprobs(params, len(ids), room, "logprobs")

    await prepare(served.driver, params.structured_output, structured_output_field(request), tenant)
    head = served.response_head("cmpl", "text_completion", request)
    salt = cache_salt(http.scope, request.cache_salt)
    generation = Generation.admit(
        served.driver,
        [
            Request(
                f"{head['id']}-{i}",
                ids[i],
                _fit(served, request, params, ids[i]),
                request.priority,
                salt,
                name,
                beams,
                tenant,
            )
            for i, name in enumerate(names)
        ],
        account_of(http.scope),
        request.timeout,
    )
    generation.num_truncated = num_truncated
    reports = PromptReports(served.driver.tokenizer, request, echoes, request.num_echo_logprobs, tenant)
    generation.on_prompt_logprobs = reports.add
    if request.stream:
        chunks = CompletionChunks(request, head, served.driver.tokenizer, echoes, ids, reports)
        return EventStream(
            generation,
            with_stream_options(chunks.encode, request, generation),
            lambda: chunks.ending(generation, asked_timings(served.driver, http.scope, request, head["id"])),
            served.config.keep_alive_interval,
        )
    tokenizer = served.driver.tokenizer
    choices = [Choice(echo, _aligner(request, tokenizer, echo)) for echo in echoes for _ in range(generation.n)]
    await collect(generation, http.receive, choices)
    if request.ranks_samples:
        choices = best_choices(choices, generation.n, request.n)
    timings = asked_timings(served.driver, http.scope, request, head["id"])

    def encode_response() -> bytes:
        found = [
            _choice(i, choice, tokenizer, request, ids[i // request.n], reports) for i, choice in enumerate(choices)
        ]
        content = {**head, "choices": found, "usage": generation.usage()}
        return encode_json(content if timings is None else content | {"timings": timings})

    num_logprobs = sum(len(choice.entries) for choice in choices) * (1 + (request.logprobs or 0))
    if request.num_prompt_logprobs is not None:
        num_logprobs += request.n * sum(map(len, ids)) * (1 + request.num_prompt_logprobs)
    body = await served.encode(tenant, num_logprobs, encode_response)
    return Response(body, media_type="application/json")


def _check_queue(served: Served, request: CompletionRequest, num_prompts: int, num_sequences: int) -> None:
    """Refuse for good what an idle server could not queue: as a 429 it would be sent again for ever.

    `num_sequences` are those of a prompt; the last prompt is taken where there is room for one.
    """
    limit = served.config.max_queued_requests
    if (num_prompts - 1) * num_sequences >= limit:
        name = "prompt" if num_prompts > limit else "best_of" if request.ranks_samples else "n"
        message = f"{num_prompts} prompts with {num_sequences} samples each are more than the queue holds ({limit}): "
        raise invalid(message + "send fewer at a time, or start the server with --max-queued-requests.", name)


def _num_logprobs(request: CompletionRequest) -> int | None:
    """Samples are ranked by the logprobs of their tokens, whether or not the client wants to see them."""
    return 0 if request.logprobs is None and request.ranks_samples else request.logprobs


def best_choices(choices: list[Choice], best_of: int, n: int) -> list[Choice]:
    """The n of the highest logprob per token among each `best_of` consecutive samples, which are of one prompt."""
    best = []
    for start in range(0, len(choices), best_of):
        samples = choices[start : start + best_of]
        best += sorted(samples, key=lambda choice: choice.mean_logprob, reverse=True)[:n]
    return best


async def _tokenize(
    driver: Driver,
    request: CompletionRequest,
    prompts: list[str] | list[list[int]],
    names: list[str],
    truncation: Truncation | None,
    tenant: str,
) -> tuple[list[EncodedPart], list[str]]:
    """(token ids of each prompt, the text of each to repeat: empty unless `echo` is set)."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    tokens = [prompt for prompt in prompts if isinstance(prompt, list)]
    if texts:
        reading = None if truncation is None else truncation.reading
        framed = [_with_suffix(driver.tokenizer, request.suffix, text) for text in texts]
        encoded = await encode_texts(driver, framed, names, request.add_special_tokens, tenant, reading)
        parts = [part if part.token_ids else EncodedPart(_new_document(driver)) for part in encoded]
    else:
        for prompt_ids, name in zip(tokens, names, strict=True):
            check_num_ids(driver, len(prompt_ids), name, truncation is not None)
            check_vocabulary(prompt_ids, driver.model.vocab_size, name)
        parts = [EncodedPart(prompt_ids) for prompt_ids in tokens]
        if request.suffix:
            suffix = (await encode_texts(driver, [request.suffix], ["suffix"], False, tenant))[0].token_ids
            parts = [EncodedPart(_fill_in_middle(driver.tokenizer).ids(prompt, suffix)) for prompt in tokens]
    if not request.echo:
        return parts, [""] * len(parts)
    if not texts:
        size = CHARS * sum(map(len, tokens))
        decode, skip = _decode_all, request.skip_special_tokens
        texts = await driver.tokenizer.run(tenant, size, decode, driver.tokenizer, tokens, skip)
    return parts, texts


def _new_document(driver: Driver) -> list[int]:
    """Token ids that stand for an empty prompt; none where the model has no such token, and the engine refuses it."""
    separator = driver.tokenizer.document_separator
    return driver.eos_token_ids[:1] if separator is None else [separator]


def _with_suffix(tokenizer: Tokenizer, suffix: str | None, prompt: str) -> str:
    return _fill_in_middle(tokenizer).text(prompt, suffix) if suffix else prompt


def _fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle:
    if tokenizer.fill_in_middle is None:
        message = "suffix is not supported: this model has no tokens to fill in the middle of a text."
        raise invalid(message, "suffix", "unsupported_value")
    return tokenizer.fill_in_middle


def _truncation(driver: Driver, request: CompletionRequest, prompts: list[str] | list[list[int]]) -> Truncation | None:
    if request.truncate_prompt_tokens is None:
        return None
    if request.suffix or request.echo:
        name = "suffix" if request.suffix else "echo"
        raise invalid(f"{name} may not be combined with truncate_prompt_tokens.", name, "unsupported_value")
    from_text = isinstance(prompts[0], str) and request.add_special_tokens
    num_kept = len(driver.tokenizer.document_start) if from_text else 0
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return truncation_of(driver, request, max_tokens, num_kept)


def _truncate(
    driver: Driver, parts: list[EncodedPart], truncation: Truncation | None
) -> tuple[list[list[int]], int | None]:
    """(prompts as short as was asked for, how many tokens that took off all of them)."""
    if truncation is None:
        return [part.token_ids for part in parts], None
    cut = [truncation.cut(driver, part) for part in parts]
    return [ids for ids, _ in cut], sum(num_cut for _, num_cut in cut)


def _decode_all(tokenizer: Tokenizer, prompts: list[list[int]], skip_special_tokens: bool) -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens) for ids in prompts]


def _fit(served: Served, request: CompletionRequest, params: SamplingParams, ids: list[int]) -> SamplingParams:
    """A default that nobody asked for shrinks to what is left of the context; an explicit one is left to fail."""
    room = served.driver.model.max_model_len - len(ids)
    if request.max_tokens is not None or not 0 < room < DEFAULT_MAX_TOKENS:
        return params
    return msgspec.structs.replace(params, max_tokens=room)


def _choice(
    index: int,
    choice: Choice,
    tokenizer: Tokenizer,
    request: CompletionRequest,
    prompt_ids: list[int],
    reports: PromptReports,
) -> dict[str, Any]:
    names = token_names(tokenizer, request.return_tokens_as_token_ids)
    prompt_index, logprobs = index // request.n, None
    if request.logprobs is not None:
        logprobs = encoded_completion_logprobs(reports.echoed.get(prompt_index), choice.entries, names)
    listed = {} if request.prompt_logprobs is None else {"prompt_logprobs": reports.listed[prompt_index]}
    ids = {"prompt_token_ids": prompt_ids, "token_ids": choice.token_ids} if request.return_token_ids else {}
    return {
        "index": index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **listed,
        **ids,
    }
