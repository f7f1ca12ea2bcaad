"""SequenceGroup: the samples of one request, or the hypotheses of a beam search, preempted and resumed together.

They share blocks, so one that gave up its own would free little, and its return would hold all of them up (gang
scheduling: Kwon et al. 2023, section 4.5).
"""

from engine.memory.block_manager import Block, BlockManager
from engine.memory.sequence import Sequence, SequenceStatus


class SequenceGroup:
    """`members` are Sequences of one prompt, adjacent in order.

    A group whose members together need more blocks than there are is `split`: they come and go in order, one by one,
    until none of them runs. So it is from when one of them gave way to another tenant's sequence.
    """

    inseparable = False  # whether its members cannot go on without each other

    def __init__(self, members: list[Sequence]) -> None:
        self.members = members
        self.split = False
        for seq in members:
            seq.group = self

    @property
    def live(self) -> bool:
        return any(seq.status is not SequenceStatus.FINISHED for seq in self.members)

    @property
    def running(self) -> list[Sequence]:
        return [seq for seq in self.members if seq.status is SequenceStatus.RUNNING]

    @property
    def waiting(self) -> list[Sequence]:
        """Without those that wait for another to compute the prompt for them."""
        return [seq for seq in self.members if seq.status is SequenceStatus.WAITING and seq.fork_of is None]

    @property
    def num_together(self) -> int:
        """Sequences that run when all of the group do."""
        return sum(seq.status is not SequenceStatus.FINISHED for seq in self.members)

    @property
    def num_spare_rows(self) -> int:
        """Rows beyond those of its running sequences that the group needs while it runs."""
        return 0

    @property
    def num_rows_to_start(self) -> int:
        """Rows that must be free before its next sequence may run: for all when none of them runs, then one by one."""
        return 1 if self.running else len(self.waiting)

    def num_blocks(self, block_manager: BlockManager) -> int:
        """Blocks that all who wait need together when each common prefix is stored once."""
        total, before = 0, None
        for seq in sorted(self.waiting, key=lambda member: member.token_ids):  # neighbours have the most in common
            total += block_manager.num_blocks_for(seq.num_tokens)
            total -= 0 if before is None else _num_common_blocks(before, seq, block_manager.block_size)
            before = seq
        return total

    def shared_prefix(self, seq: Sequence, block_manager: BlockManager) -> list[Block]:
        """The longest start of `seq`, in full blocks, that a running member has computed."""
        longest: list[int] = []
        for other in self.running:
            num_blocks = _num_common_blocks(seq, other, block_manager.block_size)
            num_blocks = min(num_blocks, other.num_computed_tokens // block_manager.block_size)
            if num_blocks > len(longest):
                longest = other.block_table[:num_blocks]
        return [block_manager.blocks[block_id] for block_id in longest]


def _num_common_blocks(a: Sequence, b: Sequence, block_size: int) -> int:
    """Full blocks at the start that hold the same tokens in both; the last token of either does not count.

    It has yet to be computed for its logits.
    """
    most = (min(len(a.token_ids), len(b.token_ids)) - 1) // block_size
    for index in range(most):
        part = slice(index * block_size, (index + 1) * block_size)
        if a.token_ids[part] != b.token_ids[part]:
            return index
    return most


def together(seq: Sequence) -> list[Sequence]:
    """The running sequences that are preempted with `seq`, itself among them."""
    return [seq] if seq.group is None or seq.group.split else seq.group.running


def smallest_part(seq: Sequence) -> list[Sequence]:
    """The running sequences that must give way with `seq`, itself among them, when its place is needed."""
    return [seq] if seq.group is None or not seq.group.inseparable else seq.group.running


def num_forks_of(seq: Sequence) -> int:
    """How many others will run beside `seq`, the first of its group to be admitted."""
    return 0 if seq.group is None or seq.group.running else seq.group.num_together - 1
