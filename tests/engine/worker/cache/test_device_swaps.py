"""Sequences whose blocks go to host memory and come back, on a device whose copies are done as late as they may be."""

import pytest
import torch

from engine.executor.step import BlockMove, FetchBlocks, NewSequence, SequenceStep, StepPlan
from engine.models.families import read_model_config
from engine.worker.bucket_runner import BucketSettings
from engine.worker.cache.host_cache import HostCache, block_copier
from engine.worker.device.host import StepLimits
from engine.worker.model_runner import ModelRunner, RunnerParts
from tests.engine.worker.cache.fake_disk import Disk
from tests.engine.worker.lazy_queue import LazyQueue
from tests.engine.worker.mini_driver import GREEDY, PROMPTS

NUM_BLOCKS, NUM_SLOTS = 8, 6


@pytest.fixture
def make_runner(model_dir, decoder):
    model = read_model_config(model_dir)

    def make(queue, disk=None):
        shape = (NUM_BLOCKS, model.num_kv_heads, 8, model.head_dim)
        caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(model.num_layers)]
        runner = ModelRunner(
            RunnerParts(
                decoder=decoder,
                kv_caches=caches,
                limits=StepLimits(4, 256),
                max_model_len=64,
                block_size=8,
                eos_token_ids=[2],
                device=queue.device,
                host_cache=HostCache(block_copier(caches), NUM_SLOTS, queue.device, disk, queue),
                queue=queue,
                buckets=BucketSettings(4, 4, 64, 8, model.hidden_size, torch.float32),
            )
        )
        runner.warm_up()
        return runner

    return make


def new(seq_id, tokens, blocks, computed=0):
    return NewSequence(
        seq_id=seq_id,
        token_ids=tokens,
        num_prompt_tokens=len(PROMPTS[seq_id]),
        num_computed_tokens=computed,
        block_ids=blocks,
        params=GREEDY,
        seed=0,
    )


def test_swapped_out_and_in_while_others_compute(make_runner, hf_greedy):
    """Sequence 2 leaves its blocks to 4, whose 40 tokens need five, and comes back to others: its text goes on."""
    runner, plans = make_runner(LazyQueue()), []
    text = hf_greedy(PROMPTS[2], 4)
    tokens = PROMPTS[2] + text
    plans.append(StepPlan(0, [], [new(2, PROMPTS[2], [0, 1, 2])], [], [SequenceStep(2, 21, True, [])]))
    plans += [StepPlan(i, [], [], [], [], decodes=[2]) for i in (1, 2, 3)]
    out = [BlockMove(block, slot) for block, slot in ((0, 5), (1, 0), (2, 4))]
    plans.append(StepPlan(4, [2], [new(4, PROMPTS[4], [2, 0, 1, 3, 4])], [], [SequenceStep(4, 40, True, [])], out))
    plans.append(StepPlan(5, [], [], [], [], decodes=[4], decode_blocks=[4, 5]))
    back = [BlockMove(7, 0), BlockMove(6, 5)]  # what was in blocks 1 and 0
    chunk = SequenceStep(2, len(tokens) - 16, True, [])
    plans.append(
        StepPlan(
            step_id=6,
            removed=[4],
            new=[new(2, tokens, [6, 7, 2, 3], 16)],
            block_copies=[],
            chunks=[chunk],
            offloads=[BlockMove(2, 1)],
            loads=back,
        )
    )
    plans += [StepPlan(i, [], [], [], [], decodes=[2]) for i in (7, 8)]
    launched, samples = [], {2: [], 4: []}
    for plan in plans:
        launched.append(runner.launch(plan))
        if len(launched) == 2:
            for sample in runner.result(launched.pop(0)).samples:
                samples[sample.seq_id].append(sample.token_id)
    for sample in runner.result(launched.pop()).samples:
        samples[sample.seq_id].append(sample.token_id)
    assert samples[4] == hf_greedy(PROMPTS[4], 2)
    assert samples[2] == hf_greedy(PROMPTS[2], 7)


def test_what_loading_costs_is_measured_on_the_queue(make_runner):
    assert make_runner(LazyQueue()).host_cache.measure_load(4) > 0


def step(number, slot, digest):
    return StepPlan(number, [], [], [], [], [BlockMove(number, slot, digest)])


def test_blocks_on_their_way_are_kept_later_and_nobody_waits_for_them(make_runner):
    disk = Disk()
    queue = LazyQueue()
    runner = make_runner(queue, disk)
    lanes = runner.host_cache._mover
    for number, slot in ((0, 3), (1, 2), (2, 3)):
        runner.launch(step(number, slot, bytes([number])))
        runner.host_cache.keep([BlockMove(number, slot, bytes([number]))])
        assert not disk.stored, "the copy has not been done: nobody asked for it"
    lanes.mark().wait()
    runner.host_cache.keep([])
    assert sorted(disk.stored) == [b"\1", b"\2"], "slot 3 was given out again"
    launched = runner.launch(step(3, 1, b"\3"))
    runner.result(launched)  # a step that samples nothing flushes
    assert sorted(disk.stored) == [b"\1", b"\2", b"\3"]


def test_a_fetch_writes_a_slot_after_the_copies_from_and_to_it(make_runner):
    disk, fetched = Disk(), []
    runner = make_runner(LazyQueue(), disk)
    cache = runner.host_cache
    threes = torch.full((1, cache.copier.block_bytes // 4), 3.0).view(torch.uint8)
    cache.copier.unpack(threes, torch.tensor([1]))
    runner.launch(StepPlan(0, [], [], [], [], [BlockMove(1, 2)]))
    runner.launch(
        StepPlan(step_id=1, removed=[], new=[], block_copies=[], chunks=[], offloads=[], loads=[BlockMove(4, 2)])
    )
    cache.fetch(FetchBlocks(0, [b"d"], [2]), fetched.append)
    content = bytes(range(256)) * (cache.copier.block_bytes // 256)
    disk.loads.pop()([content])
    assert cache._slots[2].numpy().tobytes() == content
    runner.launch(
        StepPlan(step_id=2, removed=[], new=[], block_copies=[], chunks=[], offloads=[], loads=[BlockMove(5, 2)])
    )
    pool = cache.copier.pack(torch.tensor([4, 5]))
    assert pool[0].view(torch.float32)[0] == 3.0 and pool[1].numpy().tobytes() == content
