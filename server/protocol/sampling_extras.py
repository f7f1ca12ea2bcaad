"""Fields beyond those of their own documents that /v1/responses and /v1/messages take: vLLM's of sampling, and ours."""

from typing import Annotated, Any

from pydantic import FailFast, Field

from server.protocol.generation import MAX_TIMEOUT, Salt, Seed, within
from server.protocol.strict import Strict


class SamplingExtras(Strict):
    """Names and meanings are those of /v1/chat/completions."""

    is_request = True

    seed: Seed = None
    min_p: float = within(0.0, 0.0, 1.0)
    presence_penalty: float = within(0.0, -2.0, 2.0)
    frequency_penalty: float = within(0.0, -2.0, 2.0)
    repetition_penalty: float = within(1.0, 0.0, 100.0)
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=1024)] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = within(0, 0)
    timeout: float | None = Field(None, gt=0.0, le=MAX_TIMEOUT)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: Salt = ""
    return_timings: bool = False

    def extras(self) -> dict[str, Any]:
        """Those that were given, as fields of a chat request."""
        return {name: getattr(self, name) for name in self.model_fields_set & SamplingExtras.model_fields.keys()}
