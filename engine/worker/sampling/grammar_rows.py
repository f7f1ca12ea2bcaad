"""GrammarRows: computes which tokens may come next in the sequences that have a structured output.

A row's matcher has consumed the generated tokens up to some position. Before a mask is made, it consumes the tokens
that came since, whichever step or Worker sampled them: a sequence that returns after preemption, or to another Worker,
brings its tokens along, and its matcher starts over from them.

The grammar wins over everything that would make the text longer: ignore_eos and min_tokens keep the end tokens out of
the mask only while the grammar allows another token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.grammars.compiler import GrammarError, Words, as_words, fill_mask
from engine.sampling_params import SamplingParams
from engine.structured_output import NOT_MATCHED, StructuredOutput
from engine.worker.batch.input_batch import SampleTargets
from engine.worker.batch.step_buffer import IntArray
from engine.worker.sampling.grammar_cache import GrammarCache
from engine.worker.sampling.grammar_ends import Ending, GrammarEnds
from engine.worker.sampling.json_numbers import JsonNumbers, Number

if TYPE_CHECKING:
    from llguidance import LLMatcher

ALL = np.int32(-1)  # every bit of a word
# Limit of processor time that a request may take in the step's thread: seconds per token, plus seconds at the start.
SECONDS_PER_TOKEN, FIRST_SECONDS = 0.004, 0.3
TOO_SLOW = "the grammar takes too long to match: make it less ambiguous"
TOO_MANY_STATES = "too many states"
MIN_TOKENS_BETWEEN_RENEWALS = 16
SLOW_SECONDS = 0.0005  # processor time of a mask that is reported; most take a tenth of it or less


@dataclass(slots=True)
class _Row:
    output: StructuredOutput
    first: int  # position of the first generated token
    matcher: "LLMatcher | None"  # None: the grammar failed
    consumed: int  # tokens of the sequence, the prompt included
    min_length: int  # tokens, prompt included; up to here end tokens are masked
    ends: Words | None  # mask without end tokens; None: end tokens stay allowed
    renewed_at: int = -MIN_TOKENS_BETWEEN_RENEWALS
    prepared: tuple[int, Words | GrammarError] | None = None  # (position, its mask or its error)
    seconds: float = 0.0  # processor time so far
    last_seconds: float = 0.0  # processor time for the newest mask
    last: int = 2**62  # position of the last token that max_tokens allows
    limits: tuple[JsonNumbers, GrammarEnds, Ending] | None = None  # JSON only: what keeps it short
    limited: int = -1  # last position whose mask the limits changed
    number: Number | None = None  # JSON only: the unfinished number at the end of the text


class GrammarRows:
    """The grammars of live sequences, by row of InputBatch."""

    def __init__(self, cache: GrammarCache, eos_token_ids: Sequence[int], max_model_len: int = 2**62) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._eos_token_ids = list(eos_token_ids)
        self._rows: dict[int, _Row] = {}
        self._slow: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Add the sequence in `row` if it has a structured output. ValueError if that cannot be compiled."""
        if params.structured_output is None:
            return
        try:
            matcher = self._cache.start(params.structured_output)
            min_length = 2**62 if params.ignore_eos else num_prompt_tokens + params.min_tokens
            stops = params.stop_token_ids if params.min_tokens else ()
            keeps_out = params.ignore_eos or params.min_tokens > 0
            ends = self._without([*self._eos_token_ids, *stops]) if keeps_out else None
        except GrammarError as error:
            raise ValueError(NOT_MATCHED + str(error)) from None
        state = _Row(params.structured_output, num_prompt_tokens, matcher, num_prompt_tokens, min_length, ends)
        state.limits = self._cache.limits(params.structured_output)
        end = self._max_model_len if params.max_tokens is None else num_prompt_tokens + params.max_tokens
        state.last = end - 1
        self._rows[row] = state

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    def places_in(self, rows: IntArray) -> IntArray:
        """Indices in `rows` of the rows with a structured output."""
        known = self._rows
        return np.flatnonzero([row in known for row in rows.tolist()])

    def masks(self, targets: SampleTargets, places: IntArray, token_ids: IntArray) -> tuple[Words, dict[int, str]]:
        """(masks int32 [len(places), num_words], reasons by sequence id) for the entries `places` of a step's targets.

        token_ids [max_num_seqs, n] are the known tokens of all rows, up to the positions of the targets. A sequence
        that failed gets a mask that allows every token; its token is thrown away.
        """
        words: Words = np.full((len(places), self._cache.num_words), ALL)
        failed: dict[int, str] = {}
        for i, place in enumerate(places.tolist()):
            row = int(targets.rows[place])
            state = self._rows[row]
            position = int(targets.positions[place])
            try:
                if state.prepared is None or state.prepared[0] != position:
                    self._fill(state, token_ids[row], position, words[i])
                elif isinstance(prepared := state.prepared[1], GrammarError):
                    raise prepared
                else:
                    words[i] = prepared
                if state.last_seconds > SLOW_SECONDS:
                    self._slow[int(targets.seq_ids[place])] = state.last_seconds
            except GrammarError as error:
                state.matcher = None
                words[i] = ALL
                failed[int(targets.seq_ids[place])] = NOT_MATCHED + str(error)
        return words, failed

    def take_slow(self) -> dict[int, float]:
        """Sequences whose masks took long since the last call, with the processor seconds of the newest."""
        slow, self._slow = self._slow, {}
        return slow

    def prepare(self, row: int, position: int, token_ids: IntArray) -> None:
        """Make the mask that `row` needs at `position` in advance; an error is kept and raised when the mask is
        needed."""
        if (state := self._rows.get(row)) is None:
            return
        words: Words = np.full(self._cache.num_words, ALL)
        try:
            self._fill(state, token_ids[row], position, words)
            state.prepared = position, words
        except GrammarError as error:
            state.prepared = position, error

    def _fill(self, state: _Row, token_ids: IntArray, position: int, words: Words) -> None:
        if state.matcher is None:
            return
        start = time.thread_time()
        try:
            self._advance(state.matcher, state, token_ids, position)
            fill_mask(state.matcher, words)
        except GrammarError as error:
            if TOO_MANY_STATES not in str(error):
                raise
            self._renew(state, token_ids, position, error)
            fill_mask(state.matcher, words)
        self._limit(state, position, words)
        if state.ends is not None and position < state.min_length:
            others = words & state.ends
            if others.any():
                words[:] = others
        state.last_seconds = time.thread_time() - start
        state.seconds += state.last_seconds
        if state.seconds > FIRST_SECONDS + SECONDS_PER_TOKEN * (position - state.first):
            raise GrammarError(TOO_SLOW)

    def _advance(self, matcher: "LLMatcher", state: _Row, token_ids: IntArray, position: int) -> None:
        if state.limits is not None:
            # A sequence that returned: repeat its limits position by position, so that the same ends are found again.
            window = state.last + 1 - state.limits[2].window
            for known in range(max(state.first, state.limited + 1, window), position):
                self._consume(matcher, state, token_ids, known)
                if not matcher.is_stopped():
                    words: Words = np.zeros(self._cache.num_words, np.int32)
                    fill_mask(matcher, words)
                    self._limit(state, known, words)
        self._consume(matcher, state, token_ids, position)

    def _consume(self, matcher: "LLMatcher", state: _Row, token_ids: IntArray, position: int) -> None:
        new = token_ids[state.consumed : position].tolist()
        state.consumed = position
        if state.limits is not None:
            state.number = state.limits[0].follow(state.number, new)
        if new and not matcher.is_stopped() and not matcher.consume_tokens(new):
            raise GrammarError(f"the grammar refuses a token that it allowed: {matcher.get_error()[:100]}")

    def _limit(self, state: _Row, position: int, words: Words) -> None:
        """JSON only: mask tokens that make numbers too large, or that leave no room for the end of the text."""
        if state.limits is None or state.matcher is None:
            return
        state.limited = position
        numbers, grammar_ends, ending = state.limits
        numbers.limit(state.number, words)
        if state.ends is None or position >= state.min_length:
            grammar_ends.limit(ending, state.matcher, words, state.last - position + 1)

    def _renew(self, state: _Row, token_ids: IntArray, position: int, error: GrammarError) -> None:
        """Compile anew and replay the text: the limit counts all states that a matcher keeps, not those of one text."""
        if position - state.renewed_at < MIN_TOKENS_BETWEEN_RENEWALS:
            raise error
        state.matcher = self._cache.renew(state.output)
        state.renewed_at, state.consumed, state.number = position, state.first, None
        self._advance(state.matcher, state, token_ids, position)

    def _without(self, token_ids: list[int]) -> Words:
        num_words = self._cache.num_words
        return ~as_words((token_id for token_id in token_ids if token_id < 32 * num_words), num_words)
