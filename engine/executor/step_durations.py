"""StepDurations: how long steps of each kind took, and so how long the next one may take before the Worker has hung.

A limit for all steps has to be as long as the slowest step of the slowest machine, minutes on a CPU. Steps of a kind
take about as long as each other, so one that takes LIMIT_FACTOR times as long as the slowest of late is not coming.
"""

from engine.executor.step import NewSequence, StepPlan
from engine.sampling_params import SamplingParams

StepKind = tuple[int, int, int]
Features = tuple[bool, ...]

LIMIT_FACTOR = 20.0
MIN_LIMIT = 10.0  # seconds: a busy machine, a page fault storm, a library that is read in
KEPT_PER_STEP = 0.95  # of the slowest time, each time that another step of its kind was quicker: compiling is forgotten
NO_FEATURES: Features = ()


def kind_of(plan: StepPlan) -> StepKind:
    """Sizes as powers of two: decodes of a step of nothing else; tokens of chunks; the longest new sequence.

    A sequence that the Worker holds grows by a step's tokens at a time, and the time of its steps with it. A new one
    may come with a long context that is cached already, whose first step is then unlike those before.
    """
    num_tokens = sum([step.num_tokens for step in plan.chunks])
    longest = max([len(new.token_ids) for new in plan.new], default=0)
    num_decodes = len(plan.decodes) if not (plan.chunks or plan.new) else 0
    return num_decodes.bit_length(), num_tokens.bit_length(), longest.bit_length()


def features_of(new: NewSequence) -> Features:
    """What the Worker computes for this sequence and not for others: each may be code that has not run yet."""
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
    """Of all Workers of a Driver: the next one is as fast as the one before."""

    def __init__(self) -> None:
        self._slowest: dict[StepKind, float] = {}  # seconds, of late
        self._features: set[Features] = {NO_FEATURES}

    def knows(self, plan: StepPlan) -> bool:
        """Whether such a step has been done: what it needs is compiled, and there is a time to compare with."""
        return kind_of(plan) in self._slowest and all([features_of(new) in self._features for new in plan.new])

    def limit(self, plan: StepPlan) -> float:
        """Seconds that such a step may take; infinite for one that is not known."""
        slowest = self._slowest.get(kind_of(plan))
        return float("inf") if slowest is None else max(MIN_LIMIT, LIMIT_FACTOR * slowest)

    def add(self, plan: StepPlan, seconds: float) -> None:
        kind = kind_of(plan)
        self._slowest[kind] = max(seconds, KEPT_PER_STEP * self._slowest.get(kind, 0.0))
        self._features.update([features_of(new) for new in plan.new])
