"""ModelRunner, driven by StepPlans alone, against greedy generation by transformers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, EngineError, ModelError
from engine.executor.step import BlockCopy, NewSequence, SequenceStep, StepPlan
from engine.models.decoder import Decoder
from engine.sampling_params import SamplingParams
from engine.worker.batch.input_batch import InputBatch
from engine.worker.batch.step_buffer import StepBuffer, step_buffer_bytes
from engine.worker.cache.host_cache import independent_copies
from engine.worker.device.host import StepLimits
from engine.worker.load import load_runner
from engine.worker.sampling import step_sampler
from engine.worker.sampling.sampling_rows import PlainDraws
from tests.engine.worker.mini_driver import CONFIG, GREEDY, PROMPTS, MiniDriver


@pytest.fixture
def runner(model_dir):
    return load_runner(CONFIG, model_dir, [2], lambda phase: None)[0]


def test_prefill_then_decode_together(runner, hf_greedy):
    driver = MiniDriver(runner)
    for seq_id, prompt in PROMPTS.items():
        driver.add(seq_id, prompt)
    driver.step({seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()})
    for _ in range(20):
        driver.step(dict.fromkeys(PROMPTS, 1))
    for seq_id, prompt in PROMPTS.items():
        assert driver.output(seq_id) == hf_greedy(prompt, 21)


def test_chunks_mixed_with_decodes_of_others(runner, hf_greedy):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1])
    driver.step({1: 5})
    driver.add(4, PROMPTS[4])
    driver.add(2, PROMPTS[2])
    driver.step({4: 7, 1: 1})
    driver.step({4: 16, 2: 20, 1: 1})
    driver.step({2: 1, 4: 1, 1: 1})  # a chunk of one that reaches the end, and one that does not
    driver.step({4: 16, 2: 1, 1: 1})
    for _ in range(6):
        driver.step({1: 1, 4: 1, 2: 1})
    for seq_id in (1, 2, 4):
        output = driver.output(seq_id)
        assert len(output) >= 7
        assert output == hf_greedy(PROMPTS[seq_id], len(output))


def test_preempted_and_resumed(runner, hf_greedy):
    driver = MiniDriver(runner)
    for seq_id in (1, 2):
        driver.add(seq_id, PROMPTS[seq_id])
    driver.step({1: 5, 2: 21})
    for _ in range(5):
        driver.step({1: 1, 2: 1})
    driver.remove(1)
    driver.add(3, PROMPTS[3])
    driver.step({3: 1, 2: 1})  # takes the row of 1, and its blocks
    driver.start(1)
    driver.step({1: 4, 2: 1, 3: 1})
    driver.step({1: 7, 2: 1, 3: 1})
    for _ in range(5):
        driver.step({1: 1, 2: 1, 3: 1})
    for seq_id in (1, 2, 3):
        output = driver.output(seq_id)
        assert output == hf_greedy(PROMPTS[seq_id], len(output))


def test_a_prefix_in_the_cache_is_not_computed_again(runner, hf_greedy):
    driver = MiniDriver(runner)
    driver.add(4, PROMPTS[4])
    driver.step({4: 40})
    shared = driver.blocks[4][:4]
    prompt = [*PROMPTS[4][:32], 1, 2, 3]
    new = NewSequence(
        seq_id=9,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=32,
        block_ids=[*shared, 63],
        params=GREEDY,
        seed=0,
    )
    assert 63 not in driver.blocks[4]
    result = runner.result(runner.launch(StepPlan(2, [], [new], [], [SequenceStep(9, 3, True, [])])))
    assert [sample.token_id for sample in result.samples] == hf_greedy(prompt, 1)


SAMPLED = {"temperature": 0.8, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 2}


@pytest.mark.parametrize("chunks", [[21], [8, 13], [20, 1]])
def test_forks_give_what_they_would_give_alone(runner, chunks):
    """Three samples of one prompt, beside another sequence; two get a copy of the block that they write to."""
    params = SamplingParams(**SAMPLED)
    alone = {}
    for seq_id in (2, 5, 6):
        driver = MiniDriver(runner)
        driver.add(seq_id, PROMPTS[2], params)
        results = [driver.step({seq_id: n}) for n in [21, 1, 1, 1]]
        alone[seq_id] = [sample for result in results for sample in result.samples]
        driver.remove(seq_id)
        runner.launch(driver.plan({}))

    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1])
    driver.step({1: 5})
    driver.add(2, PROMPTS[2], params)
    for n in chunks[:-1]:
        driver.step({1: 1, 2: n})
    plan = driver.plan({1: 1, 2: chunks[-1]})
    shared = driver.blocks[2]
    for seq_id in (5, 6):
        plan.new.append(
            NewSequence(
                seq_id=seq_id,
                token_ids=PROMPTS[2],
                num_prompt_tokens=21,
                num_computed_tokens=21,
                block_ids=shared,
                params=params,
                seed=1000 + seq_id,
                fork_of=2,
            )
        )
        plan.chunks.append(SequenceStep(seq_id, 0, True, []))
        driver.tokens[seq_id], driver.prompts[seq_id], driver.params[seq_id] = list(PROMPTS[2]), PROMPTS[2], params
        driver.computed[seq_id], driver.blocks[seq_id], driver.pending[seq_id] = 21, list(shared), 1
    found = driver.runner.result(driver.runner.launch(plan))
    driver.update(found)
    samples = list(found.samples)
    plan = driver.plan({6: 1, 1: 1, 2: 1, 5: 1})
    for seq_id in (5, 6):
        target = int(driver.free.pop())
        plan.block_copies.append(BlockCopy(seq_id, shared[-1], target))
        driver.blocks[seq_id][-1] = target
    found = driver.runner.result(driver.runner.launch(plan))
    driver.update(found)
    samples += found.samples
    for _ in range(2):
        samples += driver.step({1: 1, 5: 1, 2: 1, 6: 1}).samples
    for seq_id, expected in alone.items():
        got = [sample for sample in samples if sample.seq_id == seq_id]
        assert [sample.token_id for sample in got] == [sample.token_id for sample in expected]
        assert [sample.logprob for sample in got] == pytest.approx([sample.logprob for sample in expected], abs=1e-4)
    assert len({tuple(sample.token_id for sample in samples) for samples in alone.values()}) == 3


def test_a_fork_of_what_computes_nothing_stops_the_worker(runner):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1])
    driver.step({1: 5})
    driver.add(3, PROMPTS[3])
    plan = driver.plan({3: 1})
    plan.new.append(
        NewSequence(
            seq_id=2,
            token_ids=PROMPTS[1],
            num_prompt_tokens=5,
            num_computed_tokens=5,
            block_ids=driver.blocks[1],
            params=GREEDY,
            seed=0,
            fork_of=1,
        )
    )
    plan.chunks.append(SequenceStep(2, 0, True, []))
    with pytest.raises(EngineError, match="forks a sequence"):
        runner.launch(plan)


def test_copies_run_together_unless_one_needs_another_first():
    def cut(*pairs):
        return [[(c.source, c.target) for c in run] for run in independent_copies([BlockCopy(0, *p) for p in pairs])]

    assert cut() == []
    assert cut((1, 2), (1, 3), (4, 5)) == [[(1, 2), (1, 3), (4, 5)]]
    assert cut((1, 2), (3, 1), (4, 5)) == [[(1, 2)], [(3, 1), (4, 5)]], "read before it is overwritten"
    assert cut((1, 2), (2, 3)) == [[(1, 2)], [(2, 3)]], "written before it is read"
    assert cut((1, 2), (3, 2)) == [[(1, 2)], [(3, 2)]], "the later one wins"


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_give_the_same_text(runner, hf_greedy, seed):
    """Chunks, decodes, removals and returns at random; tokens of a plan ahead of the Driver's knowledge, too."""
    random = np.random.default_rng(seed)
    driver = MiniDriver(runner)
    length = 12
    goal = {seq_id: len(prompt) + length for seq_id, prompt in PROMPTS.items()}
    for seq_id, prompt in PROMPTS.items():
        driver.add(seq_id, prompt)
    away = set()
    ahead = None
    while any(len(driver.tokens[seq_id]) < goal[seq_id] for seq_id in PROMPTS):
        counts = {}
        for seq_id in random.permutation(list(PROMPTS)).tolist():
            known = len(driver.tokens[seq_id]) + driver.pending[seq_id]
            left = known - driver.computed[seq_id]
            if seq_id in away and not driver.pending[seq_id] and random.random() < 0.5:
                driver.start(seq_id)
                away.remove(seq_id)
            elif seq_id not in away and known < goal[seq_id] and left and random.random() < 0.8:
                counts[seq_id] = int(random.integers(1, left + 1))
            elif (
                seq_id not in away and not driver.pending[seq_id] and random.random() < 0.1 and driver.computed[seq_id]
            ):
                driver.remove(seq_id)
                away.add(seq_id)
        if counts:
            launched = runner.launch(driver.plan(counts))  # before the last result is taken in
            if ahead is not None:
                driver.update(runner.result(ahead))
            ahead = launched
        elif ahead is not None:
            driver.update(runner.result(ahead))
            ahead = None
    for seq_id, prompt in PROMPTS.items():
        assert driver.output(seq_id)[:length] == hf_greedy(prompt, length)


def test_a_plan_may_build_on_a_token_that_the_driver_has_not_seen(runner, hf_greedy):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1])
    launched = [runner.launch(driver.plan({1: 5}))]
    launched += [runner.launch(driver.plan({1: 1})) for _ in range(5)]  # no result was looked at
    for step in launched:
        driver.update(runner.result(step))
    assert driver.output(1) == hf_greedy(PROMPTS[1], 6)


def test_tokens_that_have_not_reached_the_host_come_from_the_device(runner, hf_greedy, monkeypatch):
    """The path of a GPU: rows hold stand-ins, last_tokens the tokens."""
    monkeypatch.setattr(InputBatch, "store_tokens", lambda self, sampled, token_ids: None)
    driver = MiniDriver(runner)
    for seq_id in (1, 2, 4):
        driver.add(seq_id, PROMPTS[seq_id])
    driver.step({1: 5, 4: 20})
    driver.step({4: 20, 2: 21, 1: 1})
    for _ in range(5):
        driver.step({4: 1, 1: 1, 2: 1})
    for seq_id in (1, 2, 4):
        output = driver.output(seq_id)
        assert output == hf_greedy(PROMPTS[seq_id], len(output))


def test_seeded_text_is_the_same_alone_in_a_batch_and_after_preemption(runner):
    params = {
        1: SamplingParams(temperature=1.0),
        2: SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5),
        3: SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.2, min_tokens=10),
        4: SamplingParams(temperature=1.0, min_p=0.05, logit_bias={5: 2.0}),
    }
    batch = MiniDriver(runner)
    for seq_id, one in params.items():
        batch.add(seq_id, PROMPTS[seq_id], one)
    batch.step({seq_id: len(PROMPTS[seq_id]) for seq_id in params})
    for i in range(15):
        batch.step(dict.fromkeys(params, 1))
        if i == 7:
            for seq_id in (2, 3):
                batch.remove(seq_id)
                batch.start(seq_id)
            batch.step({seq_id: len(batch.tokens[seq_id]) for seq_id in (2, 3)} | {1: 1, 4: 1})
    for seq_id, one in params.items():
        batch.remove(seq_id)
        alone = MiniDriver(runner)
        alone.removed = batch.removed
        batch.removed = []
        alone.add(seq_id, PROMPTS[seq_id], one)
        alone.step({seq_id: len(PROMPTS[seq_id])})
        for _ in range(len(batch.output(seq_id)) - 1):
            alone.step({seq_id: 1})
        assert alone.output(seq_id) == batch.output(seq_id)
        batch.removed.append(seq_id)


def test_logprobs_are_those_of_transformers(runner, hf_model):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], SamplingParams(temperature=0.0, logprobs=3))
    driver.add(2, PROMPTS[2], SamplingParams(temperature=0.0))
    driver.add(3, PROMPTS[3], SamplingParams(temperature=1.0, logprobs=0))
    result = driver.step({1: 5, 2: 21, 3: 1})
    by_id = {sample.seq_id: sample for sample in result.samples}
    with torch.inference_mode():
        expected = {i: hf_model(torch.tensor([PROMPTS[i]])).logits[0, -1].log_softmax(-1) for i in (1, 3)}
    top = expected[1].topk(3)
    assert [token_id for token_id, _ in by_id[1].top] == top.indices.tolist()
    assert [value for _, value in by_id[1].top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert by_id[1].logprob == by_id[1].top[0][1]
    assert by_id[2].top == []
    assert by_id[3].top == []
    assert by_id[3].logprob == pytest.approx(float(expected[3][by_id[3].token_id]), abs=1e-4)


def test_a_sequence_with_logits_that_are_not_finite_fails_alone(runner, hf_greedy, monkeypatch):
    driver = MiniDriver(runner)
    for seq_id in (1, 2, 3):
        driver.add(seq_id, PROMPTS[seq_id])
    compute_logits = Decoder.compute_logits

    def poisoned(decoder, hidden):
        logits = compute_logits(decoder, hidden)
        logits[-1, 7] = float("nan")
        return logits

    monkeypatch.setattr(Decoder, "compute_logits", poisoned)
    result = driver.step({3: 1, 1: 5, 2: 21})
    assert list(result.failed) == [2]
    assert "NaN" in result.failed[2]
    monkeypatch.undo()
    driver.step({1: 1, 3: 1})
    for seq_id in (1, 3):
        assert driver.output(seq_id) == hf_greedy(PROMPTS[seq_id], 2)


def test_a_sampler_that_raises_for_one_sequence_fails_that_one(runner, hf_greedy, monkeypatch):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1])
    driver.add(2, PROMPTS[2], SamplingParams(temperature=1.0))
    driver.add(3, PROMPTS[3], SamplingParams(temperature=0.0, logprobs=2))
    sample = step_sampler.sample

    def fragile(logits, inputs, counts, mask=None, forced=None):
        if isinstance(inputs, PlainDraws) or (inputs is not None and inputs.draws):
            raise RuntimeError("no luck")
        return sample(logits, inputs, counts)

    monkeypatch.setattr(step_sampler, "sample", fragile)
    result = driver.step({1: 5, 2: 21, 3: 1})
    assert result.failed == {2: "RuntimeError: no luck"}
    assert {sample.seq_id: len(sample.top) for sample in result.samples} == {1: 0, 3: 2}
    driver.step({1: 1, 3: 1})
    assert driver.output(1) == hf_greedy(PROMPTS[1], 2)


def test_a_sampler_that_always_raises_ends_the_worker(runner, monkeypatch):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1])
    driver.add(2, PROMPTS[2])

    def broken(logits, inputs, counts, mask=None, forced=None):
        raise RuntimeError("no luck")

    monkeypatch.setattr(step_sampler, "sample", broken)
    with pytest.raises(EngineError, match="no luck"):
        driver.step({1: 5, 2: 21})


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([5, 96], GREEDY),
        ([5, -1], GREEDY),
        ([5, 6], SamplingParams(logit_bias={96: 1.0})),
        ([5, 6], SamplingParams(stop_token_ids=(1000,), min_tokens=2)),
    ],
)
def test_ids_outside_the_vocabulary_fail_their_own_sequence(runner, hf_greedy, prompt, params):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1])
    driver.add(2, prompt, params)
    result = driver.step({1: 5, 2: 2})
    assert list(result.failed) == [2]
    assert [sample.seq_id for sample in result.samples] == [1]
    driver.step({1: 1, 2: 1})  # was on its way
    driver.remove(2)
    driver.step({1: 1})
    assert driver.output(1) == hf_greedy(PROMPTS[1], 3)


def test_plans_that_do_not_fit_the_state_are_refused(runner):
    def launch(new, steps):
        runner.launch(StepPlan(1, [7, 8], new, [], steps))

    seven = NewSequence(
        seq_id=7, token_ids=[1, 2, 3], num_prompt_tokens=3, num_computed_tokens=0, block_ids=[0], params=GREEDY, seed=0
    )
    with pytest.raises(EngineError, match="known tokens"):
        launch([seven], [SequenceStep(7, 2, True, [])])
    with pytest.raises(EngineError, match="known tokens"):
        launch([seven], [SequenceStep(7, 4, True, [])])
    with pytest.raises(EngineError, match="no KV block"):
        launch([replace_blocks(seven, [])], [SequenceStep(7, 3, True, [])])
    with pytest.raises(EngineError, match="while it is live"):
        launch([seven, seven], [])
    with pytest.raises(EngineError, match="max_num_seqs"):
        launch(
            [
                NewSequence(
                    seq_id=100 + i,
                    token_ids=[1],
                    num_prompt_tokens=1,
                    num_computed_tokens=0,
                    block_ids=[i],
                    params=GREEDY,
                    seed=0,
                )
                for i in range(9)
            ],
            [],
        )


def replace_blocks(new, block_ids):
    return NewSequence(
        seq_id=new.seq_id,
        token_ids=new.token_ids,
        num_prompt_tokens=new.num_prompt_tokens,
        num_computed_tokens=0,
        block_ids=block_ids,
        params=new.params,
        seed=new.seed,
    )


def test_removing_what_never_arrived_is_harmless(runner):
    result = runner.result(runner.launch(StepPlan(1, [12345], [], [], [])))
    assert (result.samples, result.failed) == ([], {})


def test_ready_names_the_resolved_sizes(model_dir):
    config = replace(CONFIG, num_blocks=None, kv_cache_memory="1MiB", max_num_seqs=None, dtype="auto")
    runner, ready = load_runner(config, model_dir, [2], lambda phase: None)
    assert ready.num_blocks == (1 << 20) // (2 * 2 * 16 * 4 * 8)  # k and v, layers, width, bytes, block size
    assert (ready.max_model_len, ready.vocab_size, ready.device, ready.dtype) == (128, 96, "cpu", "float32")
    assert (ready.max_num_seqs, ready.max_num_batched_tokens) == (128, 2048)
    assert ready.kv_cache_dtype == "float32"
    assert ready.memory["kv_cache"] <= 1 << 20
    assert ready.memory["weights"] == sum(p.numel() for p in load_hf(model_dir).parameters()) * 4
    assert len(runner.batch.num_tokens) == 128


@pytest.mark.parametrize(("name", "row"), [("int8", 8 + 4), ("fp8", 8 + 4), ("int4", 4 + 4)])
def test_a_quantised_cache_is_sized_served_and_named(model_dir, name, row):
    """head_dim is 8: the CPU kernels do not cover it, the reference does."""
    config = replace(CONFIG, num_blocks=None, kv_cache_memory="1MiB", kv_cache_dtype=name)
    runner, ready = load_runner(config, model_dir, [2], lambda phase: None)
    assert ready.num_blocks == (1 << 20) // (2 * 2 * 2 * row * 8)  # k and v, layers, KV heads, bytes, block size
    assert (ready.dtype, ready.kv_cache_dtype) == ("float32", name)
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[2])
    driver.step({1: len(PROMPTS[2])})
    for _ in range(4):
        driver.step({1: 1})
    assert len(driver.tokens[1]) == len(PROMPTS[2]) + 5


def load_hf(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir)


def test_settings_that_cannot_be_met_are_refused(model_dir, tmp_path):
    def load(**changes):
        load_runner(replace(CONFIG, **changes), model_dir, [2], lambda phase: None)

    with pytest.raises(ConfigError, match=r"--max-model-len 128"):
        load(max_model_len=129)
    with pytest.raises(ConfigError, match=r"--max-model-len 32 or less.*--num-blocks"):
        load(max_model_len=40, num_blocks=4)
    with pytest.raises(ConfigError, match="float16 is not served on a CPU"):
        load(dtype="float16")
    with pytest.raises(ConfigError, match="--device cpu"):
        load(device="cuda")
    with pytest.raises(ModelError):
        load_runner(CONFIG, tmp_path, [2], lambda phase: None)


def test_a_pool_smaller_than_the_model_cuts_max_model_len(model_dir):
    _, ready = load_runner(replace(CONFIG, num_blocks=4), model_dir, [2], lambda phase: None)
    assert ready.max_model_len == 32


def test_the_longest_sequence_fits(runner, hf_greedy):
    driver = MiniDriver(runner)
    prompt = [7, 9] * 62
    driver.add(1, prompt)
    driver.step({1: 124})
    for _ in range(3):
        driver.step({1: 1})
    assert driver.output(1) == hf_greedy(prompt, 4)


@pytest.mark.parametrize("counts", [{1: 1, 2: 1}, {1: 5, 2: 1, 3: 3}, {1: 4}])
def test_metadata_of_a_step(counts):
    batch = InputBatch(4, 64, 8)
    tokens = {1: list(range(20, 30)), 2: list(range(40, 45)), 3: list(range(60, 63))}
    blocks = {1: [7, 2], 2: [5], 3: [9]}
    computed = {1: 4, 2: 4, 3: 0}
    for seq_id in tokens:
        new = NewSequence(
            seq_id=seq_id,
            token_ids=tokens[seq_id],
            num_prompt_tokens=1,
            num_computed_tokens=computed[seq_id],
            block_ids=blocks[seq_id],
            params=GREEDY,
            seed=0,
        )
        batch.add(new)
    steps = [SequenceStep(i, n, computed[i] + n == len(tokens[i]), []) for i, n in counts.items()]
    inputs = batch.build([], [], steps, StepBuffer(0, None))
    order = sorted(counts, key=lambda i: counts[i] > 1)
    positions = [computed[i] + j for i in order for j in range(counts[i])]
    owners = [i for i in order for _ in range(counts[i])]
    metadata = inputs.metadata
    assert metadata.positions.tolist() == positions
    assert inputs.input_ids.tolist() == [tokens[i][p] for i, p in zip(owners, positions, strict=True)]
    assert metadata.slot_mapping.tolist() == [
        blocks[i][p // 8] * 8 + p % 8 for i, p in zip(owners, positions, strict=True)
    ]
    assert metadata.num_decodes == sum(n == 1 for n in counts.values())
    chunks = [n for n in counts.values() if n > 1]
    assert metadata.cu_seqlens_q.tolist() == [0, *np.cumsum(chunks)]
    assert metadata.max_seqlen_q == max(chunks, default=0)
    assert metadata.seq_lens.tolist() == [computed[i] + counts[i] for i in order]
    widest = max(math.ceil((computed[i] + counts[i]) / 8) for i in order)
    assert metadata.block_tables.tolist() == [(blocks[i] + [0, 0])[:widest] for i in order]
    dtypes = [t.dtype for t in (metadata.positions, metadata.slot_mapping, metadata.block_tables, metadata.seq_lens)]
    assert dtypes == [torch.int64, torch.int64, torch.int32, torch.int32]
    assert metadata.cu_seqlens_q.dtype == torch.int32


def test_step_limits_are_part_of_the_buffer():
    """The data of a full step must fit the pinned buffer, or every step of a GPU would take the slow path."""
    limits = StepLimits(16, 64)
    put = []

    class Counting(StepBuffer):
        def put(self, array):
            put.append(-(-array.nbytes // 16) * 16)
            return super().put(array)

    batch = InputBatch(16, 64, 8)
    for i in range(16):
        batch.add(
            NewSequence(
                seq_id=i,
                token_ids=[1] * 64,
                num_prompt_tokens=4,
                num_computed_tokens=60,
                block_ids=[0] * 8,
                params=GREEDY,
                seed=0,
            )
        )
    batch.build([], [], [SequenceStep(i, 4, True, []) for i in range(16)], Counting(0, None))
    assert sum(put) <= step_buffer_bytes(limits, 64, 8)
