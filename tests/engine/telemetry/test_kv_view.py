"""The window on the blocks, against the books of the block manager, block by block."""

import random

import pytest

from engine.memory.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.kv_view import LEGEND, kv_view
from tests.engine.scheduling.loop import ForkLoop, prompt


def expected_blocks(scheduler):
    """(state, owner, ref count, fill) of every block, from the tables and the free list alone."""
    manager = scheduler.block_manager
    fills = dict.fromkeys(range(manager.num_blocks), 0)
    holders = dict.fromkeys(range(manager.num_blocks), 0)
    for seq in scheduler.running:
        for index, block_id in enumerate(seq.block_table):
            fills[block_id] = min(manager.block_size, seq.num_computed_tokens - index * manager.block_size)
            holders[block_id] += 1
    known = {block.block_id for block in manager.cached_blocks.values()}
    free = set(manager.free_blocks.ids())
    blocks = []
    for block_id in range(manager.num_blocks):
        cached = block_id in known
        if block_id not in free:
            owner = "sequences_and_prefix_cache" if cached else "sequences"
            blocks.append(("used", owner, holders[block_id], fills[block_id]))
        elif cached:
            blocks.append(("cached", "prefix_cache", 0, manager.block_size))
        else:
            blocks.append(("free", "nobody", 0, 0))
    return blocks


def owner_of(seq_id):
    """As if the last digit of a sequence's id were the number of its sample, and the rest that of its request."""
    request_id, sample = divmod(seq_id, 10)
    return str(request_id), sample


def decoded(view):
    """The same from a view, by the rules that it states."""
    blocks = []
    for block_id, letter in enumerate(view.states):
        state, owner = view.legend[letter]["state"], view.legend[letter]["owner"]
        ref_count = view.shared.get(block_id, int(state == "used"))
        fill = view.partial.get(block_id, 0 if state == "free" else view.block_size)
        blocks.append((state, owner, ref_count, fill))
    return blocks


@pytest.mark.parametrize("seed", range(12))
def test_a_view_is_what_the_tables_and_the_free_list_say(seed):
    rng = random.Random(seed)
    loop = ForkLoop(
        num_blocks=40, block_size=rng.choice([1, 4, 8]), depth=rng.randint(1, 2), prefix_caching=seed % 3 > 0
    )
    common = prompt(rng, 9)
    seen = set()
    for _ in range(150):
        if rng.random() < 0.3:
            loop.add_samples((common if rng.random() < 0.5 else []) + prompt(rng, rng.randint(1, 9)), rng.randint(1, 3))
        loop.step()
        view = kv_view(loop.scheduler, owner_of)
        assert [(int(s.request_id), s.sample, s.blocks) for s in view.sequences] == [
            (seq.seq_id // 10, seq.seq_id % 10, seq.block_table) for seq in loop.scheduler.running
        ]
        assert all(s.num_prompt_tokens > 0 and s.num_computed_tokens > 0 for s in view.sequences)
        assert decoded(view) == expected_blocks(loop.scheduler)
        assert (view.num_blocks, view.num_running) == (40, len(loop.scheduler.running))
        assert view.num_running + view.num_waiting == len(loop.scheduler._sequences)
        seen |= set(view.states)
        seen |= {"shared"} if view.shared else set()
        seen |= {"partial"} if view.partial else set()
    assert {".", "u", "shared"} <= seen
    assert ("partial" in seen) == (loop.scheduler.block_manager.block_size > 1)
    assert ({"c", "p"} <= seen) == loop.scheduler.block_manager.enable_prefix_caching


def test_an_idle_pool_is_all_free():
    view = kv_view(Scheduler(BlockManager(5, 16), max_num_seqs=1, max_num_batched_tokens=16), owner_of)
    assert view.states == "....." and not view.shared and not view.partial
    assert set(view.legend) == set(LEGEND)
