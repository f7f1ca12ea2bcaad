"""Samples of one prompt: it is computed once, its blocks are shared, and who writes to a shared block gets a copy."""

import random

import pytest

from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence, SequenceStatus
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from tests.engine.scheduling.loop import ForkLoop, prompt


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("length", "budget"), [(9, 64), (8, 64), (30, 7), (1, 64), (3, 64)])
def test_the_prompt_is_computed_once(depth, prefix_caching, length, budget):
    loop = ForkLoop(num_blocks=64, depth=depth, prefix_caching=prefix_caching, max_num_batched_tokens=max(budget, 7))
    loop.scheduler.admission.max_num_seqs = 7
    seqs = loop.add_samples(prompt(random.Random(0), length), 4, max_tokens=6)
    loop.run()
    loop.check_finished(seqs)
    assert loop.computed() == length + 4 * 5, "each sample computes what it generated itself, but for its last token"
    assert len(loop.copies()) == (3 if length % 4 else 0), "the last of four writes in place"


def test_all_blocks_are_shared_until_the_first_write():
    loop = ForkLoop(num_blocks=64, depth=1)
    seqs = loop.add_samples(prompt(random.Random(0), 10), 4, max_tokens=20)
    loop.step()
    assert len({tuple(seq.block_table) for seq in seqs}) == 1
    blocks = loop.scheduler.block_manager
    assert blocks.num_blocks - len(blocks.free_blocks) == 3
    loop.step()
    assert [seq.block_table[:2] for seq in seqs] == [seqs[0].block_table[:2]] * 4
    assert len({seq.block_table[2] for seq in seqs}) == 4
    assert blocks.num_blocks - len(blocks.free_blocks) == 2 + 4
    loop.run()
    loop.check_finished(seqs)


def test_a_fork_that_finds_no_row_waits_and_is_computed_by_itself():
    loop = ForkLoop(num_blocks=64, max_num_seqs=3)
    other = loop.add(prompt(random.Random(1), 5), max_tokens=30)
    loop.step()
    seqs = loop.add_samples(prompt(random.Random(0), 10), 5)
    loop.run()
    loop.check_finished([other, *seqs])


def test_the_first_sample_may_be_preempted_before_the_prompt_is_computed():
    loop = ForkLoop(num_blocks=12, max_num_batched_tokens=8, prefix_caching=False)
    seqs = loop.add_samples(prompt(random.Random(5), 22), 3, max_tokens=4)
    loop.step()
    assert 0 < seqs[0].num_computed_tokens < 22
    loop.preempt(seqs[0])
    loop.scheduler.check_invariants()
    loop.run()
    loop.check_finished(seqs)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1], [0], [2], [0, 2]])
def test_samples_may_end_in_any_order_at_any_time(steps, order):
    """Also the first, while others still wait for it: the next one takes its place."""
    loop = ForkLoop(num_blocks=32, max_num_batched_tokens=8, depth=2)
    other = loop.add(prompt(random.Random(2), 9))
    seqs = loop.add_samples(prompt(random.Random(3), 18), 3, max_tokens=6)
    for _ in range(steps):
        loop.step()
    for index in order:
        loop.scheduler.finish(seqs[index], FinishReason.ABORT)
        loop.scheduler.check_invariants()
    loop.run()
    loop.check_finished([other, *(seq for i, seq in enumerate(seqs) if i not in order)])
    assert all(seq.status is SequenceStatus.FINISHED for seq in seqs)


@pytest.mark.parametrize("seed", range(30))
def test_random_samples_aborts_and_tiny_pools(seed):
    rng = random.Random(seed)
    loop = ForkLoop(
        num_blocks=rng.randint(12, 40),
        block_size=rng.choice([1, 2, 4, 8]),
        depth=rng.randint(1, 3),
        eos_every=rng.choice([0, 9]),
        prefix_caching=rng.random() < 0.5,
        max_num_seqs=rng.randint(1, 9),
        max_num_batched_tokens=rng.randint(9, 40),
    )
    room = loop.scheduler.block_manager.num_blocks * loop.scheduler.block_manager.block_size
    seqs, aborted = [], set()
    for _ in range(120):
        if rng.random() < 0.2:
            length = rng.randint(1, min(12, room - 2))
            limit = rng.randint(1, min(10, room - length))
            seqs += loop.add_samples(prompt(rng, length), rng.randint(1, 5), limit)
        if seqs and rng.random() < 0.1:
            seq = rng.choice(seqs)
            if seq.status is not SequenceStatus.FINISHED:
                loop.scheduler.finish(seq, FinishReason.ABORT)
                aborted.add(seq)
        loop.step()
    loop.run()
    loop.check_finished([seq for seq in seqs if seq not in aborted], loop.device.eos_every)


def test_allocate_copies_only_what_is_shared_and_written():
    blocks = BlockManager(6, 4)

    def sequence(seq_id):
        return Sequence(seq_id, list(range(6)), SamplingParams(), seed=0, max_num_tokens=24)

    parent, child = sequence(0), sequence(1)
    assert blocks.allocate(parent, 6) == ([0, 1], None)
    parent.num_computed_tokens = 6
    blocks.fork(parent, child)
    blocks.check_invariants([parent, child])
    assert blocks.allocate(child, 3) == ([3], (1, 2)), "the shared last block is replaced, one more is appended"
    child.num_computed_tokens = 9
    assert blocks.allocate(parent, 2) == ([], None), "the other is now alone with it"
    parent.num_computed_tokens = 8
    grandchild = sequence(2)
    blocks.fork(parent, grandchild)
    assert blocks.allocate(grandchild, 1) == ([4], None), "a full block is never written again"
    grandchild.num_computed_tokens = 9
    fourth = sequence(3)
    blocks.fork(child, fourth)
    assert blocks.allocate(fourth, 4) is None, "a copy and a new block need two"
    blocks.check_invariants([parent, child, grandchild, fourth])
    for seq in (parent, child, grandchild, fourth):
        blocks.free(seq)
    blocks.check_invariants([])
    assert len(blocks.free_blocks) == 6
