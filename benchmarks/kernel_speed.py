"""`python benchmarks/kernel_speed.py [--json PATH]`: time every kernel on this machine, at the shapes of one model.

Each line gives the best of several runs, the bytes it must move and the FLOPs it must do, and the larger of its two
shares: of the copy bandwidth and of the matmul rate, both measured here first. The default shape is a 90 M LLaMA (12
heads, 4 KV heads, head size 64, hidden 768, intermediate 2048), bf16. Mixtures of experts have the shapes of Mixtral
8x7B and Qwen3-30B-A3B, on a CPU an eighth of each expert.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.attention.decode import paged_attention
from kernels.attention.plan import AttentionPlan, attention_plan
from kernels.attention.prefill import prefill_attention
from kernels.attention.work import StepWork
from kernels.cache.reshape_and_cache import reshape_and_cache
from kernels.cache.rope_and_cache import QKVHeads, rope_and_cache
from kernels.elementwise.activation import gated_activation
from kernels.elementwise.layer_norm import layer_norm
from kernels.elementwise.rms_norm import rms_norm
from kernels.elementwise.rotary_embedding import rotary_embedding
from kernels.kv_format import KV_FORMATS, KVFormat
from kernels.linear.moe import Experts
from kernels.linear.moe_routing import RoutingRule, route
from kernels.linear.packed import PackedLinear
from kernels.sampling.draw import draw_tokens
from kernels.sampling.logits import largest_logits


@dataclass(frozen=True)
class Shape:
    """The sizes of one decoder layer."""

    num_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64
    hidden_size: int = 768
    intermediate_size: int = 2048
    vocab_size: int = 8192
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def flops_per_score(self) -> int:
        """FLOPs of one query token against one key, all heads."""
        return 4 * self.num_heads * self.head_dim


@dataclass(frozen=True)
class MoEShape:
    """The experts of one layer. `shards`: each expert is a part of one, cut along the inner size as between GPUs."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    shards: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def inner_size(self) -> int:
        return self.intermediate_size // self.shards

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden_size * self.inner_size


MOE_SHAPES = (MoEShape("Mixtral", 8, 2, 4096, 14336), MoEShape("Qwen3-MoE", 128, 8, 2048, 768))
MOE_TOKENS = (1, 16, 64, 256, 4096)  # tokens per step: decodes, and a prefill
CPU_SHARDS = 8


@dataclass(frozen=True)
class Case:
    """One call, what it must read and write, and what it must compute."""

    kernel: str
    size: str
    call: Callable[[], object]
    num_bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Result:
    """A timed case."""

    kernel: str
    size: str
    microseconds: float
    gigabytes_per_second: float
    gigaflops: float
    share: float  # the larger of two: share of the copy bandwidth, share of the matmul rate


def best_seconds(call: Callable[[], object], device: torch.device, budget: float = 0.5) -> float:
    """The fastest of at least 5 runs, for about `budget` seconds: noise on a shared machine only ever adds."""
    best, runs, started = float("inf"), 0, time.perf_counter()
    while runs < 7 or time.perf_counter() - started < budget:
        _synchronize(device)
        begin = time.perf_counter()
        call()
        _synchronize(device)
        if runs >= 2:  # the first ones compile and warm up
            best = min(best, time.perf_counter() - begin)
        runs += 1
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_limits(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes/s of a large copy, reads and writes counted; FLOP/s of a large linear layer)."""
    source = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / best_seconds(lambda: target.copy_(source), device)
    rows, size = (1024, 2048) if device.type == "cpu" else (8192, 8192)
    layer = PackedLinear(torch.randn(size, size, device=device).to(dtype))
    x = torch.randn(rows, size, device=device).to(dtype)
    return bandwidth, 2 * rows * size * size / best_seconds(lambda: layer(x), device, budget=3)


def attention_cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    """Decode over the batch sizes and contexts that matter, prefill whole and in chunks."""
    for num_seqs, context in ((1, 160), (16, 160), (64, 160), (1, 4096), (64, 1024)):
        yield decode_case(shape, device, num_seqs, context)
    yield decode_case(shape, device, 64, 1024, shared=768)
    for kv_format in KV_FORMATS.values():
        for num_seqs, context in ((16, 160), (1, 4096), (64, 1024)):
            yield decode_case(shape, device, num_seqs, context, kv_format)
    for num_seqs, chunk, context in ((1, 128, 128), (16, 128, 128), (1, 512, 512), (1, 512, 2048), (1, 2048, 2048)):
        yield prefill_case(shape, device, num_seqs, chunk, context)


def decode_case(
    shape: Shape, device: torch.device, num_seqs: int, context: int, kv_format: KVFormat | None = None, shared: int = 0
) -> Case:
    """One token of each of `num_seqs` sequences against `context` cached ones, the first `shared` of which are the same
    for all."""
    q, *paged = paged_batch(shape, num_seqs, context, num_seqs, device, kv_format)
    blocks = shared // shape.block_size
    paged[2][:, :blocks] = paged[2][0, :blocks].clone()
    plan, work = make_plan(shape, num_seqs, device), StepWork()  # the map of a step serves all its layers
    tokens, scale = num_seqs * context, shape.head_dim**-0.5
    width = kv_format.width(shape.head_dim) if kv_format else shape.head_dim * shape.dtype.itemsize
    name = f"paged_attention {kv_format.name}" if kv_format else "paged_attention"
    size = f"{num_seqs} x {context}" + (f", {shared} shared" if shared else "")
    moved = (tokens - (num_seqs - 1) * shared) * 2 * shape.num_kv_heads * width
    return Case(name, size, lambda: paged_attention(q, *paged, scale, plan=plan, work=work), moved,
                tokens * shape.flops_per_score)  # fmt: skip


def prefill_case(shape: Shape, device: torch.device, num_seqs: int, chunk: int, context: int) -> Case:
    """The last `chunk` tokens of each of `num_seqs` sequences of `context`."""
    q, k_cache, v_cache, block_tables, seq_lens = paged_batch(shape, num_seqs, context, num_seqs * chunk, device)
    cu_seqlens_q = torch.arange(0, num_seqs * chunk + 1, chunk, dtype=torch.int32, device=device)
    arguments = q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, chunk, shape.head_dim**-0.5
    attend = partial(prefill_attention, *arguments, plan=make_plan(shape, num_seqs, device), work=StepWork())
    scores = num_seqs * chunk * (context - (chunk - 1) / 2)
    row = shape.num_kv_heads * shape.head_dim * 2 * shape.dtype.itemsize  # bytes of one token's K and V in one layer
    moved = num_seqs * context * row + 2 * q.numel() * shape.dtype.itemsize
    return Case("prefill_attention", f"{num_seqs} x {chunk} of {context}", attend, moved,
                scores * shape.flops_per_score)  # fmt: skip


def make_plan(shape: Shape, num_seqs: int, device: torch.device) -> AttentionPlan | None:
    """As the engine makes it, once for all steps; a CPU has none."""
    if device.type == "cpu":
        return None
    return attention_plan(
        device, max_num_seqs=num_seqs, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )  # fmt: skip


def paged_batch(
    shape: Shape, num_seqs: int, context: int, num_rows: int, device: torch.device, kv_format: KVFormat | None = None
) -> tuple[Tensor, ...]:
    """Queries, k_cache, v_cache, block_tables and seq_lens of sequences of one length, in blocks out of order."""
    blocks_per_seq = -(-context // shape.block_size)
    num_blocks = num_seqs * blocks_per_seq
    k_cache, v_cache = (_cache(shape, num_blocks, device, kv_format) for _ in range(2))
    rows = torch.randn(num_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim, device=device).to(shape.dtype)
    reshape_and_cache(rows, rows, k_cache, v_cache, torch.arange(len(rows), device=device))
    block_tables = torch.randperm(num_blocks, device=device).int().view(num_seqs, blocks_per_seq)
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
    return fused_queries(shape, num_rows, device), k_cache, v_cache, block_tables, seq_lens


def fused_queries(shape: Shape, num_rows: int, device: torch.device) -> Tensor:
    """Queries as a model has them: a view of the rows that hold keys and values, too. Triton compiles another kernel
    for rows that are adjacent."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(num_rows, heads, shape.head_dim, device=device).to(shape.dtype)
    return qkv[:, : shape.num_heads]


def uneven_decode_case(shape: Shape, device: torch.device, lengths: Mapping[int, int]) -> Case:
    """decode_case with sequences of several lengths: `lengths` maps a context to the number of its sequences."""
    contexts = [context for context, count in lengths.items() for _ in range(count)]
    blocks = [-(-context // shape.block_size) for context in contexts]
    q, k_cache, v_cache, tables, _ = paged_batch(shape, 1, sum(blocks) * shape.block_size, len(contexts), device)
    block_tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int32, device=device)
    for row, part in zip(block_tables, tables[0].split(blocks), strict=True):
        row[: len(part)] = part
    seq_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    plan, scale, tokens = make_plan(shape, len(contexts), device), shape.head_dim**-0.5, sum(contexts)
    return Case("paged_attention", " + ".join(f"{count} x {context}" for context, count in lengths.items()),
                lambda: paged_attention(q, k_cache, v_cache, block_tables, seq_lens, scale, plan=plan),
                tokens * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize,
                tokens * shape.flops_per_score)  # fmt: skip


def _cache(shape: Shape, num_blocks: int, device: torch.device, kv_format: KVFormat | None = None) -> Tensor:
    dtype = getattr(torch, kv_format.dtype_name) if kv_format else shape.dtype
    width = kv_format.width(shape.head_dim) if kv_format else shape.head_dim
    return torch.empty((num_blocks, shape.num_kv_heads, shape.block_size, width), dtype=dtype, device=device)


def row_cases(shape: Shape, num_rows: int, device: torch.device) -> Iterator[Case]:
    """The operators that work row by row, at one number of tokens."""
    hidden, wide, item, size = shape.hidden_size, shape.intermediate_size, shape.dtype.itemsize, f"{num_rows} rows"
    x, residual, weight = (torch.randn(n, device=device).to(shape.dtype)
                           for n in ((num_rows, hidden), (num_rows, hidden), (hidden,)))  # fmt: skip
    gate_up = torch.randn(num_rows, 2 * wide, device=device).to(shape.dtype)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(num_rows, heads, shape.head_dim, device=device).to(shape.dtype)
    q, key, value = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    cos_sin_cache = torch.rand(num_rows, shape.head_dim, device=device)
    positions = torch.arange(num_rows, device=device)
    num_blocks = -(-num_rows // shape.block_size)
    k_cache, v_cache = (_cache(shape, num_blocks, device) for _ in range(2))
    yield Case("rms_norm + residual", size, lambda: rms_norm(x, weight, 1e-5, residual), 4 * x.numel() * item)
    yield Case(
        "layer_norm + residual", size, lambda: layer_norm(x, weight, weight, 1e-5, residual), 4 * x.numel() * item
    )
    yield Case("gated_activation silu", size, lambda: gated_activation(gate_up, "silu"), 1.5 * gate_up.numel() * item)
    yield Case("rotary_embedding", size, lambda: rotary_embedding(positions, q, key, cos_sin_cache),
               2 * (q.numel() + key.numel()) * item)  # fmt: skip
    yield Case("reshape_and_cache", size, lambda: reshape_and_cache(key, value, k_cache, v_cache, positions),
               4 * key.numel() * item)  # fmt: skip
    fused = QKVHeads(shape.num_heads, shape.num_kv_heads, cos_sin_cache)
    yield Case("rope_and_cache", size, lambda: rope_and_cache(qkv, fused, positions, positions, k_cache, v_cache),
               2 * qkv.numel() * item)  # fmt: skip
    for kv_format in KV_FORMATS.values():
        pages = [_cache(shape, num_blocks, device, kv_format) for _ in range(2)]
        yield Case(f"reshape_and_cache {kv_format.name}", size,
                   lambda pages=pages: reshape_and_cache(key, value, *pages, positions),
                   2 * key.numel() * item + 2 * num_rows * shape.num_kv_heads * kv_format.width(shape.head_dim)
                   )  # fmt: skip


def sampling_cases(num_rows: int, device: torch.device) -> Iterator[Case]:
    """A GPU's sampler over a vocabulary of today. The bytes are those of one read of the logits for each launch over
    them; rows that stay in L2 may be faster."""
    logits = 4 * torch.randn(num_rows, 128256, device=device).to(torch.bfloat16)
    token_ids, largest, _ = largest_logits(logits)
    rows, num_bytes = torch.arange(num_rows, device=device), logits.numel() * logits.element_size()
    given = {"rows": rows, "temperature": torch.full((num_rows,), 0.8, device=device),
             "uniform": torch.rand(num_rows, dtype=torch.float64, device=device)}  # fmt: skip
    nucleus = given | {"top_p": torch.full((num_rows,), 0.95, dtype=torch.float64, device=device)}
    flat = nucleus | {"top_p": torch.full((num_rows,), 0.99, dtype=torch.float64, device=device),
                      "temperature": torch.full((num_rows,), 2.0, device=device)}  # fmt: skip
    best = given | {"top_k": torch.full((num_rows,), 50, device=device)}
    size = f"{num_rows} x 128256"
    yield Case("sampling greedy", size, lambda: largest_logits(logits), num_bytes)
    for name, arguments, reads in (
        ("plain", given, 1),
        ("top_p 0.95", nucleus, 2),
        ("top_p 0.99, temperature 2", flat, 2),
        ("top_k 50", best, 2),
    ):
        yield Case(f"sampling {name}", size,
                   lambda arguments=arguments: draw_tokens(logits, None, largest, token_ids, **arguments),
                   reads * num_bytes)  # fmt: skip


def linear_cases(shape: Shape, num_rows: int, device: torch.device) -> Iterator[Case]:
    """The linear layers of one decoder layer and the head; each weight is followed by others, as in a model."""
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    sizes = {"qkv": (qkv, shape.hidden_size), "out": (shape.hidden_size, shape.num_heads * shape.head_dim),
             "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
             "down": (shape.hidden_size, shape.intermediate_size),
             "head": (shape.vocab_size, shape.hidden_size)}  # fmt: skip
    for name, (n_out, n_in) in sizes.items():
        copies = max(1, (96 << 20) // (n_out * n_in * shape.dtype.itemsize))  # more than any cache holds
        layers = [PackedLinear(torch.randn(n_out, n_in, device=device).to(shape.dtype)) for _ in range(copies)]
        x = torch.randn(num_rows, n_in, device=device).to(shape.dtype)
        turn = iter(range(10**9))
        moved = (n_out * n_in + num_rows * (n_in + n_out)) * shape.dtype.itemsize
        yield Case(f"linear {name}", f"{num_rows} rows", lambda la=layers, t=turn, x=x: la[next(t) % len(la)](x), moved,
                   2 * num_rows * n_out * n_in)  # fmt: skip


@dataclass(frozen=True)
class MoELayer:
    """Plain weights, which are also the kernels' on a GPU, and the layer that was made of them."""

    shape: MoEShape
    gate_up: Tensor  # [num_experts, 2 * inner, hidden]
    down: Tensor  # [num_experts, hidden, inner]
    experts: Experts

    @classmethod
    def random(cls, shape: MoEShape, device: torch.device) -> "MoELayer":
        def weights(rows: int, columns: int) -> Tensor:
            size = (shape.num_experts, rows, columns)
            return torch.randn(size, dtype=shape.dtype, device=device).mul_(columns**-0.5)

        gate_up = weights(2 * shape.inner_size, shape.hidden_size)
        down = weights(shape.hidden_size, shape.inner_size)
        return cls(shape, gate_up, down, Experts(gate_up, down))

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Hidden states, and router logits that make all experts equally likely."""
        x, logits = (torch.randn(num_tokens, n, device=self.down.device).to(self.shape.dtype)
                     for n in (self.shape.hidden_size, self.shape.num_experts))  # fmt: skip
        return x, logits


def moe_case(layer: MoELayer, x: Tensor, logits: Tensor) -> Case:
    """The experts of one layer, from the router's logits to the sum. The weights of experts that have tokens are read
    once; FLOPs are those of every token's own experts."""
    shape, num_tokens, rule = layer.shape, len(x), RoutingRule(layer.shape.top_k, True)
    reached = len(route(logits, rule).experts.unique())
    moved = reached * shape.expert_parameters + 2 * x.numel() + logits.numel()
    return Case(f"moe {shape.name}", f"{num_tokens} rows", lambda: layer.experts(x, route(logits, rule)),
                moved * shape.dtype.itemsize, 2 * num_tokens * shape.top_k * shape.expert_parameters)  # fmt: skip


def moe_cases(shape: MoEShape, device: torch.device) -> Iterator[Case]:
    """One layer at every number of tokens."""
    layer = MoELayer.random(shape, device)
    for num_tokens in MOE_TOKENS:
        yield moe_case(layer, *layer.inputs(num_tokens))


def cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    """Everything, in the order of the table."""
    yield from attention_cases(shape, device)
    for num_rows in (1, 64, 2048):
        yield from row_cases(shape, num_rows, device)
    for num_rows in (1, 64, 256) if device.type == "cuda" else ():
        yield from sampling_cases(num_rows, device)
    for num_rows in (1, 16, 64, 512):
        yield from linear_cases(shape, num_rows, device)
    for moe in MOE_SHAPES:
        yield from moe_cases(moe if device.type == "cuda" else replace(moe, shards=CPU_SHARDS), device)


def main() -> None:
    """Print the table as it is measured, then write it where --json says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here as well")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name contains TEXT")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, shape = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Shape()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {args.threads} threads"
    bandwidth, rate = measure_limits(device, shape.dtype)
    print(f"{name}: copies at {bandwidth / 1e9:.1f} GB/s, matmul at {rate / 1e9:.0f} GFLOP/s ({shape.dtype})")
    print(f"{'kernel':<24}{'size':<20}{'us':>10}{'GB/s':>9}{'GFLOP/s':>9}{'share':>8}")
    results = []
    for case in cases(shape, device):
        if args.only not in case.kernel:
            continue
        seconds = best_seconds(case.call, device)
        share = max(case.num_bytes / seconds / bandwidth, case.flops / seconds / rate)
        result = Result(case.kernel, case.size, seconds * 1e6, case.num_bytes / seconds / 1e9,
                        case.flops / seconds / 1e9, share)  # fmt: skip
        results.append(result)
        print(f"{result.kernel:<24}{result.size:<20}{result.microseconds:>10.1f}{result.gigabytes_per_second:>9.1f}"
              f"{result.gigaflops:>9.0f}{result.share:>8.0%}", flush=True)  # fmt: skip
    if args.json:
        limits = {"copy_gigabytes_per_second": bandwidth / 1e9, "matmul_gigaflops": rate / 1e9}
        report = {"device": name, "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
                  "limits": limits, "results": [asdict(result) for result in results]}  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
