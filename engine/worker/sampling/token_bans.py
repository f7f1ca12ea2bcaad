"""Token bans of live sequences: `bad_words` and `allowed_token_ids`.

A word of one token is always ruled out. A word of several tokens is ruled out at its last token, if the newest
generated tokens of the sequence are the word's other tokens. The device makes that comparison, for all words of all
rows at once: on a GPU the host does not know the newest token when it prepares a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams

Array = npt.NDArray[Any]
Put = Callable[[Array], Tensor]

NUM_RECENT = MAX_BAD_WORD_TOKENS - 1  # generated tokens that a ban looks back at
ANY = -1  # pads the front of shorter words


@dataclass(frozen=True, slots=True)
class WordBans:
    """Words of several tokens, all int64.

    prefixes [num_words, n] are right-aligned, padded by ANY; at [num_words] are flat indices (row * vocab_size + last
    token); batch_rows [num_words] are rows of RecentTokens; update = (rows of the step, their rows in RecentTokens):
    the rows whose new tokens RecentTokens must keep.
    """

    prefixes: Tensor
    at: Tensor
    batch_rows: Tensor
    update: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """rows: rows of the step with allowed_token_ids; at: flat indices of their allowed tokens. int64."""

    rows: Tensor
    at: Tensor


class RecentTokens:
    """The newest generated tokens of each row, int64 [max_num_seqs, NUM_RECENT], padded by ANY at the front."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.token_ids = torch.full((max_num_seqs, NUM_RECENT), ANY, dtype=torch.int64, device=device)

    def reset(self, row: int, generated: Tensor) -> None:
        """Set the tokens of a sequence that is new, or back after preemption. generated int64 [n]."""
        newest = generated[-NUM_RECENT:]
        self.token_ids[row].fill_(ANY)[NUM_RECENT - len(newest) :] = newest

    def add(self, batch_rows: Tensor, token_ids: Tensor) -> None:
        """Append one token to each of batch_rows."""
        kept = self.token_ids.index_select(0, batch_rows)[:, 1:]
        self.token_ids.index_copy_(0, batch_rows, torch.cat([kept, token_ids[:, None]], 1))

    def matches(self, bans: WordBans) -> Tensor:
        """True for each word whose tokens before the last were just generated, bool [num_words]."""
        said = self.token_ids.index_select(0, bans.batch_rows)[:, -bans.prefixes.shape[1] :]
        return ((said == bans.prefixes) | (bans.prefixes == ANY)).all(1)


def ban_words(values: Tensor, bans: WordBans, recent: RecentTokens) -> None:
    """Rule out, in logits fp32 [rows, vocab_size], every token that would complete a word."""
    rule_out = torch.where(recent.matches(bans), -torch.inf, 0.0)
    values.view(-1).index_add_(0, bans.at, rule_out)


def allow_only(values: Tensor, allowed: AllowedTokens) -> None:
    """Rule out all but the allowed tokens, in logits fp32 [rows, vocab_size]."""
    flat = values.view(-1)
    kept = flat.index_select(0, allowed.at)
    values.index_fill_(0, allowed.rows, -torch.inf)
    flat.index_copy_(0, allowed.at, kept)


class TokenBans:
    """The bans of the rows of a batch. Rows without bans take no memory."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._single: dict[int, Array] = {}  # row -> words of one token
        self._words: dict[int, tuple[Array, Array]] = {}  # row -> prefixes [n, NUM_RECENT], last tokens [n]
        self._allowed: dict[int, Array] = {}

    def set(self, row: int, params: SamplingParams) -> bool:
        """Take over the parameters of a sequence; whether they ban anything. ValueError for what is no token id."""
        for held in (self._single, self._words, self._allowed):
            held.pop(row, None)
        if not params.bad_words and params.allowed_token_ids is None:
            return False
        words = [self._checked(word) for word in params.bad_words]
        single = [word[0] for word in words if len(word) == 1]
        several = [word for word in words if len(word) > 1]
        if single:
            self._single[row] = np.unique(np.array(single, np.int64))
        if several:
            prefixes = np.full((len(several), NUM_RECENT), ANY, np.int64)
            for prefix, word in zip(prefixes, several, strict=True):
                prefix[NUM_RECENT - len(word) + 1 :] = word[:-1]
            self._words[row] = prefixes, np.array([word[-1] for word in several], np.int64)
        if params.allowed_token_ids is not None:
            self._allowed[row] = np.unique(np.array(self._checked(params.allowed_token_ids), np.int64))
        return True

    def has_words(self, row: int) -> bool:
        """True if the row has words of several tokens, so that its newest tokens must be kept."""
        return row in self._words

    def single(self, row: int) -> Array | None:
        """Token ids that are ruled out in every step, ascending; None if there are none."""
        return self._single.get(row)

    def build_words(self, rows: Array, indices: Array, put: Put) -> WordBans | None:
        """The word bans of a step, for rows[indices]; `indices` are their rows in its logits. None if there are
        none."""
        held = [(i, row, *self._words[row]) for i in indices.tolist() if (row := int(rows[i])) in self._words]
        if not held:
            return None
        counts = [len(last) for _, _, _, last in held]
        places, batch_rows = (np.array([entry[k] for entry in held], np.int64) for k in (0, 1))
        prefixes = np.concatenate([prefix for _, _, prefix, _ in held])
        width = int((prefixes != ANY).sum(1).max())
        return WordBans(
            prefixes=put(prefixes[:, -width:]),
            at=put(np.repeat(places, counts) * self.vocab_size + np.concatenate([last for *_, last in held])),
            batch_rows=put(np.repeat(batch_rows, counts)),
            update=(put(places), put(batch_rows)),
        )

    def build_allowed(self, rows: Array, indices: Array, put: Put) -> AllowedTokens | None:
        held = [(i, self._allowed[row]) for i in indices.tolist() if (row := int(rows[i])) in self._allowed]
        if not held:
            return None
        at = np.concatenate([i * self.vocab_size + ids for i, ids in held])
        return AllowedTokens(put(np.array([i for i, _ in held], np.int64)), put(at))

    def _checked(self, token_ids: object) -> tuple[int, ...]:
        if not isinstance(token_ids, tuple) or any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise ValueError(f"bad_words and allowed_token_ids must be token ids below {self.vocab_size}")
        return token_ids
