"""POST /v1/completions."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.text.tokenizer import Tokenizer
from server.context import Served
from server.http.body import encode_json
from server.http.caller import Caller
from server.intake.completion import Completion, admit_completion
from server.output.collect import Choice, collect
from server.output.completion_chunks import CompletionChunks, completion_aligner
from server.output.logprobs import encoded_completion_logprobs, token_names
from server.output.prompt_logprobs import PromptReports
from server.output.sse import EventStream
from server.output.stream_options import with_stream_options
from server.output.timings import Timings, find_timings
from server.protocol import CompletionRequest


async def create_completion(http: HttpRequest, served: Served) -> Response:
    """Validate, tokenise and admit all prompts before a status is sent, so that errors keep their status."""
    request, served = await served.read(http, CompletionRequest)
    caller: Caller = http.state.caller
    head = served.response_head("cmpl", "text_completion", request.model)
    completion = await admit_completion(served, caller, request, head["id"])
    reports = PromptReports(
        served.driver.tokenizer, request, completion.echoes, request.num_echo_logprobs, caller.tenant
    )
    timings = partial(find_timings, served.driver, caller.tenant, head["id"])
    if request.stream:
        return _stream(served, request, head, completion, reports=reports, timings=timings)
    return await _collect(http, served, request, head, completion, reports=reports, timings=timings)


def _stream(
    served: Served,
    request: CompletionRequest,
    head: dict[str, Any],
    completion: Completion,
    reports: PromptReports,
    timings: Timings,
) -> Response:
    tokenizer, usage = served.driver.tokenizer, completion.generation.usage
    chunks = CompletionChunks(request, head, tokenizer, completion.echoes, completion.token_ids, reports)

    running_usage = usage if request.includes_running_usage else None
    encode = with_stream_options(chunks.encode, running_usage, request.include_obfuscation)
    return EventStream(
        completion.generation,
        encode,
        partial(chunks.ending, usage, timings),
        served.config,
        on_prompt_logprobs=reports.add,
        text_frame=chunks.text_frame if encode == chunks.encode else None,
    )


async def _collect(
    http: HttpRequest,
    served: Served,
    request: CompletionRequest,
    head: dict[str, Any],
    completion: Completion,
    reports: PromptReports,
    timings: Timings,
) -> Response:
    tokenizer, generation, ids = served.driver.tokenizer, completion.generation, completion.token_ids
    choices = [
        Choice(echo, completion_aligner(request, tokenizer, echo))
        for echo in completion.echoes
        for _ in range(generation.n)
    ]
    num_logprobs = request.logprobs or 0
    await collect(generation, http.receive, choices, reports.add, num_logprobs)
    if request.ranks_samples:
        choices = best_choices(choices, generation.n, request.n)
    reported = {"timings": timings()} if request.return_timings else {}

    def encode_response() -> bytes:
        found = [
            _choice(i, choice, tokenizer, request, ids[i // request.n], reports) for i, choice in enumerate(choices)
        ]
        return encode_json({**head, "choices": found, "usage": generation.usage(), **reported})

    num_reported = sum(len(choice.entries) for choice in choices) * (1 + num_logprobs)
    if request.num_prompt_logprobs is not None:
        num_reported += request.n * sum(map(len, ids)) * (1 + request.num_prompt_logprobs)
    body = await served.encode(http.state.caller.tenant, num_reported, encode_response)
    return Response(body, media_type="application/json")


def best_choices(choices: list[Choice], best_of: int, n: int) -> list[Choice]:
    """The n samples with the highest mean logprob of each prompt, which has `best_of` consecutive samples."""
    best = []
    for start in range(0, len(choices), best_of):
        samples = choices[start : start + best_of]
        best += sorted(samples, key=lambda choice: choice.mean_logprob, reverse=True)[:n]
    return best


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
