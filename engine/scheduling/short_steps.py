"""ShortSteps: keeps steps short while a request of another tenant may come at any moment and would have to wait.

A step may take `seconds`, by a model of step times that is learnt from past steps: a new first token waits that long
for the step under way. A step may always take MIN_RATIO times as long as a step with an empty prompt, for slow models.
All time beyond that of an empty step is work. So at most one part in MIN_RATIO of the throughput is lost, and much less
where `seconds` is many times the time of an empty step.

Chunks of prompts get one half of the work and decodes the other; either gets all of it if the other is absent.
Sequences that do not fit decode in turns.

TimedTarget uses the same model of step times for another aim: with a target, prompts are cut into chunks so small that
the streams beside them get their next token in time (Sarathi-Serve: Agrawal et al. 2024, section 4.3, whose token
budget is fixed).
"""

from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.executor.step import StepPlan, StepResult
from engine.memory.sequence import Sequence

Numbers = npt.NDArray[np.floating]

MIN_RATIO = 3.0
MIN_CHUNK = 16  # prompt tokens that a step with a target may always hold, or a busy server would never start a prompt
ERROR_WEIGHT = 0.05  # the weight of a step in the mean error of predicted step times
DISTANCE = 3.0  # from the target, in mean errors: one normally distributed step in a hundred is later
CHUNK_SHARE = 16  # one part in 16 of a step's tokens goes to chunks while step times are unknown


class StepRoom(NamedTuple):
    """The most that fits into a short step."""

    decodes_alone: float  # in a step of decodes only
    decodes: float  # beside an empty prompt
    tokens: float  # prompt tokens, in a step without decodes


class StepTimes:
    """How long a step takes, learnt from those that were computed.

    Model: seconds = base + per_decode * decodes, and in steps with chunks + first_token + per_token * chunk tokens. The
    weights are read once; each decode reads the keys and values that it attends to; each prompt token is computed. A
    GPU runs decodes alone as a recorded graph, and steps with chunks kernel by kernel. The four coefficients minimise
    the squared relative errors; recent steps weigh most, and steps that waited for slow masks do not count. If steps do
    not tell the coefficients apart, the last fit stays (ridge regression towards it).
    """

    MEMORY = 0.99  # weight of a step relative to the next one
    RIDGE = 1e-3
    MIN_STEPS = 16  # steps before the first fit

    def __init__(self) -> None:
        self._products: Numbers = np.zeros((4, 4))
        self._sums: Numbers = np.zeros(4)
        self._fit: Numbers = np.zeros(4)  # base, first_token, per_decode, per_token
        self._num_steps = 0
        self._planned: dict[int, tuple[int, int]] = {}  # by step id: decodes with their drafts, tokens of chunks

    def planned(self, plan: StepPlan) -> None:
        """A plan is sent, from whose result to learn. A row of a draft is computed as a decode is."""
        self._planned[plan.step_id] = plan.num_rows, plan.num_tokens - plan.num_rows

    def computed(self, result: StepResult) -> float | None:
        """Learns from the result of a plan. Returns the part by which the step missed its predicted time; None without
        a prediction."""
        found, seconds = self._planned.pop(result.step_id, None), result.compute_seconds
        if found is None or seconds <= 0.0 or result.slow_masks:
            return None
        predicted = self.seconds_of(*found)
        self.observe(*found, seconds)
        return abs(seconds / predicted - 1) if predicted else None

    def lose_plans(self) -> None:
        """The Worker is gone: no result will come for plans in flight."""
        self._planned.clear()

    def observe(self, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        """Learns from a computed step; `seconds` is above 0."""
        # The product of the features with the fit is to be 1.
        features = np.array([1, num_chunk_tokens > 0, num_decodes, num_chunk_tokens]) / seconds
        self._products = self.MEMORY * self._products + np.outer(features, features)
        self._sums = self.MEMORY * self._sums + features
        self._num_steps += 1

    def tokens_in(self, seconds: float, num_decodes: int) -> float | None:
        """Prompt tokens that fit into `seconds` beside so many decodes, below 0 if the decodes alone take longer. None
        while step times are unknown."""
        if not self._refit():
            return None
        base, first_token, per_decode, per_token = self._coefficients
        return float((seconds - base - first_token - per_decode * num_decodes) / per_token)

    def seconds_of(self, num_decodes: int, num_chunk_tokens: int) -> float:
        """The time of a step by the last fit; 0 before the first one."""
        if not self._fit.any():
            return 0.0
        base, first_token, per_decode, per_token = self._coefficients
        chunks = first_token + per_token * num_chunk_tokens if num_chunk_tokens else 0.0
        return float(base + per_decode * num_decodes + chunks)

    @property
    def _coefficients(self) -> Numbers:
        """base, first_token, per_decode, per_token."""
        coefficients: Numbers = np.maximum(self._fit, 1e-9)
        return coefficients

    def _refit(self) -> bool:
        """Fits the model to what was observed; False before the first fit."""
        if self._num_steps < self.MIN_STEPS:
            return False
        pull = np.diag(self.RIDGE * np.diag(self._products) + 1e-9)
        self._fit = np.linalg.solve(self._products + pull, self._sums + pull @ self._fit)
        return True

    def room_in(self, seconds: float) -> StepRoom | None:
        """Fits the model and returns what fits into `seconds`, or into MIN_RATIO times the time of a step with an empty
        prompt if that is longer. None while step times are unknown.
        """
        if not self._refit():
            return None
        base, first_token, per_decode, per_token = self._coefficients
        empty = base + first_token
        work = max(seconds, MIN_RATIO * empty) - empty
        return StepRoom((work + first_token) / per_decode, work / per_decode, work / per_token)


class ShortSteps:
    """Limits plans, and learns from their results (about 30 microseconds a step)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._times = StepTimes()
        self._turns = count(1)

    def planned(self, plan: StepPlan) -> None:
        """A plan is sent while steps are short."""
        self._times.planned(plan)

    def computed(self, result: StepResult) -> None:
        """The result of any step is back."""
        self._times.computed(result)

    def lose_plans(self) -> None:
        """The Worker is gone: no result will come for plans in flight."""
        self._times.lose_plans()

    def limit(self, sequences: list[Sequence], more_wait: bool, most: int) -> tuple[list[Sequence], int, set[Sequence]]:
        """Returns the sequences that the next step may hold, in order, its token budget (at most `most`), and the
        sequences that rest. `more_wait`: waiting sequences could start.
        """
        room = self._times.room_in(self._seconds)
        if room is None:
            return sequences, min(most, len(sequences) + -(-most // CHUNK_SHARE)), set()
        single = [seq for seq in sequences if seq.in_worker and seq.num_uncomputed_tokens == 1]
        decodes = [seq for seq in single if seq.has_started]
        has_chunks = more_wait or any(seq.num_uncomputed_tokens > 1 for seq in sequences)
        resting = self._resting(decodes, round(room.decodes / 2 if has_chunks else room.decodes_alone))
        for seq in single:
            if not seq.has_started:  # the end of a prompt takes no turn: forks may wait for it. This counts as its turn
                seq.last_turn = next(self._turns)
        num_decodes = len(decodes) - len(resting)
        num_tokens = round(room.tokens * max(0.0, 1.0 - num_decodes / room.decodes))
        others = [seq for seq in sequences if seq not in resting] if resting else sequences
        return others, min(most, len(single) - len(resting) + max(1, num_tokens)), resting

    def _resting(self, decodes: list[Sequence], most: int) -> set[Sequence]:
        """Returns the decodes that rest so that about `most` remain: in turns, and max-min fair between tenants."""
        if len(decodes) <= most:
            return set()
        by_tenant: dict[str, list[Sequence]] = {}
        for seq in decodes:
            seq.last_turn = seq.last_turn or next(self._turns)  # a new sequence is behind all others
            by_tenant.setdefault(seq.tenant, []).append(seq)
        resting, num_left = set[Sequence](), max(most, len(by_tenant))
        for number, rows in enumerate(sorted(by_tenant.values(), key=len)):
            share = num_left // (len(by_tenant) - number)
            rows.sort(key=lambda seq: seq.last_turn)
            for seq in rows[:share]:
                seq.last_turn = next(self._turns)
            resting.update(rows[share:])
            num_left -= len(rows[:share])
        return resting


class StepTarget:
    """No target. The Scheduler calls `limit` and `planned` for each plan, `computed` for each result, and `lose_plans`
    for a new Worker."""

    bounds_steps = False  # True: `limit` may return less than its `most`

    def limit(self, sequences: list[Sequence], most: int) -> int:
        """The token budget of the next step, at most `most`; `sequences`: those that it may hold."""
        return most

    def planned(self, plan: StepPlan) -> None:
        """A plan is sent."""

    def computed(self, result: StepResult) -> None:
        """A result is back."""

    def lose_plans(self) -> None:
        """The Worker is gone: no result will come for plans in flight."""


def make_target(seconds: float | None) -> StepTarget:
    """The target of a step with decodes; None: no target."""
    return StepTarget() if seconds is None else TimedTarget(seconds)


class TimedTarget(StepTarget):
    """Bounds the token budget of steps that hold decodes, so that a step takes no longer than a target."""

    bounds_steps = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._times = StepTimes()
        self._error = 0.0  # mean relative error of predictions

    def limit(self, sequences: list[Sequence], most: int) -> int:
        num_decodes = sum(seq.has_started and seq.num_uncomputed_tokens <= 1 for seq in sequences)
        if not num_decodes:
            return most
        tokens = self._times.tokens_in(self._seconds / (1 + DISTANCE * self._error), num_decodes)
        if tokens is None:
            tokens = -(-most // CHUNK_SHARE)
        return min(most, num_decodes + max(MIN_CHUNK, int(tokens)))

    def planned(self, plan: StepPlan) -> None:
        self._times.planned(plan)

    def computed(self, result: StepResult) -> None:
        if (error := self._times.computed(result)) is not None:
            self._error += ERROR_WEIGHT * (min(1.0, error) - self._error)

    def lose_plans(self) -> None:
        self._times.lose_plans()
