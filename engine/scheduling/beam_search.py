"""Beam search: chooses which continuations of the hypotheses of one prompt go on. Works on token ids and logprobs.

The semantics are those of transformers' generate(num_beams=..., do_sample=False), so that results can be compared token
by token. The score of a hypothesis is sum of logprobs / generated tokens ** length_penalty (Wu et al. 2016, section 7,
in its simple form). In each step the best `width` continuations that do not end go on; a continuation that ends counts
as finished only if it is among the best `width` of all.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.outputs import FinishReason
from engine.sampling_params import BeamSearchParams

Candidates = Sequence[tuple[int, float]]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A generated text as a list of tokens, linked backwards: continuations share their common start."""

    parent: "Hypothesis | None" = None
    token_id: int = -1
    logprob: float = 0.0
    length: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    def extend(self, token_id: int, logprob: float, finish_reason: FinishReason | None = None) -> "Hypothesis":
        cumulative = self.cumulative_logprob + logprob
        return Hypothesis(self, token_id, logprob, self.length + 1, cumulative, finish_reason)

    def score(self, length_penalty: float) -> float:
        return _normalised(self.cumulative_logprob, self.length, length_penalty)

    def tokens(self) -> list[tuple[int, float]]:
        """Returns (token id, logprob) of each generated token, in order."""
        found = []
        node: Hypothesis | None = self
        while node is not None and node.length:
            found.append((node.token_id, node.logprob))
            node = node.parent
        return found[::-1]


class Survivor(NamedTuple):
    """A hypothesis that goes on: running hypothesis number `parent`, and one more token."""

    parent: int
    token_id: int


class BeamSearch:
    """The search for one prompt. Starts with one running hypothesis, the empty one; `finished` is best first."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, end_token_ids: Collection[int]) -> None:
        self.params = params
        self.running = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.done = False
        self.max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)

    @property
    def num_candidates(self) -> int:
        """Number of continuations of each hypothesis that `advance` needs for an exact result.

        At most one per end token drops out, and at most `width` of one hypothesis can go on.
        """
        return self.params.beam_width + len(self._end_token_ids)

    def advance(self, candidates: Sequence[Candidates]) -> list[Survivor]:
        """Chooses among the candidates of each running hypothesis, given in the order of `running`.

        Returns the survivors, best first, in the order of the new `running`; none once the search is done.
        """
        width = self.params.beam_width
        ranked = self._rank(candidates)
        length = self.running[0].length + 1
        going_on = []
        for rank, (cumulative, parent, token_id, logprob) in enumerate(ranked):
            reason = self._finish_reason(token_id, length)
            if reason is None:
                going_on.append((parent, token_id, logprob, cumulative))
            elif rank < width:
                self.finished.append(self.running[parent].extend(token_id, logprob, reason))
        self.finished.sort(key=self._score, reverse=True)
        del self.finished[width:]
        del going_on[width:]
        self.running = [self.running[parent].extend(token_id, logprob) for parent, token_id, logprob, _ in going_on]
        self.done = not self.running or self._cannot_improve()
        return [] if self.done else [Survivor(parent, token_id) for parent, token_id, *_ in going_on]

    def _rank(self, candidates: Sequence[Candidates]) -> list[tuple[float, int, int, float]]:
        """Returns (cumulative logprob, number of the parent, token id, logprob), best first, ties in a fixed order."""
        banned = self._end_token_ids if self.running[0].length < self.params.min_tokens else ()
        ranked = [
            (hypothesis.cumulative_logprob + logprob, parent, token_id, logprob)
            for parent, (hypothesis, offers) in enumerate(zip(self.running, candidates, strict=True))
            for token_id, logprob in offers
            if token_id not in banned
        ]
        ranked.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        return ranked

    def _finish_reason(self, token_id: int, length: int) -> FinishReason | None:
        if token_id in self._end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_tokens else None

    def _cannot_improve(self) -> bool:
        if len(self.finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        best, penalty = self.running[0], self.params.length_penalty
        longest = self.params.early_stopping == "never" and penalty > 0
        length = self.max_tokens if longest else best.length
        return _normalised(best.cumulative_logprob, length, penalty) <= self._score(self.finished[-1])

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.score(self.params.length_penalty)


def _normalised(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    return cumulative_logprob / math.pow(length, length_penalty)
