"""Steps of a ModelRunner whose prefills FlashInfer computes: the stand-in of tests/kernels/fake_flashinfer.py."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.errors import ConfigError
from engine.models.families import read_model_config
from engine.models.layers.operators import FastOperators
from engine.worker import memory_profile
from engine.worker.attention_warmup import AttentionSettings
from engine.worker.device.choice import prompt_attention
from engine.worker.device.host import StepLimits
from engine.worker.load import load_runner
from engine.worker.memory_profile import GpuProfile, LoadedDecoder, size_cache
from kernels.attention.flashinfer import FlashInferPrefill
from kernels.attention.plan import attention_plan
from tests.engine.models.tiny_models import VOCAB, save_model
from tests.engine.worker.lazy_queue import LazyQueue
from tests.engine.worker.mini_driver import CONFIG, PROMPTS, ColumnDriver
from tests.engine.worker.runners import load_decoder, make_queue_runner
from tests.kernels.fake_flashinfer import as_package


def texts(runner):
    """Whole prompts, chunks, chunks beside decodes, and steps of decodes alone."""
    driver = ColumnDriver(runner)
    for seq_id in (1, 4, 2):
        driver.add(seq_id, [token % VOCAB for token in PROMPTS[seq_id]])
    for counts in ({1: 5}, {4: 9, 1: 1}, {4: 15, 2: 21, 1: 1}, {4: 16, 2: 1}, *[{1: 1, 4: 1, 2: 1}] * 4):
        driver.step(counts)
    driver.take()
    return [driver.output(seq_id) for seq_id in (1, 4, 2)]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_text_is_that_of_our_kernels(name, tmp_path, monkeypatch):
    save_model(name, tmp_path)
    model, decoder, queue = read_model_config(tmp_path), load_decoder(tmp_path), LazyQueue()
    runners = [make_queue_runner(tmp_path, decoder, one, graphs=False) for one in (LazyQueue(), queue)]
    package = as_package(monkeypatch, queue)
    sizes = prompt_attention(CONFIG, model, torch.float32)
    plan = attention_plan(queue.device, max_num_seqs=8, num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads,
                          head_dim=sizes.head_dim)  # fmt: skip
    runners[1].batch.attention_plan = replace(plan, flashinfer=FlashInferPrefill(queue, sizes, 8))
    ours, theirs = map(texts, runners)
    assert theirs == ours and len(package.plans) == 4 * len(sizes.windows), "four steps have prefills"
    assert len(sizes.windows) == (2 if name == "gemma2" else 1)


def test_a_server_that_cannot_use_it_ends_before_weights_load(model_dir):
    phases = []
    with pytest.raises(ConfigError, match=r"^attention_backend: FlashInfer needs a GPU, .*--attention-backend triton"):
        load_runner(replace(CONFIG, attention_backend="flashinfer"), model_dir, [2], phases.append)
    assert phases == ["compiling FlashInfer"]


def test_its_memory_is_reported(model_dir, monkeypatch):
    model, limits = read_model_config(model_dir), StepLimits(8, 64)
    cuda = torch.device("cuda")
    monkeypatch.setattr(memory_profile, "CudaQueue", lambda device: LazyQueue())
    monkeypatch.setattr(memory_profile, "profile_gpu", lambda loaded, queue: GpuProfile(1, 2, 1 << 30))
    decoder = SimpleNamespace(operators=FastOperators())
    planned = SimpleNamespace(num_bytes=5)
    loaded = LoadedDecoder(CONFIG, model, decoder, limits, torch.float32, cuda, AttentionSettings(flashinfer=planned))
    assert size_cache(loaded)[1] == {"activations": 1, "cuda_graphs": 2, "flashinfer": 5}
    assert "flashinfer" not in size_cache(replace(loaded, attention=AttentionSettings()))[1]
