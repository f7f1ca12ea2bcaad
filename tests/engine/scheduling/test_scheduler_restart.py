"""Scheduler.reset (the Worker is gone) and Scheduler.isolate (some run alone), against the device that checks."""

import random

import pytest

from engine.memory.host_tier import HostTier
from engine.memory.sequence import SequenceStatus
from engine.outputs import FinishReason
from tests.engine.scheduling.loop import Loop, prompt
from tests.fake_device import FakeDevice


def lose_worker(loop, num_blocks):
    """The device with everything in it, and all results under way, are gone."""
    loop.results.clear()
    loop.device = FakeDevice(num_blocks, loop.device.block_size, loop.device.eos_every)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": loop.scheduler.max_num_batched_tokens}
    loop.scheduler.reset(num_blocks, **limits)
    loop.scheduler.check_invariants()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reset_computes_everything_again_and_nothing_else_changes(depth):
    loop = Loop(num_blocks=64, depth=depth)
    seqs = [loop.add(prompt(random.Random(i), 9), max_tokens=12) for i in range(4)]
    for _ in range(5):
        loop.step()
    known = [list(seq.token_ids) for seq in seqs]
    hits = loop.scheduler.block_manager.num_prefix_queries
    lose_worker(loop, 64)
    assert loop.scheduler.waiting == seqs and not loop.scheduler.running
    assert [seq.token_ids for seq in seqs] == known
    assert not loop.scheduler.block_manager.cached_blocks, "what the old Worker had cached is forgotten"
    assert loop.scheduler.block_manager.num_prefix_queries == hits, "counters never fall"
    num_plans = len(loop.plans)
    loop.run()
    loop.check_finished(seqs)
    assert not loop.plans[num_plans].removed, "the new Worker never had them"
    assert loop.plans[num_plans].new[0].seq_id == 0


def test_counters_of_the_host_tier_never_fall():
    loop = Loop(num_blocks=12, max_num_batched_tokens=64, host_tier=HostTier(16))
    for tokens in ([97] * 33, prompt(random.Random(1), 40), [97] * 33):
        loop.add(tokens, max_tokens=2)
        loop.run()
    blocks = loop.scheduler.block_manager
    counted = blocks.host_tier.num_loads, blocks.host_tier.num_offloads
    assert min(counted) > 0
    loop.scheduler.reset(12, HostTier(16), max_num_seqs=8, max_num_batched_tokens=64)
    assert (blocks.host_tier.num_loads, blocks.host_tier.num_offloads) == counted and not len(blocks.host_tier)


def test_reset_takes_the_new_sizes():
    loop = Loop(num_blocks=100, watermark=0.1)
    lose_worker(loop, 20)
    scheduler = loop.scheduler
    assert scheduler.block_manager.num_blocks == 20 and scheduler.admission.reserve.watermark_blocks == 2
    scheduler.reset(30, max_num_seqs=5, max_num_batched_tokens=3)
    assert scheduler.max_num_seqs == 3 and scheduler.max_num_batched_tokens == 3


def test_isolated_sequences_run_and_the_others_wait_in_order():
    loop = Loop(num_blocks=64, depth=1)
    seqs = [loop.add(prompt(random.Random(i), 9), max_tokens=6) for i in range(4)]
    loop.step()
    loop.scheduler.isolate([seqs[2]])
    late = loop.add([97] * 5)
    num_plans = len(loop.plans)
    for _ in range(2):
        loop.step()
    assert {step.seq_id for plan in loop.plans[num_plans:] for step in plan.steps} == {2}
    assert loop.scheduler.held == [seqs[0], seqs[1], seqs[3], late] and loop.scheduler.num_waiting == 4
    loop.scheduler.finish(seqs[1], FinishReason.ABORT)
    loop.scheduler.isolate([seqs[0]])
    assert loop.scheduler.held == [seqs[2], seqs[3], late] and loop.scheduler.waiting == [seqs[0]]
    loop.scheduler.isolate(None)
    assert not loop.scheduler.held
    loop.run()
    loop.check_finished([seqs[0], seqs[2], seqs[3], late])


def test_held_sequences_are_work_that_is_left():
    """So that a Driver which forgets to let them go is told, and does not hang."""
    loop = Loop(num_blocks=64)
    alone, other = loop.add([97] * 5), loop.add([98] * 5)
    loop.scheduler.isolate([alone])
    loop.scheduler.finish(alone, FinishReason.ABORT)
    assert loop.scheduler.schedule() is None and loop.scheduler.has_work
    loop.scheduler.isolate(None)
    loop.run()
    loop.check_finished([other])


@pytest.mark.parametrize("seed", range(40))
def test_random_deaths_and_suspicions(seed):
    rng = random.Random(seed)
    longest = rng.choice([12, 40])
    block_size = rng.choice([1, 4, 16])
    smallest = -(-longest // block_size)
    eos_every = rng.choice([0, 12])
    loop = Loop(
        num_blocks=smallest + rng.randrange(0, 12),
        block_size=block_size,
        depth=rng.choice([1, 2, 3]),
        eos_every=eos_every,
        prefix_caching=rng.random() < 0.7,
        max_num_batched_tokens=rng.choice([8, 16, 64]),
    )
    stem = prompt(rng, 20)
    seqs, aborted = [], set()
    for _ in range(rng.randrange(5, 30)):
        length = rng.randrange(1, longest)
        seqs.append(
            loop.add((stem + prompt(rng, longest))[-length:], max_tokens=rng.randrange(1, longest - length + 1))
        )
        for _ in range(rng.randrange(0, 4)):
            loop.step()
        live = [seq for seq in seqs if seq.status is not SequenceStatus.FINISHED]
        chance = rng.random()
        if chance < 0.2:
            lose_worker(loop, smallest + rng.randrange(0, 12))
        elif chance < 0.4:
            loop.scheduler.isolate(rng.sample(live, min(len(live), 2)))
        elif chance < 0.5 and live:
            aborted.add(live[0])
            loop.scheduler.finish(live[0], FinishReason.ABORT)
        elif chance < 0.6:
            loop.scheduler.isolate(None)
        loop.scheduler.check_invariants()
    loop.scheduler.isolate(None)
    loop.run()
    loop.check_finished([seq for seq in seqs if seq not in aborted], eos_every)
