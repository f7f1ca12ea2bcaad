"""No request of one tenant keeps all rows or all blocks from another tenant, and each still gets its own tokens."""

import random

import pytest

from engine.memory.sequence import SequenceStatus
from tests.engine.scheduling.beam_loop import BeamLoop
from tests.engine.scheduling.loop import ForkLoop, prompt


class Holders(ForkLoop, BeamLoop):
    """The holder's requests are those of the tenant ""."""

    def visit(self, length=6, max_tokens=2, priority=0):
        """A small request of another tenant; the steps until its first token."""
        seq = self.add(prompt(random.Random(self._next_id), length), max_tokens, priority=priority, tenant="other")
        for count in range(1, 300):
            self.step()
            if seq.num_generated_tokens:
                return seq, count
        raise AssertionError("no first token")

    def visits(self, count=5, **request):
        seqs, steps = zip(*(self.visit(**request) for _ in range(count)), strict=True)
        return list(seqs), max(steps)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("priority", [0, -1])
def test_samples_that_hold_all_rows_give_way_one_by_one(depth, priority):
    loop = Holders(num_blocks=400, depth=depth, max_num_seqs=16, max_num_batched_tokens=64)
    samples = loop.add_samples(prompt(random.Random(0), 10), 16, max_tokens=60)
    for _ in range(8):
        loop.step()
    assert len(loop.scheduler.running) == 16
    small = []
    for _ in range(5):
        seq, steps = loop.visit(priority=priority)
        assert steps <= 1 + depth, "the step under way, then its own"
        assert sum(sample.status is SequenceStatus.RUNNING for sample in samples) >= 15
        small.append(seq)
        for _ in range(6):
            loop.step()
    assert sum(seq.num_preemptions for seq in samples) == 5, "one sample for each visit"
    loop.run()
    loop.check_finished([*samples, *small])


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_many_prompts_give_way_one_by_one(depth):
    """As of one HTTP request with a list of prompts: more of them than rows."""
    loop = Holders(num_blocks=400, depth=depth, max_num_seqs=8, max_num_batched_tokens=64)
    samples = [seq for i in range(8) for seq in loop.add_samples(prompt(random.Random(i), 10), 4, max_tokens=30)]
    for _ in range(8):
        loop.step()
    small, most = loop.visits()
    assert most <= 1 + depth
    loop.run()
    loop.check_finished([*samples, *small])


def test_a_request_with_more_samples_than_rows_gets_the_rows_of_one_long_sequence():
    """Its first sample ends, and a sequence of a tenant with a quarter of its weight takes the only row."""
    loop = Holders(num_blocks=400, depth=1, max_num_seqs=1, max_num_batched_tokens=64)
    samples = loop.add_samples(prompt(random.Random(0), 10), 3, max_tokens=3, tenant="other", weight=4.0)
    long = loop.add(prompt(random.Random(1), 10), max_tokens=300)
    while not all(seq.status is SequenceStatus.FINISHED for seq in samples):
        assert loop.step()
    assert long.num_generated_tokens < 30
    loop.run()
    loop.check_finished([*samples, long])


def test_samples_that_hold_all_blocks_give_way_and_are_then_preempted_before_the_small_request():
    """Sixteen samples outgrow the pool. The blocks that they need next are their own, not those of the visitor."""
    loop = Holders(num_blocks=100, depth=1, max_num_seqs=32, max_num_batched_tokens=64)
    samples = loop.add_samples(prompt(random.Random(0), 8), 16, max_tokens=40)
    while len(loop.scheduler.block_manager.free_blocks) > 3:
        loop.step()
    small, steps = loop.visit(length=12, max_tokens=30)
    assert steps <= 2
    while small.status is not SequenceStatus.FINISHED:
        loop.step()
    assert small.num_preemptions <= 1
    loop.run()
    loop.check_finished([*samples, small])


@pytest.mark.parametrize("num_steps", [1, 12], ids=["while it computes its prompt", "while it searches"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_beam_search_that_holds_all_rows_gives_way_as_a_whole(depth, num_steps):
    loop = Holders(num_blocks=400, depth=depth, max_num_seqs=8, max_num_batched_tokens=16)
    group = loop.add_beams(prompt(random.Random(0), 40), 8, max_tokens=40, ignore_eos=True)
    for _ in range(num_steps):
        loop.step()
    small, _ = loop.visit()
    assert small.num_preemptions == 0 and loop.scheduler.admission.fair_share.num_displaced
    seqs, most = loop.visits()
    # Eight rows of up to 20 tokens behind the prompt are computed again, 16 tokens a step, and go on for as long.
    assert most <= 30
    loop.run()
    loop.check_groups([group])
    loop.check_finished([small, *seqs])


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_sequence_that_holds_all_blocks_gives_way(depth, prefix_caching):
    loop = Holders(num_blocks=30, depth=depth, prefix_caching=prefix_caching, max_num_batched_tokens=32)
    long = loop.add(prompt(random.Random(0), 100), max_tokens=18)
    for _ in range(6):
        loop.step()
    small, most = loop.visits()
    assert long.num_preemptions and most <= (4 if prefix_caching else 40)
    loop.run()
    loop.check_finished([long, *small])


def test_who_comes_all_the_time_does_not_keep_a_large_request_from_its_end():
    """Without a prefix cache all of it is computed again each time: about half of its time remains for progress."""
    loop = Holders(num_blocks=50, depth=1, prefix_caching=False, max_num_batched_tokens=32)
    long = loop.add(prompt(random.Random(0), 100), max_tokens=100)
    while long.status is not SequenceStatus.FINISHED:
        loop.visit(length=36)
    computed = sum(step.num_tokens for plan in loop.plans for step in plan.steps if step.seq_id == long.seq_id)
    assert long.num_preemptions > 1
    assert computed < 8 * 200, "not computed again for each token"
    loop.run()
    loop.check_finished([long])


def test_a_part_that_cannot_be_divided_stays_where_the_newcomer_asks_for_more_than_half_as_much():
    loop = Holders(num_blocks=30, depth=1, max_num_batched_tokens=32)
    long = loop.add(prompt(random.Random(0), 90), max_tokens=10)
    for _ in range(6):
        loop.step()
    _, steps = loop.visit(length=60)
    assert long.num_preemptions == 0 and steps > 4
    loop.run()
