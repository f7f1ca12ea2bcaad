"""SamplingRows: the sampling parameters of live sequences as arrays; makes the sampler's inputs for a step.

Rows are those of InputBatch. A step gathers its parameters with a few vectorised reads; parameters of a few sequences
only (penalties, biases, logprobs ...) are prepared for those sequences alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.worker.sampling.token_bans import AllowedTokens, TokenBans, WordBans
from kernels.dispatch import cpu_kernels

Array = npt.NDArray[Any]
Put = Callable[[Array], Tensor]  # moves a host array to the device: StepBuffer.put

# Features that a row asks for beyond the most likely token, one bit each.
DRAW, TOP_K, TOP_P, PENALTY, BIAS, MIN_TOKENS, LOGPROBS, GRAMMAR, BANS, THINKING = (1 << i for i in range(10))

NOT_PLAIN = np.uint16(0xFFFF & ~(DRAW | TOP_K | TOP_P | PENALTY))

NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, presence, frequency

# A top_k up to this value uses partial selection; a larger one sorts the whole row.
MAX_SELECTED = 256
# Most logits of one group of draws, which bounds the sampler's workspace (about 20 bytes per logit).
MAX_DRAW_ELEMENTS = 1 << 24

# Uses every part of the sampler at once: for warm-up, and for measuring its peak of memory.
EVERYTHING_ON = SamplingParams(
    temperature=0.5,
    top_p=0.5,
    top_k=1000,
    min_p=0.001,
    repetition_penalty=1.5,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    logit_bias={0: 1.0},
    min_tokens=1,
    logprobs=MAX_LOGPROBS,
    bad_words=((1, 0),),
)
# The parameters of warm-up steps: a GPU compiles a kernel for each, with and without changed logits and filters.
WARM_UP = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
    SamplingParams(),
    SamplingParams(presence_penalty=1.0),
    SamplingParams(top_p=0.5),
    EVERYTHING_ON,
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Draw:
    """A group of rows that are drawn together. All tensors [n]; `rows` are rows of the step's logits.

    num_candidates (on a CPU): the largest top_k of these rows, or the size of the vocabulary to sort whole rows.
    """

    rows: Tensor
    temperature: Tensor  # float32
    uniform: Tensor  # float64 in [0, 1)
    log_min_p: Tensor | None  # float32, -inf: off
    top_k: Tensor | None  # int64, vocab_size: off
    top_p: Tensor | None  # float64, 1: off
    num_candidates: int


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of `rows` (rows of the step's logits); batch_rows: their rows in TokenCounts; factors float32 [n,
    1]."""

    rows: Tensor
    batch_rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    # For a CPU's compiled kernels, which count by themselves: the History, and how many of its tokens come before the
    # step's, int64 [n].
    history: tuple[Any, Tensor] | None = None


class PlainDraws(NamedTuple):
    """The sampling of a step on a CPU whose rows are all plain: a token of each row of the logits, int64 [rows], or
    FAILED."""

    draw: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampler's inputs for one step. A flat index is row * vocab_size + token id."""

    changed_rows: Tensor | None  # rows whose logits the next five fields change
    bias: tuple[Tensor, Tensor] | None  # flat indices, float32 values
    penalties: Penalties | None
    banned: Tensor | None  # flat indices ruled out by min_tokens and by bad words of one token
    words: WordBans | None
    allowed: AllowedTokens | None
    draws: list[Draw]
    logprob_rows: Tensor | None
    num_logprobs: Array  # [rows of the step], -1: none asked
    max_logprobs: int


class SamplingRows:
    """Arrays [max_num_seqs] of sampling parameters.

    one_draw (for kernels): all rows that draw are one group, whatever their filters. Otherwise rows with the same
    filters form a group, so that no row pays for another row's filter.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: list[int],
        *,
        one_draw: bool = False,
        token_ids: Array | None = None,
    ) -> None:
        """token_ids int32 [max_num_seqs, n]: the known tokens of all rows, if the host knows them all (on a CPU).
        Compiled kernels then draw plain rows by themselves, and penalties visit no other tokens."""
        self.vocab_size = vocab_size
        self._one_draw = one_draw
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._flags = np.zeros(max_num_seqs, np.uint16)
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._plain_temperature = np.zeros(max_num_seqs, np.float32)  # 0: greedy
        self._log_min_p = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, presence, frequency
        self._num_prompt = np.zeros(max_num_seqs, np.int64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._min_length = np.zeros(max_num_seqs, np.int64)  # in tokens, the prompt included
        self._num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self._bias: dict[int, tuple[Array, Array]] = {}
        self._end_ids: dict[int, Array] = {}
        self._bans = TokenBans(vocab_size)
        self._history: Any = None
        if token_ids is not None and (cpu := cpu_kernels()) is not None:
            self._history = cpu.penalties.History(token_ids, self._num_prompt, self._penalties)

    def set(self, row: int, params: SamplingParams, seed: int, num_prompt_tokens: int) -> None:
        """Set the parameters of the sequence in `row`. ValueError if a token id is not in the vocabulary."""
        bias = params.logit_bias or {}
        end_ids = [*self._eos_token_ids, *params.stop_token_ids] if params.min_tokens else []
        if any(not 0 <= token_id < self.vocab_size for token_id in (*bias, *end_ids)):
            raise ValueError(f"a token id of logit_bias or stop_token_ids is not below {self.vocab_size}")
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._temperature[row] = 1.0 if params.greedy else params.temperature
        self._plain_temperature[row] = 0.0 if params.greedy else params.temperature
        self._log_min_p[row] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        self._top_k[row], self._top_p[row] = top_k, params.top_p
        self._penalties[row] = penalties
        self._seed[row] = seed & 0xFFFFFFFFFFFFFFFF
        self._num_prompt[row] = num_prompt_tokens
        self._min_length[row] = num_prompt_tokens + params.min_tokens
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._bias[row] = (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
        self._end_ids[row] = np.unique(np.array(end_ids, np.int64))
        asked = {
            DRAW: not params.greedy,
            TOP_K: not params.greedy and top_k < self.vocab_size,
            TOP_P: not params.greedy and params.top_p < 1.0,
            PENALTY: penalties != NO_PENALTIES,
            BIAS: bool(bias),
            # With a structured output, the grammar's mask applies min_tokens (engine/worker/sampling/grammar_rows.py).
            MIN_TOKENS: bool(end_ids) and params.structured_output is None,
            LOGPROBS: params.logprobs is not None,
            # GrammarMasks and ThinkingRows make the masks and the forced tokens. These two bits keep the row from
            # counting as greedy or plain, and tell that earlier tokens change its draw (depends_on_tokens).
            GRAMMAR: params.structured_output is not None,
            THINKING: params.thinking_token_budget is not None,
            BANS: self._bans.set(row, params),
        }
        self._flags[row] = sum(bit for bit, is_asked in asked.items() if is_asked)

    def set_greedy(self, row: int) -> None:
        """Make a row greedy whose sequence has already failed."""
        self._flags[row] = 0
        self._plain_temperature[row], self._penalties[row] = 0.0, NO_PENALTIES

    def depends_on_tokens(self, row: int) -> bool:
        """True if the tokens before a position change the draw there beyond its logits."""
        return bool(self._flags[row] & (PENALTY | GRAMMAR | THINKING)) or self._bans.has_words(row)

    def needs_history(self, row: int) -> bool:
        """True if the sampler must keep the row's tokens: for penalties that have no other source, or for bad words of
        several tokens."""
        return bool(self._flags[row] & PENALTY and self._history is None) or self._bans.has_words(row)

    def is_greedy(self, rows: Array) -> bool:
        """True if all rows just want the most likely token."""
        return not self._flags[rows].any()

    def is_plain(self, rows: Array) -> bool:
        """True if compiled kernels draw all rows by themselves: by penalties, temperature, min_p, top_k and top_p."""
        return self._history is not None and not (self._flags[rows] & NOT_PLAIN).any()

    def plain_draws(self, rows: Array, positions: Array) -> Callable[[Tensor], Tensor]:
        """Draws the tokens of plain rows on a CPU with compiled kernels, from logits [n, vocab_size]. rows, positions
        int64: those of a step, contiguous, in arrays that never move."""
        cpu = cpu_kernels()
        assert cpu is not None and self._history is not None, "no row is plain"
        draws = cpu.draw.DrawRows(
            temperature=self._plain_temperature,
            log_min_p=self._log_min_p,
            top_k=self._top_k,
            top_p=self._top_p,
            seed=self._seed,
            history=self._history,
            rows=rows,
            positions=positions,
        )
        return draws.draw  # type: ignore[no-any-return]

    def build(self, rows: Array, positions: Array, put: Put) -> SamplingInputs | PlainDraws | None:
        """The inputs of a step that samples `rows` at `positions`; None if all rows just want the most likely token."""
        flags = self._flags[rows]
        if not flags.any():
            return None
        if self.is_plain(rows):
            return PlainDraws(self.plain_draws(*(np.ascontiguousarray(array, np.int64) for array in (rows, positions))))
        penalty = np.flatnonzero(flags & PENALTY)
        bias = np.flatnonzero(flags & BIAS)
        too_short = (flags & MIN_TOKENS != 0) & (positions < self._min_length[rows])
        bans = np.flatnonzero(flags & BANS)
        logprob = np.flatnonzero(flags & LOGPROBS)
        changed = np.unique(np.concatenate([penalty, bias, np.flatnonzero(too_short), bans]))
        num_logprobs = np.where(flags & LOGPROBS, self._num_logprobs[rows], -1)
        return SamplingInputs(
            changed_rows=put(changed) if len(changed) else None,
            bias=self._build_bias(rows, bias, put) if len(bias) else None,
            penalties=self._build_penalties(rows, penalty, positions, put) if len(penalty) else None,
            banned=self._build_banned(rows, too_short, bans, put),
            words=self._bans.build_words(rows, bans, put) if len(bans) else None,
            allowed=self._bans.build_allowed(rows, bans, put) if len(bans) else None,
            draws=self._build_draws(rows, positions, flags, put),
            logprob_rows=put(logprob) if len(logprob) else None,
            num_logprobs=num_logprobs,
            max_logprobs=max(0, int(num_logprobs.max())),
        )

    def _flat(self, indices: Array, token_ids: list[Array]) -> Array:
        """Flat indices of token_ids[i] in the row indices[i] of the logits."""
        flat: Array = np.repeat(indices, [len(ids) for ids in token_ids]) * self.vocab_size + np.concatenate(token_ids)
        return flat

    def _build_banned(self, rows: Array, too_short: Array, bans: Array, put: Put) -> Tensor | None:
        """Flat indices of end tokens in rows that are `too_short`, and of bad words of one token in the rows `bans`."""
        banned = {i: [self._end_ids[rows[i]]] for i in np.flatnonzero(too_short).tolist()}
        for i in bans.tolist():
            if (single := self._bans.single(int(rows[i]))) is not None:
                banned.setdefault(i, []).append(single)
        if not banned:
            return None
        indices = sorted(banned)
        return put(self._flat(np.array(indices, np.int64), [np.concatenate(banned[i]) for i in indices]))

    def _build_bias(self, rows: Array, indices: Array, put: Put) -> tuple[Tensor, Tensor]:
        entries = [self._bias[row] for row in rows[indices].tolist()]
        return (
            put(self._flat(indices, [ids for ids, _ in entries])),
            put(np.concatenate([values for _, values in entries])),
        )

    def _build_penalties(self, rows: Array, indices: Array, positions: Array, put: Put) -> Penalties:
        batch_rows = rows[indices]
        repetition, presence, frequency = (put(self._penalties[batch_rows, i : i + 1]) for i in range(3))
        history = None if self._history is None else (self._history, put(positions[indices]))
        return Penalties(put(indices), put(batch_rows), repetition, presence, frequency, history)

    def _build_draws(self, rows: Array, positions: Array, flags: Array, put: Put) -> list[Draw]:
        """Groups of rows with the same filters, of bounded size; with one_draw a single group."""
        drawn = flags & DRAW != 0
        if self._one_draw:
            indices = np.flatnonzero(drawn)
            return [self._build_draw(rows[indices], positions[indices], indices, 0, put)] if len(indices) else []
        top_k, top_p = flags & TOP_K != 0, flags & TOP_P != 0
        large_k = top_k & (self._top_k[rows] > MAX_SELECTED)
        small_k = top_k & ~large_k
        selected = int(self._top_k[rows[small_k]].max(initial=0))
        draws = []
        group_size = max(1, MAX_DRAW_ELEMENTS // self.vocab_size)
        for members, num_candidates in (
            (drawn & ~top_k & ~top_p, 0),
            (drawn & ~top_k & top_p, 0),
            (small_k, selected),
            (large_k, self.vocab_size),
        ):
            indices = np.flatnonzero(members)
            for start in range(0, len(indices), group_size):
                group = indices[start : start + group_size]
                draws.append(self._build_draw(rows[group], positions[group], group, num_candidates, put))
        return draws

    def _build_draw(self, rows: Array, positions: Array, indices: Array, num_candidates: int, put: Put) -> Draw:
        log_min_p, top_k, top_p = self._log_min_p[rows], self._top_k[rows], self._top_p[rows]
        has_k, has_p = bool((top_k < self.vocab_size).any()), bool((top_p < 1.0).any())
        if self._one_draw:  # both filters or none: fewer variants of the kernel
            has_k = has_p = has_k or has_p
        return Draw(
            rows=put(indices),
            temperature=put(self._temperature[rows]),
            uniform=put(uniforms(self._seed[rows], positions)),
            log_min_p=put(log_min_p) if self._one_draw or (log_min_p > -np.inf).any() else None,
            top_k=put(top_k) if has_k else None,
            top_p=put(top_p) if has_p else None,
            num_candidates=num_candidates,
        )


def uniforms(seeds: Array, positions: Array) -> Array:
    """One number in [0, 1) per (seed, position), float64 with 53 random bits. Sampling has no other randomness.

    It is output number `position` of a SplitMix64 generator (Steele, Lea, Flood 2014) whose state starts at a hash of
    the seed, so that neighbouring seeds give unrelated streams.
    """
    state = _mix(seeds.astype(np.uint64) + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    result: Array = (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
