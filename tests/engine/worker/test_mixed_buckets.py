"""Steps with prompt chunks in padded buckets: padding is inert, and the steps cost what they should."""

import numpy as np
import pytest
import torch

from engine.executor.step import LoadAdapter, NewSequence, SequenceStep, StepPlan
from engine.models.families import read_model_config
from engine.sampling_params import Pooling, SamplingParams
from engine.worker.batch.bucket_buffers import input_bytes, input_views
from engine.worker.batch.device_rows import DeviceRows
from engine.worker.batch.input_batch import InputBatch
from engine.worker.batch.step_buffer import StepBuffer
from engine.worker.bucket_runner import MIXED, BucketSettings, graph_keys
from engine.worker.device.cuda_graphs import Bucket
from tests.engine.models.adapters.peft_files import TARGETS, Merged, write_adapter
from tests.engine.worker.lazy_queue import LazyQueue
from tests.engine.worker.mini_driver import GREEDY, PROMPTS, ColumnDriver, remove_all
from tests.engine.worker.runners import load_decoder, make_queue_runner, zeroed_kv_caches

NAN = float("nan")
WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=1)


@pytest.fixture
def kv_caches(model_dir):
    return zeroed_kv_caches(read_model_config(model_dir))


def poison(runner, kv_caches, random):
    """NaN wherever no live sequence has a token, and nonsense in the inputs and tables of the step before."""
    batch, buffers = runner.batch, runner.buckets.buffers
    used = np.zeros(len(kv_caches[0][0]) * batch.block_size, np.bool_)
    for row in batch.row_of.values():
        positions = np.arange(batch.num_computed[row])
        used[batch.block_table[row, positions // batch.block_size] * batch.block_size + positions % 8] = True
    unused = torch.from_numpy(~used).view(-1, 1, batch.block_size, 1)
    for cache in (cache for layer in kv_caches for cache in layer):
        cache.masked_fill_(unused, NAN)
    buffers.hidden.fill_(NAN)
    buffers.device_rows.inputs.copy_(torch.from_numpy(random.integers(0, 256, len(buffers.device_rows.inputs))))
    for tables in (buffers.device_rows.step_tables, buffers.device_rows.output_tables):
        tables.fill_(1 << 30)
    for host in buffers._packed_host:
        host.copy_(torch.from_numpy(random.integers(0, 256, len(host))))
    return used


def run_randomly(runner, kv_caches, seed, num_steps=40, poisoned=False, adapters=None, params=WITH_LOGPROBS):
    """(texts, hidden states of each step's sampled rows) of a random schedule of chunks and decodes. `adapters`: the
    adapter of a sequence, for those that have one. Greedy steps without logprobs sample in a graph: no hidden states.
    """
    random, nonsense = np.random.default_rng(seed), np.random.default_rng(seed)
    driver, hidden = ColumnDriver(runner, ahead=0), []
    sample = runner.sampler.sample

    def spy(states, *rest):
        hidden.append(states.clone())
        return sample(states, *rest)

    runner.sampler.sample = spy
    for seq_id, prompt in PROMPTS.items():
        driver.add(seq_id, prompt, params, adapter_id=(adapters or {}).get(seq_id, 0))
    for _ in range(num_steps):
        counts = {}
        for seq_id in PROMPTS:
            left = len(driver.tokens[seq_id]) - driver.computed[seq_id]
            if random.random() < 0.6 and len(driver.tokens[seq_id]) < 100:
                counts[seq_id] = int(random.integers(1, left + 1))
        if not counts:
            continue
        before = poison(runner, kv_caches, nonsense) if poisoned else None
        driver.step(counts)
        if before is not None:
            written_alone(runner, kv_caches, before)
    runner.sampler.sample = sample
    return [driver.output(seq_id) for seq_id in PROMPTS], hidden


def written_alone(runner, kv_caches, used_before):
    """Every slot that was unused and is no slot of the step's tokens still holds NaN."""
    batch = runner.batch
    used = used_before.copy()
    for row in batch.row_of.values():
        positions = np.arange(batch.num_computed[row])
        used[batch.block_table[row, positions // 8] * 8 + positions % 8] = True
    for cache in (cache for layer in kv_caches for cache in layer):
        per_slot = cache.transpose(1, 2).flatten(0, 1).flatten(1)
        assert bool(per_slot[torch.from_numpy(~used)].isnan().all()), "padding wrote to the cache"
        assert not per_slot[torch.from_numpy(used)].isnan().any()


@pytest.mark.parametrize("seed", range(4))
def test_poisoned_padding_changes_nothing(make_runner, model_dir, hf_greedy, kv_caches, seed):
    queue = LazyQueue()
    graphed = make_runner(queue, kv_caches=kv_caches)
    replays = queue.replays
    texts, hidden = run_randomly(graphed, kv_caches, seed, poisoned=True)
    assert queue.replays > replays + 20
    own = zeroed_kv_caches(read_model_config(model_dir))
    eager_texts, eager_hidden = run_randomly(make_runner(LazyQueue(), graphs=False, kv_caches=own), own, seed)
    assert texts == eager_texts
    for prompt, text in zip(PROMPTS.values(), texts, strict=True):
        assert len(text) > 3 and text == hf_greedy(prompt, len(text))
    assert len(hidden) == len(eager_hidden) > 20
    for states, eager in zip(hidden, eager_hidden, strict=True):
        torch.testing.assert_close(states, eager, rtol=2e-6, atol=5e-5)


# Adapters of sequences, two at a time, and how all of them are sampled.
ROUNDS = (({2: 1, 3: 2, 4: 1, 5: 2}, WITH_LOGPROBS), ({1: 3, 2: 2, 4: 3}, WITH_LOGPROBS), ({1: 1, 3: 3, 5: 1}, GREEDY))


def run_with_adapters(model_dir, folders, queue, kv_caches, graphs, poisoned=False):
    """(number of replays, [(texts, hidden states) of each round]). Adapters take each other's slots."""
    decoder = load_decoder(model_dir, lora=(2, 8))
    runner = make_queue_runner(model_dir, decoder, queue, graphs=graphs, kv_caches=kv_caches)
    answers, replays = [], queue.replays
    for adapter_id, folder in enumerate(folders, start=1):
        runner.handle_message(LoadAdapter(adapter_id, str(folder)), answers.append)
    found = []
    for seed, (adapters, params) in enumerate(ROUNDS):
        found.append(run_randomly(runner, kv_caches, seed, poisoned=poisoned, adapters=adapters, params=params))
        remove_all(runner)
    assert len(answers) == len(folders) and not any(answer.error for answer in answers)
    return queue.replays - replays, found


def test_rows_with_different_adapters_share_a_bucket(model_dir, hf_model, hf_greedy, kv_caches, tmp_path):
    """The text of merged weights, and the hidden states of steps without buckets, whose products torch adds in another
    order; one adapter changes lm_head."""
    deltas = [
        write_adapter(tmp_path / str(i), hf_model, targets=targets, seed=i, rank=rank)
        for i, (targets, rank) in enumerate([((*TARGETS, "lm_head"), 4), (("q_proj", "down_proj"), 8), (TARGETS, 1)])
    ]
    folders = [tmp_path / str(i) for i in range(len(deltas))]
    replays, graphed = run_with_adapters(model_dir, folders, LazyQueue(), kv_caches, graphs=True, poisoned=True)
    assert replays > 60
    own = zeroed_kv_caches(read_model_config(model_dir))
    _, eager = run_with_adapters(model_dir, folders, LazyQueue(), own, graphs=False)
    for (adapters, params), (texts, hidden), (eager_texts, eager_hidden) in zip(ROUNDS, graphed, eager, strict=True):
        assert texts == eager_texts
        if params is WITH_LOGPROBS:
            torch.testing.assert_close(torch.cat(hidden), torch.cat(eager_hidden), atol=5e-5, rtol=2e-5)
        for (seq_id, prompt), text in zip(PROMPTS.items(), texts, strict=True):
            with Merged(hf_model, deltas[adapters[seq_id] - 1] if seq_id in adapters else {}):
                assert len(text) > 3 and text == hf_greedy(prompt, len(text)), seq_id


def test_the_padding_that_the_poison_would_show(make_runner, kv_caches, monkeypatch):
    """A slot of padding that is not -1, or a length that is not 0, is found."""
    from engine.worker.batch.bucket_buffers import BucketBuffers

    pad = BucketBuffers.pad_mixed

    def wrong(self, arrays, num_tokens, num_seqs, num_outputs):
        pad(self, arrays, num_tokens, num_seqs, num_outputs)
        arrays.slots[num_tokens:] = 63 * 8

    monkeypatch.setattr(BucketBuffers, "pad_mixed", wrong)
    with pytest.raises(AssertionError, match="padding wrote"):
        run_randomly(make_runner(LazyQueue(), kv_caches=kv_caches), kv_caches, 0, poisoned=True)


def test_every_bucket_gives_the_same_tokens(make_runner, hf_greedy, kv_caches):
    """The same step padded to each bucket that holds it."""
    runner = make_runner(LazyQueue(), kv_caches=kv_caches)
    buckets = [bucket for name, bucket in graph_keys(settings()) if name == MIXED]
    assert len(buckets) == 4
    for bucket in buckets:
        runner.buckets.mixed_bucket = lambda tokens, seqs, bucket=bucket: bucket if tokens <= bucket.tokens else None
        driver = ColumnDriver(runner)
        driver.add(1, PROMPTS[1])
        driver.step({1: 5})
        driver.add(3, PROMPTS[3])
        driver.add(2, PROMPTS[2])
        driver.step({1: 1, 2: 7, 3: 1})
        driver.step({1: 1, 2: 14})
        driver.take()
        for seq_id in (1, 2, 3):
            assert driver.output(seq_id) == hf_greedy(PROMPTS[seq_id], len(driver.output(seq_id)))
            driver.remove(seq_id)
        driver.step({})
        driver.take()


def settings():
    return BucketSettings(max_seqs=6, max_num_seqs=8, max_tokens=64, max_blocks=16, hidden_size=8, dtype=torch.float32)


def test_steps_that_need_more_than_last_rows_run_without_buckets(make_runner):
    """Logprobs of a prompt, an embedding, a fork, more tokens than the largest bucket."""
    queue = LazyQueue()
    runner = make_runner(queue)
    replays = queue.replays

    def step(seq_id, params, num_tokens=5, **rest):
        new = NewSequence(
            seq_id=seq_id, token_ids=[7] * num_tokens, num_prompt_tokens=num_tokens, num_computed_tokens=0,
            block_ids=list(range(10)), params=params, seed=0,
        )  # fmt: skip
        chunks = [SequenceStep(seq_id, num_tokens, True, [])]
        news = [new]
        if rest:
            fork = NewSequence(
                seq_id=99, token_ids=[7] * num_tokens, num_prompt_tokens=num_tokens, num_computed_tokens=num_tokens,
                block_ids=list(range(10)), params=params, seed=1, fork_of=seq_id,
            )  # fmt: skip
            news, chunks = [new, fork], [*chunks, SequenceStep(99, 0, True, [])]
        plan = StepPlan(1, [], news, [], chunks)
        result = runner.result(runner.launch(plan))
        assert not result.failed
        runner.launch(StepPlan(2, [new.seq_id for new in news], [], [], []))

    step(1, SamplingParams(temperature=0.0, prompt_logprobs=1))
    step(2, SamplingParams(pooling=Pooling("last")))
    step(3, GREEDY, fork=True)
    step(4, GREEDY, num_tokens=65)
    assert queue.replays == replays
    step(5, GREEDY, num_tokens=64)
    assert queue.replays == replays + 2


def test_every_kind_of_step_takes_the_cells_that_it_changed(make_runner):
    """Mixed steps and decodes, in graphs and beyond their sizes: nothing is left to grow."""
    for capacity, graphs in ((6, True), (6, False), (1, True)):
        driver = ColumnDriver(make_runner(LazyQueue(), capacity=capacity, graphs=graphs))
        cells = driver.runner.batch.changed_cells
        for seq_id in (1, 2, 4):
            driver.add(seq_id, PROMPTS[seq_id])
        for counts in ({1: 5}, {1: 1, 2: 21}, {1: 1, 2: 1}, {4: 40, 1: 1}, {1: 1, 2: 1, 4: 1}):
            driver.step(counts)
            assert driver.runner.batch.changed_cells == [] and cells is not None
        driver.take()


def test_changed_cells_stay_flat_in_mixed_steps():
    """25,000 steps of one decode and one chunk each, which run without graphs."""
    batch, buffer, first = InputBatch(2, 1 << 12, 4), StepBuffer(0, None), 1 << 20
    batch.changed_cells = []
    device_rows = DeviceRows(torch.device("cpu"), 2, 1 << 10, 0)

    def new(seq_id, num_tokens):
        blocks = list(range(-(-(num_tokens + 1) // 4)))
        return NewSequence(
            seq_id=seq_id, token_ids=[1] * num_tokens, num_prompt_tokens=num_tokens, num_computed_tokens=0,
            block_ids=blocks, params=GREEDY, seed=0,
        )  # fmt: skip

    for step in range(25_000):
        length = step % 4000 + 1
        if length == 1:
            batch.remove(first)
            batch.add(new(first, 1))
        batch.remove(step - 1)
        batch.add(new(step, 3))
        chunk = SequenceStep(step, 3, True, [])
        batch.build([first], [first, step % 999] if length % 4 == 0 else [], [chunk], buffer, device_rows=device_rows)
        assert not batch.changed_cells


@pytest.mark.parametrize("graphs", [True, False])
def test_the_bytes_of_a_mixed_step_do_not_grow_with_its_context(graphs):
    """One sequence of 100k tokens among 256 rows. Tables in the upload would take 2 x 6250 x 4 bytes a row."""
    max_blocks, sizes = 6250, []
    batch = InputBatch(256, max_blocks * 16, 16)
    batch.changed_cells = []
    bucket = Bucket(320, 256)
    device_rows = DeviceRows(torch.device("cpu"), 256, max_blocks, input_bytes(bucket))

    class Counting(StepBuffer):
        def put(self, array):
            sizes.append(array.nbytes)
            return super().put(array)

    for seq_id in range(256):
        length = 99_999 if seq_id == 0 else 99
        new = NewSequence(
            seq_id=seq_id, token_ids=[1] * length, num_prompt_tokens=length, num_computed_tokens=length - 1,
            block_ids=[0] * -(-length // 16), params=GREEDY, seed=0,
        )  # fmt: skip
        batch.add(new)
    batch.num_computed[255] -= 39  # a chunk of 40 tokens
    device_rows.stage_cells(batch.take_changed_cells(), batch.block_table, Counting(0, None).put)
    sizes.clear()
    chunks = [SequenceStep(255, 40, True, [])]
    if graphs:
        views = input_views(device_rows.inputs, bucket)
        batch.lay_out(list(range(255)), [], chunks)
        sizes += [getattr(views, name).nbytes for name in views.__dataclass_fields__]
    else:
        batch.build(list(range(255)), [], chunks, Counting(0, None), device_rows=device_rows)
    assert sum(sizes) < 30_000


@pytest.mark.parametrize("num_cells", [0, 1, 20, 1000])
def test_cells_reach_the_device_one_by_one_or_as_the_whole_table(num_cells):
    random = np.random.default_rng(num_cells)
    table = random.integers(0, 99, (7, 30)).astype(np.int32)
    device_rows, sizes = DeviceRows(torch.device("cpu"), 7, 30, 0), []
    old = random.integers(100, 199, (8, 30)).astype(np.int32)
    device_rows.block_tables.copy_(torch.from_numpy(old))
    cells = random.integers(0, table.size, num_cells).tolist()

    def put(array):
        sizes.append(array.nbytes)
        return torch.from_numpy(array.copy())

    device_rows.stage_cells(cells, table, put)()
    found, changed = device_rows.block_tables.numpy(), np.zeros(table.size, np.bool_)
    changed[cells] = True
    if num_cells == 1000:
        changed[:] = True
    assert (found[:7] == np.where(changed.reshape(7, 30), table, old[:7])).all()
    assert (found[7] == old[7]).all()
    assert sum(sizes) == min(12 * num_cells, table.nbytes)
