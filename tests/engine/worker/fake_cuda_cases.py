"""The runner on a CUDA device without memory (fake_cuda.py): what it does in a step is done on the device, waits for
nothing and was compiled before. Run by test_on_a_fake_cuda.py, in a process of its own."""

import triton  # noqa: F401 -- before the kernels: it tells them to define their Triton halves

# isort: split
import gc

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from transformers import BertConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.executor.step import (
    OPEN_TOKEN,
    BlockCopy,
    BlockMove,
    Draft,
    LoadAdapter,
    NewSequence,
    SequenceStep,
    StepPlan,
)
from engine.models import encoder as encoder_module
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from engine.sampling_params import Pooling, SamplingParams
from engine.worker import memory_profile
from engine.worker.attention_warmup import AttentionSettings, make_attention_plan
from engine.worker.bucket_runner import BucketSettings
from engine.worker.cache import block_mover
from engine.worker.cache.host_cache import HostCache, block_copier
from engine.worker.cache.kv_cache import allocate_kv_caches
from engine.worker.device.choice import prompt_attention
from engine.worker.device.host import StepLimits
from engine.worker.encoder_runner import EncoderRunner
from engine.worker.loaded import LoadedDecoder
from engine.worker.memory_profile import profile_gpu
from engine.worker.model_runner import ModelRunner, RunnerParts
from engine.worker.sampling.sampling_rows import EVERYTHING_ON, WARM_UP
from engine.worker.sampling.step_sampler import StepSampler
from engine.worker.speculation import QueuedPasses
from engine.worker.speculation.loaded_draft import LoadedDraft
from kernels.attention.flashinfer import FlashInferPrefill
from kernels.card import known_card
from kernels.kv_format import KV_FORMATS
from kernels.quantized import code_matmul
from kernels.sampling.token_mask import TokenMask
from tests.engine.models.adapters.peft_files import write_adapter
from tests.engine.models.tiny_encoders import CASES as ENCODERS
from tests.engine.models.tiny_models import CASES
from tests.engine.worker.fake_cuda import DeviceError, FakeCudaQueue, fake_cuda
from tests.engine.worker.mini_driver import ColumnDriver
from tests.kernels.fake_flashinfer import as_package

LIMITS, LENGTH, BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = StepLimits(8, 128), 128, 8, 128, 40
MIXED_TOKENS = 48  # of the largest bucket: few graphs, which the fake device takes long to record
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)


@pytest.fixture
def cuda(monkeypatch):
    with fake_cuda(monkeypatch) as device:
        yield device


@pytest.fixture
def make_decoder(cuda, tmp_path):
    def make(name, batch_invariant=False, lora=None, quantization=None):
        CASES[name]().save_pretrained(tmp_path)
        model = read_model_config(tmp_path, quantization)
        decoder = load_model(tmp_path, model, dtype=torch.bfloat16, device=FakeCudaQueue.device, seed=0,
                             load_format="dummy", max_model_len=LENGTH, batch_invariant=batch_invariant,
                             lora=lora)  # fmt: skip
        return model, decoder

    return make


def one_at_a_time(*_):
    raise DeviceError("the sampler raised for a batch")  # which the runner gets over, row by row


@pytest.fixture
def make_runner(cuda, make_decoder, monkeypatch):
    monkeypatch.setattr(StepSampler, "_sample_row", one_at_a_time)

    def make(name, kv_format=None, batch_invariant=False, num_slots=0, flashinfer=False, lora=None, drafts=False,
             quantization=None, graphs=True):  # fmt: skip
        """Warm, with all graphs recorded; from then on nothing may be compiled or waited for."""
        (model, decoder), queue = make_decoder(name, batch_invariant, lora, quantization), FakeCudaQueue(cuda)
        if quantization is not None:
            decoder.operators.choose_kernels(queue.device, LIMITS.max_num_batched_tokens)
        caches = allocate_kv_caches(model, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, queue.device, kv_format)
        host_cache = HostCache(block_copier(caches), num_slots, queue.device, queue=queue)
        buckets = BucketSettings(LIMITS.max_num_seqs, LIMITS.max_num_seqs, MIXED_TOKENS,
                                 LENGTH // BLOCK_SIZE, model.hidden_size, torch.bfloat16,
                                 graphs=graphs and not flashinfer)  # fmt: skip
        prefill = None
        if flashinfer:
            size = prompt_attention(EngineConfig(block_size=BLOCK_SIZE), model, torch.bfloat16)
            prefill = FlashInferPrefill(queue, size, LIMITS.max_num_seqs)
            prefill.warm_up()
        draft_caches = allocate_kv_caches(model, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, queue.device, kv_format)
        parts = RunnerParts(
            decoder=decoder, kv_caches=caches, limits=LIMITS, max_model_len=LENGTH, block_size=BLOCK_SIZE,
            eos_token_ids=[2], device=queue.device, host_cache=host_cache, queue=queue, buckets=buckets,
            attention=AttentionSettings(batch_invariant, prefill), draft=decoder if drafts else None,
            draft_caches=draft_caches,
        )  # fmt: skip
        runner = ModelRunner(parts)
        runner.warm_up()
        runner.record_graphs()
        while runner.use_idle_time():
            pass
        assert runner.buckets.graphs.enabled == buckets.graphs, "a graph could not be recorded"
        cuda.quiet = cuda.may_compile = False
        return runner

    return make


class StrictDriver(ColumnDriver):
    """The runner takes an exception in its sampler for the failure of a sequence, and goes on: not here."""

    def update(self, result):
        assert not result.failed, result.failed
        super().update(result)


def serve(runner, params, prompts=(40, 17, 1, 9), num_steps=4, first=0, adapters=(0, 0, 0, 0)):
    """Chunks without a graph and mixed steps with one, decodes of some and of all, a removal in between. Sequence
    first + i has params[i]."""
    device, driver = runner._queue._fake, StrictDriver(runner)
    device.launched.clear()
    driver.free = list(range(NUM_BLOCKS))
    for i, (length, one, adapter) in enumerate(zip(prompts, params, adapters, strict=True), start=first):
        driver.add(i, [1] * length, one, adapter)
    ids = list(driver.prompts)
    graphs = runner.buckets.graphs
    graphs.enabled = False
    driver.step({i: len(driver.prompts[i]) for i in ids[1:]} | {first: 7})
    graphs.enabled = True
    assert "graph" not in device.launched
    driver.step({first: prompts[0] - 7} | dict.fromkeys(ids[1:], 1))
    for _ in range(num_steps):
        driver.step(dict.fromkeys(ids, 1))
    driver.remove(ids[-1])
    for n in (1, 2, len(ids) - 1):
        driver.step(dict.fromkeys(ids[:n], 1))
    driver.take()
    assert [len(driver.output(i)) for i in ids] == [num_steps + more for more in (4, 4, 3, 1)]
    for i in ids[:-1]:
        driver.remove(i)
    driver.step({})
    driver.take()
    assert {"prefill_attention_kernel", "graph"} <= set(device.launched)


MODELS = ("llama", "qwen3", "qwen3_moe", "gpt2", "gemma2", "phi3_longrope", "gpt_neox", "gemma4")
MORE_MODELS = (
    "qwen3_window_bias", "opt_350m", "mixtral_window", "gemma3", "smollm3_window", "granite", "starcoder2",
    "stablelm_parallel", "phi", "gemma4_dense",
)  # fmt: skip


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MODELS)])
def test_every_kind_of_model(make_runner, name):
    serve(make_runner(name), [GREEDY] * 4)


@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_quantised_caches(make_runner, kv_format):
    serve(make_runner("llama", kv_format), [GREEDY, DRAWN] * 2)


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8", "w8a8"])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_weights_in_codes(make_runner, cuda, monkeypatch, name, quantization):
    """The rows of an embedding are decoded in a graph, too. Prompts in fp8 and w8a8 are multiplied in 8 bits."""
    monkeypatch.setattr(code_matmul, "narrow_scales", lambda scales: scales)  # asks for values
    serve(make_runner(name, quantization=quantization), [GREEDY, DRAWN] * 2)
    assert ("scaled_matmul_kernel" in cuda.launched) == (quantization in ("fp8", "w8a8"))
    assert ("rms_norm_quantized_kernel" in cuda.launched) == (quantization in ("fp8", "w8a8"))


def test_rows_with_different_adapters(make_runner, cuda, tmp_path):
    """Two slots for three adapters: rows change their slots, and a slot its adapter, without a wait."""
    runner, answers = make_runner("llama", lora=(2, 8)), []
    for adapter_id in (1, 2, 3):
        with unset_fake_temporarily():
            write_adapter(tmp_path / f"{adapter_id}", LlamaForCausalLM(CASES["llama"]()), seed=adapter_id, rank=4)
        runner.handle_message(LoadAdapter(adapter_id, str(tmp_path / f"{adapter_id}")), answers.append)
    serve(runner, [GREEDY] * 4, adapters=(1, 2, 0, 1))
    serve(runner, [GREEDY, DRAWN] * 2, adapters=(3, 0, 2, 3), first=10)
    assert not any(answer.error for answer in answers) and len(answers) == 3
    assert {"shrink_kernel", "expand_kernel"} <= set(cuda.launched)


def test_a_runner_reads_no_rows_of_the_one_before(cuda, make_decoder, monkeypatch):
    """A wake profiles and warms up with the layers that served before the sleep: the rows that they read last were in a
    graph, whose memory is gone."""
    model, decoder = make_decoder("llama", lora=(2, 8))
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", max_model_len=LENGTH, block_size=BLOCK_SIZE)
    loaded = LoadedDecoder(config, model, decoder, LIMITS, torch.bfloat16, FakeCudaQueue.device)
    queue = FakeCudaQueue(cuda)
    runner = loaded.make_runner(loaded.one_block(), LENGTH, queue, eos_token_ids=[])
    runner.warm_up()
    runner.record_graphs()
    assert "shrink_kernel" in cuda.launched
    del runner
    cuda.launched.clear()
    monkeypatch.setattr(memory_profile, "graph_bytes", lambda *_: 0)
    profile_gpu(loaded, queue)
    assert "prefill_attention_kernel" in cuda.launched and "shrink_kernel" not in cuda.launched


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_draft_model(make_runner, cuda, name):
    """It catches up with prompts in chunks, then with single tokens in a graph; a token of all drafts is one replay."""
    runner, blocks, ids = make_runner(name, drafts=True), {i: list(range(8 * i, 8 * i + 8)) for i in range(3)}, range(3)
    new = [NewSequence(seq_id=i, token_ids=[0] * 30, num_prompt_tokens=30, num_computed_tokens=0, block_ids=blocks[i],
                       params=GREEDY, seed=0) for i in ids]  # fmt: skip
    runner.result(runner.launch(StepPlan(0, [], new, [], [SequenceStep(i, 30, True, []) for i in ids])))
    drafts = [Draft(0, [OPEN_TOKEN] * 3), Draft(2, [OPEN_TOKEN] * 2)]
    for step, num_passes in ((1, 2), (2, 3), (3, 3)):  # in graphs: the first catches up with two prompts without one
        known = {i: int(runner.batch.num_blocks[runner.batch.row_of[i]]) for i in ids}
        more = [x for i in ids for block in blocks[i][known[i] :] for x in (i, block)]
        cuda.launched.clear()
        cuda.copies = 0
        result = runner.result(runner.launch(StepPlan(step, [], [], [], [], [], [], [0, 1, 2], more, drafts)))
        assert [len(tokens) for tokens in result.verified] == [4, 3], "every token is 0 here"
        assert ("prefill_attention_kernel" in cuda.launched) == (step == 1)
        assert cuda.launched.count("graph") == num_passes + 2
        assert cuda.copies == 4, "in and out for the drafts, in and out for the step"


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_batch_invariant(make_runner, cuda, name):
    """No library chooses an order of sums by the number of rows, and attention does not divide its keys."""
    serve(make_runner(name, batch_invariant=True), [GREEDY, DRAWN] * 2)
    assert "matmul_kernel" in cuda.launched
    assert not {"mm", "addmm", "linear", "paged_attention_kernel"} & set(cuda.launched)


ASKED = (
    *WARM_UP,
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(top_k=5, min_p=0.1),
    SamplingParams(temperature=0.0, logit_bias={3: 1.0, 5: -1.0}),
    SamplingParams(temperature=0.0, bad_words=((4,), (5, 6), (7, 8, 9))),
    SamplingParams(allowed_token_ids=(3, 4, 5)),
    SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(6,)),
    SamplingParams(temperature=0.0, prompt_logprobs=2),
)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prompts_of_flashinfer(make_runner, cuda, monkeypatch, name):
    """Its plans wait for nothing, and steps without a graph launch no prefill kernel of ours."""
    queue = FakeCudaQueue(cuda)
    package = as_package(monkeypatch, queue, launch=lambda: cuda.launched.append("flashinfer"))
    runner = make_runner(name, flashinfer=True)
    config = runner._decoder.config
    cuda.launched.clear()
    package.plans.clear()
    driver = StrictDriver(runner)
    for seq_id, length in enumerate((40, 17, 30)):
        driver.add(seq_id, [1] * length, GREEDY)
    driver.step({0: 40, 1: 5})
    driver.step({0: 1, 1: 12, 2: 30})
    driver.step({0: 1, 1: 1, 2: 1})
    driver.take()
    windows = {config.window(layer) for layer in range(config.num_layers)}
    assert len(package.plans) == 2 * len(windows), "two steps have prefills"
    assert 0 < cuda.launched.count("flashinfer") <= 2 * config.num_layers
    assert "prefill_attention_kernel" not in cuda.launched and "paged_attention_kernel" in cuda.launched


def test_prompts_of_several_sequences_in_a_step_without_a_graph(make_runner, cuda):
    """The last layer computes an output row of each."""
    runner, ids = make_runner("llama", graphs=False), range(6)
    cuda.launched.clear()
    driver = StrictDriver(runner)
    for i in ids:
        driver.add(i, [1] * 9, GREEDY)
    driver.step(dict.fromkeys(ids, 9))
    driver.step(dict.fromkeys(ids, 1))
    driver.take()
    assert {"prefill_attention_kernel", "windows_kernel"} <= set(cuda.launched) and "graph" not in cuda.launched


def test_sampling_parameters(make_runner):
    """Each kind alone in a batch, and beside others."""
    runner = make_runner("llama")
    for i, params in enumerate(ASKED):
        serve(runner, [params] * 4, first=100 * i)
        serve(runner, [params, GREEDY, DRAWN, EVERYTHING_ON], first=100 * i + 50)


def test_embeddings_beside_text(make_runner):
    last, mean = (SamplingParams(pooling=Pooling(kind)) for kind in ("last", "mean"))
    runner = make_runner("llama")
    new = [
        NewSequence(
            seq_id=i, token_ids=[1] * n, num_prompt_tokens=n, num_computed_tokens=0, block_ids=[i], params=p, seed=0
        )
        for i, (n, p) in enumerate([(5, last), (6, mean), (3, DRAWN)])
    ]
    steps = [SequenceStep(i, n, True, []) for i, n in enumerate([5, 6, 3])]
    assert set(runner.result(runner.launch(StepPlan(1, [], new, [], steps))).vectors) == {0, 1}


def test_an_encoder(cuda, tmp_path):
    """One upload and one download a step, and no wait."""
    BertConfig(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
               max_position_embeddings=80, architectures=["BertModel"]).save_pretrained(tmp_path)  # fmt: skip
    model, device = read_model_config(tmp_path), FakeCudaQueue.device
    encoder = load_model(tmp_path, model, dtype=torch.bfloat16, device=device, seed=0, load_format="dummy")
    runner = EncoderRunner(encoder, device, LIMITS, queue=FakeCudaQueue(cuda))
    runner.warm_up(80)
    cuda.quiet = cuda.may_compile = False
    for kinds in (["mean"], ["cls"], ["last", "mean", "cls"]):
        params = [SamplingParams(pooling=Pooling(kind)) for kind in kinds]
        new = [NewSequence(seq_id=i, token_ids=[5] * n, num_prompt_tokens=n, num_computed_tokens=0, block_ids=[],
                           params=params[i % len(params)], seed=0)
               for i, n in enumerate((9, 1, 4, 10, 11))]  # fmt: skip
        steps = [SequenceStep(i, len(one.token_ids), True, []) for i, one in enumerate(new)]
        copies = cuda.copies
        result = runner.result(runner.launch(StepPlan(1, [], new, [], steps)))
        assert len(result.vectors) == 5 and cuda.copies == copies + 1


@pytest.mark.parametrize(
    "name, dtype, lengths, capability, grouped",
    [
        ("qwen2_both_ways", torch.bfloat16, (20, 20), 90, [True] * 3),
        ("qwen2_both_ways", torch.bfloat16, (20, 19), 90, [False] * 3),
        ("gemma3_both_ways", torch.bfloat16, (20,), 90, [False] * 3),
        ("gemma3_both_ways", torch.bfloat16, (5,), 90, [True] * 3),
        ("qwen2_both_ways", torch.float32, (20,), 90, [False] * 3),
        ("qwen2_both_ways", torch.float16, (20,), 75, [False] * 3),
    ],
)
def test_attention_of_an_encoder_takes_no_matrix_of_all_scores(
    cuda, tmp_path, monkeypatch, name, dtype, lengths, capability, grouped
):
    """torch computes grouped heads with flash attention alone, which takes 16 bits and no mask."""
    ENCODERS[name]().save_pretrained(tmp_path)
    monkeypatch.setattr(encoder_module, "read_card", lambda device: known_card(capability))
    model, device, seen = read_model_config(tmp_path), FakeCudaQueue.device, []
    encoder = load_model(tmp_path, model, dtype=dtype, device=device, seed=0, load_format="dummy")
    attend = encoder_module.F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.append(q.shape[1] != k.shape[1])
        assert k.shape[1] == v.shape[1] and options["enable_gqa"] == seen[-1]
        return attend(q, k, v, **options)

    monkeypatch.setattr(encoder_module.F, "scaled_dot_product_attention", watched)
    mean = SamplingParams(pooling=Pooling("mean"))
    new = [NewSequence(seq_id=i, token_ids=[5] * n, num_prompt_tokens=n, num_computed_tokens=0, block_ids=[],
                       params=mean, seed=0) for i, n in enumerate(lengths)]  # fmt: skip
    steps = [SequenceStep(i, n, True, []) for i, n in enumerate(lengths)]
    runner = EncoderRunner(encoder, device, LIMITS, queue=FakeCudaQueue(cuda))
    runner.result(runner.launch(StepPlan(1, [], new, [], steps)))
    assert seen == grouped


@pytest.mark.parametrize("blocks_per_copy", [7, 40])
def test_blocks_move_between_the_tiers_and_are_copied(make_runner, cuda, monkeypatch, blocks_per_copy):
    """Ids of the second 7 begin where no vector load may."""
    monkeypatch.setattr(block_mover, "staging_sizes", lambda *_: (blocks_per_copy, 2))
    runner = make_runner("llama", num_slots=NUM_SLOTS)
    new = NewSequence(
        seq_id=1,
        token_ids=[1] * 17,
        num_prompt_tokens=17,
        num_computed_tokens=0,
        block_ids=[3, 4, 5],
        params=GREEDY,
        seed=0,
    )
    runner.launch(StepPlan(1, [], [new], [], [SequenceStep(1, 17, True, [])]))
    for start in (0, 1, 5):  # of the slots, and of the ids among what the step sends
        moves = [BlockMove(10 + i, start + i) for i in range(20)]
        runner.launch(StepPlan(2, [], [], [], [], moves))
        runner.launch(
            StepPlan(
                step_id=3,
                removed=[],
                new=[],
                block_copies=[BlockCopy(1, 5, 6 + start)],
                chunks=[SequenceStep(1, 1, True, [])],
                offloads=[],
                loads=moves,
            )
        )
    assert {"pack_blocks_kernel", "copy_blocks_kernel"} <= set(cuda.launched)


def test_masks_of_grammars(make_runner, cuda, monkeypatch):
    """Masks of one row and of several, beside rows without; the matchers themselves are not tested here."""
    runner = make_runner("llama")
    words = np.zeros((2, 4), np.int32)

    def make(at):
        buffer = runner.sampler.grammars._step_buffer(words.shape[1])
        n = min(2, len(at.rows))
        mask = TokenMask(buffer.put(np.arange(n)), buffer.put(words[:n]))
        buffer.upload()
        return mask

    monkeypatch.setattr(runner.sampler.grammars, "make", make)
    serve(runner, [DRAWN, DRAWN, GREEDY, DRAWN])
    assert "mask_tokens_kernel" in cuda.launched


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_profile_of_memory(cuda, make_decoder, name):
    """The largest prefill, the worst sampling, and two graphs."""
    model, decoder = make_decoder(name)
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", max_model_len=LENGTH)
    loaded = LoadedDecoder(config, model, decoder, LIMITS, torch.bfloat16, FakeCudaQueue.device)
    profile = profile_gpu(loaded, FakeCudaQueue(cuda))
    assert profile.cache_budget == int(0.9 * (80 << 30)) - (8 << 30) - (2 << 30)
    assert "graph" not in cuda.launched and "prefill_attention_kernel" in cuda.launched


def test_the_profile_of_memory_holds_the_largest_pass_of_a_draft_model(cuda, make_decoder, monkeypatch):
    model, decoder = make_decoder("llama")
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", max_model_len=LENGTH)
    draft, tokens, run = LoadedDraft(model, decoder), [], QueuedPasses.run
    monkeypatch.setattr(QueuedPasses, "run", lambda self, work: (tokens.append(work.counts.sum()), run(self, work))[1])
    profile_gpu(LoadedDecoder(config, model, decoder, LIMITS, torch.bfloat16, FakeCudaQueue.device, draft=draft),
                FakeCudaQueue(cuda))  # fmt: skip
    assert tokens == [LIMITS.max_num_batched_tokens]


def live_bytes():
    """Bytes of the tensors on the device that something still refers to, by (shape, dtype)."""
    found = {}
    for tensor in [x for x in gc.get_objects() if type(x) is FakeTensor and x.is_cuda]:
        key = tuple(tensor.shape), tensor.dtype
        found[key] = found.get(key, 0) + tensor.numel() * tensor.element_size()
    return found


def test_the_profile_holds_what_serving_holds(cuda, make_decoder, monkeypatch):
    """While the largest step is scored: counts of tokens, tables of steps, partial results of attention. Then none."""
    model, decoder = make_decoder("llama")
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", max_model_len=LENGTH, block_size=BLOCK_SIZE)
    loaded = LoadedDecoder(config, model, decoder, LIMITS, torch.bfloat16, FakeCudaQueue.device)
    seen, score = [], memory_profile.compute_scores
    monkeypatch.setattr(memory_profile, "compute_scores", lambda *args: (seen.append(live_bytes()), score(*args))[1])
    profile_gpu(loaded, FakeCudaQueue(cuda))
    rows, blocks = LIMITS.max_num_seqs, LENGTH // BLOCK_SIZE
    plan = make_attention_plan(model, rows, FakeCudaQueue.device)
    held = [
        ((rows, model.vocab_size), torch.int32),
        ((rows, model.vocab_size), torch.bool),
        ((rows + 1, blocks), torch.int32),
        (tuple(plan.partial.shape), torch.float32),
        ((rows, model.hidden_size), torch.bfloat16),
    ]
    assert all(seen[0].get(key) for key in held)
    del plan
    gc.collect()
    after = live_bytes()
    assert not [key for key in held[:4] if key in after]


def test_a_decode_step_is_one_copy_in_a_graph_or_two_and_one_copy_out(make_runner, cuda):
    runner = make_runner("llama")
    driver = ColumnDriver(runner)
    driver.free = list(range(NUM_BLOCKS))
    for i in range(3):
        driver.add(i, [1] * 9)
    driver.step(dict.fromkeys(range(3), 9))
    for _ in range(3):
        driver.step(dict.fromkeys(range(3), 1))
    cuda.launched.clear()
    cuda.copies = 0
    driver.step(dict.fromkeys(range(3), 1))
    assert cuda.launched == ["graph", "graph"]
    assert cuda.copies == 2


def test_a_step_with_a_prompt_is_one_copy_in_a_graph_or_two_and_one_copy_out(make_runner, cuda):
    runner = make_runner("llama")
    driver = ColumnDriver(runner)
    driver.free = list(range(NUM_BLOCKS))
    for i in range(4):
        driver.add(i, [1] * 40)
    driver.step(dict.fromkeys(range(3), 40))
    cuda.launched.clear()
    cuda.copies = 0
    driver.step({0: 1, 1: 1, 2: 1, 3: 20})
    assert cuda.launched == ["graph", "graph"]
    assert cuda.copies == 2
    driver.step({3: 9})  # samples nothing
    assert cuda.launched == ["graph"] * 3
    assert cuda.copies == 3


def test_the_sweep_of_tiles_launches_what_it_names(cuda):
    from benchmarks.gpu_check import tiles
    from benchmarks.kernel_speed import Shape

    shape, names = Shape(8, 2, 64), []
    for case in (
        *tiles.decodes(shape, FakeCudaQueue.device, 2, 700),
        *tiles.prefills(shape, FakeCudaQueue.device, 2, 5, 50),
    ):
        case.call()
        names.append(case.kernel)
    assert len(set(names)) == len(names) == len(tiles.DECODE_TILES) + len(tiles.MORE_SPLITS) + len(tiles.PREFILL_TILES)
    variants = {key for key in cuda.compiled if "attention_kernel" in key[0]}
    assert len(variants) == len(tiles.DECODE_TILES) + len(tiles.PREFILL_TILES)


class TestTheDeviceItself:
    """The fake device finds each of these mistakes."""

    def test_tensors_of_two_devices(self, cuda):
        x, index = torch.zeros(4, 5, device=FakeCudaQueue.device), torch.tensor([1])
        for wrong in (lambda: x + torch.ones(5), lambda: x.index_select(0, index), lambda: x[index]):
            with pytest.raises((DeviceError, RuntimeError), match="device"):
                wrong()

    def test_values_that_the_host_asks_for(self, cuda):
        x = torch.zeros(4, device=FakeCudaQueue.device)
        cuda.quiet = False
        for wrong in (lambda: x.sum().item(), lambda: x.tolist(), lambda: x.nonzero(), lambda: x.cpu()):
            with pytest.raises((DeviceError, RuntimeError)):
                wrong()

    def test_copies_that_wait(self, cuda):
        queue, x = FakeCudaQueue(cuda), torch.zeros(4, dtype=torch.uint8, device=FakeCudaQueue.device)
        cuda.quiet = False
        queue.copy(x, queue.host_bytes(4))
        with pytest.raises(DeviceError, match="not pinned in a step"):
            queue.copy(x, torch.zeros(4, dtype=torch.uint8))
        with pytest.raises(DeviceError, match="waits in a step"):
            x.copy_(queue.host_bytes(4))
        with pytest.raises(DeviceError, match="not pinned"):
            torch.zeros(4).to(x.device)
        with pytest.raises(DeviceError, match="while a graph is recorded"):
            queue.capture(lambda: queue.copy(x, queue.host_bytes(4)))

    def test_launches_that_are_compiled_too_late(self, cuda):
        from kernels.elementwise.rms_norm import rms_norm

        x, weight = (torch.zeros(n, dtype=torch.bfloat16, device=FakeCudaQueue.device) for n in (96, 32))
        rms_norm(x.view(3, 32), weight, 1e-5)
        cuda.may_compile = False
        rms_norm(x[:64].view(2, 32), weight, 1e-5)
        with pytest.raises(DeviceError, match="rms_norm_kernel is compiled too late"):
            rms_norm(x[1:65].view(2, 32), weight, 1e-5)  # a pointer that is no multiple of 16
