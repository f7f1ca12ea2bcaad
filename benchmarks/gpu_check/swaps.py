"""KV blocks of Llama-3-8B's shape to host memory and back, as the Worker moves them, against one plain copy."""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.timing import synchronize
from engine.executor.step import BlockMove
from engine.worker.cache.host_cache import HostCache
from engine.worker.device.queue import CudaQueue
from kernels.cache.copy_blocks import BlockCopier

TENSORS, PAGE, BLOCKS = 64, (8, 16, 128), 256  # keys and values of 32 layers; blocks of 2 MiB in bf16
TINY_TENSORS, TINY_PAGE, TINY_BLOCKS = 4, (2, 16, 16), 8
RUNS = 7


def run(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    recorder.case("swaps", partial(measure, recorder, device, tiny), seconds=60)


def measure(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Slots side by side, and every other slot: those cannot share a copy. Wall time to the end of the copies."""
    tensors, page, count = (TINY_TENSORS, TINY_PAGE, TINY_BLOCKS) if tiny else (TENSORS, PAGE, BLOCKS)
    copier = BlockCopier([torch.zeros(count, *page, dtype=torch.bfloat16, device=device) for _ in range(tensors)])
    queue = CudaQueue(device) if device.type == "cuda" else None
    cache = HostCache(copier, 2 * count, device, queue=queue)
    num_bytes = count * copier.block_bytes
    plain = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=queue is not None)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    blocks = torch.arange(count, device=device)
    for name, move, copy in (
        ("offload", cache.offload, lambda: plain.copy_(target, non_blocking=True)),
        ("load", cache.load, lambda: target.copy_(plain, non_blocking=True)),
    ):
        limit = num_bytes / _seconds(copy, cache, device)
        for label, step in (("slots side by side", 1), ("slots apart", 2)):
            moves = [BlockMove(i, i * step) for i in range(count)]
            rate = num_bytes / _seconds(partial(move, moves, blocks), cache, device)
            recorder.figure(f"{name} {count} blocks, {label}", rate / 1e9, "GB/s", share=rate / limit, of="one copy",
                            bytes=num_bytes)  # fmt: skip


def _seconds(call: Callable[[], object], cache: HostCache, device: torch.device) -> float:
    """The fastest of a few."""
    best = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        call()
        cache.synchronize()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
