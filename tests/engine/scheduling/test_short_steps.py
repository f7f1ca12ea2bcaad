"""How long steps take, learnt from steps."""

import random

import msgspec
import pytest

from engine.executor.step import Draft, SequenceStep, StepPlan, StepResult
from engine.memory.sequence import Sequence
from engine.sampling_params import SamplingParams
from engine.scheduling.short_steps import MIN_CHUNK, ShortSteps, StepTimes, TimedTarget
from tests.engine.scheduling.loop import Loop


def observe(
    times, num_steps, base=1e-3, first_token=0.0, per_decode=2e-4, per_token=3e-5, noise=0.0, rng=None, steps=None
):
    rng = rng or random.Random(1)
    for _ in range(num_steps):
        decodes, tokens = steps or rng.choice([(0, 32), (rng.randrange(100), 0), (rng.randrange(100), 128), (1, 0)])
        seconds = base + per_decode * decodes + (tokens > 0) * first_token + per_token * tokens
        times.observe(decodes, tokens, seconds * rng.uniform(1 - noise, 1 + noise))


@pytest.mark.parametrize(("noise", "rel"), [(0.0, 0.02), (0.3, 0.35)])
def test_the_limits_follow_from_what_was_seen(noise, rel):
    times = StepTimes()
    assert times.room_in(3e-3) is None
    observe(times, 300, noise=noise)
    room = times.room_in(3e-3)
    assert room.decodes == pytest.approx(2 * 1e-3 / 2e-4, rel=rel)
    assert room.tokens == pytest.approx(2 * 1e-3 / 3e-5, rel=rel)


@pytest.mark.parametrize(("seconds", "step"), [(1e-6, 3e-3), (3e-3, 3e-3), (20e-3, 20e-3)])
def test_a_step_may_take_so_long_and_no_less_than_three_times_an_empty_one(seconds, step):
    times = StepTimes()
    observe(times, 300)
    room = times.room_in(seconds)
    assert room.decodes == pytest.approx((step - 1e-3) / 2e-4, rel=0.02)
    assert room.tokens == pytest.approx((step - 1e-3) / 3e-5, rel=0.02)


def test_where_prompts_cost_a_step_its_graph_they_are_not_cut_down_to_nothing():
    """A decode step of 5 ms as a graph, 5 more where a prompt is in it: 40 ms are four times the shortest one."""
    times, rng = StepTimes(), random.Random(1)
    for _ in range(300):
        observe(times, 1, rng=rng, base=5e-3, first_token=5e-3, per_decode=4e-5, per_token=2e-5)
        room = times.room_in(40e-3)
    assert room.decodes_alone == pytest.approx(35e-3 / 4e-5, rel=0.1)
    assert room.decodes == pytest.approx(30e-3 / 4e-5, rel=0.1) and room.tokens == pytest.approx(30e-3 / 2e-5, rel=0.1)


def test_they_change_with_the_device():
    times = StepTimes()
    observe(times, 300)
    observe(times, 600, base=6e-3, per_decode=4e-5, per_token=4e-5)
    room = times.room_in(3e-3)
    assert room.decodes == pytest.approx(300, rel=0.15) and room.tokens == pytest.approx(300, rel=0.15)


def test_steps_that_are_all_alike_do_not_undo_what_is_known():
    times = StepTimes()
    observe(times, 300)
    times.room_in(3e-3)
    for _ in range(20):
        observe(times, 100, steps=(10, 0))
        room = times.room_in(3e-3)
    assert room.decodes == pytest.approx(10, rel=0.5) and room.tokens == pytest.approx(66, rel=0.5)


@pytest.mark.parametrize("steps", [(127, 129), (0, 1), (1, 0)])
def test_from_steps_that_say_nothing_come_finite_limits(steps):
    times = StepTimes()
    observe(times, 50, steps=steps)
    assert all(0 <= value < 1e12 for value in times.room_in(3e-3))


def decoding(seq_id):
    seq = Sequence(seq_id, [1], SamplingParams(), seed=0, max_num_tokens=9)
    seq.token_ids.append(2)
    seq.num_computed_tokens, seq.in_worker = 1, True
    return seq


def test_who_comes_takes_nobodys_turn():
    """Ten new ones come with every step, and stay for one: the three that are there all the time get on."""
    steps = ShortSteps(3e-3)
    for step_id, num_decodes in enumerate([1, 2, 5, 10] * 10):
        steps.planned(StepPlan(step_id, [], [], [], [], decodes=[*range(num_decodes)]))
        steps.computed(StepResult(step_id, [], {}, 1e-3 + 5e-4 * num_decodes))
    old, turns = [decoding(i) for i in range(3)], 0
    for count in range(1, 41):
        everyone = [*old, *(decoding(100 * count + i) for i in range(10))]
        taken, _, resting = steps.limit(everyone, False, 512)
        assert len(taken) == 4 and len(resting) == 9
        turns += len({*old} - resting)
    assert turns > 80


def test_the_end_of_a_prompt_waits_for_no_turn_and_takes_none():
    """Other samples of the prompt may wait for it: it is computed as a chunk, which decodes may leave no token for."""
    steps = ShortSteps(3e-3)
    for step_id, num_decodes in enumerate([1, 2, 5, 10] * 10):
        steps.planned(StepPlan(step_id, [], [], [], [], decodes=[*range(num_decodes)]))
        steps.computed(StepResult(step_id, [], {}, 1e-3 + 5e-4 * num_decodes))
    end = Sequence(99, [1, 2], SamplingParams(), seed=0, max_num_tokens=9)
    end.num_computed_tokens, end.in_worker = 1, True
    everyone = [*(decoding(i) for i in range(13)), end]
    for _ in range(13):
        taken, num_tokens, resting = steps.limit(everyone, False, 512)
        assert end not in resting and len(taken) == 5 and num_tokens >= 5


class TimedLoop(Loop):
    """A Loop on a device that takes 2 ms, 0.1 ms for each decode and 0.05 ms for each prompt token, up to 10 % more or
    less."""

    def __init__(self, **settings):
        super().__init__(num_blocks=4000, depth=1, max_num_batched_tokens=512, **settings)
        self.steps, self._noise = [], random.Random(3)  # of steps: (decodes, tokens of chunks, seconds)

        execute = self.device.execute

        def timed(plan):
            return msgspec.structs.replace(execute(plan), compute_seconds=self._seconds(plan))

        self.device.execute = timed

    def _seconds(self, plan):
        decodes = len(plan.decodes)
        chunks = plan.num_tokens - decodes
        seconds = (2e-3 + 1e-4 * decodes + 5e-5 * chunks) * self._noise.uniform(0.9, 1.1)
        self.steps.append((decodes, chunks, seconds))
        return seconds


@pytest.mark.parametrize("target", [8e-3, None])
def test_a_long_prompt_beside_streams_keeps_to_the_target(target):
    loop = TimedLoop(itl_target=target)
    streams = [loop.add([97] * 8, max_tokens=400, ignore_eos=True) for _ in range(4)]
    for _ in range(60):
        loop.step()
    prompts = [loop.add([98 + i] * 1500, max_tokens=2) for i in range(3)]
    before = len(loop.steps)
    while not all(seq.num_generated_tokens for seq in prompts):
        loop.step()
    late = [seconds for _, _, seconds in loop.steps[before:] if seconds > 8e-3]
    chunks = [tokens for _, tokens, _ in loop.steps[before:] if tokens]
    if target is None:
        assert max(chunks) > 500 and len(late) > 5
    else:
        assert len(late) <= len(chunks) // 50
        assert sum(chunks) / len(chunks) > 60, "the room of the target is used"
    loop.run()
    loop.check_finished(streams + prompts)


class DraftSteps:
    """Steps of 10 decodes, each with a draft of up to `most` tokens, and each `every`-th with a chunk; one costs 10 ms,
    0.02 for each row, and with a chunk 10 more and 0.05 for each of its tokens."""

    def __init__(self, most, every):
        self.target, self.num_chunk_tokens = TimedTarget(30e-3), []
        rng, seqs = random.Random(1), [decoding(i) for i in range(10)]
        for step_id in range(1000):
            drafts = [Draft(i, [5] * rng.randint(1, most)) for i in range(10) if most]
            num_tokens = self.target.limit(seqs, 2048) - 10 if step_id % every == 0 else 0
            chunks = [SequenceStep(99, num_tokens, True, [])] if num_tokens else []
            plan = StepPlan(step_id, [], [], [], chunks, decodes=[*range(10)], drafts=drafts)
            seconds = 10e-3 + 2e-5 * plan.num_rows + (10e-3 + 5e-5 * num_tokens if num_tokens else 0)
            self.target.planned(plan)
            self.target.computed(StepResult(step_id, [], {}, seconds))
            if num_tokens:
                self.num_chunk_tokens.append((num_tokens, seconds))


@pytest.mark.parametrize("most", [0, 4])
@pytest.mark.parametrize("every", [4, 50])
def test_rows_of_drafts_are_not_taken_for_tokens_of_prompts(most, every):
    seconds = [seconds for _, seconds in DraftSteps(most, every).num_chunk_tokens[5:]]
    assert 28e-3 < sum(seconds) / len(seconds) < 31e-3


def test_what_is_not_predicted_yet_counts_as_no_error():
    """The first chunks after the first fit are as long as the target allows."""
    steps = DraftSteps(0, 1)
    assert [num_tokens > 100 for num_tokens, _ in steps.num_chunk_tokens[16:20]] == [True] * 4


def test_a_target_that_cannot_be_met_still_lets_prompts_start():
    target = TimedTarget(1e-6)
    for step_id in range(100):
        target.planned(StepPlan(step_id, [], [], [], [], decodes=[*range(8)]))
        target.computed(StepResult(step_id, [], {}, 5e-3))
    seqs = [decoding(i) for i in range(8)]
    assert target.limit(seqs, 512) == 8 + MIN_CHUNK
    assert target.limit([], 512) == 512, "no stream waits"
