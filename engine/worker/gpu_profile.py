"""How much of a GPU's memory the largest step takes, so that the KV cache can have the rest."""

import gc
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata
from engine.sampling_params import MAX_LOGPROBS
from engine.worker.attention_warmup import make_attention_plan
from engine.worker.cache.kv_cache import allocate_kv_caches, gpu_cache_bytes, kv_format_of, model_max_len
from engine.worker.decode_runner import DecodeRunner, decode_settings
from engine.worker.device.host import StepLimits
from engine.worker.device.queue import DeviceQueue
from engine.worker.sampling.prompt_scorer import compute_scores
from engine.worker.sampling.sampler import TokenCounts, sample
from engine.worker.sampling.sampling_rows import EVERYTHING_ON, SamplingRows


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Bytes: what a step needs beside the weights, what all CUDA graphs take, and what is left for the KV cache (may be
    negative).
    """

    activations: int
    graphs: int
    cache_budget: int


@torch.inference_mode()
def profile_gpu(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    limits: StepLimits,
    dtype: torch.dtype,
    queue: DeviceQueue,
) -> GpuProfile:
    """Run the largest prefill, the scoring of all its tokens and the worst sampling once and read the peak; record the
    two largest CUDA graphs.

    What others use of the card (and what the driver itself takes) counts as used: the share is of the card in all.
    """
    device = queue.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    _largest_step(config, model, decoder, limits, dtype, device)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    graphs = decode_bytes(config, model, decoder, limits, dtype, queue)
    gc.collect()  # the runner was in a cycle
    torch.cuda.empty_cache()
    budget = gpu_cache_bytes(config.gpu_memory_utilization, total, used_by_others, peak + graphs)
    return GpuProfile(peak - weights, graphs, budget)


def decode_bytes(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    limits: StepLimits,
    dtype: torch.dtype,
    queue: DeviceQueue,
) -> int:
    """What a DecodeRunner and its graphs take in all, from two of them.

    The first brings the memory that all share; every further one takes what the second does (its own nodes).
    """
    free = [queue.free_bytes()]
    caches = allocate_kv_caches(model, 1, config.block_size, dtype, queue.device, kv_format_of(config, model))
    settings = decode_settings(config, model, limits, model_max_len(config, model), dtype)
    plan = make_attention_plan(model, limits.max_num_seqs, queue.device, config.batch_invariant)
    runner = DecodeRunner(queue, decoder, caches, TokenCounts(1, model.vocab_size, queue.device), settings, plan)
    if runner.graphs.enabled:
        for _ in range(2):
            runner.record_next()
            free.append(queue.free_bytes())
    else:
        free.append(queue.free_bytes())
    used = [before - after for before, after in pairwise(free)]
    return used[0] + max(0, used[-1]) * (len(runner.graphs.sizes) - 1) if runner.graphs.enabled else used[0]


def _largest_step(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_tokens = limits.max_num_batched_tokens
    # One block stands for all: no token is written, and what is read does not matter.
    caches = allocate_kv_caches(model, 1, config.block_size, dtype, device, kv_format_of(config, model))
    kv_caches = [(k.zero_(), v.zero_()) for k, v in caches]
    metadata = _prefill_metadata(num_tokens, model_max_len(config, model), config.block_size, device)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    hidden = decoder.forward(ids, metadata, kv_caches)
    rows = np.arange(limits.max_num_seqs)
    sampling = SamplingRows(len(rows), model.vocab_size, [], one_draw=True)
    for row in range(len(rows)):
        sampling.set(row, EVERYTHING_ON, seed=0, num_prompt_tokens=1)
    inputs = sampling.build(rows, rows, lambda array: torch.from_numpy(array).to(device))
    logits = decoder.compute_logits(hidden[torch.from_numpy(rows % num_tokens).to(device)])
    sample(logits, inputs, TokenCounts(len(rows), model.vocab_size, device))
    del logits
    every_row = torch.arange(num_tokens, device=device)
    compute_scores(hidden, decoder.compute_logits, every_row, ids, MAX_LOGPROBS, model.vocab_size)


def _prefill_metadata(num_tokens: int, longest: int, block_size: int, device: torch.device) -> BatchMetadata:
    """Prompts as long as the model takes them, that fill the step."""
    lengths = np.full(-(-num_tokens // longest), longest)
    lengths[-1] = num_tokens - longest * (len(lengths) - 1)
    positions = np.concatenate([np.arange(n) for n in lengths])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_blocks = -(-int(lengths.max()) // block_size)
    return BatchMetadata(
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        num_decodes=0,
        block_tables=torch.zeros((len(lengths), num_blocks), dtype=torch.int32, device=device),
        seq_lens=torch.from_numpy(lengths.astype(np.int32)).to(device),
        cu_seqlens_q=torch.from_numpy(starts).to(device),
        max_seqlen_q=int(lengths.max()),
    )
