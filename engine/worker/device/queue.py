"""DeviceQueue: the small interface to a GPU that the runner needs: memory that the host fills, and work in order.

The host runs ahead: queued work runs later, in order, and only `Mark.wait` waits for it. So no code on the path of a
step may ask the device for a value, and memory that the host wrote for a step must not change until the copy that reads
it is done.
"""

import mmap
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# torch rounds its pinned memory up to a power of two; from this size on that would waste too much.
LARGE_HOST_BYTES = 64 << 20
PORTABLE = 1  # cudaHostRegisterPortable, the flag that torch pins with


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Block until all work before this place is done."""

    def done(self) -> bool:
        """True if all work before this place is done. Does not block."""


class CopyQueue(Protocol):
    """A queue for copies only."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between device memory and `host_bytes`."""

    def mark(self) -> Mark:
        """A mark behind all work queued so far."""

    def after(self, mark: Mark) -> None:
        """Make work queued here from now on wait for the work before a mark of another queue."""


class DeviceQueue(CopyQueue, Protocol):
    """A device whose work is queued."""

    device: torch.device

    def host_bytes(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of pinned host memory, which copies read and write while the host goes on.

        The caller must keep it until these copies are done.
        """

    def copy_queue(self) -> CopyQueue:
        """Another queue of this device, which runs concurrently with this one."""

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` and return its result; what it does with tensors of the device is queued."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work that `work` queues, without running it; the function returned queues that work again.

        `work` must have run before, must not depend on values, and must read and write tensors that never move. All
        captures share one pool for temporary memory. Raises RuntimeError if the device cannot record the work.
        """

    def free_bytes(self) -> int:
        """Bytes of device memory that no process uses, once the queue is empty."""


class CudaMark:
    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaCopyQueue:
    """A separate stream for copies, which the copy engines of a CUDA device run."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return CudaMark(self._stream)

    def after(self, mark: Mark) -> None:
        _wait_on(self._stream, mark)


class PinnedMemory(mmap.mmap):
    """Memory that the driver has pinned at `address`. It is unpinned before it is unmapped: else the driver would
    refuse to pin the next memory at this address, which is mostly that of the next runner, or would copy the old
    pages."""

    address = 0  # 0: not pinned

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


class CudaQueue:
    """The current stream of a CUDA device, and CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Captures can share the pool only on the same stream.
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_bytes(self, num_bytes: int) -> Tensor:
        if num_bytes < LARGE_HOST_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        pinned = PinnedMemory(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pinned, dtype=torch.uint8)  # keeps `pinned` as long as there is a view of it
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, PORTABLE))
        if status != 0:
            raise RuntimeError(
                f"CUDA error {status}: {num_bytes >> 20} MiB of host memory could not be pinned; "
                "lower --swap-space, or raise the limit of locked memory (ulimit -l)"
            )
        pinned.address = memory.data_ptr()
        return memory

    def copy_queue(self) -> CopyQueue:
        return CudaCopyQueue(self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def mark(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self.device))

    def after(self, mark: Mark) -> None:
        _wait_on(torch.cuda.current_stream(self.device), mark)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        try:
            # thread_local: other threads, such as the disk tier's, may use CUDA during a capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"
            ):
                work()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own stream current
        replay: Callable[[], None] = graph.replay
        return replay

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def _wait_on(stream: "torch.cuda.Stream", mark: Mark) -> None:
    """Make the stream wait for the mark; the host does not wait."""
    assert isinstance(mark, CudaMark), "a mark of another kind of queue"
    stream.wait_event(mark.event)
