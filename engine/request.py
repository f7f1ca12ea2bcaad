"""Request: what a caller hands to the Driver."""

import random
from dataclasses import dataclass

import msgspec

from engine.memory.sequence import Sequence
from engine.sampling_params import BeamSearchParams, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its sampling parameters; becomes `params.n` sequences.

    `request_id` must be unique among live requests (the server makes it, a client's own id is only echoed). Lower
    `priority` runs first; equal priorities are first come, first served. `cache_salt` separates tenants in the prefix
    cache: blocks are shared only between requests of equal salt. `prompt_param` is the field that errors about the
    prompt name ("prompt" or "messages"). With `beam_search` the outputs are its hypotheses, and all come at the end:
    `params` must then be its `sampling_params()`.

    Tenants share the engine fairly, each by its `weight` (engine/scheduling/fair_share.py). A request that is not
    finished `timeout` seconds after it was accepted ends with DeadlineError. `trace_parent` is for listeners of the
    RequestLog.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    prompt_param: str = "prompt"
    beam_search: BeamSearchParams | None = None
    tenant: str = ""
    weight: float = 1.0
    timeout: float | None = None
    trace_parent: str = ""

    def sequence(self, index: int, number: int, max_num_tokens: int) -> Sequence:
        """Sample `index`; `number` is unique and grows with the time of arrival. The first one scores the prompt."""
        seed = random.getrandbits(64) if self.params.seed is None else self.params.seed
        return Sequence(
            number,
            self.prompt_token_ids,
            self.params if index == 0 else _without_scores(self.params),
            seed=(seed + index * 0x9E3779B97F4A7C15) % 2**64,  # samples of one seed draw apart, the first as if alone
            max_num_tokens=max_num_tokens,
            priority=self.priority,
            arrival=number,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            weight=self.weight,
        )


def _without_scores(params: SamplingParams) -> SamplingParams:
    return params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
