"""Beam search: which continuations of the hypotheses of one prompt are kept. Tokens and logprobs in, a choice out.

The semantics are those of transformers' generate(num_beams=..., do_sample=False), so that results can be compared token
by token: a hypothesis scores sum of logprobs / generated tokens ** length_penalty (Wu et al. 2016, section 7, in its
simple form), of all continuations of a step the best `width` that do not end go on, and one that ends is finished only
if it is among the best `width` of all.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.errors import InvalidRequestError
from engine.outputs import FinishReason
from engine.sampling_params import MAX_LOGPROBS, SamplingParams, require_float, require_int

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0  # of either sign: no length to its power overflows

Candidates = Sequence[tuple[int, float]]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Frozen and validated when made. `beam_width` hypotheses are searched and returned, best first.

    `length_penalty` above 0 favours long hypotheses, below 0 short ones. `early_stopping` True ends the search when
    `beam_width` hypotheses are finished; False when the best running one, at its present length, scores below all of
    them; "never" when it cannot get past them at any length up to max_tokens. The rest is as in SamplingParams.
    """

    beam_width: int
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        require_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        require_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequestError('early_stopping must be true, false or "never".', "early_stopping")
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1, 2**31 - 1)  # a search of no tokens finds nothing
        self.sampling_params()  # checks the rest

    def sampling_params(self, num_candidates: int | None = None) -> SamplingParams:
        """What the Worker does for each hypothesis: report its `num_candidates` most likely continuations."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=num_candidates,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def end_token_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_token_ids)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A generated text as the list of its tokens, linked backwards: continuations share what they have in common."""

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
        """(token id, logprob) of each generated token, in order."""
        found = []
        node: Hypothesis | None = self
        while node is not None and node.length:
            found.append((node.token_id, node.logprob))
            node = node.parent
        return found[::-1]


class Survivor(NamedTuple):
    """A hypothesis that goes on: running hypothesis number `parent` and one more token."""

    parent: int
    token_id: int


class BeamSearch:
    """The search for one prompt. Begins with one running hypothesis, the empty one; `finished` is best first."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, end_token_ids: Collection[int]) -> None:
        self.params = params
        self.running = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.done = False
        self.max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)

    @property
    def num_candidates(self) -> int:
        """How many continuations of each hypothesis `advance` must see for an exact result.

        At most one per end token drops out, and no more than `width` of one hypothesis can go on.
        """
        return self.params.beam_width + len(self._end_token_ids)

    def advance(self, candidates: Sequence[Candidates]) -> list[Survivor]:
        """Choose among the candidates of each running hypothesis, given in the order of `running`.

        Returns who goes on, best first, which is the new `running`; nobody once the search is done.
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
        """(cumulative logprob, number of the parent, token id, logprob), best first, ties in a fixed order."""
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


def check_beams(params: BeamSearchParams, eos_token_ids: Collection[int], vocab_size: int, max_num_seqs: int) -> None:
    """Raise InvalidRequestError, which names `n` as HTTP calls the width, where a model or an engine is too small."""
    width, num_end_tokens = params.beam_width, len(params.end_token_ids(eos_token_ids))
    needed = width + num_end_tokens
    if width > max_num_seqs:
        raise InvalidRequestError(
            f"n (the beam width) is {width}; this server runs at most {max_num_seqs} sequences at once. Lower n.", "n"
        )
    if needed > vocab_size:
        raise InvalidRequestError(
            f"n (the beam width) is {width}; with {num_end_tokens} tokens that end it this model has only "
            f"{max(0, vocab_size - num_end_tokens)} ways to go on. Lower n.",
            "n",
        )
    if needed > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"n (the beam width) is {width} and {num_end_tokens} tokens (end-of-sequence and stop_token_ids) end a "
            f"hypothesis; together they may be at most {MAX_LOGPROBS}. Give fewer stop_token_ids.",
            "stop_token_ids",
        )
