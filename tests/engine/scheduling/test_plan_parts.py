"""Decodes as a column of the plan: who is in it, and who is asked for blocks."""

from engine.executor.step import SequenceStep
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.fake_device import FakeDevice


def make(num_blocks, *lengths, max_tokens=20):
    scheduler = Scheduler(BlockManager(num_blocks, 4), max_num_seqs=8, max_num_batched_tokens=64, watermark=0.0)
    for number, length in enumerate(lengths):
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        prompt = [97 + number] * length
        scheduler.add(Sequence(number, prompt, params, seed=0, max_num_tokens=length + max_tokens, arrival=number))
    return scheduler, FakeDevice(num_blocks, 4)


def run(scheduler, device):
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        scheduler.update(device.execute(plans[-1]))
        scheduler.check_invariants()
    return plans


def test_after_the_prompts_there_are_only_decodes_and_a_block_for_each_boundary(monkeypatch):
    scheduler, device = make(64, 5, 7)
    asked = []
    allocate = scheduler.block_manager.allocate
    monkeypatch.setattr(
        scheduler.block_manager, "allocate", lambda seq, n: asked.append((seq.seq_id, n)) or allocate(seq, n)
    )
    first, *others = run(scheduler, device)
    assert [step.num_tokens for step in first.chunks] == [5, 7] and not first.decodes
    assert all(plan.decodes == [0, 1] and not plan.chunks for plan in others)
    assert len(others) == 19 and first.num_tokens == 12 and others[0].num_tokens == 2
    assert asked[:2] == [(0, 5), (1, 7)]
    # Computed in the end: 24 and 26 tokens. A block is asked for at tokens 8, 12, 16, 20 and at 8, 12, 16, 20, 24.
    assert len(asked[2:]) == 9 and {n for _, n in asked[2:]} == {1}
    assert [plan.decode_blocks[::2] for plan in others[:5]] == [[], [1], [], [0], []]


def test_steps_shows_decodes_and_chunks_alike():
    scheduler, device = make(64, 7)
    scheduler.update(device.execute(scheduler.schedule()))
    scheduler.update(device.execute(scheduler.schedule()))
    plan = scheduler.schedule()
    assert plan.steps == (SequenceStep(0, 1, True, plan.decode_blocks[1:]),) and plan.decode_blocks[0] == 0
    assert plan.seq_ids == [0]


def test_a_victim_leaves_the_column_and_its_block_is_used_in_the_same_plan():
    scheduler, device = make(5, 7, 7, max_tokens=8)  # each needs 4 blocks in the end
    plans = run(scheduler, device)
    preempting = next(plan for plan in plans if plan.removed == [1])
    assert preempting.decodes == [0] and scheduler.num_preemptions >= 1
    assert all(len(set(plan.decodes)) == len(plan.decodes) for plan in plans)
