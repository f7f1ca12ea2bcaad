"""Fair sharing between tenants inside the scheduler, against a device that checks what it reads."""

from collections import Counter

import pytest

from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence, SequenceStatus
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduling import fair_share
from engine.scheduling.fair_share import VISIT_SECONDS, Comeback, Displacement, FairShare
from tests.engine.scheduling.loop import Loop
from tests.fake_device import compute_seconds


class Shared(Loop):
    """A Loop whose sequences have tenants, and in which one request after the other may come."""

    def send(self, tenant, length=8, max_tokens=8, weight=1.0, priority=0):
        fill = 97 + len(self.sent) % 26
        seq = self.add([fill] * length, max_tokens, priority=priority, tenant=tenant, weight=weight)
        self.sent.append(seq)
        return seq

    def __init__(self, *args, step_seconds=3e-3, **settings):
        super().__init__(*args, step_seconds=step_seconds, **settings)
        self.sent = []

    def flood(self, count, num_steps, **request):
        """So many requests at once, and steps after them."""
        for _ in range(count):
            self.send("flood", **request)
        for _ in range(num_steps):
            self.step()


def served(loop, tenant, first=0):
    """Seconds of the device for a tenant in all plans from `first` on: those of a plan divided by what it computes."""
    tenants, seconds = {seq.seq_id: seq.tenant for seq in loop.sent}, 0.0
    for plan in loop.plans[first:]:
        cost = Counter({name: 0 for name in tenants.values()})
        for seq_id in plan.decodes:
            cost[tenants[seq_id]] += 2
        for chunk in plan.chunks:
            cost[tenants[chunk.seq_id]] += chunk.num_tokens
        seconds += compute_seconds(plan) * cost[tenant] / cost.total()
    return seconds


def settle(loop):
    loop.scheduler.admission.fair_share.settle(loop.scheduler.running)


def steps_to_first_token(loop, seq, limit=200):
    for count in range(1, limit):
        loop.step()
        if seq.num_generated_tokens:
            return count
    raise AssertionError("no first token")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_quiet_tenant_gets_a_row_at_once_where_a_flood_holds_all(depth):
    loop = Shared(num_blocks=200, depth=depth, max_num_seqs=4)
    flood = [loop.send("flood", max_tokens=100) for _ in range(50)]
    for _ in range(20):
        loop.step()
    assert len(loop.scheduler.running) == 4 and {seq.tenant for seq in loop.scheduler.running} == {"flood"}
    for _ in range(3):
        quiet = loop.send("quiet", max_tokens=3)
        assert steps_to_first_token(loop, quiet) <= 1 + depth, "the step under way, then its own"
        for _ in range(10):
            loop.step()
    assert loop.scheduler.admission.fair_share.num_displaced == 3
    loop.run()
    loop.check_finished([*flood, *(seq for seq in loop.sent if seq.tenant == "quiet")])


def test_a_quiet_tenant_gets_blocks_where_a_flood_holds_all():
    loop = Shared(num_blocks=40, depth=2, max_num_seqs=8, prefix_caching=False)
    loop.flood(20, 30, length=12, max_tokens=100)
    assert len(loop.scheduler.block_manager.free_blocks) < 10
    quiet = loop.send("quiet", length=32, max_tokens=4)
    assert steps_to_first_token(loop, quiet) <= 4
    loop.run()
    loop.check_finished(loop.sent)


def test_the_first_step_of_a_quiet_tenant_is_its_own():
    """The plan holds no decode and no unfinished prompt of tenants that were served more."""
    loop = Shared(num_blocks=200, depth=1, max_num_seqs=8)
    loop.flood(6, 7, length=40, max_tokens=50)
    assert any(seq.num_uncomputed_tokens > 1 for seq in loop.scheduler.running), "a prompt of the flood is under way"
    quiet = loop.send("quiet", length=20)
    loop.step()
    assert {step.seq_id for step in loop.plans[-1].steps} == {quiet.seq_id}
    loop.run()
    loop.check_finished(loop.sent)


@pytest.mark.parametrize("depth", [1, 2])
def test_further_tokens_of_a_quiet_tenant_are_computed_alone_while_it_uses_little(depth, monkeypatch):
    monkeypatch.setattr(fair_share, "ALONE_SECONDS", 0.01)
    loop = Shared(num_blocks=400, depth=depth, max_num_seqs=8)
    loop.flood(12, 20, length=40, max_tokens=400)
    first = len(loop.plans)
    quiet = loop.send("quiet", length=20, max_tokens=200)
    while quiet.status is not SequenceStatus.FINISHED:
        loop.step()
    plans = loop.plans[first + depth - 1 :]
    alone = [plan.decodes == [quiet.seq_id] and not plan.chunks for plan in plans]
    if depth == 1:
        assert all(alone[1:6]), "nobody is in its first steps"
    assert sum(quiet.seq_id in plan.decodes for plan in plans) > sum(alone), "then others are beside it"
    seconds = sum(compute_seconds(plan) for plan, is_alone in zip(plans, alone, strict=True) if is_alone)
    total = sum(map(compute_seconds, plans))
    assert 0.005 < seconds < 0.01 + fair_share.ALONE_SHARE * total + 0.005
    loop.run()
    loop.check_finished(loop.sent)


def test_two_quiet_tenants_share_the_steps_that_they_have_to_themselves():
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=8)
    loop.flood(12, 20, length=40, max_tokens=400)
    early = loop.send("early", length=6, max_tokens=20)
    for _ in range(3):
        loop.step()
    late = loop.send("late", length=40, max_tokens=20)
    loop.step()
    assert {step.seq_id for step in loop.plans[-1].steps} == {early.seq_id, late.seq_id}
    loop.run()
    loop.check_finished(loop.sent)


def test_who_is_forgotten_comes_back_with_a_full_allowance_only():
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=8)
    loop.flood(12, 20, length=40, max_tokens=400)
    quiet = loop.send("quiet", length=20, max_tokens=40)
    while quiet.status is not SequenceStatus.FINISHED:
        loop.step()
    kept = loop.scheduler.admission.fair_share.tenants["quiet"].alone.seconds
    assert kept < fair_share.ALONE_SECONDS
    again = loop.send("quiet", length=20, max_tokens=2)
    assert loop.scheduler.admission.fair_share.tenants["quiet"].alone.seconds <= kept + 0.001
    loop.run()
    loop.check_finished([again])


def test_where_all_of_a_plan_makes_way_those_it_left_out_go_on(monkeypatch):
    """The flood has just given up a place, so it is out of a plan whose only chunk then finds no block.

    Nothing is on its way: were that plan given up, nobody would ask for another one.
    """
    monkeypatch.setattr(fair_share, "ALONE_SECONDS", 0.0)
    loop = Shared(num_blocks=200, depth=1, max_num_seqs=8, max_num_batched_tokens=8)
    flood = [loop.send("flood", max_tokens=100) for _ in range(7)]
    early = loop.send("quiet", max_tokens=100)
    for _ in range(30):
        loop.step()
    long = loop.send("quiet", length=40)
    loop.scheduler.finish(early, FinishReason.ABORT)
    loop.step()
    assert {step.seq_id for step in loop.plans[-1].steps} == {long.seq_id} and long.num_uncomputed_tokens == 32
    loop.send("quiet")
    blocks = loop.scheduler.block_manager
    allocate = blocks.allocate
    with monkeypatch.context() as refusing:
        refused = SequenceStatus.RUNNING, long
        refusing.setattr(blocks, "allocate", lambda s, n: None if (s.status, s) == refused else allocate(s, n))
        assert loop.step(), "a plan"
    assert loop.scheduler.admission.fair_share.num_displaced == 1 and long.num_preemptions == 1
    assert flood[0].seq_id in {step.seq_id for step in loop.plans[-1].steps}
    loop.run()
    loop.check_finished([seq for seq in loop.sent if seq is not early])


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_two_floods_are_served_by_their_weights(weight, depth, monkeypatch):
    """One sends many short requests, the other few long ones."""
    monkeypatch.setattr(
        "engine.scheduling.fair_share.CREDIT_SECONDS", 0.02
    )  # who holds little may be ahead by it, once
    loop = Shared(num_blocks=400, depth=depth, max_num_seqs=8)
    for _ in range(1000):
        loop.send("short", length=4, max_tokens=4)
    for _ in range(200):
        loop.send("long", length=60, max_tokens=40, weight=weight)
    for _ in range(60):
        loop.step()
    before = len(loop.plans)
    for _ in range(300):
        loop.step()
    assert loop.scheduler.waiting[0].tenant == "short" and loop.scheduler.waiting[-1].tenant == "long", (
        "both still flood"
    )
    assert served(loop, "long", before) / served(loop, "short", before) == pytest.approx(weight, rel=0.1)


def test_one_request_of_many_samples_is_no_more_than_its_tokens():
    loop = Shared(num_blocks=200, depth=1, max_num_seqs=4)
    for _ in range(20):
        loop.send("a", max_tokens=10)
        loop.send("b", max_tokens=10)
    finished = []
    while loop.step():
        finished += [seq.tenant for seq in loop.sent if seq.finish_reason and seq not in finished]
        counts = [sum(seq.finish_reason is not None for seq in loop.sent if seq.tenant == t) for t in "ab"]
        assert abs(counts[0] - counts[1]) <= 4
    loop.check_finished(loop.sent)


def test_who_comes_back_has_saved_nothing():
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=4)
    loop.send("idle", max_tokens=4)
    loop.run()
    for _ in range(100):
        loop.send("busy", max_tokens=20)
    for _ in range(200):
        loop.step()
    settle(loop)
    before = len(loop.plans)
    for _ in range(100):
        loop.send("idle", max_tokens=20)
    account = loop.scheduler.admission.fair_share.tenants
    assert account["idle"].served == account["busy"].served
    for _ in range(100):
        loop.step()
    assert served(loop, "busy", before) > 0.3 * served(loop, "idle", before), (
        "not shut out until the other has caught up"
    )


def test_a_tenant_alone_uses_everything_and_is_kept_no_account_of_in_the_plans():
    loop = Shared(num_blocks=200, depth=1, max_num_seqs=4)
    for _ in range(8):
        loop.send("a")
    loop.step()
    assert len(loop.scheduler.running) == 4 and not loop.scheduler.admission.fair_share.contended
    loop.run()
    loop.check_finished(loop.sent)
    assert (
        len(loop.scheduler.admission.fair_share.tenants) <= 1 and loop.scheduler.admission.fair_share.num_displaced == 0
    )


def test_priority_goes_before_fairness():
    loop = Shared(num_blocks=200, depth=1, max_num_seqs=2)
    urgent = [loop.send("flood", max_tokens=6, priority=-1) for _ in range(6)]
    quiet = loop.send("quiet", max_tokens=6)
    loop.run()
    assert loop.scheduler.admission.fair_share.num_displaced == 0
    loop.check_finished([*urgent, quiet])


def test_the_first_in_order_is_never_pushed_out():
    loop = Shared(num_blocks=30, depth=2, max_num_seqs=2, prefix_caching=False)
    first = loop.send("flood", length=40, max_tokens=40)
    loop.step()
    for i in range(60):
        loop.send("quiet" if i % 2 else "other", length=30, max_tokens=2)
        loop.step()
    assert first.num_preemptions == 0
    loop.run()
    loop.check_finished(loop.sent)


def test_after_the_loss_of_the_pool_the_accounts_stay():
    loop = Shared(num_blocks=100, depth=1, max_num_seqs=4)
    for _ in range(10):
        loop.send("a", max_tokens=20)
        loop.send("b", max_tokens=20)
    for _ in range(10):
        loop.step()
    settle(loop)
    accounts = {name: tenant.served for name, tenant in loop.scheduler.admission.fair_share.tenants.items()}
    loop.results.clear()
    loop.scheduler.reset(100, max_num_seqs=4, max_num_batched_tokens=32)
    assert {name: tenant.served for name, tenant in loop.scheduler.admission.fair_share.tenants.items()} == accounts
    loop.scheduler.check_invariants()


@pytest.mark.parametrize(("seconds", "longest"), [(1e-6, 3.5e-3), (5e-3, 5.5e-3)])
def test_while_others_are_expected_the_steps_of_a_flood_are_short(seconds, longest):
    """At least three times an empty step of 1 ms, and a chunk of one token; 8 decodes and 24 tokens take 7.4 ms."""
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=8, step_seconds=seconds)
    loop.flood(40, 20, length=40, max_tokens=30)
    assert max(map(compute_seconds, loop.plans)) > 4e-3, "nobody else was ever seen"
    for _ in range(12):
        quiet = loop.send("quiet", length=6, max_tokens=3)
        assert steps_to_first_token(loop, quiet) <= 2
        for _ in range(6):
            loop.step()
    first = len(loop.plans)
    for _ in range(10):
        quiet = loop.send("quiet", length=30, max_tokens=3)
        assert steps_to_first_token(loop, quiet) <= 2, "a prompt of a tenant that holds little is computed at once"
        for _ in range(6):
            loop.step()
    flooded = [plan for plan in loop.plans[first:] if any(id in flood_ids(loop) for id in plan.seq_ids)]
    assert len(flooded) > 30 and max(map(compute_seconds, flooded)) <= longest
    loop.run()
    loop.check_finished(loop.sent)


def test_who_asks_for_much_is_not_small_however_little_it_holds():
    """Prompts of many chunks and one token: their short steps keep it from holding more than a few rows."""
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=16, max_num_batched_tokens=64)
    loop.flood(40, 20, length=100, max_tokens=1)
    for _ in range(20):
        quiet = loop.send("quiet", length=6, max_tokens=1)
        assert steps_to_first_token(loop, quiet) <= 2
        loop.step()
    first, num_running = len(loop.plans), set()
    for _ in range(30):
        loop.step()
        num_running.add(len(loop.scheduler.running))
    assert num_running <= {0, 1}, "no more than a small tenant holds"
    assert max(map(compute_seconds, loop.plans[first:])) <= 3.2e-3


def test_without_a_bound_steps_are_as_long_as_they_may_be():
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=8, step_seconds=None)
    loop.flood(40, 20, length=40, max_tokens=30)
    for _ in range(20):
        steps_to_first_token(loop, loop.send("quiet", length=6, max_tokens=3))
    first = len(loop.plans)
    for _ in range(10):
        loop.step()
    assert max(plan.num_tokens for plan in loop.plans[first:]) == 32


def flood_ids(loop):
    return {seq.seq_id for seq in loop.sent if seq.tenant == "flood"}


def test_in_short_steps_all_take_turns():
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=16, max_num_batched_tokens=64)
    for _ in range(15):
        loop.send("flood", length=8, max_tokens=400)
    for _ in range(30):
        quiet = loop.send("quiet", length=6, max_tokens=3)
        steps_to_first_token(loop, quiet)
    first = len(loop.plans)
    for _ in range(60):
        loop.step()
    counts = Counter(seq_id for plan in loop.plans[first:] for seq_id in plan.decodes)
    flood = [counts[seq_id] for seq_id in flood_ids(loop)]
    assert max(map(compute_seconds, loop.plans[first:])) <= 3.5e-3
    assert max(flood) - min(flood) <= 1 and min(flood) >= 10, flood
    loop.run()
    loop.check_finished(loop.sent)


def test_the_decodes_of_who_holds_little_never_rest():
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=16, max_num_batched_tokens=64)
    for _ in range(15):
        loop.send("flood", length=8, max_tokens=400)
    for _ in range(30):
        steps_to_first_token(loop, loop.send("quiet", length=6, max_tokens=2))
        loop.step()
    quiet = loop.send("quiet", length=6, max_tokens=20)
    loop.step()
    for count in range(1, 20):
        assert quiet.num_generated_tokens == count
        loop.step()


def test_alone_or_beside_equals_steps_are_as_long_as_they_may_be():
    """No small tenant is active or was in the last VISIT_SECONDS."""
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=8)
    for _ in range(200):
        loop.send("a", length=40, max_tokens=30)
        loop.send("b", length=40, max_tokens=30)
    for _ in range(200):
        loop.step()
    fair_share = loop.scheduler.admission.fair_share
    loop.scheduler.admission.fair_share._clock += VISIT_SECONDS  # since one of them held but one row, when both began
    first = len(loop.plans)
    for _ in range(50):
        loop.step()
    assert fair_share.contended and not loop.scheduler.scope.resting
    assert max(plan.num_tokens for plan in loop.plans[first:]) == 32


def test_the_prompt_of_an_encoder_is_never_cut():
    blocks = BlockManager(100, 4, enable_prefix_caching=False)
    fair_share = FairShare(blocks, 8)
    running = [
        Sequence(i, [1] * 40, SamplingParams(), seed=0, max_num_tokens=50, tenant="ab"[i % 2], arrival=i)
        for i in range(8)
    ]
    for seq in running:
        fair_share.came(seq, [])
    assert fair_share.begin_step(None, Displacement(), running, False, 512).budget == 512


@pytest.mark.parametrize(("credit", "num_steps"), [(0.25, {1, 2}), (0.0, {*range(3, 50)})])
def test_who_holds_little_may_be_ahead_by_one_prompt(credit, num_steps, monkeypatch):
    """And need not wait until the others, whose steps are short, have caught up with it."""
    monkeypatch.setattr("engine.scheduling.fair_share.CREDIT_SECONDS", credit)
    loop = Shared(num_blocks=400, depth=1, max_num_seqs=8, max_num_batched_tokens=256)
    loop.flood(30, 20, length=40, max_tokens=100)
    steps_to_first_token(loop, loop.send("quiet", length=200, max_tokens=1))
    assert steps_to_first_token(loop, loop.send("quiet", length=8)) in num_steps


def test_who_leaves_with_a_step_under_way_and_comes_back_owes_it():
    """The account is not thrown away before: its cost would be taken off that of the new one."""
    loop = Shared(num_blocks=400, depth=2, max_num_seqs=8)
    loop.flood(20, 10, length=20, max_tokens=50)
    for _ in range(5):
        quiet = loop.send("quiet", length=20, max_tokens=10)
        while not quiet.num_computed_tokens:
            loop.step()
        loop.scheduler.finish(quiet, FinishReason.ABORT)
        assert "quiet" in loop.scheduler.admission.fair_share.tenants
    loop.run()
    tenants = loop.scheduler.admission.fair_share.tenants
    assert "flood" in tenants and all(tenant.cost == 0 for tenant in tenants.values())


def test_progress_after_a_comeback_counts_when_it_is_charged_already():
    """Turns are asked for while the plan is made, so its tokens may be charged before the plan is sent."""
    seq = Sequence(0, [1] * 10, SamplingParams(), seed=0, max_num_tokens=50)
    seq.status = SequenceStatus.RUNNING
    comeback = Comeback(num_tokens=12)
    for now, num_computed in ((1.0, 8), (3.0, 12), (4.0, 13), (6.0, 15), (7.0, 16)):
        seq.num_computed_tokens = seq.num_charged_tokens = num_computed
        comeback.observe(seq, now)
        assert comeback.is_over(now) == (now == 7.0), "3 s to catch up, so 3 s of progress"
