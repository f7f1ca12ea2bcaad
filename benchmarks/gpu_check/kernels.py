"""The time of every kernel at the shapes of Llama-3-8B (and of two mixtures of experts) in bf16, against what the card
can do and torch's own."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_check import moe, quantized_rows, swaps, torch_peers
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.datasheets import find_limits
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Goal, Recorder, at_least, at_most
from benchmarks.gpu_check.timing import Stopwatch, pick_device
from benchmarks.kernel_speed import (
    Case,
    Shape,
    decode_case,
    prefill_case,
    row_cases,
    sampling_cases,
    uneven_decode_case,
)
from kernels.cache.copy_blocks import BlockCopier
from kernels.elementwise.layer_norm import layer_norm
from kernels.kv_format import KV_FORMATS

SHAPE = Shape(32, 8, 128, 4096, 14336, 128256)
TINY_SHAPE = Shape(4, 2, 32, 64, 96, 128)
# (sequences, context); the goal counts from 16 x 4096 up, where the keys and values fill the card's memory pipeline
DECODES = ((1, 1024), (64, 1024), (256, 1024), (16, 4096), (1, 16384), (16, 1024), (24, 1024), (32, 1024), (48, 1024),
           (16, 16384), (64, 4096))  # fmt: skip
UNEVEN = ({1024: 63, 32768: 1},)  # sequences of each context
PREFILLS = ((1, 8192, 8192), (1, 32, 32768), (1, 1024, 1024), (1, 512, 512), (1, 2048, 2048), (1, 32768, 32768),
            (16, 512, 512), (1, 2048, 32768), (8, 1, 4096))  # sequences, chunk, context  # fmt: skip
ROWS, SAMPLED_ROWS = (64, 8192), (256, 64, 1)
TINY_DECODES, TINY_PREFILLS, TINY_ROWS = ((1, 64), (3, 40)), ((1, 16, 16), (2, 8, 24)), (2,)
TINY_UNEVEN = ({16: 2, 40: 1},)
SHARED, TINY_SHARED = ((64, 4096, 3584), (16, 4096, 3584), (64, 1024, 768)), ((3, 40, 32),)
DECODE_GOAL_TOKENS = 16 * 4096
PREFILL_GOAL_TOKENS, PREFILL_GOAL = 8192, 350e12  # on an H100
COPIED_BLOCKS = 64

MakeCase = Callable[[], Case]


def run_attention(recorder: Recorder, setting: Setting) -> None:
    """A case is made right before it is timed, so that memory holds one at a time and a failure costs one."""
    bench = make_bench(recorder, setting)
    for name, make in attention(setting.tiny, bench.device):
        recorder.case(name, partial(time_attention, bench, make), seconds=30)


def run(recorder: Recorder, setting: Setting) -> None:
    """Kernels that work row by row, and the sampler's."""
    bench = make_bench(recorder, setting)
    shape, rows = (TINY_SHAPE, TINY_ROWS) if setting.tiny else (SHAPE, ROWS)
    if setting.tiny:
        recorder.skip("sampling kernels", "a CPU samples otherwise")
    else:
        for num_rows in SAMPLED_ROWS:
            bench.series(f"sampling, {num_rows} rows", sampling_cases(num_rows, bench.device), sampling_goal)
    for num_rows in rows:
        bench.series(f"row kernels, {num_rows} rows", row_cases(shape, num_rows, bench.device))
        quantized_rows.run(bench, shape, num_rows)
        others(bench, shape, num_rows, bench.device)


def run_peers(recorder: Recorder, setting: Setting) -> None:
    """Mixtures of experts and attention beside torch's own, and swaps. Swaps last: host memory that they register with
    the driver stays registered, and what the allocator puts there later would be read from pages that are gone."""
    bench = make_bench(recorder, setting)
    moe.run(recorder, bench, setting.tiny)
    torch_peers.run(recorder, bench, TINY_SHAPE if setting.tiny else SHAPE, setting.tiny)
    swaps.run(recorder, bench.device, setting.tiny)


def make_bench(recorder: Recorder, setting: Setting) -> Bench:
    device = pick_device(setting.tiny)
    return Bench(recorder, device, Stopwatch(device, seconds=0.15), find_limits(setting, recorder))


def attention(tiny: bool, device: torch.device) -> Iterator[tuple[str, MakeCase]]:
    """Decode before prefill, and sizes with goals before others."""
    shape = TINY_SHAPE if tiny else SHAPE
    decodes, prefills = (TINY_DECODES, TINY_PREFILLS) if tiny else (DECODES, PREFILLS)
    for num_seqs, context in decodes:
        yield f"decode {num_seqs} x {context}", partial(decode_case, shape, device, num_seqs, context)
    for lengths in TINY_UNEVEN if tiny else UNEVEN:
        label = " + ".join(f"{count} x {context}" for context, count in lengths.items())
        yield f"decode {label}", partial(uneven_decode_case, shape, device, lengths)
    for num_seqs, context, shared in TINY_SHARED if tiny else SHARED:
        make = partial(decode_case, shape, device, num_seqs, context, shared=shared)
        yield f"decode {num_seqs} x {context}, {shared} shared", make
    for num_seqs, chunk, context in prefills:
        make = partial(prefill_case, shape, device, num_seqs, chunk, context)
        yield f"prefill {num_seqs} x {chunk} of {context}", make
    for kv_format in KV_FORMATS.values():
        num_seqs, context = decodes[-1]
        make = partial(decode_case, shape, device, num_seqs, context, kv_format)
        yield f"decode {kv_format.name} {num_seqs} x {context}", make


def sampling_goal(case: Case) -> Goal | None:
    """Flat rows, whose nucleus is wide, at 256 rows: 0.3 ms."""
    return at_most(300.0) if "temperature 2" in case.kernel and case.size.startswith("256 ") else None


def time_attention(bench: Bench, make: MakeCase) -> None:
    case = make()
    bench.time(case, attention_goal(case, bench.device, bench.limits.copy))


def attention_goal(case: Case, device: torch.device, copy_bandwidth: float = 0.0) -> Goal | None:
    """Decode from 16 x 4096 tokens up: 95 % of the bandwidth of a copy, in bytes/s; where that was not measured, of the
    share of the limits. Prefill of 8192 on Hopper: 350 TFLOP/s."""
    counts = [int(word) for word in case.size.split() if word.isdigit()]
    if "shared" in case.size:
        return None
    if case.kernel == "paged_attention" and counts[0] >= 16 and counts[0] * counts[1] >= DECODE_GOAL_TOKENS:
        if copy_bandwidth:
            return at_most(case.num_bytes / (0.95 * copy_bandwidth) * 1e6, text=">= 95 % of a copy")
        return at_least(0.95, on="share")
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if case.kernel == "prefill_attention" and counts == [1, PREFILL_GOAL_TOKENS, PREFILL_GOAL_TOKENS] and hopper:
        most = case.flops / PREFILL_GOAL * 1e6
        return Goal(">= 350 TFLOP/s", most=most)
    return None


def others(bench: Bench, shape: Shape, num_rows: int, device: torch.device) -> None:
    """Kernels that benchmarks/kernel_speed.py has no row for: LayerNorm, and copies of whole blocks."""
    item = shape.dtype.itemsize

    def norm() -> None:
        x, residual = (torch.randn(num_rows, shape.hidden_size, device=device).to(shape.dtype) for _ in range(2))
        weight, bias = (torch.randn(shape.hidden_size, device=device).to(shape.dtype) for _ in range(2))
        call = partial(layer_norm, x, weight, bias, 1e-5, residual)
        bench.time(Case("layer_norm + residual", f"{num_rows} rows", call, 4 * x.numel() * item))

    def copy() -> None:
        count = min(num_rows, COPIED_BLOCKS)
        pages = (2 * count, shape.num_kv_heads, shape.block_size, shape.head_dim)
        copier = BlockCopier([torch.randn(pages, device=device).to(shape.dtype) for _ in range(64)])  # 32 layers
        blocks = torch.arange(2 * count, device=device)
        call = partial(copier.copy, blocks[:count], blocks[count:])
        bench.time(Case("copy_blocks, 32 layers", f"{count} blocks", call, 2 * count * copier.block_bytes))

    bench.recorder.case(f"layer_norm + residual {num_rows} rows", norm, seconds=40)
    bench.recorder.case(f"copy_blocks {min(num_rows, COPIED_BLOCKS)} blocks", copy, seconds=40)
