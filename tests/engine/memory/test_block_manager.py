"""BlockManager and FreeList against models, driven by Hypothesis: any order of what a scheduler may do."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.memory.block_manager import BlockManager
from engine.memory.free_list import Block, FreeList
from engine.memory.host_tier import HostTier
from engine.memory.sequence import Sequence
from engine.sampling_params import SamplingParams

PARAMS = SamplingParams()
QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


class FreeListMachine(RuleBasedStateMachine):
    """The model is a Python list."""

    @initialize(size=st.integers(0, 6), outside=st.integers(1, 3))
    def make(self, size, outside):
        self.blocks = [Block(i) for i in range(size + outside)]
        self.free_list = FreeList(self.blocks[:size])
        self.model = list(range(size))

    def outside(self):
        return [block for block in self.blocks if block.block_id not in self.model]

    @precondition(lambda self: self.outside())
    @rule(data=st.data(), left=st.booleans())
    def put(self, data, left):
        block = data.draw(st.sampled_from(self.outside()))
        if left:
            self.free_list.append_left(block)
            self.model.insert(0, block.block_id)
        else:
            self.free_list.append(block)
            self.model.append(block.block_id)

    @precondition(lambda self: self.model)
    @rule()
    def pop_left(self):
        assert self.free_list.pop_left().block_id == self.model.pop(0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        block_id = data.draw(st.sampled_from(self.model))
        self.free_list.remove(self.blocks[block_id])
        self.model.remove(block_id)

    @invariant()
    def same_order(self):
        assert self.free_list.ids() == self.model
        assert len(self.free_list) == len(self.model)
        assert all(block.prev_free is None and block.next_free is None for block in self.outside())


class BlockManagerMachine(RuleBasedStateMachine):
    """The model is what the device would hold: per slot the salt and all tokens up to it, as they were computed."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        num_slots=st.sampled_from([0, 0, 1, 2, 5, 20]),
    )
    def make(self, num_blocks, block_size, caching, num_slots):
        self.tier = HostTier(num_slots) if num_slots else None
        self.manager = BlockManager(num_blocks, block_size, caching, self.tier)
        self.contents = [[None] * block_size for _ in range(num_blocks)]
        self.host = [None] * num_slots
        self.live = []
        self.num_made = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "a"]))
    def admit(self, tokens, salt):
        """Match, ask, adopt; a refusal must be one."""
        limit = self.manager.num_blocks * self.manager.block_size
        seq = Sequence(self.num_made, tokens[:limit], PARAMS, seed=0, max_num_tokens=limit, cache_salt=salt)
        prefix = self.manager.match_prefix(seq)
        num_found = len(prefix.parts) * self.manager.block_size + prefix.num_partial_tokens
        assert num_found < len(seq.token_ids), "the last token is always computed"
        if not self.manager.can_admit(seq, prefix, 0):
            held = sum(block.ref_count > 0 for block in self.manager.blocks)
            new = self.manager.num_blocks_for(len(seq.token_ids)) - sum(block.ref_count > 0 for block in prefix.blocks)
            assert held + new > self.manager.num_blocks
            return
        self.num_made += 1
        self.manager.adopt_prefix(seq, prefix)
        assert seq.num_computed_tokens == num_found
        self.move()
        self.live.append(seq)
        self.check_contents(seq)

    @rule()
    def begin_plan(self):
        self.manager.begin_plan()

    def move(self, copy=None):
        """Do what the Worker does for a plan between the pool and the host tier, and in the pool."""
        offloads, loads = self.tier.pop_moves() if self.tier is not None else ([], [])
        for move in offloads:
            self.host[move.slot] = list(self.contents[move.block_id])
        if copy is not None:
            source, target = copy
            self.contents[target] = list(self.contents[source])
        for move in loads:
            self.contents[move.block_id] = list(self.host[move.slot])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def compute(self, data, num_tokens):
        """Known tokens, one more of them made up where all are computed, as far as there is room."""
        seq = data.draw(st.sampled_from(self.live))
        if seq.num_computed_tokens == len(seq.token_ids) < seq.max_num_tokens:
            seq.token_ids.append(data.draw(st.integers(0, 1)))
        num_tokens = min(num_tokens, len(seq.token_ids) - seq.num_computed_tokens)
        table, num_free = list(seq.block_table), len(self.manager.free_blocks)
        needed = self.manager.num_blocks_for(seq.num_computed_tokens + num_tokens) - len(table)
        writes_last = seq.num_computed_tokens % self.manager.block_size > 0
        shared = writes_last and self.holders(table[-1]) > 1
        cached = writes_last and self.manager.blocks[table[-1]].key is not None
        blocks = self.manager.allocate(seq, num_tokens)
        if blocks is None:
            assert needed + shared > num_free and seq.block_table == table, "a refusal is one, and changes nothing"
            return
        copied = shared or (cached and needed < num_free)
        assert (blocks.copy is not None) == copied and len(blocks.new_block_ids) == needed
        self.move(blocks.copy)
        if blocks.copy is not None:
            source, target = blocks.copy
            assert table.pop() == source
            table.append(target)
        assert seq.block_table == table + blocks.new_block_ids
        self.write(seq, num_tokens)
        self.manager.register_full_blocks(seq)
        self.check_contents(seq)

    def holders(self, block_id):
        return sum(block_id in seq.block_table for seq in self.live)

    @precondition(lambda self: any(seq.num_computed_tokens for seq in self.live))
    @rule(data=st.data())
    def fork(self, data):
        """A second sample of the same prompt: it shares all blocks, until one of the two writes."""
        parent = data.draw(st.sampled_from([seq for seq in self.live if seq.num_computed_tokens]))
        child = Sequence(self.num_made, parent.token_ids, PARAMS, seed=1, max_num_tokens=parent.max_num_tokens)
        child.cache_salt = parent.cache_salt
        self.num_made += 1
        self.manager.fork(parent, child)
        self.live.append(child)
        assert child.block_table == parent.block_table is not child.block_table
        self.check_contents(child)

    def write(self, seq, num_tokens):
        size = self.manager.block_size
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            block_id = seq.block_table[position // size]
            assert self.holders(block_id) == 1, "written while shared"
            self.contents[block_id][position % size] = seq.cache_salt, tuple(seq.token_ids[: position + 1])
        seq.num_computed_tokens += num_tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data(), discard=st.booleans(), keep_tail=st.booleans())
    def free(self, data, discard, keep_tail):
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        alone = [block_id for block_id in seq.block_table if self.manager.blocks[block_id].ref_count == 1]
        keys = [key for block_id in alone if (key := self.manager.blocks[block_id].key) is not None]
        self.manager.free(seq, discard=discard, keep_tail=keep_tail)
        assert (seq.block_table, seq.num_computed_tokens, seq.num_registered_blocks) == ([], 0, 0)
        if discard:
            assert not [key for key in keys if key in self.manager.cached_blocks]
            assert self.tier is None or not [key for key in keys if key in self.tier]

    def check_contents(self, seq):
        size = self.manager.block_size
        for position in range(seq.num_computed_tokens):
            found = self.contents[seq.block_table[position // size]][position % size]
            assert found == (seq.cache_salt, tuple(seq.token_ids[: position + 1]))

    @invariant()
    def books_balance(self):
        self.manager.check_invariants(self.live)
        held = {block_id for seq in self.live for block_id in seq.block_table}
        assert self.manager.usage == 1 - (self.manager.num_blocks - len(held)) / self.manager.num_blocks

    @invariant()
    def everybody_reads_its_own(self):
        for seq in self.live:
            self.check_contents(seq)

    @invariant()
    def cached_blocks_are_full_and_tell_keys_apart(self):
        contents = [self.contents[block.block_id][-1] for block in self.manager.cached_blocks.values()]
        assert None not in contents and len(set(contents)) == len(contents)
        known = self.manager.cached_blocks or self.manager.tails or self.manager.followers
        assert self.manager.enable_prefix_caching or not known

    @invariant()
    def a_tail_holds_its_tokens(self):
        for block in self.manager.tails.values():
            found = self.contents[block.block_id][: len(block.tail.token_ids)]
            assert [tokens[-1] for _, tokens in found] == list(block.tail.token_ids)

    def teardown(self):
        for seq in getattr(self, "live", []):
            self.manager.free(seq)
        if hasattr(self, "manager"):
            self.manager.check_invariants([])
            assert len(self.manager.free_blocks) == self.manager.num_blocks


TestFreeList = FreeListMachine.TestCase
TestFreeList.settings = QUICK
TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = QUICK


def test_a_prefix_outlives_what_follows_it():
    """Eviction takes the blocks of a freed sequence from its end, the oldest sequence first."""
    manager = BlockManager(6, 2)
    letters = random.Random(0)
    seqs = [
        Sequence(i, [letters.randrange(100) for _ in range(6)], PARAMS, seed=0, max_num_tokens=12) for i in range(2)
    ]
    for seq in seqs:
        manager.allocate(seq, 6)
        seq.num_computed_tokens = 6
        manager.register_full_blocks(seq)
    tables = [list(seq.block_table) for seq in seqs]
    for seq in seqs:
        manager.free(seq)
    assert manager.free_blocks.ids() == tables[0][::-1] + tables[1][::-1]


def held(manager, seq_id, tokens, salt=""):
    """A sequence whose tokens are all computed, as far as the prefix cache does not hold them."""
    seq = Sequence(seq_id, tokens, PARAMS, seed=0, max_num_tokens=100, cache_salt=salt)
    prefix = manager.match_prefix(seq)
    assert manager.can_admit(seq, prefix, 0)
    manager.adopt_prefix(seq, prefix)
    num_found = seq.num_computed_tokens
    manager.allocate(seq, len(tokens) - num_found)
    seq.num_computed_tokens = len(tokens)
    manager.register_full_blocks(seq)
    return seq, num_found


def test_the_next_turn_goes_on_in_the_last_block():
    """Once: the block is then the next turn's own. Another salt, and less than half of the tail, find nothing."""
    manager = BlockManager(8, 4)
    tokens = list(range(10, 17))
    first, _ = held(manager, 0, tokens)
    tail = first.block_table[-1]
    manager.free(first, keep_tail=True)
    for others, salt in (([*tokens, 1], "other"), ([*tokens[:5], 1, 2], "")):
        seq, num_found = held(manager, 1, others, salt)
        assert num_found == (0 if salt else 4)
        manager.free(seq)
    seq, num_found = held(manager, 2, [*tokens, 1, 2])
    assert num_found == 7 and seq.block_table[1] == tail
    again, num_found = held(manager, 3, [*tokens, 3])
    assert num_found == 4, "a block that is held is no tail"
    manager.check_invariants([seq, again])


def started(manager, seq_id, tokens):
    """(a sequence that got its blocks, how many of its tokens were found, what is copied for it)"""
    seq = Sequence(seq_id, tokens, PARAMS, seed=0, max_num_tokens=100)
    manager.adopt_prefix(seq, manager.match_prefix(seq))
    return seq, seq.num_computed_tokens, manager.allocate(seq, len(tokens) - seq.num_computed_tokens).copy


@pytest.mark.parametrize("in_use", [True, False])
def test_the_first_tokens_of_a_full_block_are_copied(in_use):
    """Once an earlier plan has computed them, and at least a quarter of the block."""
    manager = BlockManager(16, 8)
    first, _ = held(manager, 0, list(range(24)))
    source = first.block_table[1]
    same_plan, num_found, _ = started(manager, 1, [*range(12), 1, 1])
    assert num_found == 8
    manager.begin_plan()
    if not in_use:
        manager.free(first)
    other, num_found, copy = started(manager, 2, [*range(12), 1, 1])
    assert num_found == 12 and copy == (source, other.block_table[1]) and copy[0] != copy[1]
    few, num_found, copy = started(manager, 3, [*range(9), 1, 1])
    assert num_found == 8 and copy is None
    whole, num_found, _ = started(manager, 4, list(range(16)))
    assert num_found == 15, "the last token is always computed"
    assert manager.blocks[source].key is not None and manager.blocks[source].ref_count == in_use
    manager.check_invariants([*([first] if in_use else []), same_plan, other, few, whole])


def test_a_full_block_is_taken_over_where_no_block_is_left_for_a_copy():
    manager = BlockManager(2, 4)
    first, _ = held(manager, 0, list(range(8)))
    source = first.block_table[1]
    manager.free(first)
    manager.begin_plan()
    seq, num_found, copy = started(manager, 1, [0, 1, 2, 3, 4, 5, 9])
    assert num_found == 6 and copy is None and seq.block_table[1] == source
    assert manager.blocks[source].key is None and not manager.followers.keys() & {manager.blocks[source].parent}
    manager.check_invariants([seq])


def test_a_pool_full_of_tails_gives_them_out():
    manager = BlockManager(2, 4)
    for number in range(4):
        seq, num_found = held(manager, number, [number] * 6)
        assert num_found == 0
        manager.free(seq, keep_tail=True)
        manager.check_invariants([])
    assert len(manager.tails) == 1
