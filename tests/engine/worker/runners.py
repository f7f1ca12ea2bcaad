"""Runners of a tiny checkpoint: on the CPU, and on a queue in host memory as on a GPU."""

import torch

from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from engine.worker.bucket_runner import BucketSettings
from engine.worker.cache.kv_cache import allocate_kv_caches
from engine.worker.device.host import StepLimits
from engine.worker.load import load_runner
from engine.worker.model_runner import ModelRunner, RunnerParts
from tests.engine.worker.mini_driver import CONFIG

CPU = torch.device("cpu")


def load_decoder(model_dir, lora=None):
    """The decoder alone, in fp32 on the CPU; `lora`: (slots, largest rank) for adapters."""
    model = read_model_config(model_dir)
    return load_model(model_dir, model, dtype=torch.float32, device=CPU, load_format="auto", seed=0, lora=lora)


def load_cpu_runner(model_dir):
    return load_runner(CONFIG, model_dir, [2], lambda phase: None)[0]


def zeroed_kv_caches(model, num_blocks=CONFIG.num_blocks):
    """(k_cache, v_cache) per layer in fp32, blocks of CONFIG.block_size."""
    caches = allocate_kv_caches(model, num_blocks, CONFIG.block_size, torch.float32, CPU)
    return [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in caches]


def make_queue_runner(
    model_dir, decoder, queue, capacity=6, graphs=True, eos=(2,), max_num_seqs=8, kv_caches=None
) -> ModelRunner:
    """A warm runner whose decode steps go through fixed buffers and graphs of up to `capacity` rows."""
    model = read_model_config(model_dir)
    runner = ModelRunner(
        RunnerParts(
            decoder=decoder,
            kv_caches=kv_caches or zeroed_kv_caches(model),
            limits=StepLimits(max_num_seqs, 2048),
            max_model_len=128,
            block_size=CONFIG.block_size,
            eos_token_ids=list(eos),
            device=queue.device,
            queue=queue,
            buckets=BucketSettings(
                max_seqs=capacity,
                max_num_seqs=max_num_seqs,
                max_tokens=64,
                max_blocks=16,
                hidden_size=model.hidden_size,
                dtype=torch.float32,
                graphs=graphs,
            ),
        )
    )
    runner.warm_up()
    runner.record_graphs()
    while graphs and runner.use_idle_time():  # all of them, however slow the machine is
        pass
    return runner
