"""SlowMasks: keeps the masks of structured outputs from delaying the sequences of other tenants.

A step waits for the masks of all its rows, which the Worker makes one after the other: a mask mostly takes some ten
microseconds, but that of an ambiguous grammar up to tenths of a second. So sequences with slow masks decode in turns
where other tenants are served or to be expected: a step makes one slow mask, or as many as fit into MOST_SECONDS.
Beside sequences of other tenants an allowance decides (a token bucket), so that slow masks take at most
SHARE / (1 + SHARE) of the time.
"""

from collections.abc import Collection

from engine.executor.step import StepResult
from engine.memory.sequence import Sequence

SHARE = 0.25  # slow masks may take this part of the other computing time
MOST_SECONDS = 0.005  # slow masks may take this long in one step; also the largest allowance
LEAST_SECONDS = -0.1  # the largest debt, which comes from the time when no other tenant was there


class SlowMasks:
    """Hears of every result."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # the last mask by id of a sequence; the next turn comes first
        self._allowance = MOST_SECONDS

    @property
    def num_slow(self) -> int:
        """Number of sequences that are known to be slow."""
        return len(self._seconds)

    def computed(self, result: StepResult) -> None:
        """A result is back: its slow masks are charged, and sequences whose masks are fast again are forgotten."""
        slow = result.slow_masks
        if not (slow or self._seconds):
            return
        sampled = {token.seq_id for token in result.samples}
        for seq_id in self._seconds.keys() & sampled:
            del self._seconds[seq_id]
        self._seconds |= slow
        spent = sum(slow.values())
        earned = SHARE * max(0.0, result.compute_seconds - spent)
        self._allowance = min(MOST_SECONDS, max(LEAST_SECONDS, self._allowance + earned - spent))

    def resting(self, sequences: Collection[Sequence], running: Collection[Sequence]) -> set[Sequence]:
        """Returns those of the `sequences` that rest in a step: slow ones for which it has no time.

        Sequences that no longer run are forgotten: a result may name one that has ended.
        """
        if not self._seconds:
            return set()
        live = {seq.seq_id for seq in running}
        self._seconds = {seq_id: seconds for seq_id, seconds in self._seconds.items() if seq_id in live}
        by_id = {seq.seq_id: seq for seq in sequences if seq.num_uncomputed_tokens > 0}
        fast = {seq.tenant for seq_id, seq in by_id.items() if seq_id not in self._seconds}
        seconds_left = {True: self._allowance, False: MOST_SECONDS}  # beside others, or not
        resting = set()
        for seq_id in [*self._seconds]:
            if (seq := by_id.get(seq_id)) is None:
                continue
            beside_others, seconds = bool(fast - {seq.tenant}), self._seconds[seq_id]
            left = seconds_left[beside_others]
            # The allowance may go into debt. A step without others has time for one mask, or for as many as fit.
            if left > 0 if beside_others else left >= seconds or left == MOST_SECONDS:
                self._seconds[seq_id] = self._seconds.pop(seq_id)  # behind those that rest
                seconds_left[beside_others] -= seconds
            else:
                resting.add(seq)
        return resting
