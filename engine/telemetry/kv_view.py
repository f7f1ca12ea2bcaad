"""KVView: the content of every KV block at one moment, small enough to be read ten times a second.

A block is a letter, not an object; maps list the few blocks that differ from the rule, and block tables are copied as
they are. A view holds no data from a request's text: no tokens, no hashes. It names requests by the ids that their
answers carry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.memory.free_list import Block
from engine.memory.sequence import Sequence
from engine.scheduling.scheduler import Scheduler

LEGEND = {
    ".": {"state": "free", "owner": "nobody"},
    "c": {"state": "cached", "owner": "prefix_cache"},  # free, but a prompt may still match its content
    "u": {"state": "used", "owner": "sequences"},
    "p": {"state": "used", "owner": "sequences_and_prefix_cache"},
}
FREE, CACHED, USED, USED_AND_CACHED = (ord(letter) for letter in LEGEND)


@dataclass(frozen=True)
class SequenceView:
    """A running sequence: sample `sample` of a request, or a hypothesis of its beam search.

    `blocks` is the block table: block ids in token order. The first `num_prompt_tokens` tokens are the prompt. The
    blocks hold `num_computed_tokens` tokens, with those of the step under way.
    """

    request_id: str
    sample: int
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: list[int]


OwnerOf = Callable[[int], tuple[str, int]]  # sequence id -> (request id, the first sample that it computes)


@dataclass(frozen=True)
class KVView:
    """`states` has one letter of `legend` per block, by block id.

    The ref count of a block is the number of running sequences that hold it: 1 if the block is used and 0 if not,
    except for the blocks in `shared` (block id -> ref count). The fill of a block is `block_size` tokens if the block
    is cached or used and 0 if it is free, except for the blocks in `partial` (block id -> tokens). Tokens of the step
    under way count.
    """

    num_blocks: int
    block_size: int
    num_running: int
    num_waiting: int
    states: str
    shared: dict[int, int]
    partial: dict[int, int]
    legend: dict[str, dict[str, str]] = field(default_factory=lambda: LEGEND)
    sequences: list[SequenceView] = field(default_factory=list)


def kv_view(scheduler: Scheduler, owner_of: OwnerOf, asleep: bool = False) -> KVView:
    """Make a view, between two steps. One pass over the blocks: 0.6 ms for 16,384 blocks.

    `asleep`: the pool is freed, and what ran waits to be recomputed; the scheduler learns that at the wake.
    """
    manager = scheduler.block_manager
    if asleep:
        return KVView(
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            num_running=0,
            num_waiting=scheduler.num_waiting + len(scheduler.running),
            states=bytes([FREE] * manager.num_blocks).decode("ascii"),
            shared={},
            partial={},
        )
    return KVView(
        num_blocks=manager.num_blocks,
        block_size=manager.block_size,
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        states=_states(manager.blocks),
        shared=_shared(scheduler),
        partial=_partial(scheduler),
        sequences=[_sequence_view(seq, *owner_of(seq.seq_id)) for seq in scheduler.running],
    )


def _states(blocks: list[Block]) -> str:
    letters = [
        (CACHED if block.key is not None else FREE)
        if block.ref_count == 0
        else (USED_AND_CACHED if block.key is not None else USED)
        for block in blocks
    ]
    return bytes(letters).decode("ascii")


def _shared(scheduler: Scheduler) -> dict[int, int]:
    """The blocks that more than one sequence holds: none if the tables together are as long as the used pool."""
    manager = scheduler.block_manager
    num_used = manager.num_blocks - len(manager.free_blocks)
    if sum(len(seq.block_table) for seq in scheduler.running) == num_used:
        return {}
    return {block.block_id: block.ref_count for block in manager.blocks if block.ref_count > 1}


def _partial(scheduler: Scheduler) -> dict[int, int]:
    """The blocks that are not full: at most one of each table. Blocks of a draft under way are left out."""
    size = scheduler.block_manager.block_size
    fills = [(seq.block_table, *divmod(seq.num_computed_tokens, size)) for seq in scheduler.running]
    return {table[index]: fill for table, index, fill in fills if fill}


def _sequence_view(seq: Sequence, request_id: str, sample: int) -> SequenceView:
    return SequenceView(request_id, sample, seq.num_prompt_tokens, seq.num_computed_tokens, list(seq.block_table))
