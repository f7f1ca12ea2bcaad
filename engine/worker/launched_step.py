"""LaunchedStep: a step whose work is queued on the device, and what it yields beside tokens."""

from dataclasses import dataclass, field

from torch import Tensor

from engine.executor.step import BlockMove, PromptScores
from engine.worker.batch.input_batch import IntArray, SampledAt
from engine.worker.device.queue import Mark
from engine.worker.pooler import PooledStep
from engine.worker.sampling.prompt_scorer import ScoredStep
from engine.worker.sampling.sampled import SampledRows


@dataclass(frozen=True, slots=True)
class Extras:
    """What a step yields beside tokens: logprobs of prompts, and `vectors` of what is pooled (see PooledStep.take)."""

    scored: ScoredStep | None = None
    pooled: PooledStep | None = None
    vectors: Tensor | None = None

    def results(self, failed: dict[int, str]) -> tuple[list[PromptScores], dict[int, bytes]]:
        """Once the step's mark has passed. Sequences that came to nothing go to `failed`."""
        scores = [] if self.scored is None else self.scored.results(failed)
        if self.pooled is None or self.vectors is None:
            return scores, {}
        return scores, self.pooled.results(self.vectors, failed)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued on the device (or done, on a CPU). Call `result` once, in the order of launches.

    `sampled_at` is None where the plan samples nothing. Tokens are in `sampled`, or (greedy decodes) in token_ids.
    """

    step_id: int
    started: float  # time.perf_counter()
    failed: dict[int, str]  # by seq_id: what could not be served at all
    sampled_at: SampledAt | None = None
    sampled: tuple[SampledRows, ...] = ()
    token_ids: IntArray | None = None
    ready: Mark | None = None
    offloads: list[BlockMove] = field(default_factory=list)
    extras: Extras | None = None
