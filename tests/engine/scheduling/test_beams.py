"""Beam groups in the scheduler, against a device that checks what it reads: whatever happens, each search gets the
hypotheses of a plain loop over whole contexts.
"""

import random

import pytest

from engine.memory.sequence import Sequence, SequenceStatus
from engine.outputs import FinishReason
from engine.request import Request
from engine.sampling_params import BeamSearchParams, SamplingParams
from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import running_driver
from tests.engine.scheduling.beam_loop import BeamLoop
from tests.engine.scheduling.loop import Loop, prompt
from tests.fake_device import FakeDevice, expected_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"length_penalty": 0.0, "early_stopping": "never"},
        {"length_penalty": 2.0, "early_stopping": "never"},
        {"length_penalty": -1.0, "early_stopping": True},
        {"ignore_eos": True, "max_tokens": 20},
        {"min_tokens": 5, "stop_token_ids": (101, 102)},
        {"max_tokens": 1},
        {"early_stopping": True, "max_tokens": 40},
    ],
    ids=str,
)
def test_the_hypotheses_are_those_of_a_plain_loop(width, depth, params):
    loop = BeamLoop(num_blocks=64, depth=depth)
    groups = [loop.add_beams(prompt(random.Random(i), 5 + i), width, **params) for i in range(3)]
    loop.run()
    loop.check_groups(groups)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_prompt_is_computed_once_and_a_step_one_token_per_hypothesis(prefix_caching):
    loop = BeamLoop(num_blocks=64, prefix_caching=prefix_caching)
    group = loop.add_beams(prompt(random.Random(0), 30), 4, max_tokens=9, ignore_eos=True)
    loop.run()
    loop.check_groups([group])
    assert sum(step.num_tokens for plan in loop.plans for step in plan.steps) == 30 + 4 * 8


@pytest.mark.parametrize("width", [2, 4, 6])
def test_blocks_are_shared(width):
    """Against the same number of sequences that share nothing."""
    shared = BeamLoop(num_blocks=256, max_num_batched_tokens=256)
    shared.add_beams(prompt(random.Random(1), 41), width, max_tokens=24, ignore_eos=True)
    alone = Loop(num_blocks=256, prefix_caching=False, max_num_batched_tokens=256)
    for _ in range(width):
        alone.add(prompt(random.Random(1), 41), max_tokens=24, ignore_eos=True)
    separate = BeamLoop.peak_blocks(alone)
    assert separate == width * 16
    # 10 full blocks of the prompt once, and at most 6 blocks of their own for each hypothesis.
    assert shared.peak_blocks() <= 10 + 6 * width < separate


def test_a_dead_hypothesis_gives_its_blocks_back_at_once():
    loop = BeamLoop(num_blocks=64, depth=1, prefix_caching=False)
    group = loop.add_beams(prompt(random.Random(3), 9), 5, max_tokens=40, ignore_eos=True)
    ends = 0
    while loop.step():
        blocks = loop.scheduler.block_manager
        held = {block_id for slot in group.slots for block_id in slot.block_table}
        assert blocks.num_blocks - len(blocks.free_blocks) == len(held)
        ends += any(len(plan.removed) for plan in loop.plans[-1:])
    assert ends > 10, "hypotheses died and were replaced"
    loop.check_groups([group])


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_is_preempted_and_resumed_as_a_whole(depth, prefix_caching):
    loop = BeamLoop(num_blocks=18, depth=depth, prefix_caching=prefix_caching, max_num_seqs=16)
    first = loop.add(prompt(random.Random(0), 9), max_tokens=60)
    group = loop.add_beams(prompt(random.Random(1), 18), 4, max_tokens=14, ignore_eos=True)
    second = loop.add_beams(prompt(random.Random(2), 7), 3, max_tokens=14, ignore_eos=True)
    preempted = 0
    for _ in range(2000):
        before = [seq.status for seq in group.slots]
        num_preemptions = loop.scheduler.num_preemptions
        if not loop.step():
            break
        if loop.scheduler.num_preemptions > num_preemptions and SequenceStatus.RUNNING in before:
            preempted += SequenceStatus.RUNNING not in [seq.status for seq in group.slots]
    assert preempted, "the pool was too large for this test"
    assert first.token_ids[9:] == expected_tokens(first.token_ids[:9], first.seed, 60)
    loop.check_groups([group, second])


def test_no_part_of_a_group_is_admitted_before_there_is_room_for_all_of_it():
    loop = BeamLoop(num_blocks=64, depth=1, prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=16)
    loop.add(prompt(random.Random(0), 4), max_tokens=60)
    group = loop.add_beams(prompt(random.Random(1), 12), 4, max_tokens=30, ignore_eos=True)
    for _ in range(25):
        loop.step()
    scheduler, blocks = loop.scheduler, loop.scheduler.block_manager
    for slot in group.running:
        loop.preempt(slot)
    needed, first = blocks.num_blocks_together(group.waiting), blocks.num_blocks_for(len(group.slots[0].token_ids))
    assert needed > first + 3
    thief = Sequence(99, [0] * 1000, SamplingParams(), seed=0, max_num_tokens=1000)
    spare = 4 + scheduler.admission.reserve.watermark_blocks
    blocks.allocate(thief, (len(blocks.free_blocks) - (needed + spare - 1)) * blocks.block_size)
    for _ in range(3):  # the other goes on and takes a block at most, so there is room for the first alone
        scheduler.update(loop.device.execute(scheduler.schedule()))
        assert not group.running
    blocks.free(thief)
    scheduler.update(loop.device.execute(scheduler.schedule()))
    assert len(group.running) == 4
    loop.run()
    loop.check_groups([group])


def test_a_resumed_group_stores_common_prefixes_once():
    loop = BeamLoop(num_blocks=64, depth=1, prefix_caching=False, max_num_batched_tokens=24, max_num_seqs=16)
    group = loop.add_beams(prompt(random.Random(1), 42), 4, max_tokens=30, ignore_eos=True)
    for _ in range(12):
        loop.step()
    blocks = loop.scheduler.block_manager
    held = blocks.num_blocks - len(blocks.free_blocks)
    for slot in group.running:
        loop.preempt(slot)
    loop.scheduler.check_invariants()
    assert len(blocks.free_blocks) == blocks.num_blocks
    wanted = blocks.num_blocks_together(group.waiting)
    while len(group.running) < 4:
        loop.step()
    assert blocks.num_blocks - len(blocks.free_blocks) <= max(wanted, held)
    loop.run()
    loop.check_groups([group])


@pytest.mark.parametrize("num_blocks", range(5, 19))
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_pool_too_small_is_an_error_of_that_search_alone(num_blocks, prefix_caching):
    loop = BeamLoop(num_blocks=num_blocks, prefix_caching=prefix_caching)
    before = loop.add(prompt(random.Random(5), 6), max_tokens=12)
    group = loop.add_beams(prompt(random.Random(1), 6), 4, max_tokens=12, ignore_eos=True)
    after = loop.add(prompt(random.Random(6), 6), max_tokens=12)
    loop.run()
    loop.check_finished([before, after])
    assert loop.scheduler.ended_groups == [group]
    if num_blocks <= 8:
        assert "KV cache" in group.error and f"{num_blocks} blocks" in group.error
        assert all(slot.finish_reason is FinishReason.ERROR for slot in group.slots)
    if num_blocks >= 17:
        loop.check_groups([group])


def test_rows_are_kept_for_the_whole_group():
    loop = BeamLoop(num_blocks=64, max_num_seqs=5)
    group = loop.add_beams(prompt(random.Random(1), 20), 4, max_tokens=10, ignore_eos=True)
    others = [loop.add(prompt(random.Random(i), 4), max_tokens=10) for i in range(4)]
    late = loop.add_beams(prompt(random.Random(2), 5), 5, max_tokens=4)
    loop.run()
    for seq in others:
        assert seq.token_ids[4:] == expected_tokens(seq.token_ids[:4], seq.seed, 10)
    assert loop.scheduler.num_preemptions == 0
    loop.check_groups([group, late])


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_any_moment(steps, depth):
    loop = BeamLoop(num_blocks=40, depth=depth, max_num_seqs=12, max_num_batched_tokens=12)
    groups = [loop.add_beams(prompt(random.Random(i), 9), 4, max_tokens=9) for i in range(2)]
    for _ in range(steps):
        loop.step()
    for slot in groups[0].slots:
        loop.scheduler.finish(slot, FinishReason.ABORT)
        loop.scheduler.check_invariants()
    loop.run()
    loop.check_groups(groups[1:])


def test_all_blocks_lost_and_everything_recomputed():
    """As after the death of a Worker: what is not in token_ids and in the group is not needed."""
    loop = BeamLoop(num_blocks=64, depth=1)
    group = loop.add_beams(prompt(random.Random(1), 9), 4, max_tokens=12, ignore_eos=True)
    for _ in range(30):
        for slot in group.running:
            loop.preempt(slot)
        for _ in range(3):
            loop.step()
    loop.run()
    loop.check_groups([group])


@pytest.mark.parametrize("num_plans", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_candidates_come_back_while_the_other_hypothesis_is_on_its_way_again(seed, num_plans):
    """Those of the second, after a preemption; those of the first were known before, and 3 plans recompute it.

    In the midst of these the group chooses, with the first half done; when the third is on its way it waits for that.
    """
    loop = BeamLoop(num_blocks=64, depth=1, prefix_caching=False, max_num_batched_tokens=8)
    group = loop.add_beams(prompt(random.Random(seed), 20), 2, max_tokens=9, ignore_eos=True)
    scheduler, device = loop.scheduler, loop.device
    first, second = group.slots
    while len(first.token_ids) < 24:  # three whole steps, so the second is recomputed after the first
        loop.step()

    def preempt_both():
        for slot in group.running:
            loop.preempt(slot)
        scheduler.check_invariants()

    preempt_both()
    while not (result := device.execute(scheduler.schedule())).samples:
        scheduler.update(result)
    assert [sample.seq_id for sample in result.samples] == [first.seq_id]
    scheduler.update(result)
    while not second.num_pending_tokens:
        on_its_way = device.execute(scheduler.schedule())
    preempt_both()
    again = [device.execute(scheduler.schedule()) for _ in range(num_plans)]
    assert first.num_computed_tokens == 8 * num_plans and second.status is SequenceStatus.WAITING
    scheduler.update(on_its_way)
    scheduler.check_invariants()
    assert group.search.running[0].length == (5 if num_plans < 3 else 4)
    for result in again:
        scheduler.update(result)
        scheduler.check_invariants()
    loop.run()
    loop.check_groups([group])


def test_a_group_that_no_longer_fits_halfway_through_its_return_fails_between_plans():
    """Never in a plan that computes another of its hypotheses: the Worker would be told to drop and to compute it."""
    loop = BeamLoop(num_blocks=64, depth=1, prefix_caching=False, max_num_batched_tokens=8)
    group = loop.add_beams(prompt(random.Random(1), 20), 2, max_tokens=9, ignore_eos=True)
    scheduler, device = loop.scheduler, loop.device
    first = group.slots[0]
    while len(first.token_ids) < 22:  # the third step ends the first and has room for the second
        loop.step()
    for slot in group.running:
        loop.preempt(slot)
    for _ in range(2):
        scheduler.update(device.execute(scheduler.schedule()))
    assert first.num_computed_tokens == 16
    blocks = scheduler.block_manager
    thief = Sequence(99, [0] * 1000, SamplingParams(), seed=0, max_num_tokens=1000)
    blocks.allocate(thief, (len(blocks.free_blocks) - 2) * 4)
    plan = scheduler.schedule()
    assert [step.seq_id for step in plan.steps] == [first.seq_id] and not group.error
    scheduler.update(device.execute(plan))
    assert scheduler.schedule() is None and "KV cache" in group.error
    other = loop.add(prompt(random.Random(4), 4), max_tokens=1)
    blocks.free(thief)
    loop.run()
    assert scheduler.ended_groups == [group] and not device.rows.keys() - {other.seq_id}
    loop.check_finished([other])


@pytest.mark.parametrize("seed", range(80))
def test_random_searches_samples_aborts_and_tiny_pools(seed):
    rng = random.Random(seed)
    loop = BeamLoop(
        num_blocks=rng.randint(12, 80),
        block_size=rng.choice([1, 2, 4, 8]),
        depth=rng.randint(1, 3),
        prefix_caching=rng.random() < 0.5,
        max_num_seqs=rng.randint(6, 12),
        max_num_batched_tokens=rng.randint(6, 40),
    )
    room = loop.scheduler.block_manager.num_blocks * loop.scheduler.block_manager.block_size
    seqs, groups, aborted = [], [], set()
    for _ in range(100):
        length = rng.randint(1, min(rng.choice([12, 60]), room - 2))
        limit = rng.randint(1, min(10, room - length))
        priority = rng.choice([0, 0, 0, -1])
        if rng.random() < 0.12:
            params = {
                "length_penalty": rng.choice([0.0, 1.0, 2.0]),
                "early_stopping": rng.choice([True, False, "never"]),
                "ignore_eos": rng.random() < 0.5,
                "min_tokens": rng.randint(0, limit),
            }
            groups.append(loop.add_beams(prompt(rng, length), rng.randint(1, 6), limit, priority, **params))
        elif rng.random() < 0.1:
            seqs.append(loop.add(prompt(rng, length), limit, priority))
        if groups and rng.random() < 0.05:
            group = rng.choice(groups)
            if group.live:
                aborted.add(group)
                for slot in group.slots:
                    loop.scheduler.finish(slot, FinishReason.ABORT)
        loop.step()
    loop.run()
    loop.check_finished(seqs)
    failed = {group for group in groups if group.error}
    loop.scheduler.ended_groups = [group for group in loop.scheduler.ended_groups if group not in failed]
    loop.check_groups([group for group in groups if group not in failed | aborted])


def test_with_prediction_a_hypothesis_counts_for_as_long_as_its_search_may_get():
    """Its own limit is always one token away: the lengths learned for that said nothing about the tenth token."""
    loop = BeamLoop(num_blocks=24, admission="predict")
    groups = [loop.add_beams(prompt(random.Random(i), 6), 3, max_tokens=40, ignore_eos=True) for i in range(4)]
    for _ in range(60):  # past a refresh of the forecast
        loop.step()
    slots = [slot for group in groups for slot in group.running]
    assert {loop.scheduler.admission.reserve.lengths.class_of(slot).limit for slot in slots} == {64}
    loop.run()
    loop.check_groups(groups)


@pytest.mark.parametrize("num_tokens", [9, 80], ids=["no row is free", "no block is free"])
def test_the_rest_of_a_group_goes_before_a_request_of_higher_priority(num_tokens):
    """A hypothesis that runs waits for those that do not: were they behind a request that waits for it, none would."""
    loop = BeamLoop(num_blocks=24, depth=1, max_num_seqs=4, max_num_batched_tokens=12)
    group = loop.add_beams(prompt(random.Random(1), 30), 4, max_tokens=12, ignore_eos=True)
    for _ in range(6):
        loop.step()
    assert len(group.running) == 4
    loop.scheduler.reset(24, max_num_seqs=4, max_num_batched_tokens=12)  # a Worker died
    loop.device = FakeDevice(24, 4, 0)
    loop.results.clear()
    loop.step()
    assert len(group.running) == 1, "the first of them uses up the budget"
    urgent = loop.add(prompt(random.Random(2), num_tokens), priority=-1)
    loop.run()
    loop.check_groups([group])
    loop.check_finished([urgent])


async def test_an_aborted_search_says_so_for_each_of_its_hypotheses(tmp_path):
    """Also for those that had not begun."""
    folder = save_fake_checkpoint(tmp_path / "model")
    params = BeamSearchParams(beam_width=3, max_tokens=20)
    async with running_driver(folder, "--step-seconds", "0.02") as driver:
        stream = driver.generate(Request("search", [104, 105], params.sampling_params(), beam_search=params))
        driver.abort("search")
        reasons = [part.finish_reason async for output in stream for part in output.outputs]
    assert reasons == [FinishReason.ABORT] * 3
