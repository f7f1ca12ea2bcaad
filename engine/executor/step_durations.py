"""StepDurations: measures steps by kind, and from that limits the time after which a Worker counts as hung.

A single limit for all steps must be as long as the slowest step of the slowest machine: minutes on a CPU. Steps of one
kind take similar times. So a step that takes LIMIT_FACTOR times as long as the slowest recent one will never end.
"""

from engine.executor.step import NewSequence, StepPlan
from engine.sampling_params import SamplingParams

StepKind = tuple[int, int, int]
Features = tuple[bool, ...]

LIMIT_FACTOR = 20.0
MIN_LIMIT = 10.0  # seconds: allows for a busy machine, a storm of page faults, a library that is loaded
KEPT_PER_STEP = 0.95  # a faster step of the kind reduces its slowest time by this factor: compiling is forgotten
NO_FEATURES: Features = ()


def kind_of(plan: StepPlan) -> StepKind:
    """The kind of a step, three sizes as powers of two: decodes, in a step without chunks and new sequences; tokens of
    chunks; tokens of the longest new sequence.

    The steps of a sequence that the Worker holds grow slowly with it. A new sequence may bring a long context that is
    cached already, so its first step may be unlike the steps before.
    """
    num_tokens = sum([step.num_tokens for step in plan.chunks])
    longest = max([len(new.token_ids) for new in plan.new], default=0)
    num_decodes = plan.num_rows if not (plan.chunks or plan.new) else 0
    return num_decodes.bit_length(), num_tokens.bit_length(), longest.bit_length()


def features_of(new: NewSequence) -> Features:
    """The optional computations that a sequence needs: each may be code that has not run yet, and must be compiled."""
    params: SamplingParams = new.params
    return (
        params.temperature == 0.0,
        bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0,
        params.repetition_penalty != 1.0,
        bool(params.presence_penalty or params.frequency_penalty),
        bool(params.logit_bias),
        params.logprobs is not None,
        params.prompt_logprobs is not None,
        bool(params.bad_words),
        params.allowed_token_ids is not None,
        params.structured_output is not None,
        bool(params.min_tokens),
        params.pooling is not None,
        new.fork_of is not None,
    )


class StepDurations:
    """Shared by all Workers of a Driver: a new Worker is as fast as the one before."""

    def __init__(self) -> None:
        self._slowest: dict[StepKind, float] = {}  # seconds, decaying
        self._features: set[Features] = {NO_FEATURES}

    def knows(self, plan: StepPlan) -> bool:
        """True if such a step was done before: its code is compiled, and its time is known."""
        return kind_of(plan) in self._slowest and all([features_of(new) in self._features for new in plan.new])

    def limit(self, plan: StepPlan) -> float:
        """Seconds that such a step may take; infinite if its kind is unknown."""
        slowest = self._slowest.get(kind_of(plan))
        return float("inf") if slowest is None else max(MIN_LIMIT, LIMIT_FACTOR * slowest)

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Learn the time of a step that is done."""
        kind = kind_of(plan)
        self._slowest[kind] = max(seconds, KEPT_PER_STEP * self._slowest.get(kind, 0.0))
        self._features.update([features_of(new) for new in plan.new])
