"""Attention with other tiles, stages and numbers of splits than those of kernels/attention/choices.py, at the shapes of
Llama-3-8B: what the table should hold. Only when it is asked for (--parts tiles): a compilation for every line."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.datasheets import find_limits
from benchmarks.gpu_check.kernels import SHAPE
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.timing import Stopwatch, pick_device
from benchmarks.kernel_speed import Case, Shape, make_plan, paged_batch
from kernels.attention.choices import Tile
from kernels.attention.decode import launch_decode
from kernels.attention.plan import AttentionPlan, AttentionShape, attention_shape
from kernels.attention.prefill import launch_prefill
from kernels.attention.tile import base_2_scale
from kernels.attention.work import StepWork
from kernels.cache.quantize import as_bytes
from kernels.kv_format import FP8, INT8, KVFormat
from kernels.tile_choice import TileChoice

# block_m, block_n, num_warps, num_stages; the first of each is the table's on Hopper. 3 stages fetch no tile ahead, 5
# one and 7 two (kernels/attention/choices.py).
PREFILL_TILES = (
    Tile(128, 64, 8, 5, overlaps=True), Tile(128, 64, 8, 5), Tile(128, 128, 8, 5), Tile(128, 128, 8, 3),
    Tile(128, 64, 8, 7), Tile(128, 64, 8, 3), Tile(64, 64, 4, 5), Tile(64, 64, 4, 3), Tile(64, 128, 4, 5),
    Tile(64, 32, 4, 5), Tile(128, 32, 8, 5),
)  # fmt: skip
DECODE_TILES = (
    Tile(16, 64, 4, 5), Tile(16, 64, 4, 3), Tile(16, 64, 4, 7), Tile(16, 32, 4, 5), Tile(16, 32, 4, 7),
    Tile(16, 128, 4, 3), Tile(16, 128, 8, 5), Tile(16, 64, 2, 5),
)  # fmt: skip
# Tiles for int8 and fp8 caches of head size 128: there converting codes to floats costs most of the instructions.
QUANTISED_TILES = (
    Tile(16, 32, 4, 5), Tile(16, 32, 4, 3), Tile(16, 64, 4, 5), Tile(16, 64, 8, 5), Tile(16, 128, 8, 5),
)  # fmt: skip
PREFILLS = ((1, 8192, 8192), (16, 512, 512), (1, 2048, 32768))  # sequences, chunk, context
DECODES = ((1, 1024), (16, 4096), (64, 1024), (256, 1024))  # sequences, context
MORE_SPLITS = (0.5, 1.5, 2.0, 4.0)  # times as many programs as the plan wants, with the table's tile


@dataclass(frozen=True, slots=True)
class FixedShape(AttentionShape):
    """A shape for which the table has one tile."""

    fixed: Tile = field(kw_only=True)

    def choice(self, use: str, capability: int, num_rows: int = 0) -> TileChoice[Tile]:
        del capability, num_rows
        return TileChoice(use, [self.fixed])


def run(recorder: Recorder, setting: Setting) -> None:
    device = pick_device(setting.tiny)
    if setting.tiny:
        recorder.skip("tiles of attention", "a CPU has none")
        return
    bench = Bench(recorder, device, Stopwatch(device, 0.1), find_limits(setting, recorder))
    for size in DECODES:
        sweep(bench, decodes(SHAPE, device, *size))
    for kv_format in (INT8, FP8):
        sweep(bench, decodes(SHAPE, device, *DECODES[1], kv_format))
    for size in PREFILLS:
        sweep(bench, prefills(SHAPE, device, *size))


def sweep(bench: Bench, cases: Iterator[Case]) -> None:
    """Each by itself: a tile that the device has no room for costs its own line."""
    for case in cases:
        bench.recorder.case(f"tile {case.kernel} {case.size}", partial(bench.time, case), seconds=40)


def decodes(
    shape: Shape, device: torch.device, num_seqs: int, context: int, kv_format: KVFormat | None = None
) -> Iterator[Case]:
    """One size with every tile, then with the table's and other numbers of splits."""
    q, k_cache, v_cache, *lengths = paged_batch(shape, num_seqs, context, num_seqs, device, kv_format)
    paged = as_bytes(k_cache), as_bytes(v_cache), *lengths
    plan = _roomy(make_plan(shape, num_seqs, device))
    tokens, out = num_seqs * context, torch.empty_like(q)
    scale, plain = base_2_scale(shape.head_dim**-0.5, 0.0), attention_shape(q, k_cache, None, 0, 0.0)
    tiles = DECODE_TILES if kv_format is None else QUANTISED_TILES
    choices = [(tile, 1.0) for tile in tiles] + [(tiles[0], more) for more in MORE_SPLITS]
    for tile, times in choices:
        busier = replace(plan, num_sms=max(1, round(plan.num_sms * times)))
        call = partial(launch_decode, _fixed(plain, tile), busier, q, *paged, None, *scale, None, out, work=StepWork())
        name = f"decode{f' {kv_format.name}' if kv_format else ''} {_name(tile)}"
        name += f", programs x {times:g}" if times != 1 else ""
        moved = tokens * 2 * shape.num_kv_heads * k_cache.shape[3] * k_cache.element_size()
        yield Case(name, f"{num_seqs} x {context}", call, moved, tokens * shape.flops_per_score)


def prefills(shape: Shape, device: torch.device, num_seqs: int, chunk: int, context: int) -> Iterator[Case]:
    """One size with every tile."""
    q, *paged, seq_lens = paged_batch(shape, num_seqs, context, num_seqs * chunk, device)
    plan, out = make_plan(shape, num_seqs, device), torch.empty_like(q)
    starts = torch.arange(0, num_seqs * chunk + 1, chunk, dtype=torch.int32, device=device)
    scale, plain = base_2_scale(shape.head_dim**-0.5, 0.0), attention_shape(q, paged[0], None, 0, 0.0)
    scores = num_seqs * chunk * (context - (chunk - 1) / 2)
    for tile in PREFILL_TILES:
        call = partial(
            launch_prefill, _fixed(plain, tile), plan, q, *paged, starts, seq_lens, chunk, None, *scale, None, out,
            work=StepWork(),
        )  # fmt: skip
        size = f"{num_seqs} x {chunk} of {context}"
        moved = 2 * (q.numel() + num_seqs * context * shape.num_kv_heads * shape.head_dim) * shape.dtype.itemsize
        yield Case(f"prefill {_name(tile)}", size, call, moved, scores * shape.flops_per_score)


def _fixed(plain: AttentionShape, tile: Tile) -> FixedShape:
    return FixedShape(**{f.name: getattr(plain, f.name) for f in fields(plain)}, fixed=tile)


def _roomy(plan: AttentionPlan) -> AttentionPlan:
    """With room for the partial results of MORE_SPLITS times as many programs."""
    return replace(plan, partial=plan.partial.new_empty(round(max(MORE_SPLITS) * plan.partial.numel())))


def _name(tile: Tile) -> str:
    overlap = " overlapped" if tile.overlaps else ""
    return f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}{overlap}"
