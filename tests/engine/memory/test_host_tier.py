"""The host tier: what the pool gives up comes back, in the right place, and costs no computation."""

import random
import time

import pytest

from engine.executor.step import BlockMove, CacheCosts
from engine.memory.block_manager import BlockManager
from engine.memory.host_tier import HostTier
from engine.memory.sequence import BlockKey, Sequence
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from tests.engine.scheduling.loop import ForkLoop, Loop, prompt


def computed(loop):
    return sum(step.num_tokens for plan in loop.plans for step in plan.steps)


def test_a_preempted_sequence_computes_only_its_last_block_again():
    """Two sequences that do not fit together: the second is pushed out and comes back with all its full blocks."""
    counts = {}
    for name, tier in {"recompute": None, "swap": HostTier(32)}.items():
        loop = Loop(num_blocks=12, max_num_batched_tokens=64, host_tier=tier, depth=1)
        seqs = [loop.add(prompt(random.Random(i), 16), max_tokens=26) for i in range(2)]
        loop.run()
        loop.check_finished(seqs)
        assert seqs[1].num_preemptions > 0
        counts[name] = computed(loop)
    alone = 2 * (16 + 25)
    assert counts["swap"] <= alone + 4 < counts["recompute"]


def test_a_prefix_comes_back_after_others_took_the_whole_pool():
    tier = HostTier(16)
    loop = Loop(num_blocks=12, max_num_batched_tokens=64, host_tier=tier)
    first = loop.add([97] * 33, max_tokens=2)
    loop.run()
    other = loop.add(prompt(random.Random(1), 40), max_tokens=2)
    loop.run()
    again = loop.add([97] * 33, max_tokens=2)
    loop.run()
    loop.check_finished([first, other, again])
    assert again.num_cached_tokens == 32
    assert tier.num_loads > 0
    assert any(plan.loads for plan in loop.plans)


def test_a_failed_sequence_leaves_nothing_in_either_tier():
    """The loaded content may have caused the failure: the next sequence computes it anew."""
    tier = HostTier(16)
    loop = Loop(num_blocks=12, max_num_batched_tokens=64, host_tier=tier)
    loop.add([97] * 33, max_tokens=2)
    loop.run()
    loop.add(prompt(random.Random(1), 40), max_tokens=2)
    loop.run()
    again = loop.add([97] * 33, max_tokens=5)
    loop.step()
    assert again.num_cached_tokens == 32
    assert any(key in tier for key in again.block_keys)
    loop.scheduler.finish(again, FinishReason.ERROR)
    tier.check_invariants()
    assert not any(key in tier for key in again.block_keys)
    assert len(tier) > 0, "the other sequence's blocks stay"
    loop.run()
    once_more = loop.add([97] * 33, max_tokens=2)
    loop.run()
    assert once_more.num_cached_tokens == 0


def test_the_least_recently_used_block_goes_first():
    tier = HostTier(2)
    tier.offload(b"a", 5)
    tier.offload(b"b", 6)
    tier.offload(b"a", 7)  # there already: used again
    tier.offload(b"c", 8)
    assert b"a" in tier and b"c" in tier and b"b" not in tier
    assert tier.pop_moves() == ([BlockMove(5, 0), BlockMove(8, 1)], []), "the slot of b was written over at once"
    assert tier.pop_moves() == ([], [])
    tier.check_invariants()


def test_what_is_about_to_be_loaded_is_not_written_over():
    tier = HostTier(2)
    tier.offload(b"a", 1)
    tier.offload(b"b", 2)
    tier.pop_moves()
    tier.pin([b"a", b"b"])
    tier.offload(b"c", 3)
    assert b"c" not in tier
    tier.load(b"a", 4)
    tier.load(b"b", 5)
    assert tier.pop_moves() == ([], [BlockMove(4, 0), BlockMove(5, 1)])
    tier.offload(b"c", 3)
    assert b"c" in tier and b"a" not in tier


def test_loading_is_chosen_where_it_is_faster():
    costs = CacheCosts(compute_linear=1e-3, compute_quadratic=1e-5, load_fixed=20e-3, load_linear=1e-4)
    tier = HostTier(8, costs)
    assert not tier.worth_loading(num_loaded=16, num_before=0, num_computed=16)
    assert tier.worth_loading(num_loaded=64, num_before=0, num_computed=64)
    assert tier.worth_loading(num_loaded=16, num_before=64, num_computed=16), "behind a long context computing is slow"
    assert costs.compute(0, 64) == pytest.approx(costs.compute(0, 48) + costs.compute(48, 16))


def test_a_gap_in_the_pool_is_filled_from_the_host():
    """The pool may hold the end of a prefix and not its middle; nothing is loaded that the pool holds."""
    blocks = BlockManager(8, 4, True, HostTier(8))

    def sequence(number, length):
        tokens = list(range(length))
        return Sequence(number, tokens, SamplingParams(), seed=0, max_num_tokens=40, arrival=number)

    first = sequence(0, 17)
    blocks.allocate(first, 17)
    first.num_computed_tokens = 17
    blocks.register_full_blocks(first)
    table = list(first.block_table)
    blocks.free(first)
    for block_id in (table[1], table[0]):  # as if evicted: another sequence took them
        block = blocks.blocks[block_id]
        blocks.free_blocks.remove(block)
        blocks.free_blocks.append_left(block)
    other = Sequence(1, [99] * 8, SamplingParams(), seed=0, max_num_tokens=40, arrival=1)
    blocks.allocate(other, 8)
    other.num_computed_tokens = 8
    blocks.check_invariants([other])
    again = sequence(2, 17)
    prefix = blocks.match_prefix(again)
    assert [isinstance(part, BlockKey) for part in prefix.parts] == [True, True, False, False]
    assert blocks.can_admit(again, prefix, 0)
    blocks.adopt_prefix(again, prefix)
    assert again.block_table[2:] == table[2:4]
    assert again.num_computed_tokens == 16
    blocks.check_invariants([other, again])


def test_digests_of_blocks_that_the_disk_has_written_over_are_forgotten():
    tier = HostTier(2, on_disk=[bytes([i]) * 32 for i in range(4)], num_disk_blocks=4)
    written = [bytes([10 + i]) * 32 for i in range(100)]
    for digest in written:
        tier.offload(BlockKey(digest, (1,)), 5)
        (move,), _ = tier.pop_moves()
        assert move.digest == digest
    assert list(tier.on_disk) == written[-8:], "twice as many as the disk holds: it may have dropped some"
    tier.offload(BlockKey(written[-8], (1,)), 5)
    assert tier.pop_moves()[0][0].digest == b"", "the disk has it"
    tier.offload(BlockKey(written[0], (1,)), 5)
    assert tier.pop_moves()[0][0].digest == written[0]


@pytest.mark.parametrize("num_slots, num_disk_blocks", [(100_000, 100), (100, 100_000)])
def test_a_large_tier_takes_no_longer_for_a_block_than_a_small_one(num_slots, num_disk_blocks):
    """The oldest of many blocks, or of their digests on the disk, is found at once."""

    def seconds(num_slots, num_disk_blocks):
        digests = [i.to_bytes(32, "little") for i in range(2 * num_disk_blocks)]
        tier = HostTier(num_slots, on_disk=digests, num_disk_blocks=num_disk_blocks)
        keys = [BlockKey((1 << 40 | i).to_bytes(32, "little"), (1,)) for i in range(num_slots + 40_000)]
        for key in keys[:num_slots]:
            tier.offload(key, 5)
            tier.pop_moves()
        started = time.thread_time()
        for key in keys[num_slots:]:
            tier.offload(key, 5)
            tier.pop_moves()
        return time.thread_time() - started

    assert seconds(num_slots, num_disk_blocks) < 5 * seconds(100, 100)


@pytest.mark.parametrize("seed", range(40))
def test_random_load_with_every_size_of_tier(seed):
    rng = random.Random(seed)
    loop = ForkLoop(
        num_blocks=rng.randint(10, 24),
        block_size=rng.choice([1, 2, 4]),
        depth=rng.randint(1, 3),
        eos_every=rng.choice([0, 9]),
        host_tier=HostTier(rng.randint(1, 30)),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(6, 40),
    )
    room = loop.scheduler.block_manager.num_blocks * loop.scheduler.block_manager.block_size
    prefixes = [prompt(rng, rng.randint(1, 12)) for _ in range(3)]
    seqs = []
    for _ in range(150):
        if rng.random() < 0.3:
            tokens = (rng.choice(prefixes) + prompt(rng, rng.randint(1, 4)))[: room - 2]
            limit = rng.randint(1, min(9, room - len(tokens)))
            seqs += loop.add_samples(tokens, rng.randint(1, 3), limit)
        loop.step()
    loop.run()
    loop.check_finished(seqs, loop.device.eos_every)
    assert any(plan.offloads for plan in loop.plans)
