"""All-reduce through symmetric memory: a buffer of each rank that the kernels of all ranks read and write over NVLink.

The tensors of a decode step are small, so that the latency of a sum counts more than bandwidth. Each method here is one
kernel of torch.distributed._symmetric_memory, which a CUDA graph can record:

- one_shot: every rank reads all buffers and adds them in the order of the ranks.
- two_shot: every rank adds up its share of the elements, then reads the other shares.
- multimem: as two_shot, but the NVLink switch adds and broadcasts (Hopper and later).

All ranks get the same bits: the order is the same, or one rank adds for all. `SymmetricSum.choose` times the methods
and NCCL at start, and takes the fastest for each size of tensor.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

BUFFER_BYTES = 32 << 20  # on each rank; for larger tensors bandwidth counts, and NCCL uses all of it
SIZES = [1 << power for power in range(13, 26, 2)]  # bytes that are timed: 8 KiB to 32 MiB
ALIGNMENT = 16  # bytes that the kernels read at once
DTYPES = (torch.bfloat16, torch.float32)  # that the kernels add
TWO_SHOT_SIZES = (2, 4, 8)  # numbers of ranks that torch compiles the kernel for
TOLERANCE = 2**-5  # for a sum of a few bf16 numbers near 1
NUM_TIMED = 10
NCCL = "NCCL"

Method = Callable[[Tensor, Tensor], None]
"""(part of the buffer, x of its shape): x becomes the sum of all ranks' x. The buffer is overwritten."""
Timer = Callable[[Callable[[], None]], float]
Agree = Callable[[list[int]], list[int]]  # Ranks.least


class SymmetricSum:
    """Sums tensors over the ranks in place: through `buffer` (uint8) by the fastest of `methods` for their size, else
    by `nccl`."""

    def __init__(self, buffer: Tensor, methods: Mapping[str, Method], nccl: Callable[[Tensor], None]) -> None:
        self._buffer, self.methods, self._nccl = buffer, methods, nccl
        self.fastest: dict[int, str] = {}  # for tensors of up to so many bytes

    def __call__(self, x: Tensor) -> None:
        """Sum x over the ranks in place."""
        name = self.fastest.get(_timed_size(x.nbytes), NCCL)
        if name == NCCL or x.nbytes % ALIGNMENT or x.dtype not in DTYPES or not x.is_contiguous():
            self._nccl(x)
        else:
            self.methods[name](self._part(x), x)

    def choose(self, dtype: torch.dtype, timer: Timer, agree: Agree) -> None:
        """Time all methods for tensors of a dtype that the kernels add. All ranks must call this at once; they choose
        alike, by the slowest rank. A method whose sum is not NCCL's on some rank is left out."""
        for size in (size for size in SIZES if size <= self._buffer.nbytes):
            x = torch.randn(size // dtype.itemsize, device=self._buffer.device).to(dtype)
            zeros, expected = torch.zeros_like(x), x.clone()
            self._nccl(expected)
            seconds = {NCCL: timer(lambda zeros=zeros: self._nccl(zeros))}  # type: ignore[misc]
            for name, method in self.methods.items():
                part, found = self._part(x), x.clone()
                method(part, found)
                right = torch.allclose(found.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE)
                spent = timer(lambda part=part, zeros=zeros, method=method: method(part, zeros))  # type: ignore[misc]
                seconds[name] = spent if right else float("inf")
            self.fastest[size] = _fastest(seconds, agree)

    def _part(self, x: Tensor) -> Tensor:
        return self._buffer[: x.nbytes].view(x.dtype).view(x.shape)


def _timed_size(num_bytes: int) -> int:
    """The least of SIZES that holds so many bytes; 0 beyond the largest."""
    return next((size for size in SIZES if num_bytes <= size), 0)


def _fastest(seconds: Mapping[str, float], agree: Agree) -> str:
    """The name of the method whose slowest rank is the fastest."""
    negative = agree([-int(min(spent, 1e3) * 1e9) for spent in seconds.values()])
    return max(zip(negative, seconds, strict=True))[1]


def open_symmetric_sum(
    group: dist.ProcessGroup,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    nccl: Callable[[Tensor], None],
    agree: Agree,
) -> SymmetricSum | None:
    """Allocate the buffer, meet the other ranks' buffers and choose the methods; None where the GPUs (`devices`, by
    rank) cannot read each other's memory, or for a dtype that the kernels do not add. All ranks must call this at
    once."""
    device = devices[group.rank()]
    reached = all(other == device or torch.cuda.can_device_access_peer(device, other) for other in devices)
    (usable,) = agree([int(dtype in DTYPES and reached)])
    if not usable:
        return None
    try:
        buffer, methods = _open_buffer(group, device)
    except RuntimeError as error:
        logger.info("sums over ranks go through NCCL, not symmetric memory: %s", str(error).partition("\n")[0])
        buffer, methods = torch.empty(0, dtype=torch.uint8), {}
    (opened,) = agree([int(bool(methods))])
    if not opened:
        return None
    summed = SymmetricSum(buffer, methods, nccl)
    summed.choose(dtype, seconds_on_gpu, agree)
    logger.info("sums over ranks, by bytes: %s", ", ".join(f"{size:,} {name}" for size, name in summed.fastest.items()))
    return summed


def _open_buffer(group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, dict[str, Method]]:
    """Raises RuntimeError where the platform has no symmetric memory."""
    from torch.distributed import _symmetric_memory

    buffer = _symmetric_memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
    shared = _symmetric_memory.rendezvous(buffer, group)
    name, ops = group.group_name, torch.ops.symm_mem

    def one_shot(part: Tensor, x: Tensor) -> None:
        part.copy_(x)
        ops.one_shot_all_reduce_out(part, "sum", name, x)

    def two_shot(part: Tensor, x: Tensor) -> None:
        part.copy_(x)
        ops.two_shot_all_reduce_out(part, "sum", name, x)

    def multimem(part: Tensor, x: Tensor) -> None:
        part.copy_(x)
        x.copy_(ops.multimem_all_reduce_(part, "sum", name))

    methods: dict[str, Method] = {"one_shot": one_shot}
    if group.size() in TWO_SHOT_SIZES:
        methods["two_shot"] = two_shot
    if shared.multicast_ptr:
        methods["multimem"] = multimem
    return buffer, methods


def seconds_on_gpu(work: Callable[[], None]) -> float:
    """Seconds of device time of one call, on average."""
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(NUM_TIMED):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / NUM_TIMED
