"""RunningParts: the part of a plan that running sequences compute, while the plan is under construction.

Most steps are decodes only, and at 256 of them all work per sequence counts. So decodes are one column: every sequence
carries `Sequence.decode_end`, the length up to which it may decode unchecked (the Worker has its row, its last block
has room and belongs to it alone, no limit is near). One comparison and a few counters suffice per decode; only a
sequence at the end of its block asks the block manager for another one.
"""

from collections.abc import Collection, Iterator

from engine.executor.step import BlockCopy, Draft, NewSequence, StepPlan
from engine.memory.block_manager import Allocation, BlockManager
from engine.memory.sequence import Sequence, SequenceStatus


class RunningParts:
    """Running sequences in one plan: decodes, and chunks of more than a plain decode.

    Tokens count as computed from `commit_decodes` on (the Scheduler counts those of chunks), so a victim of preemption
    just drops out.
    """

    __slots__ = ("_decode_allocations", "_drafts", "_growing", "_wanted", "budget", "chunks", "decodes")

    def __init__(self, sequences: list[Sequence], forked: Collection[Sequence], budget: int) -> None:
        """Divides `sequences`, in order, into decodes and chunks. `budget`: tokens that the plan may compute, at least
        one per decode. `forked`: sequences that compute a prompt for other samples.
        """
        self.decodes: list[Sequence] = []
        self._drafts: dict[Sequence, list[int]] = {}
        self._growing: dict[Sequence, None] = {}  # decodes that need a block; in order
        self._decode_allocations: dict[Sequence, Allocation] = {}
        self._wanted: list[tuple[Sequence, int]] = []  # chunks, before the budget cuts them
        self.chunks: dict[Sequence, tuple[int, Allocation]] = {}  # number of tokens, blocks
        add = self.decodes.append
        for seq in sequences:
            num_computed = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) + seq.num_pending_tokens - num_computed
            if num_tokens == 1 and num_computed < seq.decode_end:
                add(seq)
            elif num_tokens > 0 and (num_tokens := seq.num_uncomputed_tokens) > 0:
                if num_tokens == 1 and seq.in_worker and seq not in forked and seq.params.pooling is None:
                    add(seq)
                    self._growing[seq] = None
                else:
                    self._wanted.append((seq, num_tokens))
        self.budget = budget - len(self.decodes)

    def without_blocks(self) -> Iterator[tuple[Sequence, int]]:
        """Yields (sequence, number of tokens) for everything that needs blocks: decodes, single tokens, longer chunks.

        Chunks are cut to the budget that is left. A sequence preempted since the last one is skipped.
        """
        for seq in list(self._growing):
            if seq.status is SequenceStatus.RUNNING:
                yield seq, 1
        singles = [wanted for wanted in self._wanted if wanted[1] == 1]
        for seq, num_tokens in singles + [wanted for wanted in self._wanted if wanted[1] > 1]:
            if self.budget == 0:
                return
            if seq.status is SequenceStatus.RUNNING:
                yield seq, min(num_tokens, self.budget)

    def add(self, seq: Sequence, num_tokens: int, blocks: Allocation) -> None:
        """Notes that `seq` got blocks for its tokens."""
        if seq in self._growing:
            self._decode_allocations[seq] = blocks
        else:
            self.chunks[seq] = num_tokens, blocks
            self.budget -= num_tokens

    def drop(self, seq: Sequence) -> None:
        """Removes a preempted sequence; its tokens go back to the budget."""
        if seq in self.chunks:
            self.budget += self.chunks.pop(seq)[0]
        elif seq in self.decodes:
            self.decodes.remove(seq)
            self._decode_allocations.pop(seq, None)
            self.budget += 1

    def add_draft(self, seq: Sequence, token_ids: list[int], blocks: Allocation) -> None:
        """Notes the draft of a decode, and the blocks that `seq` got for it."""
        before = self._decode_allocations.get(seq, Allocation([]))
        self._decode_allocations[seq] = Allocation(
            before.new_block_ids + blocks.new_block_ids, before.copy or blocks.copy
        )
        self._drafts[seq] = token_ids
        self.budget -= len(token_ids)

    def commit_decodes(self, plan: StepPlan, block_manager: BlockManager) -> None:
        """Writes the decodes into `plan`, and counts for each one token as computed and one as pending."""
        size = block_manager.block_size
        for seq, (new_block_ids, copy) in self._decode_allocations.items():
            if copy is not None:
                plan.block_copies.append(BlockCopy(seq.seq_id, *copy))
            for block_id in new_block_ids:
                plan.decode_blocks.extend((seq.seq_id, block_id))
            seq.decode_end = decode_end(seq, size)
        add = plan.decodes.append
        for seq in self.decodes:
            add(seq.seq_id)
            seq.num_pending_tokens += 1
            seq.num_computed_tokens = num_computed = seq.num_computed_tokens + 1
            if not num_computed % size:
                block_manager.register_full_blocks(seq)
        for seq, token_ids in self._drafts.items():
            plan.drafts.append(Draft(seq.seq_id, token_ids))
            seq.num_draft_tokens = len(token_ids)
            seq.decode_end = 0  # its next token is planned when it is known how many of these are right


def decode_end(seq: Sequence, block_size: int) -> int:
    """Returns Sequence.decode_end for a sequence that owns its last block and has a row in the Worker."""
    return min(len(seq.block_table) * block_size, seq.max_num_tokens - 1)


def new_sequence(seq: Sequence, blocks: Allocation, fork_of: int | None = None) -> NewSequence:
    """Returns what the Worker must know of a sequence that it does not hold.

    The block table is the one before `blocks` were added: those come with the step of the sequence.
    """
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
        adapter_id=0 if seq.adapter is None else seq.adapter.adapter_id,
    )
