"""What a plan says about a sequence that the Worker does not hold yet."""

from engine.executor.step import NewSequence
from engine.memory.block_manager import Allocation
from engine.memory.sequence import Sequence


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
