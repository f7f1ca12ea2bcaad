"""How much memory the KV cache can have: on a GPU, what the largest step leaves free; on a CPU, what is free."""

import gc
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.models.layers.attention import BatchMetadata
from engine.sampling_params import MAX_LOGPROBS
from engine.worker.cache.kv_cache import KVCacheSize, gpu_cache_bytes, host_cache_bytes, size_kv_cache
from engine.worker.device.cuda_graphs import GRAPH_SHARE
from engine.worker.device.host import available_host_bytes
from engine.worker.device.queue import CudaQueue, DeviceQueue
from engine.worker.loaded import LoadedDecoder
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling.prompt_scorer import compute_scores
from engine.worker.sampling.sampler import sample
from engine.worker.sampling.sampling_rows import EVERYTHING_ON, SamplingRows

MEASURED_GRAPHS = 5


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Bytes that a step needs beside the weights, that all CUDA graphs take, and that are left for the KV cache (may be
    negative)."""

    activations: int
    graphs: int
    cache_budget: int


def size_cache(loaded: LoadedDecoder) -> tuple[KVCacheSize, dict[str, int]]:
    """(the size of the KV cache, bytes that steps use beside the cache, by name: "activations" includes buffers).
    All ranks have the fewest blocks that one of them has room for. ConfigError where nothing fits."""
    config = loaded.config
    used: dict[str, int] = {}
    if loaded.device.type == "cuda":
        # With a queue of its own: the memory pool of recorded graphs cannot be used again once they are gone.
        profile = profile_gpu(loaded, CudaQueue(loaded.device))
        budget = available = profile.cache_budget
        used = {"activations": profile.activations, "cuda_graphs": profile.graphs}
        if loaded.attention.flashinfer is not None:  # allocated before the weights, so not a part of the activations
            used["flashinfer"] = loaded.attention.flashinfer.num_bytes
    else:
        available = available_host_bytes() // config.num_processes
        budget = host_cache_bytes(config, available)
    size = size_kv_cache(
        config,
        loaded.model,
        draft=None if loaded.draft is None else loaded.draft.model,
        dtype_bytes=loaded.dtype.itemsize,
        budget=budget,
        available=available,
        max_num_seqs=loaded.limits.max_num_seqs,
        on_gpu=loaded.device.type == "cuda",
    )
    if (ranks := loaded.decoder.operators.ranks) is not None:
        num_blocks, max_model_len = ranks.least([size.num_blocks, size.max_model_len])
        size = replace(size, num_blocks=num_blocks, max_model_len=max_model_len)
    return size, used


@torch.inference_mode()
def profile_gpu(loaded: LoadedDecoder, queue: DeviceQueue) -> GpuProfile:
    """Run the largest prefill, the scoring of all its tokens, the worst sampling and the largest pass of a draft model
    once and read the peak; record some CUDA graphs.

    A runner is held meanwhile, so that the peak includes all that serving holds: the tokens counted for penalties, the
    tables and inputs of steps, the partial results of attention. Memory that other processes (and the driver itself)
    use of the card counts as used, because gpu_memory_utilization is a share of the whole card.
    """
    device = queue.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    draft_caches = None if loaded.draft is None else loaded.draft.allocate(loaded.config, 1, loaded.dtype, device)
    runner = loaded.make_runner(
        loaded.one_block(), loaded.max_model_len, queue, eos_token_ids=[], draft_caches=draft_caches
    )
    _run_largest_step(loaded, runner)
    runner.draft_model.run_largest_pass()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    graphs = graph_bytes(runner, queue, total)
    del runner
    gc.collect()  # the runner is part of a reference cycle
    torch.cuda.empty_cache()
    budget = gpu_cache_bytes(loaded.config, total, used_by_others, peak + graphs)
    return GpuProfile(peak - weights, graphs, budget)


def graph_bytes(runner: ModelRunner, queue: DeviceQueue, total_bytes: int) -> int:
    """Bytes for all graphs of a runner, estimated from MEASURED_GRAPHS: at most GRAPH_SHARE of the card, beside the
    temporary memory.

    The first graph allocates the temporary memory that all share; every further graph takes its nodes, as much as the
    next ones on average. Those of a draft model, which come between, are recorded and not counted: they are smaller.
    """
    if runner.buckets is None or not runner.buckets.graphs.enabled:
        return 0
    graphs = runner.buckets.graphs
    free = [queue.free_bytes()]
    while len(free) <= MEASURED_GRAPHS + graphs.num_added and graphs.record_next():
        free.append(queue.free_bytes())
    if len(free) < 2 or not graphs.enabled:
        return 0
    counted = free[min(1 + graphs.num_added, len(free) - 1) :]
    each = max(0, counted[0] - counted[-1]) / max(1, len(counted) - 1)
    return max(0, free[0] - free[1]) + min(int(each * (graphs.num_keys - 1)), int(GRAPH_SHARE * total_bytes))


def _run_largest_step(loaded: LoadedDecoder, runner: ModelRunner) -> None:
    model, decoder, limits, device = loaded.model, loaded.decoder, loaded.limits, runner.device
    num_tokens = limits.max_num_batched_tokens
    kv_caches = [(k.zero_(), v.zero_()) for k, v in loaded.one_block()]
    metadata = _prefill_metadata(num_tokens, loaded, runner)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    hidden = decoder.forward(ids, metadata, kv_caches)
    rows = np.arange(limits.max_num_seqs)
    sampling = SamplingRows(len(rows), model.vocab_size, [], one_draw=True)
    for row in range(len(rows)):
        sampling.set(row, EVERYTHING_ON, seed=0, num_prompt_tokens=1)
    inputs = sampling.build(rows, rows, lambda array: torch.from_numpy(array).to(device))
    logits = decoder.compute_logits(hidden[torch.from_numpy(rows % num_tokens).to(device)])
    sample(logits, inputs, runner.sampler.counts)
    del logits
    every_row = torch.arange(num_tokens, device=device)
    compute_scores(hidden, decoder.compute_logits, every_row, ids, MAX_LOGPROBS, model.vocab_size)


def _prefill_metadata(num_tokens: int, loaded: LoadedDecoder, runner: ModelRunner) -> BatchMetadata:
    """A step full of prompts, each as long as the model takes it."""
    longest, block_size, device = loaded.max_model_len, loaded.config.block_size, runner.device
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
        plan=runner.batch.attention_plan,
    )
