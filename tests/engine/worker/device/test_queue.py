"""The calls that the queues of a CUDA device make to torch, tested without a device."""

from contextlib import contextmanager

import pytest
import torch

from engine.worker.device import queue as device_queue
from engine.worker.device.queue import CudaCopyQueue, CudaMark, CudaQueue


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")


@pytest.fixture
def log(monkeypatch):
    """Every call, by the names of streams and events; the second stream is the copies'."""
    log, events = [], iter(range(100))

    class Event:
        def record(self, stream):
            self.name = f"event {next(events)} of {stream.name}"

        def synchronize(self):
            log.append(f"host waits for {self.name}")

        def query(self):
            return False

    @contextmanager
    def use(stream):
        log.append(f"on {stream.name}")
        yield

    compute, side = Stream(log, "compute"), Stream(log, "side")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return log


def test_the_device_waits_and_not_the_host(log):
    queue = CudaQueue(torch.device("cuda"))
    side = queue.copy_queue()
    assert isinstance(side, CudaCopyQueue)
    side.after(queue.mark())
    target = torch.zeros(3)
    side.copy(target, torch.ones(3))
    queue.after(side.mark())
    assert log == ["side waits for event 0 of compute", "on side", "compute waits for event 1 of side"]
    assert target.sum() == 3
    mark = queue.mark()
    assert isinstance(mark, CudaMark) and not mark.done()
    mark.wait()
    assert log[-1] == "host waits for event 2 of compute"


@pytest.mark.parametrize("status", [0, 2])
def test_a_large_host_memory_is_pinned_where_it_lies(log, monkeypatch, status):
    """torch's own would be rounded up to a power of two."""
    pinned = []

    class Cudart:
        @staticmethod
        def cudaHostRegister(address, num_bytes, flags):
            pinned.append((address, num_bytes, flags))
            return status

        @staticmethod
        def cudaHostUnregister(address):
            pinned[:] = [range_ for range_ in pinned if range_[0] != address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(device_queue, "LARGE_HOST_BYTES", 1000)
    queue = CudaQueue(torch.device("cuda"))
    if status:
        with pytest.raises(RuntimeError, match="CUDA error 2: 0 MiB of host memory could not be pinned; lower --swap"):
            queue.host_bytes(5000)
    else:
        memory = queue.host_bytes(5000)
        assert pinned == [(memory.data_ptr(), 5000, 1)] and memory.dtype == torch.uint8 and len(memory) == 5000
        view = memory[:8].view(torch.int64)
        del memory
        assert len(pinned) == 1 and view.fill_(7).item() == 7
        del view
        assert not pinned, "the next memory at this address could not be pinned"
