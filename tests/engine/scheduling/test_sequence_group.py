"""Samples of one request are preempted and come back as a whole; where they outgrow the pool, they run one by one."""

import random

import pytest

from engine.memory.host_tier import HostTier
from engine.memory.sequence import SequenceStatus, together
from engine.outputs import FinishReason
from engine.scheduling.block_reserve import PredictedReserve
from tests.engine.scheduling.loop import ForkLoop, prompt

MEMORY = {
    "recompute": {"prefix_caching": False},
    "prefix cache": {"prefix_caching": True},
    "swap": {"prefix_caching": True, "host_tier": 64},
}


def group_loop(num_blocks, memory="recompute", **settings):
    """With rows and a budget for everybody: blocks are the only limit."""
    given = dict(MEMORY[memory])
    tier = HostTier(given.pop("host_tier")) if "host_tier" in given else None
    settings = {"depth": 1, "max_num_seqs": 32, "max_num_batched_tokens": 512, "host_tier": tier} | given | settings
    return ForkLoop(num_blocks, **settings)


def live(seqs):
    return [seq for seq in seqs if seq.status is not SequenceStatus.FINISHED]


def num_running(seqs):
    return sum(seq.status is SequenceStatus.RUNNING for seq in seqs)


def preempt_all(loop, seqs):
    for seq in [seq for seq in seqs if seq.status is SequenceStatus.RUNNING]:
        loop.preempt(seq)
    loop.scheduler.check_invariants()


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("admission", ["plain", "predict"])
def test_all_samples_run_or_none_does(memory, admission):
    """Three requests of four samples, of which the pool holds two to their end; the first never has to go."""
    loop = group_loop(64, memory, admission=admission)
    groups = [loop.add_samples(prompt(random.Random(i), 18), 4, max_tokens=24 + i) for i in range(3)]
    while loop.step():
        for seqs in groups:
            assert num_running(seqs) in (0, len(live(seqs)))
    assert all(seq.num_preemptions == 0 for seq in groups[0])
    assert groups[2][0].num_preemptions > 0
    assert len({seq.num_preemptions for seq in groups[2]}) == 1
    assert not any(seqs[0].group.split for seqs in groups)
    loop.check_finished([seq for seqs in groups for seq in seqs])


def test_the_prompt_is_computed_once_on_return_without_a_prefix_cache():
    """Its four full blocks; the two tokens behind them share a block with what each sample generated itself."""
    loop = group_loop(64)
    seqs = loop.add_samples(prompt(random.Random(0), 18), 3, max_tokens=20)
    for _ in range(6):
        loop.step()
    preempt_all(loop, seqs)
    held = loop.scheduler.block_manager
    loop.step()
    steps = loop.plans[-1].steps
    assert num_running(seqs) == 3
    assert sum(step.num_tokens for step in steps) == 16 + 3 * (2 + 6)
    assert held.num_blocks - len(held.free_blocks) == 4 + 3 * 2
    loop.run()
    loop.check_finished(seqs)


@pytest.mark.parametrize(("num_free", "comes_back"), [(14, False), (15, True)])
def test_a_group_comes_back_when_there_is_room_for_all_of_it(num_free, comes_back):
    """Four blocks of the prompt, three of each sample's own, and one more for two that will grow at once."""
    loop = group_loop(40, watermark=0.0)
    seqs = loop.add_samples(prompt(random.Random(1), 16), 3, max_tokens=40)
    for _ in range(9):
        loop.step()
    preempt_all(loop, seqs)
    blocks = loop.scheduler.block_manager
    assert blocks.num_blocks_together(seqs[0].group.waiting) == 4 + 3 * 3
    other = loop.add(prompt(random.Random(2), 4 * (40 - num_free)), max_tokens=2, priority=-1)
    loop.step()
    assert other.status is SequenceStatus.RUNNING
    assert num_running(seqs) == (3 if comes_back else 0)
    loop.run()
    loop.check_finished([other, *seqs])


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_group_that_outgrows_the_pool_runs_one_by_one(memory, depth):
    """Eight samples, each of which needs a third of the pool in the end; with others before and behind them."""
    loop = group_loop(24, memory, depth=depth)
    before = loop.add(prompt(random.Random(1), 5), max_tokens=12)
    seqs = loop.add_samples(prompt(random.Random(0), 10), 8, max_tokens=22)
    behind = loop.add_samples(prompt(random.Random(2), 6), 2, max_tokens=9)
    split = False
    while loop.step():
        split |= seqs[0].group.split
        if before.status is SequenceStatus.FINISHED:
            head = next((seq for seq in seqs if seq.status is not SequenceStatus.FINISHED), None)
            assert head is None or head.status is SequenceStatus.RUNNING or not num_running(seqs)
    assert split and before.num_preemptions == 0
    assert not behind[0].group.split
    loop.check_finished([before, *seqs, *behind])


def test_a_split_group_is_whole_again_when_it_fits():
    loop = group_loop(14)
    seqs = loop.add_samples(prompt(random.Random(0), 8), 4, max_tokens=16, ignore_eos=True)
    group = seqs[0].group
    while not group.split:
        loop.step()
    for seq in seqs[2:]:
        loop.scheduler.finish(seq, FinishReason.ABORT)
    preempt_all(loop, seqs)
    loop.step()
    assert not group.split and num_running(seqs) == 2
    loop.run()
    loop.check_finished(seqs[:2])


def test_a_group_too_large_for_the_pool_does_not_wait_for_others_to_end():
    """It comes back beside them, as many samples as find room, and gives way one by one."""
    loop = group_loop(20, watermark=0.0)
    seqs = loop.add_samples(prompt(random.Random(0), 8), 6, max_tokens=16, ignore_eos=True)
    while not seqs[0].group.split:
        loop.step()
    preempt_all(loop, seqs)
    first = loop.add(prompt(random.Random(1), 8), max_tokens=20, priority=-1, ignore_eos=True)
    loop.step()
    assert first.status is SequenceStatus.RUNNING
    assert 0 < num_running(seqs) < 6 and seqs[0].group.split
    loop.run()
    loop.check_finished([first, *seqs])


def test_a_group_is_spared_until_all_of_it_got_further():
    """Two groups behind one that needs blocks: the last came back just now, so the one before it makes room."""
    loop = group_loop(128)
    groups = [loop.add_samples(prompt(random.Random(i), 6), 3, max_tokens=20) for i in range(3)]
    for _ in range(3):
        loop.step()
    victim = loop.scheduler.admission.victim_for
    assert together(victim(groups[0][0])) == groups[2]
    preempt_all(loop, groups[2])
    assert loop.scheduler.schedule() is not None  # they are admitted again, and the result is not in yet
    assert loop.scheduler.running == [seq for seqs in groups for seq in seqs]
    assert together(victim(groups[0][0])) == groups[1]
    groups[2][0].token_ids.append(97)
    assert together(victim(groups[0][0])) == groups[1], "two of three got no further"
    assert together(victim(groups[1][2])) == groups[2], "nobody else behind it"
    assert together(victim(groups[2][0])) == groups[2]


def test_no_group_gives_up_its_own_blocks_while_another_is_behind_it():
    """Though none of those behind it got any further."""
    loop = group_loop(128)
    groups = [loop.add_samples(prompt(random.Random(i), 6), 3, max_tokens=20) for i in range(2)]
    for _ in range(3):
        loop.step()
    preempt_all(loop, groups[1])
    assert loop.scheduler.schedule() is not None
    assert loop.scheduler.admission.victim_for(groups[0][0]) is groups[1][2]


def test_a_token_that_was_on_its_way_at_the_preemption_is_no_progress():
    loop = group_loop(64)
    seqs = loop.add_samples(prompt(random.Random(0), 6), 2, max_tokens=9)
    result = loop.device.execute(loop.scheduler.schedule())
    preempt_all(loop, seqs)
    loop.scheduler.update(result)
    assert not any(seq.has_progressed for seq in seqs)
    loop.step()
    assert all(seq.has_progressed for seq in seqs)
    loop.run()
    loop.check_finished(seqs)


@pytest.mark.parametrize("memory", MEMORY)
def test_more_samples_than_rows_come_back_as_rows_get_free(memory):
    loop = group_loop(64, memory, max_num_seqs=3)
    seqs = loop.add_samples(prompt(random.Random(0), 10), 5, max_tokens=8)
    loop.step()
    loop.step()
    preempt_all(loop, seqs)
    loop.step()
    assert num_running(seqs) == 3
    loop.run()
    loop.check_finished(seqs)


def test_a_group_comes_back_when_there_are_rows_for_all_of_it():
    loop = group_loop(64, max_num_seqs=4)
    seqs = loop.add_samples(prompt(random.Random(0), 10), 3, max_tokens=20)
    for _ in range(3):
        loop.step()
    preempt_all(loop, seqs)
    urgent = [loop.add(prompt(random.Random(i), 5), max_tokens=3 + 6 * i, priority=-1) for i in range(2)]
    loop.step()
    assert num_running(seqs) == 0, "two rows are free"
    while urgent[0].status is not SequenceStatus.FINISHED:
        loop.step()
    loop.step()
    assert num_running(seqs) == 3 and urgent[1].status is SequenceStatus.RUNNING
    loop.run()
    loop.check_finished([*seqs, *urgent])


def test_a_new_request_starts_with_the_rows_that_there_are():
    loop = group_loop(64, max_num_seqs=4)
    other = loop.add(prompt(random.Random(1), 5), max_tokens=30)
    loop.step()
    seqs = loop.add_samples(prompt(random.Random(0), 10), 4)
    loop.step()
    assert num_running(seqs) == 3
    loop.run()
    loop.check_finished([other, *seqs])


@pytest.mark.parametrize("memory", MEMORY)
def test_a_small_budget_brings_a_group_back_in_several_steps(memory):
    loop = group_loop(64, memory, max_num_batched_tokens=8, max_num_seqs=8)
    seqs = loop.add_samples(prompt(random.Random(0), 22), 4, max_tokens=12)
    for _ in range(7):
        loop.step()
    preempt_all(loop, seqs)
    loop.run()
    loop.check_finished(seqs)


def test_the_prediction_counts_a_returning_group_by_its_size():
    loop = group_loop(64, admission="predict")
    seqs = loop.add_samples(prompt(random.Random(0), 10), 4, max_tokens=12)
    loop.step()
    loop.step()
    asked = []
    reserve = loop.scheduler.admission.reserve
    assert isinstance(reserve, PredictedReserve)
    spare = reserve.spare
    reserve.spare = lambda seq, prefix, num_forks, *rest: (
        asked.append(num_forks) or spare(seq, prefix, num_forks, *rest)
    )
    preempt_all(loop, seqs)
    assert not reserve.holders
    loop.add(prompt(random.Random(3), 4), max_tokens=9, priority=-1)
    loop.step()
    assert asked == [3, 0, 0, 0]
    assert set(seqs) < reserve.holders.keys()
    loop.run()
    assert not reserve.holders


def watch_preemptions(scheduler):
    """Every plan: who was preempted left nobody of an unsplit group behind. Returns the list of who was."""
    preempt, schedule, everyone = scheduler._preempt, scheduler.schedule, []

    def watched_schedule():
        num_before = len(everyone)
        plan = schedule()
        for seq in everyone[num_before:]:
            assert seq.group is None or seq.group.split or not seq.group.running
        return plan

    scheduler._preempt = lambda seq: everyone.append(seq) or preempt(seq)
    scheduler.schedule = watched_schedule
    return everyone


@pytest.mark.parametrize("seed", range(60))
def test_random_groups_singles_aborts_and_tiny_pools(seed):
    rng = random.Random(seed)
    memory = rng.choice(list(MEMORY))
    loop = group_loop(
        rng.randint(12, 40),
        memory,
        block_size=rng.choice([1, 2, 4, 8]),
        depth=rng.randint(1, 3),
        eos_every=rng.choice([0, 9]),
        max_num_seqs=rng.randint(2, 12),
        max_num_batched_tokens=rng.randint(12, 40),
        admission=rng.choice(["plain", "predict"]),
        watermark=rng.choice([0.0, 0.05]),
    )
    watch_preemptions(loop.scheduler)
    room = loop.scheduler.block_manager.num_blocks * loop.scheduler.block_manager.block_size
    seqs, aborted = [], set()
    for _ in range(120):
        if rng.random() < 0.15:
            length = rng.randint(1, min(20, room - 2))
            limit = rng.randint(1, min(20, room - length))
            seqs += loop.add_samples(prompt(rng, length), rng.choice([1, 2, 3, 8]), limit)
        if seqs and rng.random() < 0.05:
            seq = rng.choice(seqs)
            if seq.status is not SequenceStatus.FINISHED:
                loop.scheduler.finish(seq, FinishReason.ABORT)
                aborted.add(seq)
        loop.step()
    loop.run()
    loop.check_finished([seq for seq in seqs if seq not in aborted], loop.device.eos_every)
