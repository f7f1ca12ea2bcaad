"""OutputLengths: the distribution of output lengths, learned from finished outputs, for requests of similar limits.

A life table (Cutler and Ederer 1958) over buckets of the output length: the hazard of a bucket is the share of the
sequences that ended in it among those that entered it. Running and aborted sequences count as entered up to their
present length (censored): short outputs end first, and without this all outputs would look short. Two
pseudo-observations per bucket carry the prior: an output of n tokens reaches 2n tokens with probability one half.
"""

from functools import cache
from itertools import accumulate

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason

MAX_LENGTH = 1 << 30  # tokens; beyond any model
MAX_OBSERVATIONS = 1024  # at this number all counts are halved, so that recent outputs outweigh old ones
PRIOR_WEIGHT = 2.0
PRIOR_SCALE = 16  # tokens: the prior sees an output as this much longer
STALE_SHARE = 0.05  # share of new observations that makes a new fit necessary
MAX_REFITS_SAVED = 8  # skipped fits before the next one in any case


def bucket_of(length: int) -> int:
    """Returns the bucket of a length: exact below 16 tokens, then eight buckets per octave."""
    if length < 16:
        return length
    shift = length.bit_length() - 4
    return (shift << 3) + (length >> shift)


def bucket_start(bucket: int) -> int:
    """Returns the smallest length of a bucket."""
    if bucket < 16:
        return bucket
    shift = (bucket >> 3) - 1
    return (bucket - (shift << 3)) << shift


@cache
def horizons(block_size: int, limit: int) -> tuple[int, ...]:
    """Returns the look-ahead distances in tokens: a quarter of a block, then two per octave, below `limit`."""
    quarter = max(1, block_size // 4)
    steps = sorted({m << e for e in range(limit.bit_length()) for m in (2, 3)} | {1})
    return tuple(step * quarter for step in steps if step * quarter < limit)


class LengthClass:
    """Outputs of 1 to `limit` tokens. `fit` turns counts into the survivor function that `reach` and `alive` read."""

    def __init__(self, limit: int, block_size: int) -> None:
        self.limit = limit
        self.horizons = horizons(block_size, limit)
        self._starts = [bucket_start(b) for b in range(bucket_of(limit) + 1)] + [limit + 1]
        self._ended = [0.0] * (len(self._starts) - 1)
        self._censored = [0.0] * (len(self._starts) - 1)
        self._num_observed = 0.0
        self.fit({})

    def observe(self, length: int, censored: bool) -> None:
        """Counts an output that ended with `length` tokens; `censored`: it would have become longer."""
        if length < 1:
            return
        (self._censored if censored else self._ended)[bucket_of(min(length, self.limit))] += 1.0
        self._num_observed += 1.0
        self._num_new += 1
        if self._num_observed >= MAX_OBSERVATIONS:
            self._num_observed /= 2
            self._ended = [count / 2 for count in self._ended]
            self._censored = [count / 2 for count in self._censored]

    def refit(self, running: dict[int, int]) -> None:
        """Calls `fit` if enough outputs ended since the last fit, or if the last fit is old."""
        self._num_refits_saved += 1
        if self._num_new > STALE_SHARE * self._num_observed or self._num_refits_saved == MAX_REFITS_SAVED:
            self.fit(running)

    def fit(self, running: dict[int, int]) -> None:
        """Computes the survivor function. `running` counts running sequences by the bucket of their next token."""
        cut = [c + running.get(bucket, 0) for bucket, c in enumerate(self._censored)]
        all_of = [e + c for e, c in zip(self._ended, cut, strict=True)]
        entered = list(accumulate(reversed(all_of)))[::-1]
        self._reach = [1.0]  # the probability of a length of at least the start of each bucket
        for bucket, at_risk in enumerate(entered):
            begin, end = self._starts[bucket], self._starts[bucket + 1]
            prior = PRIOR_WEIGHT * (end - begin) / (end + PRIOR_SCALE)
            # A censored output was at risk for half of the bucket, on average.
            hazard = (self._ended[bucket] + prior) / (at_risk - cut[bucket] / 2 + PRIOR_WEIGHT)
            self._reach.append(self._reach[-1] * (1.0 - min(1.0, hazard)))
        self._reach[-1] = 0.0
        self._rows: dict[int, tuple[float, ...]] = {}
        self._num_new = self._num_refits_saved = 0

    def reach(self, length: int) -> float:
        """Returns the probability of `length` tokens or more."""
        if length > self.limit:
            return 0.0
        bucket = bucket_of(length)
        begin, end = self._starts[bucket], self._starts[bucket + 1]
        low, high = self._reach[bucket], self._reach[bucket + 1]
        return low + (high - low) * (length - begin) / (end - begin)

    def alive(self, bucket: int) -> tuple[float, ...]:
        """Returns P(still running after each of `horizons`) for an output whose next token is in `bucket`."""
        if (row := self._rows.get(bucket)) is None:
            begin = self._starts[bucket]
            total = self.reach(begin)
            reaches = [self.reach(begin + ahead) for ahead in self.horizons]
            row = self._rows[bucket] = tuple(reach / total if total else 0.0 for reach in reaches)
        return row


class OutputLengths:
    """A LengthClass per power of two of the limit; requests without max_tokens, or with ignore_eos, have their own."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._classes: dict[tuple[int, bool, bool], LengthClass] = {}

    def class_of(self, seq: Sequence) -> LengthClass:
        """Returns the class of a sequence; there are a few dozen at most."""
        limit = seq.max_num_tokens - seq.num_prompt_tokens
        if seq.group is not None and seq.group.max_new_tokens is not None:
            limit = seq.group.max_new_tokens  # the limit of a hypothesis is always its next token
        exponent = (limit - 1).bit_length()
        key = exponent, seq.params.max_tokens is None, seq.params.ignore_eos
        if (found := self._classes.get(key)) is None:
            found = self._classes[key] = LengthClass(1 << exponent, self._block_size)
        return found

    def observe(self, seq: Sequence, reason: FinishReason) -> None:
        """Counts a finished sequence. One that its limit ended is not censored: such requests have that length."""
        censored = reason in (FinishReason.ABORT, FinishReason.ERROR)
        self.class_of(seq).observe(seq.num_generated_tokens, censored)
