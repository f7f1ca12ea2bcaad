"""SequenceQueue: sequences by their place in the order; the queues of the scheduler."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

from engine.memory.sequence import Sequence, SequenceStatus


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order


class SequenceQueue(list[Sequence]):
    """A list sorted by `Sequence.order`, which is unique. Changed by `add` and `take_out` only.

    `num_tokens` counts the known tokens that its sequences came with: for those that wait, what there is to compute.
    """

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        super().__init__()
        self.num_tokens = 0
        for seq in sorted(sequences, key=_order):
            self._count(seq)
            self.append(seq)

    def add(self, seq: Sequence) -> None:
        self._count(seq)
        insort(self, seq, key=_order)

    def take_out(self, seq: Sequence) -> None:
        index = bisect_left(self, seq.order, key=_order)
        assert self[index] is seq, "arrival is unique, so the order finds exactly this sequence"
        self.num_tokens -= seq.num_queued_tokens
        del self[index]

    def check_invariants(self) -> None:
        """For tests and simulation."""
        assert list(self) == sorted(self, key=_order)
        assert self.num_tokens == sum(seq.num_queued_tokens for seq in self)

    def _count(self, seq: Sequence) -> None:
        seq.num_queued_tokens = seq.num_tokens  # noted, for what a beam search knows changes while it waits
        self.num_tokens += seq.num_queued_tokens


def check_queues(
    waiting: SequenceQueue,
    running: SequenceQueue,
    held: SequenceQueue,
    forks: list[Sequence],
    sequences: Mapping[int, Sequence],
) -> None:
    """Assert that every live sequence is in one queue, or waits to be forked, and that its state says so."""
    for queue in (waiting, running, held):
        queue.check_invariants()
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    assert all(seq.status is SequenceStatus.WAITING and not seq.block_table for seq in waiting + held)
    assert all(fork.fork_of is not None and not fork.block_table for fork in forks)
    assert {id(s) for s in sequences.values()} == {id(s) for s in running + waiting + held + forks}
    assert all(seq.num_computed_tokens <= seq.num_tokens <= seq.max_num_tokens for seq in running)
