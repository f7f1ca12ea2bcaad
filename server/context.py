"""Models: the models of the server, by name. Served: what handlers know of one, and the prelude of every POST."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from engine.driver import SERVING_PHASES
from engine.errors import InvalidRequestError, UnavailableError
from engine.replicas.engine import Engine
from server.config import ServerConfig
from server.errors import ApiError, invalid, new_id
from server.http.body import convert, read_parsed
from server.http.resting_thread import RestingThread
from server.protocol import GenerationRequest
from server.protocol.strict import AnyModel, parse_request
from server.protocol.translated import SamplingExtras

T = TypeVar("T")

MANY_NAMES = 8  # in an error
MANY_LOGPROBS = 2000  # encoding 2000 logprobs takes 2 ms


def package_version() -> str:
    """The version of the installed package; "unknown" for a source tree that is not installed."""
    try:
        return version("pageserve")
    except PackageNotFoundError:
        return "unknown"


class Models:
    """Every model of the server, in the order of its settings. Handlers get the first one; `find` has the others."""

    def __init__(self) -> None:
        self._served: list[Served] = []

    def __len__(self) -> int:
        return len(self._served)

    def __iter__(self) -> "Iterator[Served]":
        return iter(self._served)

    def add(self, served: "Served") -> None:
        self._served.append(served)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for served in self._served for name in served.names)

    @property
    def drivers(self) -> list[Engine]:
        return [served.driver for served in self._served]

    def find(self, name: str) -> "Served":
        """The model that a request names, by a name of its own or of an adapter. Raises ApiError 404."""
        for served in self._served:
            if name in served.names or name in served.adapters:
                return served
        message = f"The model {name[:128]!r} does not exist here; this server has {self.choices}."
        raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def choices(self) -> str:
        """The models in words, for an error."""
        return ", ".join(repr(served.names[0]) for served in self._served[:MANY_NAMES])

    def named(self, http: HttpRequest) -> "Served | None":
        """The model that the path or `?model=` names; None where neither does. Raises ApiError 404."""
        name = http.path_params.get("model") or http.query_params.get("model")
        return None if name is None else self.find(name)

    def check_ready(self) -> None:
        """Raise UnavailableError unless a model accepts requests."""
        if not any(served.accepts_requests for served in self._served):
            self._served[0].check_ready()

    @property
    def all_accept_requests(self) -> bool:
        """True while every model accepts requests."""
        return all(served.accepts_requests for served in self._served)

    @property
    def longest_context(self) -> int:
        """The context in tokens of the model with the longest one, of those that have loaded."""
        return max(served.driver.model.max_model_len for served in self._served if served.accepts_requests)


@dataclass(frozen=True)
class Served:
    """One model. `names` are all its names; answers show the first. `created` is the start of this server in Unix
    seconds. `http_counts` counts responses by (route, status), `refused` counts refusals by reason; all models share
    both. `config` has the settings of this model."""

    driver: Engine
    config: ServerConfig
    names: tuple[str, ...]
    created: int
    models: Models = field(default_factory=Models, repr=False)
    http_counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    _singletons: dict[Callable[["Served"], Any], Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.models.add(self)

    def once(self, make: Callable[["Served"], T]) -> T:
        """The result of the first call of `make(self)`: state that the handlers of a route keep between requests."""
        if make not in self._singletons:
            self._singletons[make] = make(self)
        result: T = self._singletons[make]
        return result

    async def read(self, http: HttpRequest, kind: type[AnyModel]) -> "tuple[AnyModel, Served]":
        """The body as a request of this `kind`, and its model. Raises what `read_as` raises."""
        return await self.read_as(http, partial(parse_request, kind))

    async def read_as(
        self, http: HttpRequest, parse: Callable[[dict[str, Any]], AnyModel]
    ) -> "tuple[AnyModel, Served]":
        """The prelude of every POST: ready, body, JSON, fields, model and limits, sampling defaults of the model.

        Returns the request and the model that it names; this one where it names none. Raises UnavailableError (503),
        what server/http/body.py raises, ApiError 404 for the model, and InvalidRequestError naming the field.
        """
        self.models.check_ready()
        context = self.models.longest_context
        try:
            request = await read_parsed(http, parse, self.config.max_body_bytes, context, self.parsing)
        except InvalidRequestError as error:
            if (error.param, error.code) != ("model", "missing_required_parameter"):
                raise
            raise invalid(f"model is required; this server has {self.models.choices}.", "model", error.code) from None
        name = getattr(request, "model", None)
        served = self if name is None else self.models.find(name)
        served.check_ready()
        if isinstance(request, GenerationRequest):
            served._check_limits(request)
        return served._with_sampling_defaults(request), served

    async def convert(self, tenant: str, work: Callable[[], T]) -> T:
        """The result of `work` on the request that this task has read: in a thread where the body was large."""
        return await convert(self.parsing, tenant, work)

    @cached_property
    def parsing(self) -> RestingThread:
        """The thread for large bodies and for answers of that size."""
        return RestingThread("parsing")

    async def encode(self, tenant: str, num_logprobs: int, encode: Callable[[], bytes]) -> bytes:
        """The JSON of an answer with `num_logprobs` logprobs; a thread makes it where there are many."""
        return await self.parsing.run(tenant, encode) if num_logprobs > MANY_LOGPROBS else encode()

    @cached_property
    def fingerprint(self) -> str:
        """Changes with everything that may change the text of a seeded request: version, checkpoint, template, ..."""
        model, config = self.driver.model, self.driver.config
        weights = (config.model, config.revision, config.load_format, config.seed, config.quantization)
        prompts = (config.tokenizer, self.config.chat_template, self.config.special_tokens_in_content)
        kernels = (config.batch_invariant, config.attention_backend == "flashinfer", config.tensor_parallel_size)
        numbers = (model.device, model.dtype, model.vocab_size, model.kv_cache_dtype, *kernels)
        text = repr((package_version(), weights, prompts, numbers, self.driver.sampling_defaults))
        return "pageserve-" + hashlib.sha256(text.encode()).hexdigest()[:12]

    def response_head(self, id_prefix: str, object_type: str, model: str) -> dict[str, Any]:
        """The fields that every chunk of one response has in common."""
        return {
            "id": new_id(id_prefix + "-"),
            "object": object_type,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.fingerprint,
        }

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the LoRA adapters that requests may name, by name."""
        return self.driver.adapters

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names that a request may give: those of the model, then those of its adapters."""
        return (*self.names, *self.adapters)

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a request's `model` names; empty for the model itself."""
        return name if name is not None and name not in self.names and name in self.adapters else ""

    @property
    def accepts_requests(self) -> bool:
        """True while requests are accepted: from the end of loading to the drain, also while the model sleeps."""
        return self.driver.phase in SERVING_PHASES

    def check_ready(self) -> None:
        """Raise UnavailableError unless requests are accepted."""
        if not self.accepts_requests:
            raise UnavailableError(f"The server is not ready ({self.driver.phase}). Try again shortly.")

    def _check_limits(self, request: GenerationRequest) -> None:
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

    def _with_sampling_defaults(self, request: AnyModel) -> AnyModel:
        """`request` with the model's own sampling in the fields that it leaves out. Beam search draws no samples."""
        generates: bool = isinstance(request, GenerationRequest | SamplingExtras)
        if not generates or getattr(request, "use_beam_search", False):
            return request
        changed = self.driver.sampling_defaults.changed
        missing = {name: value for name, value in changed.items() if name not in request.model_fields_set}
        return request.model_copy(update=missing) if missing else request
