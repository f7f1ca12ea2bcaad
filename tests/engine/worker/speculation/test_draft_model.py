"""A draft model in the Worker: it proposes what it would say alone, and the served model's text stays the same.

The real Scheduler plans, the real runner computes, in one process: on a CPU, and as on a GPU, with fixed buffers,
graphs and a plan ahead of what the host has seen.
"""

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.block_manager import BlockManager
from engine.memory.host_tier import HostTier
from engine.memory.sequence import Sequence
from engine.models.families import read_model_config
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.drafts import DraftSource, make_drafts
from engine.scheduling.speculation.step_costs import PassCosts
from engine.worker.cache.host_cache import HostCache, block_copier
from engine.worker.cache.kv_cache import allocate_kv_caches, resolve_kv_format
from engine.worker.load import load_runner
from engine.worker.loaded import load_decoder
from engine.worker.model_runner import ModelRunner
from engine.worker.speculation import DraftModel, HostPasses, QueuedPasses
from engine.worker.speculation.draft_passes import DraftWork
from tests.engine.worker.lazy_queue import LazyQueue

CONFIG = EngineConfig(device="cpu", dtype="float32", block_size=8, num_blocks=64, max_num_seqs=16, cpu_threads=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
CPU = torch.device("cpu")
ON = pytest.mark.parametrize("on_queue", [False, True], ids=["cpu", "queue"])


@pytest.fixture(scope="module")
def hf_draft():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=128, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def draft_dir(hf_draft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-draft")
    hf_draft.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch):
    monkeypatch.setattr(PassCosts, "needed", lambda self, rows, num_tokens: 0.1)


class Engine:
    """Scheduler and runner."""

    def __init__(self, model_dir, draft_dir, on_queue=False, **settings):
        config = replace(CONFIG, speculative=f"{draft_dir}:4", **settings)
        self.queue = None
        if on_queue:
            self.queue = LazyQueue()
            self.runner, self.draft_caches, num_host_blocks = queue_runner(config, model_dir, draft_dir, self.queue)
            host_tier = HostTier(num_host_blocks, None) if num_host_blocks else None
        else:
            self.runner, ready = load_runner(config, model_dir, [2], lambda phase: None, draft_dir=draft_dir)
            host_tier = HostTier.of(ready, False)
        self.scheduler = Scheduler(
            BlockManager(config.num_blocks, 8, True, host_tier),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 512,
            watermark=0.0,
            drafts=make_drafts(4, DraftSource.MODEL),
        )
        self.num_steps = self.num_tokens = 0
        self.next_id = 1
        self.launched = deque()

    def add(self, prompt, params=GREEDY, n=1):
        seqs = []
        for _ in range(n):
            limit = len(prompt) + params.max_tokens
            seqs.append(
                Sequence(self.next_id, prompt, params, seed=self.next_id, max_num_tokens=limit, arrival=self.next_id)
            )
            self.next_id += 1
        self.scheduler.add(seqs[0], seqs[1:])
        return seqs

    def step(self):
        plan = self.scheduler.schedule()
        if plan is not None:
            self.num_steps += 1
            self.num_tokens += plan.num_tokens
            self.launched.append(self.runner.launch(plan))
        if plan is None or len(self.launched) == self.runner.max_in_flight:
            self.scheduler.update(self.runner.result(self.launched.popleft()))
        self.scheduler.check_invariants()

    def run(self):
        while self.scheduler.has_work or self.launched:
            self.step()


def zeroed(caches):
    return [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in caches]


def queue_runner(config, model_dir, draft_dir, queue):
    """(A warm runner on `queue` with all graphs recorded, its draft model's caches, slots of its host tier.)"""
    model = read_model_config(model_dir)
    loaded = load_decoder(config, model_dir, model, lambda phase: None, draft_dir=draft_dir)
    kv_format, place = resolve_kv_format(config, model), (torch.float32, CPU)
    caches = zeroed(allocate_kv_caches(model, config.num_blocks, config.block_size, *place, kv_format))
    draft_caches = zeroed(loaded.draft.allocate(config, config.num_blocks, *place))
    num_slots = 64 if config.swap_space else 0
    runner = loaded.make_runner(
        caches,
        loaded.max_model_len,
        queue,
        eos_token_ids=[2],
        host_cache=HostCache(block_copier(caches + draft_caches), num_slots, loaded.device, queue=queue),
        draft_caches=draft_caches,
    )
    runner.warm_up()
    runner.record_graphs()
    while runner.use_idle_time():
        pass
    return runner, draft_caches, num_slots


@torch.inference_mode()
def greedy(model, tokens, n):
    tokens, start = list(tokens), len(tokens)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[start:]


def check_proposals(monkeypatch, engine, model):
    """From now on every proposal must be what `model` says alone; returns the list of their lengths."""
    lengths, propose = [], DraftModel.propose

    def checked(self, plan):
        filled, seconds = propose(self, plan)
        for before, draft in zip(plan.drafts, filled.drafts, strict=True):
            known = engine.scheduler.sequence(draft.seq_id).token_ids
            assert before.is_open and draft.token_ids == greedy(model, known, len(before.token_ids))
            lengths.append(len(draft.token_ids))
        return filled, seconds

    monkeypatch.setattr(DraftModel, "propose", checked)
    return lengths


@ON
def test_the_served_model_as_its_own_draft_is_always_right(model_dir, hf_model, monkeypatch, on_queue):
    engine, computed = Engine(model_dir, model_dir, on_queue), []
    kind = QueuedPasses if on_queue else HostPasses
    run = kind.run
    monkeypatch.setattr(kind, "run", lambda self, work: (computed.append(work), run(self, work))[1])
    prompts = [list(range(10, 31)), [40], [91, 3] * 8]
    seqs = [engine.add(prompt)[0] for prompt in prompts]
    engine.run()
    assert [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs] == [greedy(hf_model, p, 24) for p in prompts]
    drafts = engine.scheduler.drafts
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens > 45
    assert engine.num_steps < (24 if on_queue else 12)
    # The draft model computes the prompts, its drafts, and after each draft the last token of it: nothing twice.
    num_computed = sum(int(work.counts.sum() + (work.lengths - 1).clip(min=0).sum()) for work in computed)
    assert num_computed <= sum(map(len, prompts)) + drafts.num_draft_tokens + 2 * drafts.num_drafts
    if on_queue:
        assert engine.queue.replays > 4 * len(computed), "passes are graphs"


@ON
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_blocks": 20},
        {"num_blocks": 20, "swap_space": 0.01, "swap_policy": "always"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_it_proposes_what_it_would_say_alone(model_dir, draft_dir, hf_model, hf_draft, monkeypatch, settings, on_queue):
    """Sequences come and go, share prefixes and blocks, and lose their blocks; some steps are too full for drafts."""
    engine, rng = Engine(model_dir, draft_dir, on_queue, **settings), random.Random(1)
    exact = "kv_cache_dtype" not in settings
    lengths = check_proposals(monkeypatch, engine, hf_draft) if exact else []
    prefix = [rng.randrange(3, 96) for _ in range(19)]
    seqs = []
    sampled = SamplingParams(temperature=1.0, max_tokens=20, presence_penalty=0.3)
    for number in range(24):
        if number % 3 == 0:
            seqs += engine.add([*prefix, *[rng.randrange(3, 96) for _ in range(number % 5)]])
        elif number % 3 == 1:
            seqs += engine.add([rng.randrange(3, 96) for _ in range(1 + number)], WITH_LOGPROBS)
        else:
            engine.add(prefix[: 3 + number // 3], sampled, n=2)
        for _ in range(0 if 9 <= number < 15 else 6):
            if engine.scheduler.has_work:
                engine.step()
    engine.run()
    if exact:
        assert len(lengths) > 40 and max(lengths) >= 3
        for seq in seqs:
            assert seq.token_ids == [
                *(prompt := seq.token_ids[: seq.num_prompt_tokens]),
                *greedy(hf_model, prompt, 24)[: len(seq.token_ids) - len(prompt)],
            ]
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
    assert engine.scheduler.drafts.num_drafts > 40


@ON
def test_a_long_prompt_is_caught_up_with_in_parts(model_dir, draft_dir, hf_model, on_queue):
    engine = Engine(model_dir, draft_dir, on_queue, max_num_batched_tokens=16)
    prompt = [(7 * i) % 90 + 3 for i in range(60)]
    (seq,) = engine.add(prompt)
    engine.run()
    assert seq.token_ids[60:] == greedy(hf_model, prompt, 24)
    assert engine.scheduler.drafts.num_drafts > 4


def test_drafts_of_different_lengths_write_their_own_slots_alone(model_dir):
    engine = Engine(model_dir, model_dir, on_queue=True)
    seqs = [engine.add([10 + i, *[20] * (2 + i)])[0] for i in range(3)]
    engine.step()
    runner, caches = engine.runner, engine.draft_caches
    rows = np.array([runner.batch.row_of[seq.seq_id] for seq in seqs])
    ends, lengths = runner.batch.num_computed[rows], np.array([1, 4, 2])
    before = [[cache.clone() for cache in layer] for layer in caches]
    runner.draft_model._passes.run(DraftWork(rows, 0 * ends, ends, lengths))
    written = set()
    for layer, old in zip(caches, before, strict=True):
        for cache, was in zip(layer, old, strict=True):  # (N, K, S, D)
            written |= set(map(tuple, (cache != was).any(3).any(1).nonzero().tolist()))
    tables = runner.batch.block_table[rows]
    assert written == {
        (tables[i, position // 8], position % 8) for i in range(3) for position in range(ends[i] + lengths[i] - 1)
    }


def test_more_sequences_than_a_pass_takes_get_drafts_that_are_wrong(model_dir, hf_model, monkeypatch):
    monkeypatch.setattr(QueuedPasses, "max_rows", 2)
    engine = Engine(model_dir, model_dir, on_queue=True)
    seqs = [engine.add([10 + i, 20, 30 + i])[0] for i in range(4)]
    engine.run()
    assert all(seq.token_ids[3:] == greedy(hf_model, seq.token_ids[:3], 24) for seq in seqs)
    drafts = engine.scheduler.drafts
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@ON
def test_two_rows_are_enough(model_dir, hf_model, monkeypatch, on_queue):
    """The smallest max_num_seqs with drafts: no step has more rows than the buffers, those of warm-up included."""
    rows, run = [], ModelRunner.launch
    monkeypatch.setattr(ModelRunner, "launch", lambda self, plan: (rows.append(plan.num_rows), run(self, plan))[1])
    engine = Engine(model_dir, model_dir, on_queue, max_num_seqs=2)
    (seq,) = engine.add(list(range(10, 31)))
    engine.run()
    assert seq.token_ids[21:] == greedy(hf_model, range(10, 31), 24)
    assert max(rows) == 2 and engine.scheduler.drafts.num_accepted_tokens > 5


def test_its_memory_is_part_of_a_block_and_of_the_report(model_dir, draft_dir):
    config = replace(CONFIG, num_blocks=None, kv_cache_memory="1MiB")
    _, alone = load_runner(config, model_dir, [2], lambda phase: None)
    _, both = load_runner(config, model_dir, [2], lambda phase: None, draft_dir=draft_dir)
    # bytes of a token: 2 layers of 2 heads of 8 numbers, and 1 layer of 2 heads of 8, keys and values in fp32
    assert (alone.num_blocks, both.num_blocks) == (2**20 // (8 * 256), 2**20 // (8 * (256 + 128)))
    assert "draft_weights" not in alone.memory and both.memory["draft_weights"] > 0


def test_a_draft_model_that_does_not_fit_is_refused(model_dir, hf_draft, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    for fields, match in (({"vocab_size": 90}, "a vocabulary of 90 tokens"), ({"positions": 64}, "--max-model-len 64")):
        settings = hf_draft.config.to_dict() | fields
        settings["max_position_embeddings"] = fields.get("positions", 128)
        folder = tmp_path / next(iter(fields))
        LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
        with pytest.raises(ConfigError, match=f"^speculative: .*{match}"):
            load_runner(CONFIG, model_dir, [2], lambda phase: None, draft_dir=folder)
