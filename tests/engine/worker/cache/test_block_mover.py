"""Moves between a GPU's pool and host memory, on streams in host memory that go on in whatever order they may."""

import random
from collections.abc import Iterator

import pytest
import torch

from engine.executor.step import BlockMove
from engine.worker.cache import kv_cache
from engine.worker.cache.block_mover import DirectMover, StreamMover
from engine.worker.cache.kv_cache import staging_bytes, staging_sizes
from kernels.cache.copy_blocks import BlockCopier
from tests.engine.worker.fake_streams import FakeDevice, FakeStream

NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 12, 10, 64
ORDERS = {
    "compute first": lambda streams, rng: streams[0],
    "copies first": lambda streams, rng: streams[-1],
    "at random": lambda streams, rng: rng.choice(streams),
}


@pytest.fixture(autouse=True)
def small_staging(monkeypatch):
    """Buffers of two blocks, two of them: they are used again within one plan."""
    monkeypatch.setattr(kv_cache, "STAGING_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(kv_cache, "STAGING_BUFFERS", 2)


def make_pool() -> tuple[list[torch.Tensor], BlockCopier]:
    """Two layers of different width."""
    tensors = [torch.zeros(NUM_BLOCKS, 24), torch.zeros(NUM_BLOCKS, 8)]
    tensors = [tensor.half() for tensor in tensors]
    return tensors, BlockCopier(tensors)


def plans(rng: random.Random, count: int) -> Iterator[tuple[list[BlockMove], list[BlockMove], dict[int, float]]]:
    """(offloads, loads, blocks that the step writes, with what), as the host tier plans them: no slot twice."""
    for step in range(count):
        slots = rng.sample(range(NUM_SLOTS), rng.randint(0, 7))
        offloads = [BlockMove(rng.randrange(NUM_BLOCKS), slot) for slot in sorted(slots)]
        targets = rng.sample(range(NUM_BLOCKS), rng.randint(0, 7))
        loads = sorted((BlockMove(block, rng.randrange(NUM_SLOTS)) for block in targets), key=lambda move: move.slot)
        free = [block for block in range(NUM_BLOCKS) if block not in targets]
        yield offloads, loads, {block: step + i / 100 for i, block in enumerate(rng.sample(free, 3))}


def ids(moves: list[BlockMove]) -> torch.Tensor:
    return torch.tensor([move.block_id for move in moves], dtype=torch.int64)


def read_and_write(tensors: list[torch.Tensor], written: dict[int, float], seen: list[torch.Tensor]) -> None:
    """A step: it reads the whole pool, and writes some blocks."""
    seen.append(torch.cat([tensor.clone().flatten() for tensor in tensors]))
    for block, value in written.items():
        for tensor in tensors:
            tensor[block] = value


def run_plans(seed: int, order: str, waits: bool = True, num_plans: int = 25):
    """Every step sees, and the slots hold in the end, the same with streams as block after block."""
    rng = random.Random(seed)
    fake = FakeDevice(lambda streams: ORDERS[order](streams, rng), waits)
    queue = fake.new_stream()
    found, expected = [], []
    (pool, copier), (plain_pool, plain_copier) = make_pool(), make_pool()
    slots = queue.host_bytes(NUM_SLOTS * BLOCK_BYTES).view(NUM_SLOTS, BLOCK_BYTES)
    plain_slots = slots.clone()
    mover, plain = StreamMover(copier, slots, queue), DirectMover(plain_copier, plain_slots)
    for offloads, loads, written in plans(random.Random(seed), num_plans):
        for one in (mover, plain):
            one.offload(offloads, ids(offloads))
            one.load(loads, ids(loads))
        queue.run(lambda written=written: read_and_write(pool, written, found))
        read_and_write(plain_pool, written, expected)
        if fake.num_waiting() > 60:
            fake.go_on(rng.randint(1, 50))
    queue.mark().wait()
    mover.mark().wait()
    return [*found, slots], [*expected, plain_slots]


def same(found, expected) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(8))
def test_every_step_sees_what_it_would_if_blocks_moved_one_by_one(seed, order):
    found, expected = run_plans(seed, order)
    assert len({tuple(state.tolist()) for state in expected[:-1]}) > 20, "the plans change what steps see"
    assert same(found, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_streams_that_do_not_wait_are_found_out(order):
    assert not all(same(*run_plans(seed, order, waits=False)) for seed in range(8))


COMPUTE, OUT, IN = range(3)  # in the order in which the streams are made
WAITS = {
    "packing for its staging": (COMPUTE, OUT),
    "copies out for what was packed": (OUT, COMPUTE),
    "copies in for their staging": (IN, COMPUTE),
    "copies in for what fills the slot": (IN, OUT),
    "unpacking for the copies": (COMPUTE, IN),
}


@pytest.mark.parametrize("waiting", WAITS.values(), ids=WAITS)
def test_each_wait_is_needed(monkeypatch, waiting):
    """With one kind left out, some order of the streams gives wrong blocks."""
    after = FakeStream.after

    def skip_one_kind(self, mark):
        place = self.fake.streams.index
        if (place(self), place(mark.stream)) != waiting:
            after(self, mark)

    monkeypatch.setattr(FakeStream, "after", skip_one_kind)
    assert not all(same(*run_plans(seed, order)) for seed in range(12) for order in ORDERS)


def test_slots_side_by_side_cross_in_one_copy():
    fake = FakeDevice(lambda streams: streams[0])
    queue = fake.new_stream()
    _, copier = make_pool()
    slots = queue.host_bytes(NUM_SLOTS * BLOCK_BYTES).view(NUM_SLOTS, BLOCK_BYTES)
    mover = StreamMover(copier, slots, queue)
    moves = [BlockMove(block, slot) for block, slot in [(5, 0), (1, 1), (7, 4), (3, 6), (2, 7)]]
    mover.offload(moves, ids(moves))
    mover.load(moves[:2], ids(moves[:2]))
    _, out, back = fake.streams
    assert out.copies == [2 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES]  # staging holds two at a time
    assert back.copies == [2 * BLOCK_BYTES]
    assert len(fake.streams[0].copies) == 0, "the compute stream copies nothing across the link"


def test_only_a_step_that_loads_waits_for_the_link():
    """With copies that are never done, a step that offloads goes on, one that loads does not."""
    fake = FakeDevice(lambda streams: streams[0])
    queue = fake.new_stream()
    _, copier = make_pool()
    mover = StreamMover(copier, queue.host_bytes(NUM_SLOTS * BLOCK_BYTES).view(NUM_SLOTS, BLOCK_BYTES), queue)
    for stream in fake.streams[1:]:
        stream.is_ready = lambda: False
    done = []
    moves = [BlockMove(i, i) for i in range(4)]  # what staging holds
    mover.offload(moves, ids(moves))
    queue.run(lambda: done.append("a step that offloads"))
    queue.mark().wait()
    mover.load(moves[:1], ids(moves[:1]))
    queue.run(lambda: done.append("a step that loads"))
    with pytest.raises(RuntimeError, match="every stream waits"):
        queue.mark().wait()
    assert done == ["a step that offloads"] and not mover.mark().done()


def test_staging_is_bounded_and_never_more_than_the_slots_can_use(monkeypatch):
    monkeypatch.undo()
    mib = 1 << 20
    assert staging_sizes(1000, 2 * mib) == (16, 4) and staging_bytes(1000, 2 * mib) == 256 * mib
    assert staging_sizes(1000, 100 * mib) == (1, 4), "a block that is larger than a buffer should be"
    assert staging_sizes(3, 2 * mib) == (3, 4)
    assert staging_bytes(0, 2 * mib) == 0
