"""What ends a sequence by its tokens: an end-of-sequence token, a stop token, its length. Stop strings: Delivery."""

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a text once it has min_tokens."""
    return (eos_token_ids if params.ends_at_eos else frozenset()).union(params.stop_token_ids)


def end_after(
    seq: Sequence, token_id: int, eos_token_ids: frozenset[int]
) -> tuple[FinishReason, str | int | None] | None:
    """The (finish reason, stop reason) of `seq`, whose last token is `token_id`; None where it goes on."""
    params = seq.params
    if not params.generates:
        return FinishReason.LENGTH, None
    if seq.num_generated_tokens >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if token_id in eos_token_ids and params.ends_at_eos:
            return FinishReason.STOP, None
    return (FinishReason.LENGTH, None) if len(seq.token_ids) >= seq.max_num_tokens else None
