"""Served: what the handlers know about the server they run in."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from engine.driver import SERVING_PHASES, Driver
from engine.errors import UnavailableError
from engine.text.text_threads import FairThreads
from server.config import ServerConfig
from server.errors import ApiError, invalid, new_id
from server.protocol import GenerationRequest
from server.protocol.strict import Strict

SampledRequest = TypeVar("SampledRequest", bound=Strict)

T = TypeVar("T")

MANY_LOGPROBS = 2000  # to encode as many takes 2 ms
REST_FROM_SECONDS, REST_SECONDS = 0.005, 0.25


def package_version() -> str:
    try:
        return version("pageserve")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def rest_for(seconds: float) -> None:
    """Sleep, in a thread, for as long as its last work took.

    What runs in C may have held the GIL all the while. An answer needs the event loop a few times over, so without a
    rest it would wait for the GIL as often.
    """
    if seconds > REST_FROM_SECONDS:
        time.sleep(min(seconds, REST_SECONDS))


class RestingThread:
    """One thread for work that may hold the GIL, which tenants use in turns. It rests between two of them."""

    def __init__(self, name: str) -> None:
        self._thread = FairThreads(1, name)
        self._took = self._ended = 0.0

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """The result of `work`."""
        return await self._thread.run(tenant, self._work, work)

    def _work(self, work: Callable[[], T]) -> T:
        rest_for(self._ended + self._took - time.perf_counter())
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._ended = time.perf_counter()
            self._took = self._ended - start


@dataclass(frozen=True)
class Served:
    """`names` are all names of the one model; the first is the one to show. `created` is the start of this server."""

    driver: Driver
    config: ServerConfig
    names: tuple[str, ...]
    created: int

    @cached_property
    def parsing(self) -> RestingThread:
        """For large bodies, and answers of that size."""
        return RestingThread("parsing")

    async def encode(self, tenant: str, num_logprobs: int, encode: Callable[[], bytes]) -> bytes:
        """An answer with so many logprobs as JSON; where they are many, off the event loop."""
        return await self.parsing.run(tenant, encode) if num_logprobs > MANY_LOGPROBS else encode()

    @cached_property
    def fingerprint(self) -> str:
        """Changes with whatever may change the text of a seeded request: version, checkpoint, template, device, ..."""
        model, config = self.driver.model, self.driver.config
        weights = (config.model, config.revision, config.load_format, config.seed, config.quantization)
        prompts = (config.tokenizer, self.config.chat_template, self.config.special_tokens_in_content)
        numbers = (model.device, model.dtype, model.vocab_size, model.kv_cache_dtype, config.batch_invariant)
        text = repr((package_version(), weights, prompts, numbers, self.driver.sampling_defaults))
        return "pageserve-" + hashlib.sha256(text.encode()).hexdigest()[:12]

    def with_model_defaults(self, request: SampledRequest) -> SampledRequest:
        """`request` with the model's own sampling in the fields that it leaves out. Beam search samples nothing."""
        changed = self.driver.sampling_defaults.changed
        if not changed or getattr(request, "use_beam_search", False):
            return request
        return request.model_copy(
            update={name: value for name, value in changed.items() if name not in request.model_fields_set}
        )

    def check_ready(self) -> None:
        if self.driver.phase not in SERVING_PHASES:
            raise UnavailableError(f"The server is not ready ({self.driver.phase}). Try again shortly.")

    def check_model(self, name: str) -> None:
        if name not in self.names:
            message = f"The model {name[:128]!r} does not exist here; this server has {self.names[0]!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_request(self, request: GenerationRequest) -> None:
        self.check_model(request.model)
        config = self.config
        if not 1 <= request.n <= config.max_n:
            raise invalid(f"n must be an integer from 1 to {config.max_n}.", "n")
        if len(request.stop) > config.max_stop:
            raise invalid(f"stop holds {len(request.stop)} strings; at most {config.max_stop} are allowed.", "stop")
        context = self.driver.model.max_model_len
        if request.num_ctx is not None and request.num_ctx > context:
            message = f"num_ctx must be at most {context}, the context of this model here: --max-model-len sets it."
            raise invalid(message, "num_ctx")
        request.check_limits(config)

    def response_head(self, id_prefix: str, object_type: str, request: GenerationRequest) -> dict[str, Any]:
        """The fields that every chunk of one response has in common."""
        return {
            "id": new_id(id_prefix + "-"),
            "object": object_type,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": self.fingerprint,
        }
