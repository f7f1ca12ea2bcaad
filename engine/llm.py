"""LLM: offline use. `LLM(model=...).generate(prompts, SamplingParams(...))`, without a server.

The Driver's event loop runs in a thread of its own, and the Worker is a fresh process, never a fork of this process.
So scripts need no `if __name__ == "__main__"`, and notebooks, which run an event loop already, work, too.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

from engine.checkpoint.sampling_defaults import SamplingDefaults
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidRequestError
from engine.outputs import CompletionOutput, FinishReason, PromptLogprobs, RequestOutput, TokenLogprobs
from engine.replicas.engine import Engine
from engine.replicas.replicas import make_engine
from engine.request import Request
from engine.requests.model_info import check_request
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.settings import from_keywords
from engine.text.bad_words import resolve_bans
from engine.text.tokenizer import Tokenizer
from engine.text.unicode import is_valid_unicode
from engine.thinking import FIELD

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = dict[str, Any]
T = TypeVar("T")

MAX_IN_FLIGHT = 1024  # requests handed to the Driver at once: more would cost memory and not run sooner
UNBOUNDED = 1 << 62
STOP_SECONDS = 10.0
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """One prompt, ready to run; `text` is None if token ids were given."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    beam_search: BeamSearchParams | None = None
    adapter: str = ""

    def request(self, request_id: str) -> Request:
        return Request(request_id, self.token_ids, self.params, beam_search=self.beam_search, adapter=self.adapter)


class LLM:
    """A loaded model for this process, until `close()`, the end of a `with` block, or the end of the program.

    Keywords are the fields of EngineConfig (enable_prefix_caching, gpu_memory_utilization, max_num_seqs ...). The
    constructor returns when the model is ready. It raises ConfigError, with the fix, for an unknown keyword and for a
    value that this machine cannot honour (for example device="cuda" without a GPU), and ModelError for a checkpoint
    that cannot be served.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._open(from_keywords(EngineConfig, {"model": model, **settings}), {})

    @classmethod
    def from_config(cls, config: EngineConfig, **driver_options: Any) -> "LLM":
        """An LLM from a finished config; `driver_options` are passed on to the Driver."""
        llm = cls.__new__(cls)
        llm._open(config, driver_options)
        return llm

    def _open(self, config: EngineConfig, driver_options: dict[str, Any]) -> None:
        self.config = config
        self._request_numbers = itertools.count()
        self._thread = _LoopThread()
        try:
            self.driver = self._thread.run(_start(config, driver_options))
        except BaseException:
            self._thread.close()
            raise
        self._finalizer = weakref.finalize(self, _stop, self._thread, self.driver)  # runs at exit, too

    @property
    def tokenizer(self) -> Tokenizer:
        return self.driver.tokenizer

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self.driver.sampling_defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete every prompt; the results are in the order of the prompts and hold the whole text.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. `sampling_params` is one
        SamplingParams for all prompts, a list with one for each prompt, or None for get_default_sampling_params().
        `lora` is the name of an adapter of the setting `lora`, for all prompts, or a list with a name for each prompt;
        the empty name is the model without an adapter.

        Raises InvalidRequestError before any prompt runs if a prompt has another form or does not fit the model, and
        for an unknown adapter. A request that fails in the engine has finish_reason "error" and the text that it had;
        EngineError is raised only if all requests fail. Ctrl-C aborts the requests and leaves the LLM usable.
        """
        prompt_list = _prompt_list(prompts)
        params = self._params(sampling_params, len(prompt_list))
        jobs = [_job(self.tokenizer, *pair, index) for index, pair in enumerate(zip(prompt_list, params, strict=True))]
        return self._run(jobs, use_tqdm, lora)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        *,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Return for every prompt the `params.beam_width` best continuations that beam search finds, best first.

        Prompts, `lora`, order and errors are those of `generate`. Each output has the logprobs of its tokens; its score
        is `cumulative_logprob / len(token_ids) ** params.length_penalty`. A search whose hypotheses do not fit the KV
        cache together has finish_reason "error".
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError("params must be a BeamSearchParams.", "params")
        jobs = [
            _job(self.tokenizer, prompt, params.sampling_params(), index, params)
            for index, prompt in enumerate(_prompt_list(prompts))
        ]
        return self._run(jobs, use_tqdm, lora)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, through the chat template. `lora`
        is that of `generate`."""
        conversations = _conversations(messages)
        params = self._params(sampling_params, len(conversations))
        jobs = []
        for conversation, conversation_params in zip(conversations, params, strict=True):
            prompt = self.tokenizer.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            jobs.append(_Job(prompt.text, prompt.token_ids, conversation_params))
        return self._run(jobs, use_tqdm, lora)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that the model's generation_config.json asks for. They do not complete SamplingParams
        that a caller gives: a field left out there has the default of SamplingParams."""
        return SamplingParams(**self.sampling_defaults.as_dict())  # type: ignore[arg-type]

    def _params(self, sampling_params: Any, count: int) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _params_list(given, count)
        return [resolve_bans(each, self.tokenizer, self.driver.eos_token_ids) for each in params]

    def close(self) -> None:
        """End the Worker process and the thread; harmless when called again."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, jobs: list[_Job], use_tqdm: bool, lora: str | Sequence[str]) -> list[RequestOutput]:
        if not self._finalizer.alive:
            raise EngineError("this LLM is closed; make a new one.")
        adapters = _adapter_list(lora, len(jobs), self.driver.adapters)
        jobs = [
            dataclasses.replace(job, params=_with_thinking(self.tokenizer, job), adapter=adapter)
            for job, adapter in zip(jobs, adapters, strict=True)
        ]
        for index, job in enumerate(jobs):
            with _naming_prompt(index):
                check_request(job.request(""), self.driver.model)
        with _Progress(len(jobs), use_tqdm) as progress:
            outputs = self._thread.run(self._complete_all(jobs, progress))
        failed = [output for output in outputs if output.outputs[0].finish_reason is FinishReason.ERROR]
        if failed and len(failed) == len(outputs):
            raise EngineError("every request failed in the engine; the log says why.")
        return outputs

    async def _complete_all(self, jobs: list[_Job], progress: "_Progress") -> list[RequestOutput]:
        slots = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def complete(index: int, job: _Job) -> RequestOutput:
            async with slots:
                request = job.request(f"llm-{next(self._request_numbers)}")
                with _naming_prompt(index):
                    output = await self._complete(request, job)
            progress.add(output)
            return output

        tasks = [asyncio.create_task(complete(index, job)) for index, job in enumerate(jobs)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # after a refused request or Ctrl-C, no request outlives the call
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, request: Request, job: _Job) -> RequestOutput:
        if request.params.structured_output is not None and not self.driver.model.embeds_only:
            await self.driver.grammars.prepare(request.params.structured_output)
        stream = self.driver.generate(request)
        stream.group(sys.maxsize)  # the output is given as a whole
        samples = [_Sample() for _ in range(job.params.n)]
        prompt_logprobs: PromptLogprobs | None = None
        last: RequestOutput | None = None
        failed = False
        try:
            async for last in stream:
                prompt_logprobs = prompt_logprobs or last.prompt_logprobs
                for part in last.outputs:
                    samples[part.index].add(part)
        except (EngineError, InvalidRequestError) as error:  # InvalidRequestError: a beam search that does not fit
            logger.error("%s failed: %s", request.request_id, error)
            failed = True
        finally:
            stream.close()
        return RequestOutput(
            request_id=request.request_id,
            outputs=[sample.whole(index, failed) for index, sample in enumerate(samples)],
            finished=True,
            num_prompt_tokens=stream.num_prompt_tokens,
            num_generated_tokens=last.num_generated_tokens if last else 0,
            num_cached_tokens=last.num_cached_tokens if last else 0,
            prompt=job.text,
            prompt_token_ids=job.token_ids,
            prompt_logprobs=prompt_logprobs,
        )


@contextlib.contextmanager
def _naming_prompt(index: int) -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompts[{index}]: {error}", error.param, error.code) from None


class _Sample:
    """Collects the parts of one sample."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._last: CompletionOutput | None = None

    def add(self, part: CompletionOutput) -> None:
        self._text.append(part.text)
        self._token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs.extend(part.logprobs)
        self._last = part

    def whole(self, index: int, failed: bool) -> CompletionOutput:
        reason = self._last.finish_reason if self._last else None
        return CompletionOutput(
            index=index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=FinishReason.ERROR if failed and reason is None else reason,
            stop_reason=self._last.stop_reason if self._last else None,
        )


class _Progress:
    """A tqdm bar over requests that also shows tokens per second; silent unless `wanted`."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._bar = tqdm(total=total, desc="requests", unit="req", disable=not wanted, dynamic_ncols=True)
        self._tokens = 0

    def add(self, output: RequestOutput) -> None:
        self._tokens += output.num_generated_tokens
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            self._bar.set_postfix_str(f"{self._tokens / elapsed:.1f} output tok/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


class _LoopThread:
    """An event loop in a daemon thread; `run` calls a coroutine there and waits."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pageserve-driver", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._cancel_tasks())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Return the coroutine's result. After Ctrl-C or the timeout, cancel it and wait for its `finally` blocks."""
        ended = threading.Event()

        async def tracked() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            ended.wait(STOP_SECONDS)
            raise

    def close(self) -> None:
        """Stop the loop; tasks that still run are cancelled."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)


async def _start(config: EngineConfig, driver_options: dict[str, Any]) -> Engine:
    driver = make_engine(config, max_queued_requests=UNBOUNDED, **driver_options)
    try:
        await driver.start()
        await driver.wait_ready()
    except BaseException:
        await driver.stop()
        raise
    return driver


def _stop(thread: _LoopThread, driver: Engine) -> None:
    # At the end of the program Python starts no more threads, so none can wait for the Worker. The Worker ends by
    # itself: its socket is closed by then.
    with contextlib.suppress(RuntimeError):
        thread.run(driver.stop(), STOP_SECONDS)
    thread.close()


def _prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many -> many. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}.", "prompts"
        )
    return list(prompts)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(token_id) is int for token_id in value)


def _params_list(sampling_params: Any, count: int) -> list[SamplingParams]:
    params = [sampling_params] * count if isinstance(sampling_params, SamplingParams) else sampling_params
    known = isinstance(params, (list, tuple)) and all(isinstance(each, SamplingParams) for each in params)
    if not known or len(params) != count:
        raise InvalidRequestError(
            f"sampling_params must be one SamplingParams, or a list of {count}: one per prompt.", "sampling_params"
        )
    return list(params)


def _adapter_list(lora: Any, count: int, known: Collection[str]) -> list[str]:
    names = [lora] * count if isinstance(lora, str) else lora
    if not isinstance(names, (list, tuple)) or len(names) != count:
        raise InvalidRequestError(f"lora must be the name of an adapter, or a list of {count}: one per prompt.", "lora")
    for name in names:
        if name not in ("", *known):
            message = f"lora: there is no adapter {name!r}; the setting `lora` of this LLM has {sorted(known)}."
            raise InvalidRequestError(message, "lora")
    return list(names)


def _with_thinking(tokenizer: Tokenizer, job: _Job) -> SamplingParams:
    """The parameters of a job; with a thinking budget, they say whether the prompt has opened a thinking block."""
    params = job.params
    if params.thinking_token_budget is None:
        return params
    if params.structured_output is not None:
        text = f"{FIELD} may not be combined with structured_output, which holds from the first token on."
        raise InvalidRequestError(text, FIELD)
    opened = params.thinking_opened or tokenizer.opens_thinking(job.token_ids)
    return msgspec.structs.replace(params, thinking_opened=opened)


def _conversations(messages: Any) -> list[list[Message]]:
    """One conversation or many -> many."""
    several = [messages] if _is_conversation(messages) else messages
    if not isinstance(several, (list, tuple)) or not all(_is_conversation(each) for each in several):
        raise InvalidRequestError(
            'messages must be a list of {"role": ..., "content": ...}, or a list of such lists.', "messages"
        )
    return [[dict(message) for message in each] for each in several]


def _is_conversation(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _job(
    tokenizer: Tokenizer, prompt: Any, params: SamplingParams, index: int, beam_search: BeamSearchParams | None = None
) -> _Job:
    if isinstance(prompt, Mapping) and len(prompt) == 1:
        (key, value), *_ = prompt.items()
        if (key == "prompt" and isinstance(value, str)) or (key == "prompt_token_ids" and _is_token_ids(value)):
            prompt = value
    if isinstance(prompt, str):
        if not is_valid_unicode(prompt):
            raise InvalidRequestError(f"prompts[{index}] is not Unicode: it holds half of a surrogate pair.", "prompts")
        return _Job(prompt, tokenizer.encode(prompt), params, beam_search)
    if _is_token_ids(prompt):
        return _Job(None, list(prompt), params, beam_search)
    raise InvalidRequestError(
        f"prompts[{index}] must be a text, a non-empty list of token ids, "
        '{"prompt": text} or {"prompt_token_ids": token ids}.',
        "prompts",
    )
