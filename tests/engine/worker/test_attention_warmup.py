"""Steps that compile the attention kernels before the first request: what they are, and that they leave no trace."""

import pytest
import torch

from engine.models.families import read_model_config
from engine.worker.attention_warmup import make_attention_plan, warm_up_attention, warm_up_steps
from kernels.attention.plan import attention_plan, attention_shape
from tests.engine.worker.runners import zeroed_kv_caches

CPU = torch.device("cpu")


@pytest.fixture
def plan():
    return attention_plan(CPU, max_num_seqs=8, num_heads=4, num_kv_heads=2, head_dim=8)


def test_a_cpu_has_no_plan_and_nothing_to_compile(model_dir, decoder, cpu_runner):
    model = read_model_config(model_dir)
    assert make_attention_plan(model, 8, CPU) is None and cpu_runner.batch.attention_plan is None
    warm_up_attention(decoder, zeroed_kv_caches(model), None, 128)


def test_the_decoder_runs_every_step_and_writes_nothing(model_dir, decoder, plan):
    kv_caches = zeroed_kv_caches(read_model_config(model_dir))
    for cache in (cache for layer in kv_caches for cache in layer):
        cache.fill_(0.5)
    warm_up_attention(decoder, kv_caches, plan, 128)
    for k_cache, v_cache in kv_caches:
        assert bool((k_cache == 0.5).all()) and bool((v_cache == 0.5).all())


@pytest.mark.parametrize("max_model_len", [2, 40, 4096])
def test_the_steps_fit_the_longest_sequence_and_reach_every_tile(plan, max_model_len):
    q, cache = torch.empty(1, 4, 8, dtype=torch.float16), torch.empty(1, 2, 8, 8, dtype=torch.float16)
    shape = attention_shape(q, cache, None, 0, 0.0)
    steps = list(warm_up_steps(shape, plan, max_model_len, CPU))
    assert all(len(ids) <= max_model_len or m.num_decodes == len(ids) for ids, m in steps)
    assert all(m.plan.partial is plan.partial for _, m in steps) and {m.num_decodes for _, m in steps} >= {1, 4}
    assert {m.block_tables.shape[1] for _, m in steps} >= {1, -(-max_model_len // 8)}
    lengths = {m.max_seqlen_q for _, m in steps} - {0}
    reachable = {shape.tile("prefill", 80, n * 2) for n in range(2, max_model_len)}
    assert {shape.tile("prefill", 80, n * 2) for n in lengths} == reachable
