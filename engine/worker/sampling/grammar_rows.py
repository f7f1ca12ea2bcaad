"""GrammarRows: which tokens may come next in the sequences that have a structured output.

A row's matcher has consumed the tokens that were generated up to some position; before a mask is made it takes in those
that came since. So it does not matter who sampled them: a sequence that comes back after preemption, or to another
Worker, brings its tokens along and its matcher starts over from them.

A form wins over everything that would make the text longer: ignore_eos and min_tokens keep the ends of the text out of
the mask for as long as the form allows another token.
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
# Processor time that a request may take of the step's thread: this much for each token, and this much to begin with.
SECONDS_PER_TOKEN, FIRST_SECONDS = 0.02, 0.5
TOO_SLOW = "the grammar takes too long to match: make it less ambiguous"
TOO_MANY_STATES = "too many states"
MIN_TOKENS_BETWEEN_RENEWALS = 16


@dataclass(slots=True)
class _Row:
    output: StructuredOutput
    first: int  # position of the first generated token
    matcher: "LLMatcher | None"  # None: it failed
    consumed: int  # tokens of the sequence, the prompt included
    min_length: int  # in tokens, the prompt included: below it, ends are kept out
    ends: Words | None  # a mask without the tokens that end the text; None where nothing keeps them out
    renewed_at: int = -MIN_TOKENS_BETWEEN_RENEWALS
    prepared: tuple[int, Words | GrammarError] | None = None  # position, and its mask or why there is none
    seconds: float = 0.0  # of processor time, so far
    last: int = 2**62  # position of the last token that the request may have
    limits: tuple[JsonNumbers, GrammarEnds, Ending] | None = None  # of JSON
    limited: int = -1  # last position whose mask was limited
    number: Number | None = None  # of JSON, that is being written


class GrammarRows:
    """Rows are those of InputBatch."""

    def __init__(self, cache: GrammarCache, eos_token_ids: Sequence[int], max_model_len: int = 2**62) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._eos_token_ids = list(eos_token_ids)
        self._rows: dict[int, _Row] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Take the sequence in `row`, where it has a structured output. ValueError where that cannot be compiled."""
        if params.structured_output is None:
            return
        try:
            matcher = self._cache.start(params.structured_output)
            longest = 2**62 if params.ignore_eos else num_prompt_tokens + params.min_tokens
            stops = params.stop_token_ids if params.min_tokens else ()
            keeps_out = params.ignore_eos or params.min_tokens > 0
            ends = self._without([*self._eos_token_ids, *stops]) if keeps_out else None
        except GrammarError as error:
            raise ValueError(NOT_MATCHED + str(error)) from None
        state = _Row(params.structured_output, num_prompt_tokens, matcher, num_prompt_tokens, longest, ends)
        state.limits = self._cache.limits(params.structured_output)
        end = self._max_model_len if params.max_tokens is None else num_prompt_tokens + params.max_tokens
        state.last = end - 1
        self._rows[row] = state

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    def which(self, rows: IntArray) -> IntArray:
        """Where in `rows` those stand that have a structured output."""
        known = self._rows
        return np.flatnonzero([row in known for row in rows.tolist()])

    def masks(self, at: SampleTargets, places: IntArray, token_ids: IntArray) -> tuple[Words, dict[int, str]]:
        """(int32 [len(places), num_words], reasons by sequence id) for the entries `places` of a step's `at`.

        token_ids [max_num_seqs, n] are the known tokens of all rows, up to the positions in `at`. A sequence that
        failed gets a mask that allows everything: nobody will see its token.
        """
        words: Words = np.full((len(places), self._cache.num_words), ALL)
        failed: dict[int, str] = {}
        for i, place in enumerate(places.tolist()):
            row = int(at.rows[place])
            state = self._rows[row]
            position = int(at.positions[place])
            try:
                if state.prepared is None or state.prepared[0] != position:
                    self._fill(state, token_ids[row], position, words[i])
                elif isinstance(prepared := state.prepared[1], GrammarError):
                    raise prepared
                else:
                    words[i] = prepared
            except GrammarError as error:
                state.matcher = None
                words[i] = ALL
                failed[int(at.seq_ids[place])] = NOT_MATCHED + str(error)
        return words, failed

    def prepare(self, row: int, position: int, token_ids: IntArray) -> None:
        """Have the mask of `row` at hand for when it samples at `position`; what goes wrong shows then."""
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
        state.seconds += time.thread_time() - start
        if state.seconds > FIRST_SECONDS + SECONDS_PER_TOKEN * (position - state.first):
            raise GrammarError(TOO_SLOW)

    def _advance(self, matcher: "LLMatcher", state: _Row, token_ids: IntArray, position: int) -> None:
        if state.limits is not None:
            # A sequence that comes back: what is known of its end is found again as it was, from text to text.
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
        """Keep the values of JSON sane, and lead it to its end."""
        if state.limits is None or state.matcher is None:
            return
        state.limited = position
        numbers, grammar_ends, ending = state.limits
        numbers.limit(state.number, words)
        if state.ends is None or position >= state.min_length:
            grammar_ends.limit(ending, state.matcher, words, state.last - position + 1)

    def _renew(self, state: _Row, token_ids: IntArray, position: int, error: GrammarError) -> None:
        """Start over with no states but those on the way of this text: the limit is on what is kept, not on a text."""
        if position - state.renewed_at < MIN_TOKENS_BETWEEN_RENEWALS:
            raise error
        state.matcher = self._cache.renew(state.output)
        state.renewed_at, state.consumed, state.number = position, state.first, None
        self._advance(state.matcher, state, token_ids, position)

    def _without(self, token_ids: list[int]) -> Words:
        num_words = self._cache.num_words
        return ~as_words((token_id for token_id in token_ids if token_id < 32 * num_words), num_words)
