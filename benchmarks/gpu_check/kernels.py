"""The time of every kernel at the shapes of Llama-3-8B (and of two mixtures of experts) in bf16, against what the card
can do and torch's own."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_check import moe, torch_peers
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.bounds import Limits
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Goal, Recorder, at_least
from benchmarks.gpu_check.timing import Stopwatch, pick_device
from benchmarks.kernel_speed import Case, Shape, decode_case, linear_cases, prefill_case, row_cases
from kernels.cache.copy_blocks import BlockCopier
from kernels.elementwise.layer_norm import layer_norm
from kernels.kv_format import KV_FORMATS

SHAPE = Shape(32, 8, 128, 4096, 14336, 128256)
TINY_SHAPE = Shape(4, 2, 32, 64, 96, 128)
# (sequences, context); the goal counts from 16 x 4096 up, where the keys and values fill the card's memory pipeline
DECODES = ((1, 1024), (1, 16384), (16, 1024), (16, 4096), (16, 16384), (64, 1024), (256, 1024), (64, 4096))
PREFILLS = ((1, 512, 512), (1, 1024, 1024), (1, 2048, 2048), (1, 8192, 8192), (1, 32768, 32768), (16, 512, 512),
            (1, 2048, 32768), (8, 1, 4096))  # sequences, chunk, context  # fmt: skip
ROWS, LINEAR_ROWS = (64, 8192), (1, 64, 8192)
TINY_DECODES, TINY_PREFILLS, TINY_ROWS = ((1, 64), (3, 40)), ((1, 16, 16), (2, 8, 24)), (2,)
DECODE_GOAL_TOKENS = 16 * 4096
PREFILL_GOAL_TOKENS, PREFILL_GOAL = 8192, 350e12  # on an H100
COPIED_BLOCKS = 64

MakeCase = Callable[[], Case]


def run(recorder: Recorder, setting: Setting) -> None:
    """A case is made right before it is timed, so that memory holds one at a time and a failure costs one."""
    device, limits = pick_device(setting.tiny), Limits.read(setting.folder / "limits.json")
    watch = Stopwatch(device, seconds=0.25)
    bench = Bench(recorder, device, watch, limits)
    for name, make in attention(setting.tiny, device):
        recorder.case(name, partial(time_attention, bench, make), seconds=60)
    shape, rows = (TINY_SHAPE, TINY_ROWS) if setting.tiny else (SHAPE, ROWS)
    for num_rows in rows:
        bench.series(f"row kernels, {num_rows} rows", row_cases(shape, num_rows, device))
        others(bench, shape, num_rows, device)
    for num_rows in TINY_ROWS if setting.tiny else LINEAR_ROWS:
        bench.series(f"linear layers, {num_rows} rows", linear_cases(shape, num_rows, device))
    moe.run(recorder, bench, setting.tiny)
    torch_peers.run(recorder, bench, shape, setting.tiny)


def attention(tiny: bool, device: torch.device) -> Iterator[tuple[str, MakeCase]]:
    shape = TINY_SHAPE if tiny else SHAPE
    decodes, prefills = (TINY_DECODES, TINY_PREFILLS) if tiny else (DECODES, PREFILLS)
    for num_seqs, context in decodes:
        yield f"decode {num_seqs} x {context}", partial(decode_case, shape, device, num_seqs, context)
    for kv_format in KV_FORMATS.values():
        num_seqs, context = decodes[-1]
        make = partial(decode_case, shape, device, num_seqs, context, kv_format)
        yield f"decode {kv_format.name} {num_seqs} x {context}", make
    for num_seqs, chunk, context in prefills:
        make = partial(prefill_case, shape, device, num_seqs, chunk, context)
        yield f"prefill {num_seqs} x {chunk} of {context}", make


def time_attention(bench: Bench, make: MakeCase) -> None:
    case = make()
    bench.time(case, attention_goal(case, bench.device))


def attention_goal(case: Case, device: torch.device) -> Goal | None:
    """Decode from 16 x 4096 tokens up: 95 % of the copy bandwidth. Prefill of 8192 on Hopper: 350 TFLOP/s."""
    counts = [int(word) for word in case.size.split() if word.isdigit()]
    if case.kernel == "paged_attention" and counts[0] >= 16 and counts[0] * counts[1] >= DECODE_GOAL_TOKENS:
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
