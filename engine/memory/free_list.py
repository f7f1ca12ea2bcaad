"""FreeList: the free blocks, in the order in which the pool gives them out."""

from collections.abc import Iterable
from typing import NamedTuple

from engine.memory.sequence import BlockKey


class Tail(NamedTuple):
    """The content of a block that is not full: its tokens, and the digest of all full blocks before it."""

    parent: bytes
    token_ids: tuple[int, ...]


class Block:
    """A KV block of the pool. `key` is set while the prefix cache knows the content, `tail` while it knows the content
    of a block that is not full, which no sequence holds. `parent`, beside `key`: the digest of all blocks before it."""

    __slots__ = ("block_id", "key", "next_free", "parent", "prev_free", "ref_count", "tail")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.parent = b""
        self.tail: Tail | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the prefix cache knows it to hold."""
        known = self.key or self.tail
        return known.token_ids if known is not None else ()


class FreeList:
    """A doubly linked list through the blocks: every operation is O(1), removal from the middle too."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._end = Block(-1)  # sentinel: `next` is the first block to give out, `prev` the last
        self._end.next_free = self._end.prev_free = self._end
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Adds a block, to be given out last."""
        self._link(block, before=self._end)

    def append_left(self, block: Block) -> None:
        """Adds a block, to be given out next."""
        assert self._end.next_free is not None
        self._link(block, before=self._end.next_free)

    def pop_left(self) -> Block:
        block = self._end.next_free
        assert block is not None and block is not self._end, "the caller checks that a block is free"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        prev, following = block.prev_free, block.next_free
        assert prev is not None and following is not None, "the block is not in the free list"
        prev.next_free, following.prev_free = following, prev
        block.prev_free = block.next_free = None
        self._length -= 1

    def ids(self) -> list[int]:
        """Returns all block ids, the next one to give out first. For checks and views: O(n)."""
        found = []
        block = self._end.next_free
        while block is not self._end:
            assert block is not None
            found.append(block.block_id)
            block = block.next_free
        return found

    def _link(self, block: Block, before: Block) -> None:
        prev = before.prev_free
        assert prev is not None
        block.prev_free, block.next_free = prev, before
        prev.next_free = before.prev_free = block
        self._length += 1
