"""DeviceQueue: what the runner asks of a GPU, as little as that can be: memory that the host fills, and work in order.

The host runs ahead: whatever is queued here is done later, one after the other, and only `Mark.wait` waits for it. So
nothing on the path of a step may ask the device for a value; and what the host writes for a step must stay as it is
until the copy that reads it is done.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# From here on torch's own pinned memory, rounded up to a power of two, would take far more than was asked for.
LARGE_HOST_BYTES = 64 << 20
PORTABLE = 1  # cudaHostRegisterPortable, as torch pins


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Until everything before it is done."""

    def done(self) -> bool:
        """Whether everything before it is done, without waiting."""


class CopyQueue(Protocol):
    """A queue of copies alone."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between device memory and `host_bytes`."""

    def mark(self) -> Mark:
        """The place that the queue has reached."""

    def after(self, mark: Mark) -> None:
        """What is queued here from now on begins when everything before a place in another queue is done."""


class DeviceQueue(CopyQueue, Protocol):
    """A device whose work is queued. `replay` of what `capture` returns queues that work again, at next to no cost."""

    device: torch.device

    def host_bytes(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] in host memory that copies may read and write while the host goes on. To be kept until the
        process ends: much of it is registered with the driver, which is never told that it is gone."""

    def copy_queue(self) -> CopyQueue:
        """Another queue of this device, which goes on beside this one."""

    def run(self, work: Callable[[], T]) -> T:
        """Queue what `work` does with tensors of the device; `work` itself runs at once and returns."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` queues, without doing it, and return what queues it again.

        `work` must have run before, must not depend on values, and finds and leaves everything in tensors that stay
        where they are. All captures share the memory of what they make in between. Raises RuntimeError where the device
        cannot record it.
        """

    def free_bytes(self) -> int:
        """Memory of the device that nobody has, once the queue is empty."""


class CudaMark:
    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaCopyQueue:
    """A stream of its own, for the copy engines of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return CudaMark(self._stream)

    def after(self, mark: Mark) -> None:
        _wait_on(self._stream, mark)


class CudaQueue:
    """The current stream of a CUDA device, and CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures, or they could not share the pool.
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_bytes(self, num_bytes: int) -> Tensor:
        if num_bytes < LARGE_HOST_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, PORTABLE))
        if status != 0:
            raise RuntimeError(
                f"CUDA error {status}: {num_bytes >> 20} MiB of host memory could not be pinned; "
                "lower --swap-space, or raise the limit of locked memory (ulimit -l)"
            )
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
            # thread_local: threads of the disk tier may go on with what they do.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"
            ):
                work()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails as it ends leaves its own stream as the current one
        replay: Callable[[], None] = graph.replay
        return replay

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def _wait_on(stream: "torch.cuda.Stream", mark: Mark) -> None:
    """The device waits, not the host."""
    assert isinstance(mark, CudaMark), "a mark of another kind of queue"
    stream.wait_event(mark.event)
