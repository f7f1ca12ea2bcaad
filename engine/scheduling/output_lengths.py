"""OutputLengths: how long outputs get, learned from those that ended, for requests of a like limit.

A life table (Cutler and Ederer 1958) over buckets of the output length: the hazard of a bucket is the share of the
sequences which entered it that ended in it. Sequences that still run, and those that were aborted, count as entered for
as far as they came (censored), so the first to end, which are the short ones, do not make all look short. Two
pseudo-observations per bucket carry the prior: what got as far as n tokens gets to 2n with probability one half.
"""

from functools import cache
from itertools import accumulate

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason

MAX_LENGTH = 1 << 30  # tokens; beyond any model
MAX_OBSERVATIONS = 1024  # then all counts are halved, so that what is served now outweighs what was
PRIOR_WEIGHT = 2.0
PRIOR_SCALE = 16  # tokens; an output that has just begun counts as this long
STALE_SHARE = 0.05  # of new observations, after which a class is fitted anew
MAX_REFITS_SAVED = 8  # times that fitting was put off


def bucket_of(length: int) -> int:
    """Exact below 16, then eight buckets an octave."""
    if length < 16:
        return length
    shift = length.bit_length() - 4
    return (shift << 3) + (length >> shift)


def bucket_start(bucket: int) -> int:
    """The least length of a bucket."""
    if bucket < 16:
        return bucket
    shift = (bucket >> 3) - 1
    return (bucket - (shift << 3)) << shift


@cache
def horizons(block_size: int, limit: int) -> tuple[int, ...]:
    """How many tokens ahead the future is looked at: a quarter of a block, then two an octave, below `limit`."""
    quarter = max(1, block_size // 4)
    steps = sorted({m << e for e in range(limit.bit_length()) for m in (2, 3)} | {1})
    return tuple(step * quarter for step in steps if step * quarter < limit)


class LengthClass:
    """Outputs of 1 to `limit` tokens. `fit` turns the counts into the survivor function that the questions read."""

    def __init__(self, limit: int, block_size: int) -> None:
        self.limit = limit
        self.horizons = horizons(block_size, limit)
        self._starts = [bucket_start(b) for b in range(bucket_of(limit) + 1)] + [limit + 1]
        self._ended = [0.0] * (len(self._starts) - 1)
        self._censored = [0.0] * (len(self._starts) - 1)
        self._num_observed = 0.0
        self.fit({})

    def observe(self, length: int, censored: bool) -> None:
        """An output ended with `length` tokens; `censored`: it would have got longer."""
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
        """`fit`, where enough has changed since: new ends, or time for those that run."""
        self._num_refits_saved += 1
        if self._num_new > STALE_SHARE * self._num_observed or self._num_refits_saved == MAX_REFITS_SAVED:
            self.fit(running)

    def fit(self, running: dict[int, int]) -> None:
        """Work out the survivor function; `running` counts those that run now, by the bucket of their next token."""
        cut = [c + running.get(bucket, 0) for bucket, c in enumerate(self._censored)]
        all_of = [e + c for e, c in zip(self._ended, cut, strict=True)]
        entered = list(accumulate(reversed(all_of)))[::-1]
        self._reach = [1.0]  # the probability of a length of at least the start of each bucket
        for bucket, at_risk in enumerate(entered):
            begin, end = self._starts[bucket], self._starts[bucket + 1]
            prior = PRIOR_WEIGHT * (end - begin) / (end + PRIOR_SCALE)
            # Those cut off within the bucket were in it for half of it, on the average.
            hazard = (self._ended[bucket] + prior) / (at_risk - cut[bucket] / 2 + PRIOR_WEIGHT)
            self._reach.append(self._reach[-1] * (1.0 - min(1.0, hazard)))
        self._reach[-1] = 0.0
        self._rows: dict[int, tuple[float, ...]] = {}
        self._num_new = self._num_refits_saved = 0

    def reach(self, length: int) -> float:
        """The probability that an output gets `length` tokens or more."""
        if length > self.limit:
            return 0.0
        bucket = bucket_of(length)
        begin, end = self._starts[bucket], self._starts[bucket + 1]
        low, high = self._reach[bucket], self._reach[bucket + 1]
        return low + (high - low) * (length - begin) / (end - begin)

    def alive(self, bucket: int) -> tuple[float, ...]:
        """The probability to be still at it after each of `horizons`, for one whose next token is in `bucket`."""
        if (row := self._rows.get(bucket)) is None:
            begin = self._starts[bucket]
            total = self.reach(begin)
            reaches = [self.reach(begin + ahead) for ahead in self.horizons]
            row = self._rows[bucket] = tuple(reach / total if total else 0.0 for reach in reaches)
        return row


class OutputLengths:
    """A LengthClass for each power of two of the limit; no max_tokens, and no end of its own, are classes apart."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._classes: dict[tuple[int, bool, bool], LengthClass] = {}

    def class_of(self, seq: Sequence) -> LengthClass:
        """The class of a sequence; at most some dozens come to be."""
        limit = seq.max_num_tokens - seq.num_prompt_tokens
        if seq.group is not None and seq.group.max_new_tokens is not None:
            limit = seq.group.max_new_tokens  # the limit of a hypothesis is always its next token
        exponent = (limit - 1).bit_length()
        key = exponent, seq.params.max_tokens is None, seq.params.ignore_eos
        if (found := self._classes.get(key)) is None:
            found = self._classes[key] = LengthClass(1 << exponent, self._block_size)
        return found

    def observe(self, seq: Sequence, reason: FinishReason) -> None:
        """A sequence ended. One cut by its limit has the length that such requests have."""
        censored = reason in (FinishReason.ABORT, FinishReason.ERROR)
        self.class_of(seq).observe(seq.num_generated_tokens, censored)
