"""Start-up by phases, recorded graphs against eager steps with poisoned padding, and a cache above 2^31 elements."""

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu_check.fabricated import BareRunner, Fabricated, load_bare
from benchmarks.gpu_check.kernels import SHAPE, TINY_SHAPE
from benchmarks.gpu_check.names import LLAMA, QWEN
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder, at_most
from benchmarks.gpu_check.shapes import write_model
from benchmarks.gpu_check.timing import pick_device, synchronize
from benchmarks.kernel_speed import Shape, fused_queries, make_plan
from engine.config import EngineConfig
from engine.executor.step import SequenceStep, StepPlan
from engine.worker.device.cuda_graphs import Bucket, decode_sizes, mixed_buckets
from engine.worker.device.queue import CudaQueue
from engine.worker.load import load_runner
from kernels.attention.decode import paged_attention
from kernels.attention.prefill import prefill_attention
from kernels.cache.reshape_and_cache import reshape_and_cache

CONTEXT, TINY_CONTEXT, TINY_SIZES = 200, 20, (1, 2, 4)
MIXED_TOKENS = 2048
TINY_MIXED = (Bucket(16, 4),)
MANY_ELEMENTS, TINY_ELEMENTS = (1 << 31) + (1 << 22), 1 << 16
# Hidden states in bf16 behind 28 layers may differ so much: a graph pads, and cuBLAS may compute more rows otherwise.
# An H100 showed 0.03.
MAX_ERROR = 0.05


def run(recorder: Recorder, setting: Setting) -> None:
    device = pick_device(setting.tiny)
    recorder.case("a cache above 2^31 elements", partial(large_pool, recorder, setting, device), seconds=40)
    for name in (QWEN, LLAMA):
        recorder.case(f"{name}: start-up", partial(start_up, name, recorder, setting, device), seconds=60)
        _free(device)
    pair: list[Pair] = []
    for size in TINY_SIZES if setting.tiny else decode_sizes(256):
        recorder.case(f"graph against eager, {size} rows", partial(same, pair, recorder, setting, device, size),
                      seconds=40)  # fmt: skip
    for bucket in TINY_MIXED if setting.tiny else mixed_buckets(MIXED_TOKENS, 256):
        name = f"graph against eager, {bucket.tokens} tokens, {bucket.seqs} sequences"
        recorder.case(name, partial(same_mixed, pair, recorder, setting, device, name, bucket), seconds=40)
    pair.clear()
    _free(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Spent:
    """Seconds and calls of something that happens inside other phases."""

    seconds: float = 0.0
    calls: int = 0
    failures: list[str] = field(default_factory=list)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
                raise
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        return timed


@contextmanager
def timed_attribute(owner: Any, name: str) -> Iterator[Spent]:
    """Time each call of an attribute."""
    spent, before = Spent(), getattr(owner, name)
    setattr(owner, name, spent.around(before))
    try:
        yield spent
    finally:
        setattr(owner, name, before)


def start_up(name: str, recorder: Recorder, setting: Setting, device: torch.device) -> None:
    """The phases that a server's log names, then what is spread over them: Triton's compiler, and captures of graphs.

    A failed capture is a figure: the server goes on without graphs, and slower.
    """
    folder = write_model(name, setting.folder, setting.tiny)
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16", device=device.type,
                          num_blocks=64 if setting.tiny else None)  # fmt: skip
    marks: list[tuple[str, float]] = []
    with timed_attribute(triton_compiler(), "compile") as compiled, timed_attribute(CudaQueue, "capture") as captured:
        runner, ready = load_runner(config, folder, [], lambda phase: marks.append((phase, time.perf_counter())))
        marks.append(("", time.perf_counter()))
        started = time.perf_counter()
        while runner.use_idle_time():
            pass
        idle = time.perf_counter() - started
    seconds: dict[str, float] = {}
    for (phase, begin), (_, end) in pairwise(marks):
        label = phase.split(" (")[0].split(":")[0]
        label = "loading weights" if label.startswith("loading") else label
        seconds[label] = seconds.get(label, 0.0) + end - begin
    for label, spent in seconds.items():
        recorder.figure(f"{name}: start-up, {label}", spent, "s")
    recorder.figure(f"{name}: start-up in all", sum(seconds.values()), "s", memory=ready.memory)
    recorder.figure(f"{name}: start-up, of it Triton", compiled.seconds, "s", compilations=compiled.calls)
    recorder.figure(f"{name}: captures of graphs", captured.seconds, "s", captures=captured.calls, idle_seconds=idle)
    recorder.figure(f"{name}: captures that failed", len(captured.failures), "", goal=NO_FAILURES,
                    reasons=captured.failures)  # fmt: skip


def triton_compiler() -> Any:
    """The module whose `compile` Triton calls for a kernel that it has not loaded; a stand-in without Triton."""
    if importlib.util.find_spec("triton") is None:
        return SimpleNamespace(compile=None)
    return importlib.import_module("triton.compiler")


NO_FAILURES = at_most(0.5, text="none")


@dataclass
class Pair:
    """The same model with and without graphs, on caches with the same numbers."""

    graphs: Fabricated
    eager: Fabricated


def make_pair(setting: Setting, device: torch.device) -> Pair:
    """Blocks that no sequence holds are NaN: a padding row that reads one, or is read, shows."""
    folder = write_model(QWEN, setting.folder, setting.tiny)
    tokens = 1024 if setting.tiny else 256 * (CONTEXT + 64)
    runners: list[BareRunner] = []
    for graphs in (True, False):
        torch.manual_seed(0)
        runners.append(load_bare(folder, device, tokens, graphs=graphs))
    for ours, theirs in zip(runners[0].kv_caches, runners[1].kv_caches, strict=True):
        for source, target in zip(ours, theirs, strict=True):
            target.copy_(source)
    torch.manual_seed(0)
    first = Fabricated(runners[0], device)
    torch.manual_seed(0)
    return Pair(first, Fabricated(runners[1], device))


def same(pair: list[Pair], recorder: Recorder, setting: Setting, device: torch.device, size: int) -> None:
    """One row less than the graph has (all, at one row) through both; steps must sample from the same hidden states."""
    if not pair:
        pair.append(make_pair(setting, device))
    rows, context = max(1, size - 1), TINY_CONTEXT if setting.tiny else CONTEXT
    compare(recorder, pair[0], f"graph against eager, {size} rows", device, rows, context, 0)


def same_mixed(
    pair: list[Pair], recorder: Recorder, setting: Setting, device: torch.device, name: str, bucket: Bucket
) -> None:
    """A step of one token and one sequence less than the bucket holds: decodes, and a prompt of the other tokens."""
    if not pair:
        pair.append(make_pair(setting, device))
    decodes = max(1, min(bucket.seqs - 2, bucket.tokens // 2))
    context = TINY_CONTEXT if setting.tiny else CONTEXT
    compare(recorder, pair[0], name, device, decodes, context, bucket.tokens - 1 - decodes)


def compare(
    recorder: Recorder, pair: Pair, name: str, device: torch.device, rows: int, context: int, prompt: int
) -> None:
    """Record how far the keys of a replayed step are from those of an eager one; raise if they differ."""
    try:
        (keys, first), (keys_eager, first_eager) = (
            two_steps(sequences, rows, context, prompt) for sequences in (pair.graphs, pair.eager)
        )
    finally:
        for sequences in (pair.graphs, pair.eager):
            sequences.forget()
    bare = pair.graphs.bare
    graph = bare.uses_mixed_graph(rows + prompt, rows + 1) if prompt else bare.uses_graph(rows)
    alike = torch.ones(len(keys), dtype=torch.bool)
    alike[:rows] = first == first_eager  # a step that pads may sample another token where two are all but as likely
    error = float((keys[alike] - keys_eager[alike]).norm() / keys_eager[alike].norm())
    recorder.figure(name, error, "of norm", goal=at_most(MAX_ERROR), rows=rows, prompt=prompt, graph=graph,
                    compared=int(alike.sum()))  # fmt: skip
    if device.type == "cuda" and not graph:
        raise RuntimeError("no graph was recorded: its capture failed, or there was no memory for it")
    if not error < MAX_ERROR:
        raise AssertionError(f"a graph differs from the eager step by {error:.2g} of the norm")


@torch.inference_mode()
def two_steps(sequences: Fabricated, rows: int, context: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the keys that the second of two steps wrote in the last layer, fp32 [rows + prompt, ...]; the tokens that the
    first sampled, int64 [rows]).

    The first step decodes `rows` sequences; the second also computes a prompt of `prompt` tokens, if not 0, and its
    graph is recorded between the two. The keys of the last layer are made of the hidden states behind all layers but
    it. Every block that no sequence holds is NaN meanwhile. RuntimeError where a row is not finite.
    """
    bare = sequences.bare
    new = [sequences.arrive(context, context - 1, 8)[1] for _ in range(rows)]
    chunk = [sequences.arrive(prompt, 0, 8)[1]] if prompt else []
    seq_ids = [one.seq_id for one in new]
    fill_others(sequences, [block for one in (*new, *chunk) for block in one.block_ids])
    first = run_plan(sequences, StepPlan(sequences.next_step(), sequences.take_removed(), new, [], [], decodes=seq_ids))
    bare.record(rows)
    if chunk:
        bare.record_mixed(rows + prompt, rows + 1)
    steps = [SequenceStep(one.seq_id, prompt, True, []) for one in chunk]
    run_plan(sequences, StepPlan(sequences.next_step(), [], chunk, [], steps, decodes=seq_ids))
    synchronize(sequences.device)
    places = [(one.block_ids[context // bare.block_size], context % bare.block_size) for one in new]
    places += [(one.block_ids[i // bare.block_size], i % bare.block_size) for one in chunk for i in range(prompt)]
    blocks, offsets = torch.tensor(places, device=sequences.device).T
    keys = bare.kv_caches[-1][0][blocks, :, offsets].float().cpu()
    generator = torch.Generator(sequences.device).manual_seed(0)
    for pair in bare.kv_caches:  # later cases find numbers again, the same in both caches
        for cache in pair:
            cache.normal_(generator=generator)
    return keys, first


def fill_others(sequences: Fabricated, block_ids: list[int]) -> None:
    """NaN in all blocks but these."""
    free = torch.ones(sequences.bare.num_blocks, dtype=torch.bool, device=sequences.device)
    free[block_ids] = False
    for pair in sequences.bare.kv_caches:
        for cache in pair:
            cache[free] = float("nan")


def run_plan(sequences: Fabricated, plan: StepPlan) -> torch.Tensor:
    """The sampled tokens of the plan's decodes, int64 in their order; RuntimeError where one could not be sampled."""
    result = sequences.bare.runner.result(sequences.bare.runner.launch(plan))
    if result.failed:
        raise RuntimeError(f"{len(result.failed)} rows failed: {next(iter(result.failed.values()))}")
    tokens = dict(zip(result.seq_ids, result.token_ids, strict=True))
    return torch.tensor([tokens[seq_id] for seq_id in plan.decodes])


@torch.inference_mode()
def large_pool(recorder: Recorder, setting: Setting, device: torch.device) -> None:
    """Sequences whose blocks lie above 2^31 elements have the results of the same blocks at the start of a cache."""
    shape, wanted = (TINY_SHAPE, TINY_ELEMENTS) if setting.tiny else (SHAPE, MANY_ELEMENTS)
    block = shape.num_kv_heads * shape.block_size * shape.head_dim
    num_blocks, used = -(-wanted // block), 64
    if device.type == "cuda" and 2 * 2 * num_blocks * block * 1.1 > torch.cuda.mem_get_info(device)[0]:
        recorder.skip("a cache above 2^31 elements", "the card has not enough free memory")
        return
    size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    caches = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2)]
    results = []
    for first in (0, num_blocks - used):
        torch.manual_seed(1)
        results.append(attend_at(shape, caches, first, used, device))
    difference = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    recorder.figure("a cache above 2^31 elements: largest difference", difference, "", goal=at_most(1e-9, text="none"),
                    elements=caches[0].numel())  # fmt: skip
    if difference != 0.0:
        raise AssertionError(f"blocks at the end of a large cache give other results: {difference:.3g}")


def attend_at(
    shape: Shape, caches: list[torch.Tensor], first: int, used: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `used` blocks from block `first` on, then decode 4 sequences and prefill one; fp32 results."""
    rows = torch.randn(used * shape.block_size, shape.num_kv_heads, shape.head_dim, device=device).to(shape.dtype)
    slots = torch.arange(first * shape.block_size, (first + used) * shape.block_size, device=device)
    reshape_and_cache(rows, rows.flip(0), *caches, slots)
    per_sequence = used // 4
    tables = torch.arange(first, first + used, dtype=torch.int32, device=device).view(4, per_sequence)
    lengths = torch.full((4,), per_sequence * shape.block_size, dtype=torch.int32, device=device)
    plan, scale = make_plan(shape, 4, device), shape.head_dim**-0.5
    q = fused_queries(shape, 4, device)
    decoded = paged_attention(q, *caches, tables, lengths, scale, plan=plan)
    chunk = min(64, per_sequence * shape.block_size)
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=device)
    prefilled = prefill_attention(fused_queries(shape, chunk, device), *caches, tables[:1], starts, lengths[:1], chunk,
                                  scale, plan=plan)  # fmt: skip
    return decoded.float(), prefilled.float()
