"""DecodeSteps: the running sequences that decode in the plan under construction, handled as a column.

Most steps are nothing but decodes, and at 256 of them whatever is done per sequence counts. `Sequence.decode_end` says
up to where a sequence may decode without being looked at: it has a row in the Worker, room in its last block, which is
its own, and no limit to reach. So what is done for each is a comparison and a few counters; only a sequence that
reaches the end of its block asks for another one.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from engine.executor.step import BlockCopy, NewSequence, StepPlan
from engine.memory.block_manager import Allocation, BlockManager
from engine.memory.sequence import Sequence


class DecodeSteps:
    """`sequences` in the order of the queue; `allocations` of those that asked. Nothing is counted as done yet."""

    __slots__ = ("allocations", "sequences")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.allocations: dict[Sequence, Allocation] = {}

    def take(
        self, running: list[Sequence], forked: Collection[Sequence]
    ) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Take the decodes out of `running`. Returns those of them that need a block, and (sequence, number of tokens)
        of what has other tokens to compute: a prompt, a row that the Worker lacks, the end of a prompt for which other
        samples wait (`forked` has the sequence that computes it), the last token of what is embedded.
        """
        growing, others = [], []
        add = self.sequences.append
        for seq in running:
            num_computed = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) + seq.num_pending_tokens - num_computed
            if num_tokens == 1 and num_computed < seq.decode_end:
                add(seq)
            elif num_tokens > 0 and (num_tokens := seq.num_uncomputed_tokens) > 0:
                if num_tokens == 1 and seq.in_worker and seq not in forked and seq.params.pooling is None:
                    add(seq)
                    growing.append(seq)
                else:
                    others.append((seq, num_tokens))
        return growing, others

    def drop(self, seq: Sequence) -> bool:
        """Leave out a sequence that is preempted; whether it was there."""
        if seq not in self.sequences:
            return False
        self.sequences.remove(seq)
        self.allocations.pop(seq, None)
        return True

    def commit(self, plan: StepPlan, block_manager: BlockManager) -> None:
        """Write them into `plan` and count their tokens as computed, and as many more as on their way."""
        size = block_manager.block_size
        for seq, (new_block_ids, copy) in self.allocations.items():
            if copy is not None:
                plan.block_copies.append(BlockCopy(seq.seq_id, *copy))
            for block_id in new_block_ids:
                plan.decode_blocks.extend((seq.seq_id, block_id))
            seq.decode_end = decode_end(seq, size)
        add = plan.decodes.append
        for seq in self.sequences:
            add(seq.seq_id)
            seq.num_pending_tokens += 1
            seq.num_computed_tokens = num_computed = seq.num_computed_tokens + 1
            if not num_computed % size:
                block_manager.register_full_blocks(seq)


def decode_end(seq: Sequence, block_size: int) -> int:
    """For a sequence whose last block is its own and whose row the Worker has from this plan on."""
    return min(len(seq.block_table) * block_size, seq.max_num_tokens - 1)


@dataclass(slots=True)
class RunningSteps:
    """What running sequences get in the plan under construction: (num_tokens, blocks), not counted as done yet.

    So a victim of preemption just drops out of it.
    """

    budget: int
    decodes: DecodeSteps = field(default_factory=DecodeSteps)
    planned: dict[Sequence, tuple[int, Allocation]] = field(default_factory=dict)

    def add(self, seq: Sequence, num_tokens: int, blocks: Allocation) -> None:
        self.planned[seq] = num_tokens, blocks
        self.budget -= num_tokens

    def drop(self, seq: Sequence) -> None:
        if seq in self.planned:
            self.budget += self.planned.pop(seq)[0]
        elif self.decodes.drop(seq):
            self.budget += 1


def new_sequence(seq: Sequence, blocks: Allocation, fork_of: int | None = None) -> NewSequence:
    """`seq` with its block table as it was before it got `blocks`: they come with its step."""
    block_ids = seq.block_table[: len(seq.block_table) - len(blocks.new_block_ids)]
    if blocks.copy is not None:
        block_ids[-1] = blocks.copy[0]
    return NewSequence(
        seq_id=seq.seq_id,
        token_ids=list(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        block_ids=block_ids,
        params=seq.params,
        seed=seq.seed,
        fork_of=fork_of,
        num_scored_tokens=seq.num_scored_tokens,
    )
