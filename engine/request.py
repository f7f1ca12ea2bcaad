"""Request: one prompt and how to sample it, as a caller hands it to the Driver."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.sampling_params import BeamSearchParams, SamplingParams


class Adapter(NamedTuple):
    """A LoRA adapter that the Worker holds. An adapter that is loaded again has another id; `version`, the digest of
    its name and files, differs where its weights do."""

    adapter_id: int
    name: str
    version: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its sampling parameters; becomes `params.n` sequences.

    `request_id` must be unique among live requests (the server makes it; an id that a client sends is only echoed).
    Lower `priority` runs first; equal priorities are first come, first served. `cache_salt` separates tenants in the
    prefix cache: only requests of equal salt share blocks. Errors about the prompt name the field `prompt_param`
    ("prompt" or "messages"). With `beam_search` the outputs are its hypotheses, which all come at the end;
    then `params` must be its `sampling_params()`.

    Tenants share the engine in proportion to their `weight` (engine/scheduling/fair_share.py). A request that is not
    finished `timeout` seconds after it was accepted ends with DeadlineError. Listeners of the RequestLog read
    `trace_parent`. `adapter` is the name of a LoRA adapter that is loaded; empty: the base model. `prediction`: tokens
    that the client expects as output; drafts for speculation, which change no output.
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
    adapter: str = ""
    prediction: tuple[int, ...] = ()
