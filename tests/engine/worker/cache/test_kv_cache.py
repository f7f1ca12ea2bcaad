"""Sizes of the KV cache, and what is said when it does not fit."""

import json
import resource
from dataclasses import replace

import pytest
import torch

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig, RopeScaling
from engine.worker.cache.kv_cache import (
    MAX_DEFAULT_GPU_BLOCKS,
    allocate_kv_caches,
    format_bytes,
    gpu_cache_bytes,
    host_cache_bytes,
    model_max_len,
    most_positions,
    num_host_blocks,
    resolve_kv_format,
    size_kv_cache,
    staging_bytes,
)
from engine.worker.load import load_runner
from kernels.kv_format import KV_FORMATS

GIB = 1 << 30
MODEL = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=1024,
    norm="rms",
    norm_eps=1e-6,
    position="rope",
    activation="silu",
    gated_mlp=True,
    dtype="bfloat16",
)
TOKEN = 2 * 3 * 2 * 16 * 2  # k and v, layers, heads, head_dim, bytes


def size(budget, *, on_gpu=False, max_num_seqs=4, available=None, **settings):
    return size_kv_cache(
        EngineConfig(**settings),
        MODEL,
        dtype_bytes=2,
        budget=budget,
        available=budget if available is None else available,
        max_num_seqs=max_num_seqs,
        on_gpu=on_gpu,
    )


def test_blocks_fill_the_budget():
    cache = size(10 * 16 * TOKEN + 5, on_gpu=True)
    assert (cache.num_blocks, cache.block_bytes, cache.num_bytes) == (10, 16 * TOKEN, 160 * TOKEN)
    assert cache.max_model_len == 160


def test_a_default_on_a_cpu_takes_no_more_than_is_of_use():
    assert size(GIB).num_blocks == 4 * 64
    assert size(GIB, kv_cache_memory="1GiB").num_blocks == GIB // (16 * TOKEN)
    assert size(GIB).max_model_len == 1024


def test_a_default_on_a_gpu_leaves_the_rest_to_the_prefix_cache_within_reason():
    assert size(GIB, on_gpu=True).num_blocks == GIB // (16 * TOKEN)
    assert size(80 * GIB, on_gpu=True).num_blocks == MAX_DEFAULT_GPU_BLOCKS
    assert size(800 * GIB, on_gpu=True, max_num_seqs=10_000).num_blocks == 640_000


def test_a_gpu_has_room_for_blocks_on_their_way_to_the_host():
    staging = staging_bytes(GIB // (16 * TOKEN), 16 * TOKEN)
    assert 2 * 4 * 32 * 1000 * 1000 < staging <= 2 * 4 * 32 << 20
    assert size(GIB, on_gpu=True, swap_space=1.0).num_bytes == (GIB - staging) // (16 * TOKEN) * (16 * TOKEN)
    assert size(GIB, swap_space=1.0, kv_cache_memory="1GiB").num_blocks == GIB // (16 * TOKEN)
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        size(staging, on_gpu=True, swap_space=1.0)


@pytest.mark.parametrize(("name", "row"), [("int8", 16 + 4), ("fp8", 16 + 4), ("int4", 8 + 4)])
def test_a_quantised_cache_has_more_blocks_of_the_same_memory(name, row):
    """Codes and a parameter of four bytes for each token, head, and key or value."""
    token = 2 * 3 * 2 * row
    assert MODEL.kv_bytes_per_token(2, KV_FORMATS[name]) == token
    cache = size(100 << 20, on_gpu=True, kv_cache_dtype=name)
    assert (cache.num_blocks, cache.block_bytes) == ((100 << 20) // (16 * token), 16 * token)
    caches = allocate_kv_caches(MODEL, 5, 16, torch.bfloat16, torch.device("cpu"), KV_FORMATS[name])
    assert sum(tensor.nbytes for pair in caches for tensor in pair) == 5 * cache.block_bytes
    assert all(tensor.shape[0] == 5 for pair in caches for tensor in pair)


def test_heads_that_int4_cannot_pack_are_refused_with_what_can():
    model = replace(MODEL, head_dim=17, position="learned")
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype: int4 packs two .*17 is odd; use --kv-cache-dtype int8, fp8"
    ):
        resolve_kv_format(EngineConfig(kv_cache_dtype="int4"), model)
    assert resolve_kv_format(EngineConfig(kv_cache_dtype="fp8"), model) is KV_FORMATS["fp8"]
    assert resolve_kv_format(EngineConfig(), model) is None


def test_num_blocks_overrides():
    assert size(GIB, num_blocks=7).num_blocks == 7
    assert size(GIB, num_blocks=7).max_model_len == 7 * 16
    with pytest.raises(ConfigError, match=r"num_blocks: 7 blocks.*--num-blocks 3 or less"):
        size(GIB, num_blocks=7, available=3 * 16 * TOKEN)


def test_a_max_model_len_that_does_not_fit_names_what_does():
    with pytest.raises(
        ConfigError, match=r"max_model_len: 500 .*--max-model-len 160 or less.*--gpu-memory-utilization"
    ):
        size(10 * 16 * TOKEN, on_gpu=True, max_model_len=500)
    with pytest.raises(ConfigError, match=r"--max-model-len 64 or less.*--num-blocks"):
        size(GIB, num_blocks=4, max_model_len=500)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory 1MiB or more"):
        size(10 * 16 * TOKEN, kv_cache_memory="60KiB", max_model_len=500)
    assert size(10 * 16 * TOKEN, max_model_len=160).max_model_len == 160


def test_no_room_at_all():
    for budget in (0, -5, 16 * TOKEN - 1):
        with pytest.raises(ConfigError, match="no room for the KV cache"):
            size(budget, on_gpu=True)


def test_max_model_len_against_the_model():
    assert model_max_len(EngineConfig(), MODEL) == 1024
    assert model_max_len(EngineConfig(max_model_len=100), MODEL) == 100
    with pytest.raises(ConfigError, match=r"max_model_len: 1025 .*--max-model-len 1024"):
        model_max_len(EngineConfig(max_model_len=1025), MODEL)
    with pytest.raises(ConfigError, match="--max-model-len 2"):
        model_max_len(EngineConfig(max_model_len=1), MODEL)


def test_max_model_len_may_ask_for_long_rotary_factors():
    pairs = (1.0,) * 8
    scaling = RopeScaling("longrope", 4.0, 1024, short_factors=pairs, long_factors=pairs, long_max_position=4096)
    model = replace(MODEL, rope_scaling=scaling)
    assert model_max_len(EngineConfig(), model) == 1024
    assert model_max_len(EngineConfig(max_model_len=4096), model) == 4096
    with pytest.raises(ConfigError, match=r"max_model_len: 4097 .*--max-model-len 4096"):
        model_max_len(EngineConfig(max_model_len=4097), model)


def test_host_memory():
    assert host_cache_bytes(EngineConfig(), 8 * GIB) == 2 * GIB
    assert host_cache_bytes(EngineConfig(), 800 * GIB) == 4 * GIB
    assert host_cache_bytes(EngineConfig(kv_cache_memory="3GiB"), 8 * GIB) == 3 * GIB
    with pytest.raises(ConfigError, match=r"kv_cache_memory: 9.0 GiB .*--kv-cache-memory 8192MiB or less"):
        host_cache_bytes(EngineConfig(kv_cache_memory="9GiB"), 8 * GIB)


def test_gpu_memory():
    assert gpu_cache_bytes(EngineConfig(gpu_memory_utilization=0.5), 80 * GIB, 10 * GIB, 20 * GIB) == 10 * GIB
    shared = EngineConfig(gpu_memory_utilization=0.9, memory_share=0.5)
    assert gpu_cache_bytes(shared, 80 * GIB, 10 * GIB, 20 * GIB) == 20 * GIB, "the share, not the memory of others"
    assert gpu_cache_bytes(shared, 80 * GIB, 60 * GIB, 2 * GIB) == 10 * GIB, "the card is full before the share is"


def test_caches_on_a_cpu_take_no_memory_until_they_are_used():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    caches = allocate_kv_caches(MODEL, 50_000, 16, torch.bfloat16, torch.device("cpu"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB, of 300 MB
    assert len(caches) == 3
    assert all(tensor.shape == (50_000, 2, 16, 16) for pair in caches for tensor in pair)


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (-1536, "-1.5 KiB")])
def test_format_bytes(value, text):
    assert format_bytes(value) == text


def test_host_tier_within_what_is_free():
    assert num_host_blocks(EngineConfig(), 1 << 20, 0) == 0
    assert num_host_blocks(EngineConfig(swap_space=0.5), 3 << 20, 1 << 30) == 170
    with pytest.raises(ConfigError, match=r"swap_space: 2.0 GiB is more than the 1.0 GiB that are free; use --swap"):
        num_host_blocks(EngineConfig(swap_space=2), 1 << 20, 1 << 30)


def test_tables_have_no_more_rows_than_the_cache_could_hold():
    claims = replace(MODEL, max_position_embeddings=10**8)
    assert most_positions(EngineConfig(), claims, 2, budget=1000 * TOKEN) == 992
    assert most_positions(EngineConfig(num_blocks=5), claims, 2, budget=GIB) == 80
    assert most_positions(EngineConfig(max_model_len=500), claims, 2, budget=GIB) == 500
    assert most_positions(EngineConfig(), MODEL, 2, budget=GIB) == 1024


def test_a_checkpoint_that_claims_a_hundred_million_positions_costs_no_more_than_another(tmp_path, caplog):
    config = json.loads((BUNDLED_MODEL / "config.json").read_text()) | {"max_position_embeddings": 10**8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(load_format="dummy", device="cpu", kv_cache_memory="32MiB", max_num_seqs=4, cpu_threads=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, ready = load_runner(settings, tmp_path, [0], lambda phase: None)
    assert ready.max_model_len == ready.num_blocks * settings.block_size < 100_000
    assert "max_model_len is cut from the model's 100000000" in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB; the tables took ten times that"
    with pytest.raises(ConfigError, match="max_model_len: 100000000 tokens do not fit a KV cache"):
        load_runner(replace(settings, max_model_len=10**8), tmp_path, [0], lambda phase: None)
