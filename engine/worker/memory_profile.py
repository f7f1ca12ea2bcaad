"""How much memory the KV cache can have: on a GPU, what the largest step leaves free; on a CPU, what is free."""

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
from engine.worker.attention_warmup import AttentionSettings, make_attention_plan
from engine.worker.cache.kv_cache import (
    KVCacheSize,
    allocate_kv_caches,
    gpu_cache_bytes,
    host_cache_bytes,
    model_max_len,
    resolve_kv_format,
    size_kv_cache,
)
from engine.worker.decode_runner import DecodeRunner, DecodeSettings
from engine.worker.device.host import StepLimits, available_host_bytes
from engine.worker.device.queue import CudaQueue, DeviceQueue
from engine.worker.sampling.prompt_scorer import compute_scores
from engine.worker.sampling.sampler import TokenCounts, sample
from engine.worker.sampling.sampling_rows import EVERYTHING_ON, SamplingRows
from kernels.attention.flashinfer import FlashInferPrefill


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder with its weights on `device` in `dtype`, and the limits of its steps."""

    config: EngineConfig
    model: ModelConfig
    decoder: Decoder
    limits: StepLimits
    dtype: torch.dtype
    device: torch.device
    flashinfer: FlashInferPrefill | None = None

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens, before the size of the KV cache cuts it."""
        return model_max_len(self.config, self.model)

    @property
    def attention(self) -> AttentionSettings:
        return AttentionSettings(self.config.batch_invariant, self.flashinfer)

    def decode_settings(self, max_model_len: int) -> DecodeSettings:
        """How decode steps run. Steps of more than cuda_graph_max_num_seqs rows run like steps with prompts."""
        return DecodeSettings(
            capacity=min(self.limits.max_num_seqs, self.config.cuda_graph_max_num_seqs),
            max_num_seqs=self.limits.max_num_seqs,
            max_blocks=-(-max_model_len // self.config.block_size),
            hidden_size=self.model.hidden_size,
            dtype=self.dtype,
            graphs=self.config.cuda_graphs,
        )

    def one_block(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A KV cache of one block, for steps that write no token and whose results nothing reads."""
        kv_format = resolve_kv_format(self.config, self.model)
        return allocate_kv_caches(self.model, 1, self.config.block_size, self.dtype, self.device, kv_format)


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Bytes that a step needs beside the weights, that all CUDA graphs take, and that are left for the KV cache (may be
    negative)."""

    activations: int
    graphs: int
    cache_budget: int


def size_cache(loaded: LoadedDecoder) -> tuple[KVCacheSize, dict[str, int]]:
    """(the size of the KV cache, bytes that steps use beside the cache, by name). ConfigError where nothing fits."""
    config = loaded.config
    used: dict[str, int] = {}
    if loaded.device.type == "cuda":
        # With a queue of its own: the memory pool of recorded graphs cannot be used again once they are gone.
        profile = profile_gpu(loaded, CudaQueue(loaded.device))
        budget = available = profile.cache_budget
        used = {"activations": profile.activations, "cuda_graphs": profile.graphs}
        if loaded.flashinfer is not None:  # allocated before the weights, so not a part of the activations
            used["flashinfer"] = loaded.flashinfer.num_bytes
    else:
        available = available_host_bytes()
        budget = host_cache_bytes(config, available)
    size = size_kv_cache(
        config,
        loaded.model,
        dtype_bytes=loaded.dtype.itemsize,
        budget=budget,
        available=available,
        max_num_seqs=loaded.limits.max_num_seqs,
        on_gpu=loaded.device.type == "cuda",
    )
    return size, used


@torch.inference_mode()
def profile_gpu(loaded: LoadedDecoder, queue: DeviceQueue) -> GpuProfile:
    """Run the largest prefill, the scoring of all its tokens and the worst sampling once and read the peak; record the
    two largest CUDA graphs.

    Memory that other processes (and the driver itself) use of the card counts as used, because gpu_memory_utilization
    is a share of the whole card.
    """
    device = queue.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    _run_largest_step(loaded, device)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    graphs = decode_bytes(loaded, queue)
    gc.collect()  # the decode runner is part of a reference cycle
    torch.cuda.empty_cache()
    budget = gpu_cache_bytes(loaded.config.gpu_memory_utilization, total, used_by_others, peak + graphs)
    return GpuProfile(peak - weights, graphs, budget)


def decode_bytes(loaded: LoadedDecoder, queue: DeviceQueue) -> int:
    """Bytes that a DecodeRunner and all its graphs take, estimated from two graphs.

    The first graph allocates the memory that all share; every further graph takes as much as the second (its nodes).
    """
    config, model = loaded.config, loaded.model
    free = [queue.free_bytes()]
    attention_plan = make_attention_plan(model, loaded.limits.max_num_seqs, queue.device, config.batch_invariant)
    counts = TokenCounts(1, model.vocab_size, queue.device)
    settings = loaded.decode_settings(loaded.max_model_len)
    runner = DecodeRunner(queue, loaded.decoder, loaded.one_block(), counts, settings, attention_plan)
    if runner.graphs.enabled:
        for _ in range(2):
            runner.record_next()
            free.append(queue.free_bytes())
    else:
        free.append(queue.free_bytes())
    used = [before - after for before, after in pairwise(free)]
    return used[0] + max(0, used[-1]) * (len(runner.graphs.sizes) - 1) if runner.graphs.enabled else used[0]


def _run_largest_step(loaded: LoadedDecoder, device: torch.device) -> None:
    model, decoder, limits = loaded.model, loaded.decoder, loaded.limits
    num_tokens = limits.max_num_batched_tokens
    kv_caches = [(k.zero_(), v.zero_()) for k, v in loaded.one_block()]
    metadata = _prefill_metadata(num_tokens, loaded.max_model_len, loaded.config.block_size, device)
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
    """A step full of prompts, each as long as the model takes it."""
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
