"""SequenceQueue: a list of sequences sorted by priority and arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

from engine.memory.sequence import Sequence, SequenceStatus


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order


class SequenceQueue(list[Sequence]):
    """A list sorted by `Sequence.order`, which is unique. Only `add`, `withdraw` and `refill` may change it.

    `num_tokens` counts the known tokens that its sequences entered with: of waiting sequences, the tokens to compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0

    def add(self, seq: Sequence) -> None:
        self._count(seq)
        insort(self, seq, key=_order)

    def withdraw(self, seq: Sequence) -> None:
        index = bisect_left(self, seq.order, key=_order)
        assert self[index] is seq, "arrival is unique, so the order finds exactly this sequence"
        self.num_tokens -= seq.num_queued_tokens
        del self[index]

    def refill(self, sequences: Iterable[Sequence]) -> None:
        """Replaces the content by `sequences`, in any order."""
        self[:] = sorted(sequences, key=_order)
        self.num_tokens = 0
        for seq in self:
            self._count(seq)

    def check_invariants(self) -> None:
        """Asserts that the order and the count hold. For tests and simulation."""
        assert list(self) == sorted(self, key=_order)
        assert self.num_tokens == sum(seq.num_queued_tokens for seq in self)

    def _count(self, seq: Sequence) -> None:
        seq.num_queued_tokens = seq.num_tokens  # kept: a waiting hypothesis may get other tokens
        self.num_tokens += seq.num_queued_tokens


def check_queues(
    waiting: SequenceQueue,
    running: SequenceQueue,
    held: SequenceQueue,
    forks: list[Sequence],
    sequences: Mapping[int, Sequence],
) -> None:
    """Asserts that every live sequence is in one queue, or waits to be forked, and that its state says so."""
    for queue in (waiting, running, held):
        queue.check_invariants()
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    assert all(seq.status is SequenceStatus.WAITING and not seq.block_table for seq in waiting + held)
    assert all(fork.fork_of is not None and not fork.block_table for fork in forks)
    assert {id(s) for s in sequences.values()} == {id(s) for s in running + waiting + held + forks}
    assert all(seq.num_computed_tokens <= seq.num_tokens <= seq.max_num_tokens for seq in running)
