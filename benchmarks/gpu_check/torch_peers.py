"""Attention of others on the same shapes: torch's own on contiguous copies, which shows what paging costs or gains, and
FlashInfer's on our pages, where it is installed."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.record import Recorder
from benchmarks.kernel_speed import Case, Shape, paged_batch
from engine.worker.device.queue import CudaQueue, DeviceQueue
from kernels.attention.decode import paged_attention
from kernels.attention.flashinfer import FlashInferPrefill, PromptAttention, import_flashinfer
from kernels.attention.prefill import prefill_attention

DECODES, PREFILLS = ((16, 4096), (64, 1024)), (1024, 8192)
FLEX = ((64, 1024),), (8192,)  # each is compiled for some seconds
FLASHINFER = ((1, 1024, 1024), (1, 8192, 8192), (16, 512, 512), (1, 2048, 32768))  # sequences, chunk, context
NUM_PLANS = 20
TINY_DECODES, TINY_PREFILLS = ((2, 32),), (16,)
MAX_ERROR = 0.02  # |ours - theirs| / |theirs| in bf16

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(recorder: Recorder, bench: Bench, shape: Shape, tiny: bool) -> None:
    """SDPA and flex_attention, decode and prefill; their results are compared with ours on the way."""
    for peer, make, decodes, prefills in (("SDPA", sdpa, DECODES, PREFILLS), ("flex_attention", flex, *FLEX)):
        for num_seqs, context in TINY_DECODES if tiny else decodes:
            name = f"{peer} decode {num_seqs} x {context}"
            measure = partial(decode, bench, shape, peer, make, num_seqs=num_seqs, context=context)
            recorder.case(name, measure, seconds=60)
        for length in TINY_PREFILLS if tiny else prefills:
            name = f"{peer} prefill 1 x {length} of {length}"
            recorder.case(name, partial(prefill, bench, shape, peer, make, length), seconds=60)
    run_flashinfer(recorder, bench, shape)


def run_flashinfer(recorder: Recorder, bench: Bench, shape: Shape) -> None:
    """FlashInfer's prefill beside ours: these figures decide if --attention-backend auto may choose it. The first case
    compiles its kernels."""
    try:
        import_flashinfer()
    except ImportError as error:
        recorder.skip("FlashInfer", str(error))
        return
    if bench.device.type != "cuda":
        recorder.skip("FlashInfer", "no CUDA device")
        return
    for i, (num_seqs, chunk, context) in enumerate(FLASHINFER):
        measure = partial(flashinfer, bench, shape, CudaQueue(bench.device), num_seqs, chunk, context)
        recorder.case(f"FlashInfer prefill {num_seqs} x {chunk} of {context}", measure, seconds=60 if i else 300)


@torch.no_grad()
def flashinfer(bench: Bench, shape: Shape, queue: DeviceQueue, num_seqs: int, chunk: int, context: int) -> None:
    """The last `chunk` tokens of each sequence: the time of a layer, and the host time of the plan of a step."""
    q, k_cache, v_cache, tables, seq_lens = paged_batch(shape, num_seqs, context, num_seqs * chunk, bench.device)
    scale, size = shape.head_dim**-0.5, f"{num_seqs} x {chunk} of {context}"
    attention = PromptAttention(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        block_size=shape.block_size, dtype=shape.dtype, scale=scale, softcap=0.0, windows=(0,),
    )  # fmt: skip
    prefill = FlashInferPrefill(queue, attention, num_seqs)
    starts, lengths = np.arange(num_seqs + 1) * chunk, np.full(num_seqs, context)
    planned, out = prefill.plan(starts, lengths, tables.flatten()), torch.empty_like(q)
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=bench.device) * chunk
    ours = prefill_attention(q, k_cache, v_cache, tables, bounds, seq_lens, max_seqlen_q=chunk, scale=scale)
    compare(ours, planned.attend(q, k_cache, v_cache, 0, out))
    queue.mark().wait()
    started = time.perf_counter()
    for _ in range(NUM_PLANS):
        planned = prefill.plan(starts, lengths, tables.flatten())
    seconds = (time.perf_counter() - started) / NUM_PLANS
    bench.recorder.figure(f"FlashInfer plan {size}", seconds * 1e6, "us", by="FlashInfer")
    row = shape.num_kv_heads * shape.head_dim * 2 * shape.dtype.itemsize  # bytes of one token's K and V
    moved = num_seqs * context * row + 2 * q.numel() * shape.dtype.itemsize
    scores = num_seqs * chunk * (context - (chunk - 1) / 2)
    call = partial(planned.attend, q, k_cache, v_cache, 0, out)
    bench.time(Case("FlashInfer prefill", size, call, moved, scores * shape.flops_per_score), by="FlashInfer")


def sdpa(causal: bool, length: int, device: torch.device) -> Attend:
    """scaled_dot_product_attention, whichever backend torch picks."""
    del length, device
    return partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)


def flex(causal: bool, length: int, device: torch.device) -> Attend:
    """Compiled flex_attention on a GPU, with a block mask for the diagonal; as it is on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(_visible, None, None, length, length, device=str(device)) if causal else None
    compiled = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    return partial(compiled, block_mask=mask, enable_gqa=True)


def _visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@torch.no_grad()
def decode(bench: Bench, shape: Shape, peer: str, make: Callable[..., Attend], num_seqs: int, context: int) -> None:
    q, k_cache, v_cache, tables, seq_lens = paged_batch(shape, num_seqs, context, num_seqs, bench.device)
    keys, values = (contiguous(cache, tables, context) for cache in (k_cache, v_cache))
    attend, query = make(False, context, bench.device), q.unsqueeze(2)  # [num_seqs, heads, 1, head_dim]
    ours = paged_attention(q, k_cache, v_cache, tables, seq_lens, shape.head_dim**-0.5)
    compare(ours, attend(query, keys, values).squeeze(2))
    moved = 2 * keys.numel() * shape.dtype.itemsize
    call = partial(attend, query, keys, values)
    case = Case(f"{peer} decode", f"{num_seqs} x {context}", call, moved, num_seqs * context * shape.flops_per_score)
    bench.time(case, by=peer)


@torch.no_grad()
def prefill(bench: Bench, shape: Shape, peer: str, make: Callable[..., Attend], length: int) -> None:
    q, k_cache, v_cache, tables, seq_lens = paged_batch(shape, 1, length, length, bench.device)
    keys, values = (contiguous(cache, tables, length) for cache in (k_cache, v_cache))
    attend, query = make(True, length, bench.device), q.transpose(0, 1).unsqueeze(0).contiguous()
    bounds = torch.tensor([0, length], dtype=torch.int32, device=bench.device)
    scale = shape.head_dim**-0.5
    ours = prefill_attention(q, k_cache, v_cache, tables, bounds, seq_lens, max_seqlen_q=length, scale=scale)
    compare(ours, attend(query, keys, values)[0].transpose(0, 1))
    scores = length * (length + 1) / 2
    moved = 2 * (keys.numel() + query.numel()) * shape.dtype.itemsize
    call = partial(attend, query, keys, values)
    case = Case(f"{peer} prefill", f"1 x {length} of {length}", call, moved, scores * shape.flops_per_score)
    bench.time(case, by=peer)


def contiguous(cache: Tensor, tables: Tensor, context: int) -> Tensor:
    """Pages -> [num_seqs, num_kv_heads, context, head_dim]."""
    pages = cache[tables.long()]  # [num_seqs, blocks, heads, block_size, head_dim]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous()


def compare(ours: Tensor, theirs: Tensor) -> None:
    """AssertionError where the results differ by more than rounding."""
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not error < MAX_ERROR:  # NaN is no number below it
        raise AssertionError(f"our result differs from theirs by {error:.2g} of its norm")
