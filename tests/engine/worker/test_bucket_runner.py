"""Steps as a GPU runs them (fixed buffers, padded graphs, two steps in flight), on a queue in host memory."""

import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.executor.step import BlockCopy
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.sampling_params import SamplingParams
from engine.worker.batch.bucket_buffers import BucketBuffers, input_bytes
from engine.worker.batch.device_rows import DeviceRows
from engine.worker.batch.step_buffer import BUFFERED_STEPS
from engine.worker.device import cuda_graphs
from engine.worker.device.cuda_graphs import (
    Bucket,
    GraphRunner,
    decode_sizes,
    mixed_buckets,
    mixed_token_sizes,
    next_size,
)
from engine.worker.device.host import StepLimits
from engine.worker.loaded import LoadedDecoder
from engine.worker.memory_profile import graph_bytes
from tests.engine.worker.lazy_queue import LazyQueue
from tests.engine.worker.mini_driver import CONFIG, GREEDY, PROMPTS, ColumnDriver, MiniDriver
from tests.engine.worker.runners import zeroed_kv_caches

SIZES = (1, 2, 4, 6)


def test_sizes_grow_by_8_then_by_16_up_to_the_largest():
    assert decode_sizes(1) == [1]
    assert decode_sizes(6) == list(SIZES)
    assert decode_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_sizes(300)[-5:] == [248, 256, 272, 288, 300]
    assert len(decode_sizes(256)) == 35


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_decodes_are_those_of_the_cpu(make_runner, hf_greedy, graphs):
    """Rows of 5, 4, 3 ... sequences in turn, so that steps are padded, with plans ahead of what the host has seen."""
    queue = LazyQueue()
    driver = ColumnDriver(make_runner(queue, graphs=graphs))
    for seq_id, prompt in PROMPTS.items():
        driver.add(seq_id, prompt)
    driver.step({seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()})
    for i in range(18):
        driver.step(dict.fromkeys(list(PROMPTS)[: 5 - i % 5], 1))
    driver.take()
    for seq_id, prompt in PROMPTS.items():
        output = driver.output(seq_id)
        assert len(output) >= 4
        assert output == hf_greedy(prompt, len(output))
    assert (queue.replays > 20) == graphs


def test_a_look_at_the_device_waits_until_it_has_caught_up(make_runner):
    runner = make_runner(queue := LazyQueue())
    queue.add(lambda: None)
    runner.check_device()
    assert not queue.waiting
    queue.add(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        runner.check_device()


def test_chunks_and_idle_time_between_decodes(make_runner, hf_greedy):
    """Mixed steps go another way and share rows, last tokens and block tables with decodes."""
    queue = LazyQueue()
    runner = make_runner(queue)
    driver = ColumnDriver(runner)
    driver.add(1, PROMPTS[1])
    driver.step({1: 5})
    for _ in range(3):
        driver.step({1: 1})
    driver.add(4, PROMPTS[4])
    driver.step({1: 1, 4: 30})
    driver.step({1: 1})
    driver.step({1: 1, 4: 10})
    for _ in range(4):
        driver.step({4: 1, 1: 1})
    driver.take()
    while runner.use_idle_time():
        pass
    driver.remove(1)
    driver.add(2, PROMPTS[2])
    driver.step({2: 21, 4: 1})
    for _ in range(9):
        driver.step({4: 1, 2: 1})
    driver.take()
    for seq_id in (1, 2, 4):
        output = driver.output(seq_id)
        assert output == hf_greedy(PROMPTS[seq_id], len(output))
    assert len(driver.output(4)) == 15 and len(driver.output(2)) == 10


def test_sampled_text_is_that_of_the_cpu(make_runner, cpu_runner):
    params = {
        1: SamplingParams(temperature=1.0),
        2: SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5),
        3: SamplingParams(temperature=0.0, logprobs=2),
        5: GREEDY,
    }
    texts = []
    for runner, make in ((make_runner(LazyQueue()), ColumnDriver), (cpu_runner, MiniDriver)):
        driver = make(runner)
        for seq_id, one in params.items():
            driver.add(seq_id, PROMPTS[seq_id], one)
        driver.step({seq_id: len(PROMPTS[seq_id]) for seq_id in params})
        for _ in range(12):
            driver.step(dict.fromkeys(params, 1))
        if make is ColumnDriver:
            driver.take()
        texts.append([driver.output(seq_id) for seq_id in params])
        for seq_id in params:
            driver.remove(seq_id)
        runner.launch(driver.plan({}))
    assert texts[0] == texts[1]


def test_a_block_that_is_replaced_is_replaced_on_the_device(make_runner, hf_greedy):
    driver = ColumnDriver(make_runner(LazyQueue()), ahead=0)
    driver.add(2, PROMPTS[2])
    driver.step({2: 21})
    plan = driver.plan({2: 1})
    target = int(driver.free.pop())
    plan.block_copies.append(BlockCopy(2, driver.blocks[2][-1], target))
    driver.blocks[2][-1] = target
    driver.update(driver.runner.result(driver.runner.launch(plan)))
    for _ in range(6):
        driver.step({2: 1})
    assert driver.output(2) == hf_greedy(PROMPTS[2], 8)


def test_padding_touches_no_block(make_runner, model_dir):
    kv_caches = zeroed_kv_caches(read_model_config(model_dir))
    driver = ColumnDriver(make_runner(LazyQueue(), kv_caches=kv_caches), ahead=0)
    for seq_id in (1, 2, 3):
        driver.add(seq_id, PROMPTS[seq_id])
    driver.step({seq_id: len(PROMPTS[seq_id]) for seq_id in (1, 2, 3)})
    before = [k.clone() for k, _ in kv_caches]
    driver.step({1: 1, 2: 1, 3: 1})  # padded to 4
    written = {driver.blocks[i][(driver.computed[i] - 1) // 8] for i in (1, 2, 3)}
    for old, (new, _) in zip(before, kv_caches, strict=True):
        changed = {block for block in range(len(new)) if not torch.equal(old[block], new[block])}
        assert changed == written


def test_more_rows_than_graphs_are_for(make_runner, hf_greedy):
    queue = LazyQueue()
    driver = ColumnDriver(make_runner(queue, capacity=2))
    replays = queue.replays
    for seq_id in (1, 2, 3):
        driver.add(seq_id, PROMPTS[seq_id])
    driver.step({seq_id: len(PROMPTS[seq_id]) for seq_id in (1, 2, 3)})
    driver.step({1: 1, 2: 1, 3: 1})
    assert queue.replays == replays
    driver.step({1: 1, 3: 1})
    driver.take()
    assert queue.replays == replays + 2
    assert driver.output(3) == hf_greedy(PROMPTS[3], 3)


@pytest.mark.parametrize("at", [0, 3])
def test_without_graphs_where_recording_fails(make_runner, hf_greedy, caplog, at):
    with caplog.at_level(logging.ERROR):
        driver = ColumnDriver(make_runner(LazyQueue(fail_capture_at=at)))
    assert [r.getMessage() for r in caplog.records if "CUDA graphs are off" in r.getMessage()], "one clear line"
    assert len(caplog.records) == 1
    driver.add(2, PROMPTS[2])
    driver.step({2: 21})
    for _ in range(6):
        driver.step({2: 1})
    driver.take()
    assert driver.output(2) == hf_greedy(PROMPTS[2], 7)
    assert not driver.runner.use_idle_time()


def test_logits_that_are_not_finite_fail_their_row_alone(make_runner, hf_greedy, monkeypatch):
    driver = ColumnDriver(make_runner(LazyQueue()), ahead=0)
    for seq_id in (1, 2, 3):
        driver.add(seq_id, PROMPTS[seq_id])
    driver.step({seq_id: len(PROMPTS[seq_id]) for seq_id in (1, 2, 3)})
    compute_logits = Decoder.compute_logits

    def poisoned(decoder, hidden):
        logits = compute_logits(decoder, hidden)
        logits[1, 7] = float("nan")
        return logits

    monkeypatch.setattr(Decoder, "compute_logits", poisoned)
    result = driver.step({1: 1, 2: 1, 3: 1})
    assert list(result.failed) == [2] and result.seq_ids == [1, 3]
    assert "NaN" in result.failed[2]
    monkeypatch.undo()
    driver.step({1: 1, 3: 1})
    for seq_id in (1, 3):
        assert driver.output(seq_id) == hf_greedy(PROMPTS[seq_id], 3)


def test_mixed_sizes_waste_less_than_a_fifth_beyond_64_tokens():
    assert mixed_token_sizes(6) == [6]
    assert mixed_token_sizes(256) == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert mixed_token_sizes(8192)[-3:] == [1536, 1792, 2048]
    sizes = mixed_token_sizes(8192)
    assert all(b - a - 1 < b / 5 for a, b in pairwise(sizes) if b > 64)
    assert mixed_buckets(64, 6) == [Bucket(16, 6), Bucket(32, 6), Bucket(48, 6), Bucket(64, 6)]
    assert mixed_buckets(48, 256) == [Bucket(16, 16), Bucket(32, 16), Bucket(32, 64), Bucket(48, 16), Bucket(48, 64)]
    every = set(mixed_buckets(2048, 256))
    for num_tokens in range(1, 2049):
        tokens = next_size(sizes, num_tokens)
        for num_seqs in (1, 16, 17, 64, 65, 256):
            if num_seqs <= num_tokens:
                assert Bucket(tokens, next_size([16, 64, 256], num_seqs)) in every


KEYS = [("a", Bucket(n, n)) for n in (40, 32, 24, 16, 8)]


def test_graphs_are_recorded_at_the_start_and_in_idle_time_never_in_a_step(monkeypatch, caplog):
    done, prepared, queue = [], [], LazyQueue()
    runner = GraphRunner(queue, {"a": done.append}, prepared.append, KEYS)
    monkeypatch.setattr(cuda_graphs, "START_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        runner.record_first()
    assert runner.num_graphs == 0
    assert "5 left for idle time, 0 without memory (a of 8 to 40 tokens)" in caplog.text
    runner.run(KEYS[3])  # missing: run as it is, and recorded next
    assert done == [Bucket(16, 16)] and runner.num_graphs == 0 and not prepared
    assert runner.record_next() and prepared == [KEYS[3]]
    while runner.record_next():
        pass
    assert prepared == [KEYS[3], *KEYS[:3], KEYS[4]] and runner.num_graphs == 5
    replays = queue.replays
    runner.run(KEYS[0])
    assert queue.replays == replays + 1


@pytest.mark.parametrize(("max_bytes", "num_graphs"), [(107, 2), (110, 3), (10**6, 5)])
def test_recording_stops_at_the_budget_of_memory(max_bytes, num_graphs, caplog):
    """The first graph takes 100, the others 7 each."""
    runner = GraphRunner(LazyQueue(), {"a": lambda bucket: None}, lambda key: None, KEYS, max_bytes=max_bytes)
    with caplog.at_level(logging.INFO):
        runner.record_first()
    assert runner.num_graphs == num_graphs
    assert not runner.record_next()
    assert ("none is left" if num_graphs == 5 else f"{5 - num_graphs} without memory") in caplog.text


def test_a_buffer_is_not_written_before_its_copy_is_done():
    queue, bucket = LazyQueue(), Bucket(4, 4)
    device_rows = DeviceRows(queue.device, 8, 3, input_bytes(bucket))
    buffers = BucketBuffers(queue, device_rows, bucket, 2, torch.float32)
    arrived = []
    for number in range(5):
        arrays = buffers.begin(bucket)
        assert queue.num_done >= 2 * (number - BUFFERED_STEPS + 1) - 1, "the copy of the step before the last"
        arrays.positions[:4] = number
        buffers.upload(bucket)
        queue.add(lambda: arrived.append(int(buffers.views(bucket).device.positions[0])))
    assert len(arrived) < 5, "the host is ahead"
    queue.catch_up()
    assert arrived == [0, 1, 2, 3, 4]


class SmallSecondGraphs(LazyQueue):
    """The graphs of a small draft model, from the second to the sixth, take 1 each."""

    def capture(self, work):
        replay = super().capture(work)
        self.free += 6 if 2 <= len(self.captured) <= 6 else 0
        return replay


def test_the_memory_of_graphs_is_estimated_from_the_first(decoder, model_dir):
    """The first takes 100, the others 7 each: 4 sizes of decodes in two pieces, and 4 of mixed steps."""
    model = read_model_config(model_dir)
    config, queue = replace(CONFIG, max_num_seqs=6), LazyQueue()
    loaded = LoadedDecoder(config, model, decoder, StepLimits(6, 64), torch.float32, queue.device)

    def estimate(total_bytes=1 << 30, queue=None, num_passes=0, **settings):
        own, queue = replace(loaded, config=replace(config, **settings)), queue or LazyQueue()
        runner = own.make_runner(own.one_block(), 128, queue, eos_token_ids=[])
        keys = [("passes of a draft model", Bucket(n, n)) for n in range(num_passes, 0, -1)]
        runner.buckets.graphs.add("passes of a draft model", lambda bucket: None, lambda key: None, keys)
        return graph_bytes(runner, queue, total_bytes)

    assert estimate() == 100 + 11 * 7
    assert estimate(cuda_graphs=False) == 0
    assert estimate(cuda_graph_max_num_seqs=1) == 100 + 5 * 7
    assert estimate(total_bytes=32 * 40) == 100 + 40
    assert estimate(queue=SmallSecondGraphs(), num_passes=5) == 100 + (11 + 5) * 7, "not as small as those of the draft"


def test_new_prompts_bring_more_table_entries_than_a_step_has_rows(make_runner, hf_greedy):
    driver = ColumnDriver(make_runner(LazyQueue()))
    driver.add(4, PROMPTS[4])
    driver.add(2, PROMPTS[2])
    driver.step({4: 40, 2: 21})  # 5 + 3 blocks
    driver.step({4: 1})  # one row
    driver.step({4: 1, 2: 1})
    driver.take()
    for seq_id in (2, 4):
        assert driver.output(seq_id) == hf_greedy(PROMPTS[seq_id], len(driver.output(seq_id)))


def test_a_random_schedule_gives_the_same_text(make_runner, hf_greedy):
    random = np.random.default_rng(0)
    driver = ColumnDriver(make_runner(LazyQueue()))
    for seq_id, prompt in PROMPTS.items():
        driver.add(seq_id, prompt)
    for _ in range(60):
        counts = {}
        for seq_id in PROMPTS:
            left = len(driver.tokens[seq_id]) + driver.pending[seq_id] - driver.computed[seq_id]
            if random.random() < 0.7 and len(driver.tokens[seq_id]) < 100:
                counts[seq_id] = int(random.integers(1, left + 1))
        if counts:
            driver.step(counts)
    driver.take()
    for seq_id, prompt in PROMPTS.items():
        output = driver.output(seq_id)
        assert len(output) > 10
        assert output == hf_greedy(prompt, len(output))
