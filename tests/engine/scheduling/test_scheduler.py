"""The scheduler against a device that checks what it reads: whatever happens, each sequence gets its own tokens."""

import random

import pytest

from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence, SequenceStatus
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from tests.engine.scheduling.loop import Loop, prompt


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_sequence_from_prompt_to_length(depth):
    loop = Loop(num_blocks=16, depth=depth)
    seq = loop.add(prompt(random.Random(0), 9), max_tokens=5)
    loop.run()
    loop.check_finished([seq])
    assert seq.finish_reason is FinishReason.LENGTH
    assert sum(len(plan.steps) for plan in loop.plans) == 5, "a length is foreseen: no token is thrown away"


def test_end_of_sequence_throws_one_token_away():
    loop = Loop(num_blocks=64, depth=2, eos_every=6)
    seqs = [loop.add(prompt(random.Random(i), 5), max_tokens=60) for i in range(4)]
    loop.run()
    loop.check_finished(seqs, eos_every=6)
    assert any(seq.finish_reason is FinishReason.STOP for seq in seqs)


def test_ignore_eos_and_min_tokens():
    loop = Loop(num_blocks=64, eos_every=3)
    through = loop.add([97] * 5, max_tokens=30, ignore_eos=True)
    late = loop.add([97] * 5, max_tokens=30, min_tokens=10)
    loop.run()
    assert through.num_generated_tokens == 30
    assert late.num_generated_tokens >= 10


def test_long_prompt_is_chunked_beside_decodes():
    loop = Loop(num_blocks=64, max_num_batched_tokens=8, depth=1)
    short = loop.add(prompt(random.Random(1), 3), max_tokens=12)
    loop.step()
    long = loop.add(prompt(random.Random(2), 40), max_tokens=2)
    loop.run()
    loop.check_finished([short, long])
    for plan in loop.plans[1:6]:
        assert [s.num_tokens for s in plan.steps] == [1, 7], "the decode never waits for the long prompt"


def test_preemption_by_recompute_keeps_the_first_in_order():
    loop = Loop(num_blocks=12, block_size=4, max_num_batched_tokens=64, prefix_caching=False)
    seqs = [loop.add(prompt(random.Random(i), 8), max_tokens=24) for i in range(4)]
    loop.run()
    loop.check_finished(seqs)
    assert loop.scheduler.num_preemptions > 0
    assert seqs[0].num_preemptions == 0


def test_priority_goes_first_and_ties_are_first_come_first_served():
    loop = Loop(num_blocks=64, max_num_seqs=1, depth=1)
    ordinary = [loop.add(prompt(random.Random(i), 4), max_tokens=2) for i in range(3)]
    urgent = loop.add(prompt(random.Random(9), 4), max_tokens=2, priority=-1)
    order = []
    while loop.step():
        order += [s for s in [urgent, *ordinary] if s.status is SequenceStatus.FINISHED and s not in order]
    assert order == [urgent, *ordinary]


def test_samples_of_one_prompt_share_its_full_blocks_within_the_first_step():
    loop = Loop(num_blocks=64, block_size=4, max_num_batched_tokens=256)
    shared = prompt(random.Random(3), 18)
    seqs = [loop.add(shared, max_tokens=3) for _ in range(4)]
    loop.step()
    assert [s.num_tokens for s in loop.plans[0].steps] == [18, 2, 2, 2]
    assert len({tuple(seq.block_table[:4]) for seq in seqs}) == 1
    loop.run()
    loop.check_finished(seqs)


def test_prefix_is_found_later_but_not_across_salts_nor_when_switched_off():
    shared = prompt(random.Random(4), 16)
    loop = Loop(num_blocks=64, block_size=4)
    first = loop.add(shared, max_tokens=2)
    loop.run()
    again, other = loop.add(shared, max_tokens=2), loop.add(shared, max_tokens=2, salt="another tenant")
    loop.run()
    assert (first.num_cached_tokens, again.num_cached_tokens, other.num_cached_tokens) == (0, 15, 0)
    off = Loop(num_blocks=64, block_size=4, prefix_caching=False)
    seqs = [off.add(shared, max_tokens=2) for _ in range(2)]
    off.run()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0]


@pytest.mark.parametrize("num_blocks", [64, 10], ids=["room", "a tight pool"])
def test_a_common_prompt_that_ends_within_a_block_is_computed_once(num_blocks):
    common, rng = prompt(random.Random(6), 27), random.Random(7)
    loop = Loop(num_blocks=num_blocks, block_size=8, max_num_batched_tokens=64)
    first = loop.add(common + prompt(rng, 9), max_tokens=2)
    loop.run()
    others = [loop.add(common + prompt(rng, 9), max_tokens=2) for _ in range(5)]
    loop.run()
    if num_blocks == 64:
        assert [seq.num_cached_tokens for seq in others] == [27] * 5
    loop.check_finished([first, *others])


def test_failed_sequence_leaves_nothing_in_the_cache():
    loop = Loop(num_blocks=64, block_size=4)
    seq = loop.add(prompt(random.Random(5), 16), max_tokens=4)
    loop.step()
    loop.scheduler.finish(seq, FinishReason.ERROR)
    assert not loop.scheduler.block_manager.cached_blocks
    loop.run()


def test_finish_twice_is_harmless():
    loop = Loop(num_blocks=8)
    seq = loop.add([97] * 4)
    loop.scheduler.finish(seq, FinishReason.ABORT)
    loop.scheduler.finish(seq, FinishReason.STOP)
    assert seq.finish_reason is FinishReason.ABORT
    assert loop.scheduler.schedule() is None


@pytest.mark.parametrize("seed", range(40))
def test_random_arrivals_aborts_and_tiny_pools(seed):
    """Every survivor equals the unbatched oracle; every block comes home."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    longest = rng.choice([12, 40, 90])
    eos_every = rng.choice([0, 12])
    loop = Loop(
        num_blocks=-(-longest // block_size) + rng.randrange(0, 12),
        block_size=block_size,
        depth=rng.choice([1, 2, 3]),
        eos_every=eos_every,
        prefix_caching=rng.random() < 0.7,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
    )
    stems = [prompt(rng, 20) for _ in range(3)]
    seqs, aborted = [], set()
    for _ in range(rng.randrange(5, 40)):
        length = rng.randrange(1, longest)
        text = (rng.choice(stems) + prompt(rng, longest))[:length] if rng.random() < 0.5 else prompt(rng, length)
        seqs.append(loop.add(text, max_tokens=rng.randrange(1, longest - length + 1), priority=rng.choice([0, 0, 1])))
        for _ in range(rng.randrange(0, 4)):
            loop.step()
        if rng.random() < 0.2:
            victim = rng.choice(seqs)
            if victim.status is not SequenceStatus.FINISHED:
                aborted.add(victim)
            loop.scheduler.finish(victim, FinishReason.ABORT)
    loop.run()
    loop.check_finished([seq for seq in seqs if seq not in aborted], eos_every)


def test_blocks_of_other_models_and_salts_have_other_keys():
    """Fields are hashed with their lengths: no two ways to cut the same bytes meet."""
    keys = set()
    for identity, salt in [(b"a", "bc"), (b"ab", "c"), (b"abc", ""), (b"", "abc"), (b"a", "bd")]:
        blocks = BlockManager(4, 4, model_identity=identity)
        seq = Sequence(0, [1] * 9, SamplingParams(), seed=0, max_num_tokens=12, cache_salt=salt)
        assert blocks.match_prefix(seq).parts == []
        keys.update(seq.block_keys)
    assert len(keys) == 10
    assert len({key.digest for key in keys}) == 10


def test_a_hit_compares_the_tokens_and_not_only_the_hash():
    blocks = BlockManager(4, 4)
    seq = Sequence(0, [1] * 5, SamplingParams(), seed=0, max_num_tokens=12)
    blocks.allocate(seq, 5)
    seq.num_computed_tokens = 5
    blocks.register_full_blocks(seq)
    other = Sequence(1, [2] * 5, SamplingParams(), seed=0, max_num_tokens=12)
    other.block_keys = [seq.block_keys[0]._replace(token_ids=(2, 2, 2, 2))]  # as if SHA-256 had collided
    assert blocks.match_prefix(other).parts == []
    other.block_keys = list(seq.block_keys)
    assert len(blocks.match_prefix(other).parts) == 1


def test_who_got_no_further_since_it_was_preempted_is_spared():
    """Three in order; the last came back just now, so the one before it makes room."""
    loop = Loop(num_blocks=64, depth=1)
    seqs = [loop.add(prompt(random.Random(i), 6), max_tokens=20) for i in range(3)]
    loop.step()
    loop.step()
    assert loop.scheduler.admission.victim_for(seqs[0]) is seqs[2]
    loop.preempt(seqs[2])
    assert loop.scheduler.schedule() is not None  # it is admitted again, and its result is not in yet
    assert loop.scheduler.running == seqs
    assert loop.scheduler.admission.victim_for(seqs[0]) is seqs[1]
    assert loop.scheduler.admission.victim_for(seqs[1]) is seqs[2], "nobody else behind it"
    assert loop.scheduler.admission.victim_for(seqs[2]) is seqs[2]
