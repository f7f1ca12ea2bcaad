"""Request: what a caller hands to the Driver."""

from dataclasses import dataclass

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
