"""POST /v1/embeddings.

A request may hold thousands of texts. The engine gets the texts of a few steps at a time, so requests of other clients
run between them. The answer is written in small portions, so streams of other clients go on.
"""

import asyncio
import time
from array import array
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import ContextLengthError, DeadlineError, QueueFullError, UnavailableError
from engine.outputs import FinishReason
from engine.replicas.engine import Engine
from engine.sampling_params import Pooling, SamplingParams
from engine.text.tokenizer import EncodedPart
from server.context import Served
from server.errors import invalid, new_id
from server.http.body import encode_json
from server.http.caller import Caller, EnginePrompt
from server.intake.generation import OutputStream
from server.intake.prompts import check_vocabulary, fewest_tokens, portions, reading_of
from server.output.collect import while_connected
from server.protocol import Prompt, Strict, parse_prompts
from server.protocol.generation_request import MAX_TIMEOUT, Salt

MAX_INPUTS = 2048  # both are OpenAI's
MAX_TOTAL_TOKENS = 300_000
STEPS_AHEAD = 2  # the step that runs and the step that is planned when it ends
PORTION = 16  # texts, or vectors, that are handled before other tasks have their turn


class EmbeddingRequest(Strict):
    """POST /v1/embeddings. Fields that OpenAI does not have carry vLLM's names and meanings."""

    is_request = True

    ignored = frozenset({"user"})

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, json_schema_extra={"not": {"const": 0}})
    add_special_tokens: bool = True
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    timeout: float | None = Field(None, gt=0.0, le=MAX_TIMEOUT)  # for all texts together
    cache_salt: Salt = ""


async def create_embeddings(http: HttpRequest, served: Served) -> Response:
    """Validate and tokenise all texts before the engine computes the first."""
    request, served = await served.read(http, EmbeddingRequest)
    caller: Caller = http.state.caller
    pooling = _pooling(served.driver, request)
    inputs = parse_prompts(request.input, MAX_INPUTS, "input")
    names = ["input"] if len(inputs) == 1 else [f"input[{i}]" for i in range(len(inputs))]
    ids = await _token_ids(served.driver, request, inputs, names, caller.tenant)
    num_tokens = sum(map(len, ids))
    params = SamplingParams(temperature=0.0, pooling=pooling)
    prompts = [EnginePrompt(prompt_ids, params, name) for prompt_ids, name in zip(ids, names, strict=True)]
    caller.check(num_tokens, request.priority)
    admission = _Admission(served, caller, request)
    vectors = await while_connected(http.receive, lambda: _embed_all(admission, prompts))
    body = await _encode_response(request, vectors, num_tokens)
    return Response(body, media_type="application/json")


def _pooling(driver: Engine, request: EmbeddingRequest) -> Pooling:
    if request.dimensions is None:
        return driver.model.pooling
    if not 1 <= request.dimensions <= driver.model.hidden_size:
        raise invalid(f"dimensions must be an integer from 1 to {driver.model.hidden_size}.", "dimensions")
    return msgspec.structs.replace(driver.model.pooling, dimensions=request.dimensions)


async def _token_ids(
    driver: Engine,
    request: EmbeddingRequest,
    inputs: list[str] | list[list[int]],
    names: list[str],
    tenant: str,
) -> list[list[int]]:
    """The token ids of each input. Raises InvalidRequestError for an input that is too long, and for too many tokens
    in all inputs."""
    longest = _truncation(driver, request)
    ids: list[list[int]] = []
    total = 0
    async for portion in _encoded(driver, request, inputs, names, longest, tenant):
        for part in portion:
            _check(driver, part, names[len(ids)])
            ids.append(part.token_ids)
            total += len(part.token_ids)
        if total > MAX_TOTAL_TOKENS:
            raise invalid(
                f"The inputs have more than {MAX_TOTAL_TOKENS} tokens in all: send them in several requests.", "input"
            )
    return ids


def _truncation(driver: Engine, request: EmbeddingRequest) -> int | None:
    """The number of tokens to which inputs are cut; None: longer inputs are refused. -1 stands for the context."""
    limit, asked = driver.model.max_model_len, request.truncate_prompt_tokens
    if asked == -1:
        return limit
    if asked is not None and not 1 <= asked <= limit:
        raise invalid(f"truncate_prompt_tokens must be -1 or an integer from 1 to {limit}.", "truncate_prompt_tokens")
    return asked


async def _encoded(
    driver: Engine,
    request: EmbeddingRequest,
    inputs: list[str] | list[list[int]],
    names: list[str],
    longest: int | None,
    tenant: str,
) -> AsyncIterator[list[EncodedPart]]:
    """Token ids of the inputs, in portions; the tokenizer's threads encode texts."""
    tokenizer, special, most = driver.tokenizer, request.add_special_tokens, reading_of(driver).num_tokens

    def encode(texts: list[str]) -> list[EncodedPart]:
        if longest is None:
            return [tokenizer.encode_part(text, special, most) for text in texts]
        return [EncodedPart(tokenizer.encode_truncated(text, special, longest)) for text in texts]

    texts = [text for text in inputs if isinstance(text, str)]
    if not texts:
        yield [EncodedPart(ids[:longest]) for ids in inputs if isinstance(ids, list)]
        return
    for text, name in zip(texts, names, strict=True):
        _check_text(driver, text, name, truncated=longest is not None)
    for portion in portions(texts):
        yield await tokenizer.run(tenant, sum(map(len, portion)), encode, portion)


def _check_text(driver: Engine, text: str, name: str, truncated: bool) -> None:
    """Refuse a text that is empty, or too long by its characters alone."""
    if not text:
        raise invalid(f"{name} is an empty string; there is nothing to embed.", name)
    at_least = fewest_tokens(driver, len(text))
    if at_least > driver.model.max_model_len and not truncated:
        raise _too_long(driver, f"{len(text)} characters, so at least {at_least} tokens", name)


def _check(driver: Engine, part: EncodedPart, name: str) -> None:
    """Refuse an input that is empty or too long. The Driver checks this too; here the error can name the input, and
    nothing has been computed."""
    model, ids = driver.model, part.token_ids
    if not ids:
        raise invalid(f"{name} has no tokens; there is nothing to embed.", name)
    if len(ids) > model.max_model_len:
        raise _too_long(driver, f"{'at least ' * bool(part.num_unread)}{len(ids)} tokens", name)
    check_vocabulary(ids, model.vocab_size, name)


def _too_long(driver: Engine, size: str, name: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {driver.model.max_model_len} tokens; {name} has {size}. Shorten it, "
        "or let it be cut with truncate_prompt_tokens: -1.",
        name,
    )


async def _embed_all(admission: "_Admission", prompts: list[EnginePrompt]) -> list[bytes]:
    """The vectors of `prompts`; the engine holds at most the texts of a few steps at any time.

    Raises what Driver.generate raises, but waits where the queue is full while some texts of this request are in it.
    """
    vectors = []
    try:
        for number, prompt in enumerate(prompts):
            while not admission.admit(number, prompt):
                vectors.append(await admission.next_vector())
            if number % PORTION == PORTION - 1:
                await asyncio.sleep(0)
        while admission.waiting:
            vectors.append(await admission.next_vector())
    finally:
        admission.close()
    return vectors


class _Admission:
    """`waiting`: the texts of one request that the engine holds, in order. The caller is charged for them."""

    def __init__(self, served: Served, caller: Caller, request: EmbeddingRequest) -> None:
        model = served.driver.model
        self._driver, self._caller, self._request = served.driver, caller, request
        self._adapter = served.adapter_of(request.model)
        self._id = new_id("embd-")
        self._deadline = None if request.timeout is None else time.monotonic() + request.timeout
        self._max_tokens, self._max_seqs = STEPS_AHEAD * model.max_num_batched_tokens, STEPS_AHEAD * model.max_num_seqs
        self._num_tokens = 0
        self.waiting: deque[OutputStream] = deque()

    def admit(self, number: int, prompt: EnginePrompt) -> bool:
        """Queue a text; False where some of the waiting texts must finish first.

        Raises DeadlineError once the request's timeout is over.
        """
        size = len(prompt.token_ids)
        if self.waiting and (self._num_tokens + size > self._max_tokens or len(self.waiting) >= self._max_seqs):
            return False
        timeout = self._seconds_left()
        try:
            stream = self._driver.generate(
                self._caller.request(f"{self._id}-{number}", prompt, self._request, timeout, adapter=self._adapter)
            )
        except QueueFullError:
            if not self.waiting:
                raise
            return False
        self._caller.limiter.use_tokens(size)
        self.waiting.append(stream)
        self._num_tokens += size
        return True

    async def next_vector(self) -> bytes:
        """The vector of the first waiting text. The text stays in `waiting` to its end, so `close` can abort it."""
        vector, aborted = b"", False
        try:
            async for output in self.waiting[0]:
                for sample in output.outputs:
                    vector, aborted = sample.embedding, sample.finish_reason is FinishReason.ABORT
        except DeadlineError:
            raise self._too_late() from None
        if aborted:  # the stream had no cause to raise
            raise UnavailableError("The server ended this request before it was finished.")
        self._num_tokens -= self.waiting.popleft().num_prompt_tokens
        return vector

    def close(self) -> None:
        """Abort the texts that wait or run."""
        for stream in self.waiting:
            stream.close()

    def _seconds_left(self) -> float | None:
        """The rest of the timeout for all texts; None without one."""
        if self._deadline is None:
            return None
        if (seconds := self._deadline - time.monotonic()) <= 0:
            raise self._too_late()
        return seconds

    def _too_late(self) -> DeadlineError:
        timeout = self._request.timeout
        return DeadlineError(f"The request was not finished within its timeout of {timeout:g} s.", "timeout")


async def _encode_response(request: EmbeddingRequest, vectors: list[bytes], num_tokens: int) -> bytes:
    parts = [b'{"object":"list","data":[']
    for i, vector in enumerate(vectors):
        if request.encoding_format == "base64":
            value = b'"' + b64encode(vector) + b'"'
        else:
            value = encode_json(array("f", vector).tolist())
        comma = b"," if i else b""
        parts.append(b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, i, value))
        if i % PORTION == PORTION - 1:
            await asyncio.sleep(0)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    parts.append(b'],"model":%b,"usage":%b}' % (encode_json(request.model), encode_json(usage)))
    return b"".join(parts)
