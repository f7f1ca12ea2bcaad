"""Caller: who sends an HTTP request. The middleware makes it once, as `state.caller` of the request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import InvalidRequestError
from engine.request import Request
from engine.sampling_params import BeamSearchParams, SamplingParams
from server.errors import ApiError
from server.http.rate_limits import RateLimiter


class RequestOptions(Protocol):
    """The fields of a request body that say how the engine treats its prompts."""

    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def timeout(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """One prompt of an HTTP request. `param` is the field that errors about the prompt name. `prediction`: tokens that
    the client expects as the answer."""

    token_ids: list[int]
    params: SamplingParams
    param: str
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """The API key of a request, its limits, and the request's place in a trace.

    `tenant` is the key's digest in hex, empty where no keys are set. `min_priority` is the most urgent `priority` that
    the key may use; None: any. `trace_parent` is the client's `traceparent` header, empty without tracing.
    `admin`: the key may change what the server serves.
    """

    limiter: RateLimiter
    tenant: str = ""
    weight: float = 1.0
    min_priority: int | None = None
    trace_parent: str = ""
    admin: bool = False

    def check_admin(self) -> None:
        """Raise ApiError 403 unless this is an administrator's key."""
        if not self.admin:
            message = "This API key may not change the models: its line in the key file needs `admin=true`."
            raise ApiError(403, message, code="admin_key_required")

    def check(self, num_tokens: int, priority: int) -> None:
        """Raise ApiError 429 unless the key may use `num_tokens` now, InvalidRequestError where the priority is not
        allowed."""
        self.limiter.check_tokens(num_tokens)
        if self.min_priority is not None and priority < self.min_priority:
            raise InvalidRequestError(f"priority must be at least {self.min_priority} with this API key.", "priority")

    def requests(
        self,
        response_id: str,
        prompts: Sequence[EnginePrompt],
        options: RequestOptions,
        beam_search: BeamSearchParams | None = None,
        adapter: str = "",
    ) -> list[Request]:
        """The engine's requests for one HTTP request, one per prompt, all with the same LoRA adapter (empty: none).
        Raises what `check` raises."""
        self.check(sum(len(prompt.token_ids) for prompt in prompts), options.priority)
        return [
            self.request(f"{response_id}-{i}", prompt, options, options.timeout, beam_search, adapter)
            for i, prompt in enumerate(prompts)
        ]

    def request(
        self,
        request_id: str,
        prompt: EnginePrompt,
        options: RequestOptions,
        timeout: float | None,
        beam_search: BeamSearchParams | None = None,
        adapter: str = "",
    ) -> Request:
        """The engine's request for one prompt; `timeout` is in seconds."""
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            priority=options.priority,
            cache_salt=self._cache_salt(options.cache_salt),
            prompt_param=prompt.param,
            beam_search=beam_search,
            tenant=self.tenant,
            weight=self.weight,
            timeout=timeout,
            trace_parent=self.trace_parent,
            adapter=adapter,
            prediction=prompt.prediction,
        )

    def _cache_salt(self, client_salt: str) -> str:
        """Clients share KV blocks if they have the same API key and the same salt of their own.

        The length of the tenant comes first and separates the two: no salt reaches the blocks of another key.
        """
        return f"{len(self.tenant)}:{self.tenant}{client_salt}" if self.tenant or client_salt else ""
