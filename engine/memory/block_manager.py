"""BlockManager: which sequence holds which KV block (PagedAttention: Kwon et al. 2023, sections 4.2 to 4.4).

The KV cache is a pool of fixed blocks. A sequence holds the blocks of its block table, in token order. Several
sequences hold the blocks of a common prefix together (reference counts). Samples of one prompt also share the block
that is not full yet, until one of them writes to it and gets a copy (copy-on-write). The prefix cache knows a full
block by the hash of its tokens and of all tokens before them. A block without a holder is free, but keeps its content
and its hash until the pool gives it out again: the free list is the LRU order of eviction, and a prefix hit removes a
block from its middle.

The last block of a sequence that ended is mostly not full: its tail. The prefix cache knows a tail, too, while no
sequence holds it. A sequence that goes on from most of its tokens (the next turn of a chat) takes the block over and
writes behind them: no copy is needed, because a tail has no other holder. A sequence may also share only the first
tokens of a full block (a common system prompt ends within the block). It gets a copy, and writes behind these tokens.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import NamedTuple

from engine.memory.free_list import Block, FreeList, Tail
from engine.memory.host_tier import HostTier
from engine.memory.sequence import BlockKey, Sequence

LAST_EVICTED = 64  # block ids kept for GET /debug/kv
COPIED_SHARE = 0.25  # a block is copied if a prompt shares at least this part of its tokens


class Allocation(NamedTuple):
    """Blocks appended to a block table. `copy`: (source, target) if its last block was not its own and is replaced."""

    new_block_ids: list[int]
    copy: tuple[int, int] | None = None


class Prefix(NamedTuple):
    """The cached full blocks at the start of a sequence, in order: Blocks of the pool, keys of the host tier.

    `partial` is the block whose first `num_partial_tokens` tokens come next, if there is one: a tail, which the
    sequence takes over, or a full block, of which it gets a copy.
    """

    parts: list[Block | BlockKey]
    partial: Block | None = None
    num_partial_tokens: int = 0

    @property
    def blocks(self) -> list[Block]:
        return [part for part in self.parts if isinstance(part, Block)]

    @property
    def host_keys(self) -> list[BlockKey]:
        return [part for part in self.parts if isinstance(part, BlockKey)]


class BlockManager:
    """Gives out, shares and takes back blocks. Evicted blocks go to `host_tier`.

    `enable_prefix_caching` False: no prefix is ever matched; all else is the same.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        host_tier: HostTier | None = None,
        model_identity: bytes = b"",
    ) -> None:
        self.block_size = block_size
        self.model_identity = model_identity
        self.enable_prefix_caching = enable_prefix_caching
        self.num_prefix_queries = 0  # both in tokens
        self.num_prefix_hits = 0
        self.num_evictions = 0
        self.last_evicted: deque[int] = deque(maxlen=LAST_EVICTED)
        self.host_tier: HostTier | None = None
        self.reset(num_blocks, host_tier)

    def reset(self, num_blocks: int, host_tier: HostTier | None = None) -> None:
        """Starts with an empty pool, after the loss of the Worker's memory. The caller clears all block tables."""
        if host_tier is not None and self.host_tier is not None:
            host_tier.count_on(self.host_tier)
        self.host_tier = host_tier
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_blocks = FreeList(self.blocks)
        self.cached_blocks: dict[BlockKey, Block] = {}
        self.tails: dict[bytes, Block] = {}  # by Tail.parent: the one freed last
        self.followers: dict[bytes, Block] = {}  # full blocks by Block.parent: the one computed last
        self._registered: list[Block] = []  # since the last plan began: the Worker has yet to compute them

    def begin_plan(self) -> None:
        """Lets the next plan copy the blocks that earlier plans fill or load: copies come before a plan's own."""
        for block in self._registered:
            if block.key is not None:
                self.followers[block.parent] = block
        self._registered.clear()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        return 1.0 - len(self.free_blocks) / len(self.blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence) -> Prefix:
        """Returns the cached blocks that hold the start of `seq`; the sequence does not hold them yet.

        Tokens whose logits are needed are not matched: see Sequence.num_skippable_tokens.
        """
        if not self.enable_prefix_caching:
            return Prefix([])
        self._extend_keys(seq)
        parts: list[Block | BlockKey] = []
        num_pool = 0  # leading blocks that are in the pool
        for key in islice(seq.block_keys, seq.num_skippable_tokens // self.block_size):
            if (block := self.cached_blocks.get(key)) is not None:
                num_pool += num_pool == len(parts)
                parts.append(block)
            elif self.host_tier is not None and key in self.host_tier:
                parts.append(key)
            else:
                break
        if num_pool < len(parts) and not self._worth_loading(parts, num_pool):
            del parts[num_pool:]
        return Prefix(parts, *self._match_partial(seq, len(parts)))

    def missing_keys(self, seq: Sequence) -> list[BlockKey]:
        """Returns the keys that `match_prefix` looked for and found neither in the pool nor in the host tier."""
        self._extend_keys(seq)
        keys = seq.block_keys[: seq.num_skippable_tokens // self.block_size]
        return [key for key in keys if key not in self.cached_blocks and key not in (self.host_tier or ())]

    def can_admit(self, seq: Sequence, prefix: Prefix, spare: int) -> bool:
        """True if all known tokens of `seq` find room and `spare` blocks stay free."""
        taken_from_free = self.num_blocks_for(seq.num_tokens) - len(prefix.blocks)
        taken_from_free += sum(block.ref_count == 0 for block in prefix.blocks)
        return len(self.free_blocks) - taken_from_free >= spare

    def num_blocks_together(self, seqs: Iterable[Sequence]) -> int:
        """Returns the blocks that waiting sequences of one group need in all; a common prefix counts once."""
        total, before = 0, None
        for seq in sorted(seqs, key=lambda member: member.token_ids):  # neighbours share the longest prefixes
            total += self.num_blocks_for(seq.num_tokens)
            total -= 0 if before is None else _num_common_blocks(before, seq, self.block_size)
            before = seq
        return total

    def shared_prefix(self, seq: Sequence, others: Iterable[Sequence]) -> list[Block]:
        """Returns the longest prefix of `seq`, in full blocks, that one of the running `others` has computed."""
        longest: list[int] = []
        for other in others:
            num_blocks = _num_common_blocks(seq, other, self.block_size)
            num_blocks = min(num_blocks, other.num_computed_tokens // self.block_size)
            if num_blocks > len(longest):
                longest = other.block_table[:num_blocks]
        return [self.blocks[block_id] for block_id in longest]

    def adopt_prefix(self, seq: Sequence, prefix: Prefix) -> None:
        """Makes `seq`, which holds no block, hold the blocks that `match_prefix` found."""
        assert not seq.block_table, "a sequence adopts a prefix before anything else"
        partial = [] if prefix.partial is None else [prefix.partial]
        for block in prefix.blocks + partial:  # before blocks are loaded, which could evict them
            if block.ref_count == 0:
                self.free_blocks.remove(block)
            block.ref_count += 1
            self._forget_tail(block)
        if self.host_tier is not None:
            self.host_tier.pin(prefix.host_keys)
        for i, part in enumerate(prefix.parts):
            block_id = part.block_id if isinstance(part, Block) else self._load(part, self._parent(seq, i))
            seq.block_table.append(block_id)
        seq.block_table += [block.block_id for block in partial]
        seq.num_computed_tokens = len(prefix.parts) * self.block_size + prefix.num_partial_tokens
        seq.num_registered_blocks = len(prefix.parts)
        if self.enable_prefix_caching:
            self.num_prefix_queries += len(seq.token_ids)
            self.num_prefix_hits += seq.num_computed_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Makes `child`, which holds no block, share all blocks of `parent`, the partly filled one too."""
        assert not child.block_table, "a sequence is forked before anything else"
        for block_id in parent.block_table:
            self.blocks[block_id].ref_count += 1
        child.block_table = list(parent.block_table)
        child.block_keys = list(parent.block_keys)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_registered_blocks = parent.num_registered_blocks

    def allocate(self, seq: Sequence, num_tokens: int) -> Allocation | None:
        """Gives `seq` room for its next `num_tokens` tokens. None, and no change, if too few blocks are free.

        A table has no more blocks than its computed tokens fill. So the tokens go to its last block, if that is not
        full, and to new blocks. A last block that others hold is copied. So is one that the prefix cache knows as full,
        unless no block is left for the copy: then the cache forgets it.
        """
        num_new = self.num_blocks_for(seq.num_computed_tokens + num_tokens) - len(seq.block_table)
        writes_last = num_tokens > 0 and seq.num_computed_tokens % self.block_size > 0
        last = self.blocks[seq.block_table[-1]] if writes_last else None
        shared = last is not None and last.ref_count > 1
        if num_new + shared > len(self.free_blocks):
            return None
        copy = None
        if last is not None and (shared or last.key is not None):
            if num_new == len(self.free_blocks):
                assert last.key is not None, "a shared block left room for its copy"
                self._evict(last, last.key)
            else:
                copy = self._replace_last(seq, last)
        new_block_ids = [self._take_free() for _ in range(num_new)]
        seq.block_table += new_block_ids
        return Allocation(new_block_ids, copy)

    def _replace_last(self, seq: Sequence, last: Block) -> tuple[int, int]:
        """Puts a new block in the place of the last one; returns the ids of both. The Worker copies before it loads or
        computes, so the old block may be given out in this very plan."""
        target = self._take_free()
        last.ref_count -= 1
        if last.ref_count == 0:
            self.free_blocks.append(last)
        seq.block_table[-1] = target
        return last.block_id, target

    def register_full_blocks(self, seq: Sequence) -> None:
        """Adds every block of `seq` that is full of known, computed tokens to the prefix cache.

        Tokens of a plan count as computed: the Worker runs plans in order and writes all keys and values of a layer
        before it reads any, so even a sequence of the same step may read the block.
        """
        if not self.enable_prefix_caching:
            return
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if num_full <= seq.num_registered_blocks:
            return
        self._extend_keys(seq)
        for index in range(seq.num_registered_blocks, num_full):
            block, key = self.blocks[seq.block_table[index]], seq.block_keys[index]
            # Tables are append-only: if another block has this content already, this block stays private.
            if block.key is None and key not in self.cached_blocks:
                self._remember(block, key, self._parent(seq, index))
        seq.num_registered_blocks = num_full

    def trim(self, seq: Sequence) -> None:
        """Takes back the blocks behind the computed tokens of `seq`: those of rejected draft tokens, which it alone
        holds and which the prefix cache does not know."""
        for block_id in seq.block_table[self.num_blocks_for(seq.num_computed_tokens) :]:
            block = self.blocks[block_id]
            block.ref_count -= 1
            self.free_blocks.append_left(block)
        del seq.block_table[self.num_blocks_for(seq.num_computed_tokens) :]

    def free(self, seq: Sequence, *, discard: bool = False, keep_tail: bool = False) -> None:
        """Takes back all blocks of `seq`. `discard` also drops them from both tiers of the prefix cache.

        `keep_tail` lets the prefix cache know a last block that is not full; between plans only: a plan under
        construction may have given `seq` the target of a copy that is then not made.

        The last block enters the free list first, so that a prefix outlives the blocks behind it.
        """
        if keep_tail and not discard and self.enable_prefix_caching:
            self._keep_tail(seq)
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if discard:
                self._forget_everywhere(block)
            if block.ref_count:
                continue
            if block.key is None and block.tail is None:
                self.free_blocks.append_left(block)
            else:
                self.free_blocks.append(block)
        seq.block_table = []
        seq.num_registered_blocks = 0
        seq.num_computed_tokens = 0

    def offload_all(self) -> None:
        """Offloads every cached block to the host tier, the most recently used last, those of live sequences behind
        them."""
        if self.host_tier is not None:
            free = list(self.free_blocks.ids())
            held = [block.block_id for block in self.cached_blocks.values() if block.ref_count]
            for block_id in [*free, *held]:
                if (key := self.blocks[block_id].key) is not None:
                    self.host_tier.offload(key, block_id)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that counts, free list and cache agree with all `sequences` that hold blocks. For tests: O(n)."""
        held = [block_id for seq in sequences for block_id in seq.block_table]
        counts = dict.fromkeys(range(self.num_blocks), 0)
        for block_id in held:
            counts[block_id] += 1
        for block in self.blocks:
            assert block.ref_count == counts[block.block_id], f"block {block.block_id}: leaked or freed twice"
            if block.key is not None:
                assert self.cached_blocks.get(block.key) is block, f"block {block.block_id}: unknown key"
        free = self.free_blocks.ids()
        assert len(free) == len(set(free)) == len(self.free_blocks), "the free list is broken"
        assert {block_id for block_id, count in counts.items() if count == 0} == set(free), "held and free overlap"
        if self.host_tier is not None:
            self.host_tier.check_invariants()
        for key, block in self.cached_blocks.items():
            assert block.key == key, f"block {block.block_id}: stale key in the cache"
        tails = {block.tail.parent: block for block in self.blocks if block.tail is not None}
        assert tails == self.tails, "a tail is lost or stale"
        for parent, block in self.followers.items():
            assert block.key is not None and block.parent == parent, f"block {block.block_id}: follows nothing"
        for block in tails.values():
            assert block.key is None and not block.ref_count, f"block {block.block_id}: a tail is held or full"

    def _worth_loading(self, parts: list[Block | BlockKey], num_pool: int) -> bool:
        """True if loading the blocks behind the first `num_pool` from the host takes less time than computing them."""
        assert self.host_tier is not None
        num_loads = sum(isinstance(part, BlockKey) for part in parts)
        computed = (len(parts) - num_pool) * self.block_size
        return self.host_tier.worth_loading(num_loads * self.block_size, num_pool * self.block_size, computed)

    def _match_partial(self, seq: Sequence, num_blocks: int) -> tuple[Block | None, int]:
        """Returns the block whose first tokens follow the first `num_blocks` blocks of `seq`, and how many they are."""
        parent, start = self._parent(seq, num_blocks), num_blocks * self.block_size
        token_ids = seq.token_ids[start : min(start + self.block_size, seq.num_skippable_tokens)]
        tail, follower = self.tails.get(parent), self.followers.get(parent)
        num_taken = 0 if tail is None else _num_common(token_ids, tail.token_ids)
        num_copied = 0 if follower is None else _num_common(token_ids, follower.token_ids)
        # A tail that shares fewer than half of its tokens stays for the sequence that goes on from it.
        if tail is not None and num_taken >= max(1, num_copied) and 2 * num_taken >= len(tail.token_ids):
            return tail, num_taken
        return (follower, num_copied) if num_copied >= COPIED_SHARE * self.block_size else (None, 0)

    def _keep_tail(self, seq: Sequence) -> None:
        """Makes the last block of `seq` a tail if it is not full of known, computed tokens and is its own."""
        num_known = min(seq.num_computed_tokens, len(seq.token_ids))
        num_full, num_tokens = divmod(num_known, self.block_size)
        if not num_tokens or (block := self.blocks[seq.block_table[num_full]]).ref_count > 1 or block.key is not None:
            return
        self._extend_keys(seq)
        parent = self._parent(seq, num_full)
        if (other := self.tails.get(parent)) is not None:
            self._forget_tail(other)
        block.tail = Tail(parent, tuple(seq.token_ids[num_full * self.block_size : num_known]))
        self.tails[parent] = block

    def _load(self, key: BlockKey, parent: bytes) -> int:
        assert self.host_tier is not None
        block = self.blocks[self._take_free()]
        self.host_tier.load(key, block.block_id)
        self._remember(block, key, parent)
        return block.block_id

    def _remember(self, block: Block, key: BlockKey, parent: bytes) -> None:
        """Adds a full block to the prefix cache. `parent`: the digest of the blocks before it."""
        block.key, block.parent = key, parent
        self.cached_blocks[key] = block
        self._registered.append(block)

    def _take_free(self) -> int:
        block = self.free_blocks.pop_left()
        if block.key is not None:
            self._evict(block, block.key)
        self._forget_tail(block)
        block.ref_count = 1
        return block.block_id

    def _evict(self, block: Block, key: BlockKey) -> None:
        """Removes a block from the cache, because its place is needed. The host tier may keep its content."""
        if self.host_tier is not None:
            self.host_tier.offload(key, block.block_id)
        self._forget(block)
        self.num_evictions += 1
        self.last_evicted.append(block.block_id)

    def _forget_everywhere(self, block: Block) -> None:
        if self.host_tier is not None and block.key is not None:
            self.host_tier.discard(block.key)
        self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            del self.cached_blocks[block.key]
            block.key = None
            if self.followers.get(block.parent) is block:
                del self.followers[block.parent]

    def _forget_tail(self, block: Block) -> None:
        if block.tail is not None:
            del self.tails[block.tail.parent]
            block.tail = None

    def _parent(self, seq: Sequence, num_blocks: int) -> bytes:
        """Returns the digest of the first `num_blocks` blocks of `seq`, whose keys are made."""
        return seq.block_keys[num_blocks - 1].digest if num_blocks else self._root(seq)

    def _extend_keys(self, seq: Sequence) -> None:
        """Makes the keys of full blocks of known tokens. Every hashed field has a fixed width or its length first."""
        keys, size = seq.block_keys, self.block_size
        for index in range(len(keys), len(seq.token_ids) // size):
            parent = self._parent(seq, index)
            token_ids = tuple(seq.token_ids[index * size : (index + 1) * size])
            packed = struct.pack(f"<I{size}I", size, *token_ids)
            keys.append(BlockKey(hashlib.sha256(parent + packed).digest(), token_ids))

    def _root(self, seq: Sequence) -> bytes:
        """Returns the hash before the first block. It differs between models, salts and versions of adapters."""
        fields = [self.model_identity, seq.cache_salt.encode()]
        if seq.adapter is not None:
            fields.append(seq.adapter.version)
        return hashlib.sha256(b"".join(struct.pack("<Q", len(field)) + field for field in fields)).digest()


def _num_common(a: Iterable[int], b: Iterable[int]) -> int:
    """Returns the number of leading tokens that are the same in both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _num_common_blocks(a: Sequence, b: Sequence, block_size: int) -> int:
    """Returns the number of leading full blocks with the same tokens in both.

    The last token of either does not count: it has to be computed for its logits.
    """
    most = (min(len(a.token_ids), len(b.token_ids)) - 1) // block_size
    for index in range(most):
        part = slice(index * block_size, (index + 1) * block_size)
        if a.token_ids[part] != b.token_ids[part]:
            return index
    return most
