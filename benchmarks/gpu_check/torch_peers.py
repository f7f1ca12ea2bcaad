"""torch's own attention on contiguous copies of the same shapes: what paging costs, or gains."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.record import Recorder
from benchmarks.kernel_speed import Case, Shape, paged_batch
from kernels.attention.decode import paged_attention
from kernels.attention.prefill import prefill_attention

DECODES, PREFILLS = ((16, 4096), (64, 1024)), (1024, 8192)
FLEX = ((64, 1024),), (8192,)  # each is compiled for some seconds
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
        raise AssertionError(f"our result differs from torch's by {error:.2g} of its norm")
