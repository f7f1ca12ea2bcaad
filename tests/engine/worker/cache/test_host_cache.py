"""The memory of the host tier, before a disk tier that answers when the test says so."""

import torch

from engine.executor.step import BlockMove, FetchBlocks
from engine.worker.cache.host_cache import HostCache
from tests.engine.worker.cache.fake_disk import Disk
from tests.engine.worker.fake_streams import FakeDevice


class Copier:
    """Blocks of a byte each."""

    block_bytes = 1

    def __init__(self):
        self.pool = torch.arange(8, dtype=torch.uint8).unsqueeze(1)

    def pack(self, block_ids, packed=None):
        return self.pool[block_ids] if packed is None else packed.copy_(self.pool[block_ids])

    def unpack(self, packed, block_ids):
        self.pool[block_ids] = packed


def test_a_block_whose_slot_goes_to_a_fetch_before_its_step_is_done_is_not_kept():
    """By then the slot holds another block: under this digest it would be served as sound."""
    disk, fetched = Disk(), []
    cache = HostCache(Copier(), 2, torch.device("cpu"), disk)
    moves = [BlockMove(5, 0, b"five"), BlockMove(6, 1, b"six")]
    cache.offload(moves, torch.tensor([5, 6]))
    cache.fetch(FetchBlocks(0, [b"seven"], [0]), fetched.append)
    disk.loads.pop()([bytes([7])])
    cache.keep(moves)
    assert disk.stored == {b"six": bytes([6])}
    assert [answer.num_blocks for answer in fetched] == [1]
    cache.offload([BlockMove(4, 0, b"four")], torch.tensor([4]))
    cache.keep([BlockMove(4, 0, b"four")])
    assert disk.stored[b"four"] == bytes([4]), "the next one to lie there is kept again"


def test_the_thread_of_the_disk_waits_on_the_gpu_of_its_worker(monkeypatch):
    """Else every rank and replica on another GPU would make a CUDA context on GPU 0, too."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cpu"):
        disk, queue = Disk(), FakeDevice(lambda streams: streams[0]).new_stream()
        cache = HostCache(Copier(), 2, torch.device(name), disk, queue)
        cache.fetch(FetchBlocks(0, [b"seven"], [0]), lambda answer: None)
        assert not chosen or name == "cpu", "only the thread"
        disk.loads.pop()([bytes([7])])
    assert chosen == [torch.device("cuda:1")]


def test_blocks_on_their_way_to_host_memory_arrive_before_a_sleep():
    """The staging buffers go with the runner, and the next mover does not know which slots are still to be filled."""
    fake = FakeDevice(lambda streams: streams[0])
    cache, moves = HostCache(Copier(), 2, torch.device("cpu"), queue=fake.new_stream()), [BlockMove(5, 0)]
    cache.offload(moves, torch.tensor([5]))
    cache.leave()
    woken = Copier()
    woken.pool.zero_()
    cache.serve(woken, FakeDevice(lambda streams: streams[0]).new_stream())
    cache.load(moves, torch.tensor([5]))
    cache.synchronize()
    assert woken.pool[5] == 5
