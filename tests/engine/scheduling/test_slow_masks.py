"""Sequences whose masks take long, beside those of another tenant, on a device that takes time for both."""

from collections import Counter

import msgspec
import pytest

from engine.outputs import FinishReason
from engine.scheduling.fair_share import VISIT_SECONDS
from engine.scheduling.slow_masks import MOST_SECONDS, SHARE
from tests.engine.scheduling.loop import Loop

MASK_SECONDS = 0.03


def as_detailed(tokens):
    return {"detailed": tokens}


def as_verified(tokens):
    return {"verified": [[token] for token in tokens]}


class SlowLoop(Loop):
    """A Loop in which each decode of the tenants `slow` takes a mask of MASK_SECONDS. column: the form in which results
    have the tokens of `flood`, if it is not the plain one."""

    def __init__(self, slow=("flood",), column=None, **settings):
        super().__init__(num_blocks=500, **settings)
        self.slow, self.column, self.sent, self.times = slow, column, {}, []
        self.base_seconds = None  # of a step without masks; None: as the device says
        execute, self.device.execute = self.device.execute, lambda plan: self._with_masks(execute(plan))

    def _with_masks(self, result):
        masks = {seq_id: MASK_SECONDS for seq_id in result.seq_ids if self.sent[seq_id].tenant in self.slow}
        self.times.append((Counter(self.sent[seq_id].tenant for seq_id in result.seq_ids), sum(masks.values())))
        seconds = (self.base_seconds or result.compute_seconds) + sum(masks.values())
        result = msgspec.structs.replace(result, compute_seconds=seconds, slow_masks=masks)
        return result if self.column is None else self._in_column(result)

    def _in_column(self, result):
        in_column = [token for token in result.samples if self.sent[token.seq_id].tenant == "flood"]
        others = [token for token in result.samples if token not in in_column]
        seq_ids, token_ids = [token.seq_id for token in others], [token.token_id for token in others]
        return msgspec.structs.replace(result, seq_ids=seq_ids, token_ids=token_ids, **self.column(in_column))

    def send(self, tenant, count=1, max_tokens=40, length=8):
        seqs = [self.add([97 + len(self.sent) % 26] * length, max_tokens, tenant=tenant) for _ in range(count)]
        self.sent |= {seq.seq_id: seq for seq in seqs}
        return seqs


def steps(loop, num_steps):
    """Tokens by tenant and seconds of masks, for each of the next steps."""
    first = len(loop.times)
    for _ in range(num_steps):
        loop.step()
    return loop.times[first:]


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_masks_take_a_share_of_the_time_beside_another_tenant(depth):
    loop = SlowLoop(depth=depth)
    flood = loop.send("flood", count=6, max_tokens=4)
    steps(loop, 3)
    quiet = loop.send("quiet", max_tokens=150)
    steps(loop, 5)
    seen = steps(loop, 100)
    assert all(tokens["quiet"] == 1 for tokens, _ in seen), "no step is without the other tenant's token"
    assert max(seconds for _, seconds in seen) <= MASK_SECONDS, "one mask uses up the allowance"
    loop.run()
    loop.check_finished(flood + quiet)


def test_the_share_is_used_and_kept():
    """Steps of 10 ms and masks of 30: a mask every twelfth step."""
    loop = SlowLoop(depth=1)
    loop.base_seconds = 0.01
    loop.send("flood", count=6, max_tokens=100)
    quiet = loop.send("quiet", count=2, max_tokens=400)
    steps(loop, 60)
    seen = steps(loop, 240)
    masks = sum(seconds for _, seconds in seen)
    assert masks / (0.01 * len(seen)) == pytest.approx(SHARE, rel=0.1)
    assert all(tokens["quiet"] == 2 for tokens, _ in seen)
    by_seq = [seq.num_generated_tokens for seq in loop.sent.values() if seq.tenant == "flood"]
    assert max(by_seq) - min(by_seq) <= 1, "they take turns"
    assert all(seq.num_generated_tokens > 290 for seq in quiet)


def test_a_tenant_alone_waits_for_all_its_masks():
    loop = SlowLoop(depth=1)
    flood = loop.send("flood", count=6)
    seen = steps(loop, 20)
    assert seen[-1] == ({"flood": 6}, pytest.approx(6 * MASK_SECONDS))
    loop.run()
    loop.check_finished(flood)


def test_while_another_tenant_is_expected_a_step_waits_for_few():
    loop = SlowLoop(depth=1)
    loop.send("flood", count=6, max_tokens=290)
    steps(loop, 4)
    loop.send("quiet", max_tokens=2)
    steps(loop, 8)
    seen = steps(loop, 40)
    assert {seconds for _, seconds in seen} == {MASK_SECONDS}, "each is longer than a step may wait"
    assert MASK_SECONDS > MOST_SECONDS
    later = steps(loop, round(VISIT_SECONDS / MASK_SECONDS))
    assert later[-1][1] == pytest.approx(6 * MASK_SECONDS), "nobody comes any more"


@pytest.mark.parametrize("column", [None, as_detailed, as_verified])
def test_masks_that_are_fast_again_hold_nobody_back(column):
    loop = SlowLoop(depth=1, column=column)
    loop.base_seconds = 0.01
    loop.send("flood", count=6, max_tokens=150)
    steps(loop, 3)
    loop.send("quiet", max_tokens=400)
    steps(loop, 20)
    assert loop.scheduler.admission.fair_share.slow_masks.num_slow == 6
    loop.slow = ()
    steps(loop, 100)
    assert steps(loop, 1) == [({"flood": 6, "quiet": 1}, 0)]


def test_sequences_that_ended_are_forgotten():
    loop = SlowLoop(depth=2)
    loop.send("flood", count=6, max_tokens=6)
    loop.send("quiet", max_tokens=200)
    steps(loop, 6)
    for seq in [seq for seq in loop.sent.values() if seq.tenant == "flood"][:3]:
        loop.scheduler.finish(seq, FinishReason.ABORT)
    loop.send("other", max_tokens=4)
    loop.run()
    slow_masks = loop.scheduler.admission.fair_share.slow_masks
    assert slow_masks.num_slow <= 1, "the last one to end"
