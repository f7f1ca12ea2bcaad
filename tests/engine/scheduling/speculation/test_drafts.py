"""Drafts from n-grams and predictions: what is proposed, how long it is, and that the text stays the same."""

import random
from pathlib import Path

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.sampling_defaults import SamplingDefaults
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.step import WorkerReady
from engine.requests.new_scheduler import new_scheduler
from engine.scheduling.speculation.drafts import DraftBounds, DraftSource, make_drafts
from engine.scheduling.speculation.ngram_index import LONG, MAX_INDEXED, SIZE, NgramIndex
from engine.scheduling.speculation.step_costs import PassCosts, StepCosts
from tests.engine.scheduling.loop import Loop
from tests.fake_device import expected_tokens


def brute_force(tokens, expected):
    """The match at `expected`, or else the last one; and whether it is long."""
    for place in (expected, *range(len(tokens) - 1, SIZE - 1, -1)):
        if SIZE <= place < len(tokens) and tokens[place - SIZE : place] == tokens[-SIZE:]:
            return place >= LONG and tokens[place - LONG : place] == tokens[-LONG:], place
    return None


def test_the_index_finds_the_last_match_and_goes_on_with_it():
    rng = random.Random(0)
    tokens = []
    index = NgramIndex(tokens)
    place = num_found = num_kept = 0
    for _ in range(600):
        tokens.append(rng.randrange(4))
        assert index.catch_up()
        found = index.find(tokens[-LONG:], len(tokens))
        assert found == brute_force(tokens, place + 1)
        num_found += found is not None
        num_kept += found is not None and found[1] == place + 1 != brute_force(tokens, 0)[1]
        place = found[1] if found else place + 1
    assert num_found > 400 and num_kept > 10


def test_a_long_prompt_is_indexed_in_parts():
    index = NgramIndex(list(range(3 * MAX_INDEXED)))
    assert [index.catch_up() for _ in range(3)] == [False, False, True]
    assert index.find([0, 0, 0, 5, 6, 7], 100) == (False, 8)


@pytest.mark.parametrize("source", ["prediction", "text"])
def test_an_answer_that_repeats_a_text_with_changes_goes_on_at_its_place(source):
    """Lines begin alike, so what followed their first tokens last is another line's rest."""
    lines = [[*range(6), 100 + i, 200 + i, 300 + i] for i in range(20)]
    text = [token for line in lines for token in line]
    lines[7] = [*range(6), 99, 98]  # changed
    lines[12] = []  # deleted
    answer = [token for line in lines for token in line]
    index = NgramIndex(text if source == "prediction" else text.copy())
    assert index.catch_up()
    before = [] if source == "prediction" else text
    wrong = []
    for i, token in enumerate(answer):
        known = before + answer[:i]
        found = index.find(known[-LONG:], len(known))
        if found is None or index.tokens[found[1]] != token:
            wrong.append(i)
        if source == "text":
            index.tokens.append(token)
            index.catch_up()
    assert len(wrong) <= 12, wrong  # 25 or 26 if the last occurrence is taken each time


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_right", [0, 7, 40])
def test_a_prediction_brings_several_tokens_a_step_and_the_same_text(depth, num_right):
    loop = Loop(40, depth=depth, drafts=make_drafts(4))
    prompt = list(range(97, 107))
    expected = expected_tokens(prompt, 0, 40)
    seq = loop.add(prompt, max_tokens=40)
    seq.prediction = tuple([*expected[:num_right], *[1] * (40 - num_right)])
    loop.run()
    assert seq.token_ids[10:] == expected
    drafts = loop.scheduler.drafts
    assert seq.num_drafted_tokens == drafts.num_draft_tokens and seq.num_accepted_tokens == drafts.num_accepted_tokens
    assert num_right // 3 <= seq.num_accepted_tokens <= num_right
    if num_right == 40:
        assert len(loop.plans) < (20 if depth == 1 else 30)


def test_drafts_end_where_wrong():
    """After some wrong guesses a sequence goes on without a draft."""
    loop = Loop(40, depth=1, drafts=make_drafts(4))
    prompt = [97, 98, 99] * 5
    seq = loop.add(prompt, max_tokens=60)
    loop.run()
    assert seq.token_ids[15:] == expected_tokens(prompt, 0, 60)
    assert loop.scheduler.drafts.num_draft_tokens < 30


@pytest.mark.parametrize("num_blocks", range(90, 130, 5))
def test_drafts_leave_blocks_for_the_next_token_of_every_decode(num_blocks):
    drafts = make_drafts(16, bounds=DraftBounds(max_decodes=64, weight_rows=1e6))
    loop = Loop(num_blocks, 1, depth=1, drafts=drafts, max_num_seqs=128, max_num_batched_tokens=256)
    for i in range(6):
        prompt = list(range(97 + i, 105 + i))
        seq = loop.add(prompt, max_tokens=80)
        seq.prediction = tuple(expected_tokens(prompt, seq.seed, 80))
    num_drafts = 0
    while loop.step():
        plan = loop.plans[-1]
        if len(plan.decode_blocks) > 2 * len(plan.decodes):  # drafts took blocks, too
            num_drafts += 1
            assert len(loop.scheduler.block_manager.free_blocks) >= len(plan.decodes)
    assert num_drafts > 10


def test_nobody_waits_for_a_draft_that_does_not_come():
    """With two plans under way, a sequence whose draft was right waits for its token before the next one; not where the
    step has become too large for drafts."""
    loop = Loop(2000, 16, drafts=make_drafts(4), max_num_seqs=64, max_num_batched_tokens=512)

    def add(numbers):
        for number in numbers:
            prompt = list(range(97 + number, 107 + number))
            seq = loop.add(prompt, max_tokens=400)
            seq.prediction = tuple(expected_tokens(prompt, seq.seed, 400))
            yield seq

    seqs = list(add(range(8)))
    for _ in range(20):
        loop.step()
    assert loop.scheduler.drafts.num_drafts > 20
    seqs += add(range(8, 16))
    for _ in range(12):
        loop.step()
    assert {len(plan.decodes) for plan in loop.plans[-8:]} == {16}
    loop.run()
    assert all(seq.token_ids[10:] == list(seq.prediction) for seq in seqs)


@pytest.mark.parametrize("distance", [5, 6, 8, 30])
def test_a_prediction_that_is_often_wrong_makes_no_stream_slower(distance):
    """With two plans under way, to wait for a token costs a step beside streams that do not wait."""
    loop = Loop(2000, 16, drafts=make_drafts(8), max_num_batched_tokens=512)
    prompt = list(range(97, 107))
    seq = loop.add(prompt, max_tokens=400)
    expected = expected_tokens(prompt, seq.seed, 400)
    seq.prediction = tuple(1 if i % distance == distance - 1 else token for i, token in enumerate(expected))
    others = [loop.add(list(range(50 + i, 60 + i)), max_tokens=400) for i in range(5)]
    for _ in range(300):
        loop.step()
    assert others[0].num_generated_tokens >= 298
    assert seq.num_generated_tokens > (350 if distance == 30 else 0.96 * 298)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_without_repetition_is_searched_now_and_then(monkeypatch, depth):
    """Each lookup takes processor time from the step; a repetition is found a little later."""
    lookups = []

    def find_nothing(index, last, length):
        if index.tokens:
            lookups.append(length)

    monkeypatch.setattr(NgramIndex, "find", find_nothing)
    loop = Loop(100, depth=depth, drafts=make_drafts(4))
    loop.add(list(range(97, 107)), max_tokens=160)
    loop.run()
    assert 160 / 9 < len(lookups) < 160 / 4
    loop.add(list(range(97, 107)), max_tokens=8)
    lookups.clear()
    loop.run()
    assert len(lookups) > 4, "a new sequence is searched at once"


def test_a_row_costs_what_was_measured():
    cheap, dear = StepCosts(8.0), StepCosts(8.0)
    for rows in [1, 2, 4, 1, 3] * 20:
        cheap.add(rows, 10.0 + 0.1 * rows)
        dear.add(rows, 0.1 + 2.0 * rows)
    assert cheap.needed(1, 1.0) == pytest.approx(0.1 / 10.1, rel=0.05)
    assert dear.needed(1, 1.0) == pytest.approx(2.0 / 2.1, rel=0.05)


def test_a_single_slow_step_does_not_count_and_steps_that_stay_slow_do():
    costs = StepCosts(8.0)
    for i in range(20):
        for rows in [1, 2, 4, 1, 3]:
            costs.add(rows, 300.0 if i > 2 and rows == 2 + i % 3 else 10.0 + 0.1 * rows)  # it records a program
    assert costs.needed(1, 1.0) == pytest.approx(0.1 / 10.1, rel=0.05)
    for rows in [1, 2, 4, 1, 3] * 100:  # a longer context
        costs.add(rows, 30.0 + 3.0 * rows)
    assert costs.needed(1, 1.0) == pytest.approx(3.0 / 33.0, rel=0.05)


def test_drafts_that_were_given_up_are_tried_again():
    """Without drafts all steps have one row, and no step tells what a second one would cost."""
    costs = StepCosts(8.0)
    for rows in [1, 2, 1, 3] * 10:
        costs.add(rows, 0.01 + 1.0 * rows)
    assert costs.needed(1, 1.0) > 0.9
    seen = []
    for _ in range(3000):
        costs.add(1, 1.01)
        seen.append(costs.needed(1, 1.0))
    assert seen[50] > 0.85 and seen[-1] == pytest.approx(1 / 9, rel=0.05)  # as before the first step
    assert costs.fixed + costs.per_row == pytest.approx(1.01)
    for rows in [1, 2, 1, 3] * 10:
        costs.add(rows, 0.01 + 1.0 * rows)
    assert costs.needed(1, 1.0) > 0.9


def test_a_pass_of_a_draft_model_costs_what_was_measured():
    costs, without = PassCosts(8.0), StepCosts(8.0)
    for rows in [1, 2, 4, 1, 3] * 20:
        for each in (costs, without):
            each.add(rows, 0.010 + 0.0001 * rows)
    assert costs.needed(1, 1.0) == without.needed(1, 1.0)
    costs.add_passes(4, 4.0)  # the first one computed a long prompt
    assert costs.needed(1, 1.0) > 1.0
    for _ in range(20):
        costs.add_passes(4, 4 * 0.002)
    assert costs.needed(1, 1.0) == pytest.approx(0.0021 / 0.0101, rel=0.05)
    costs.num_sharing = 4
    assert costs.needed(4, 4.0) == pytest.approx(4 * (0.0001 + 0.002 / 4) / 0.0104, rel=0.05)


@pytest.mark.parametrize(
    ("device", "speculative", "max_decodes"),
    [("cpu", None, 8), ("cuda", None, 64), ("cuda", "ngram:4", 64), ("cuda", "some/model:4", 8)],
)
def test_a_gpu_may_have_drafts_in_larger_steps(device, speculative, max_decodes):
    ready = WorkerReady(4, 64, 2, 64, 256, device, "none", {})
    checkpoint = Checkpoint(Path(), [2], SamplingDefaults(), None, b"")
    drafts = new_scheduler(ready, EngineConfig(speculative=speculative), checkpoint).drafts
    assert drafts.max_decodes == max_decodes


@pytest.mark.parametrize("value", ["ngram", "ngram:0", "ngram:65", "ngram:x", "some/model", "some/model:0", ":4", ""])
def test_other_forms_are_refused(value):
    with pytest.raises(ConfigError, match="speculative"):
        EngineConfig(speculative=value)


@pytest.mark.parametrize(
    "settings", [{"tensor_parallel_size": 2}, {"disk_cache": "/tmp/x", "swap_space": 1.0}, {"lora": ("a=/b",)}], ids=str
)
def test_a_draft_model_is_not_served_with(settings):
    with pytest.raises(ConfigError, match=r"^speculative: "):
        EngineConfig(speculative="some/model:4", **settings)


def test_k_and_the_model_are_read():
    found = [EngineConfig(speculative=value) for value in (None, "ngram:8", "/a/b:2", "org/model:4")]
    assert [(config.draft_model, config.max_draft_tokens) for config in found] == [
        ("", 0), ("", 8), ("/a/b", 2), ("org/model", 4)
    ]  # fmt: skip


def test_drafts_of_a_model_are_left_open_and_tried_again_after_they_were_wrong():
    loop = Loop(40, depth=1, drafts=make_drafts(4, DraftSource.MODEL))
    seq = loop.add(list(range(97, 107)), max_tokens=100)
    loop.run()  # the fake device finds that OPEN_TOKEN is never right
    assert seq.token_ids[10:] == expected_tokens(list(range(97, 107)), 0, 100)
    lengths = [len(draft.token_ids) for plan in loop.plans for draft in plan.drafts]
    assert all(draft.is_open for plan in loop.plans for draft in plan.drafts)
    assert lengths[0] > 1 and 4 < len(lengths) < 20
    assert set(lengths[-3:]) == {1}
