"""Sums through symmetric memory on a GPU. Two processes share one card, which proves sums and says nothing about speed.
Not collected by default: `make gpu-check` runs it (see tests/kernels/device_cases.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.models.parallel.symmetric_memory import SIZES, open_symmetric_sum

ROOT = Path(__file__).parents[4]
SECONDS = 60


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_ranks_on_one_card_sum_alike_eagerly_and_in_a_graph(dtype, tmp_path):
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, __file__, str(rank), str(tmp_path / "meet"), dtype] for rank in range(2)]
    ranks = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for c in commands]
    try:
        found = [rank.communicate(timeout=SECONDS)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(found)


def main(rank: int, meeting: str, dtype: torch.dtype) -> None:
    """One of the two ranks. NCCL refuses a card that two ranks share, so gloo stands in for it."""
    device = torch.device("cuda", 0)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    group = dist.group.WORLD

    def least(numbers: list[int]) -> list[int]:
        given = torch.tensor(numbers)
        dist.all_reduce(given, dist.ReduceOp.MIN, group=group)
        return given.tolist()

    summed = open_symmetric_sum(group, [device, device], dtype, lambda x: dist.all_reduce(x, group=group), least)
    assert summed is not None, "this card has no symmetric memory"
    assert list(summed.fastest) == SIZES
    for name in summed.methods:
        for size in SIZES:
            summed.fastest[size] = name
            check(summed, size // dtype.itemsize - 8, dtype, device, rank)
    dist.barrier(group)


def check(summed, num_elements, dtype, device, rank):
    """Two calls in a row and a recorded one, with whole numbers, whose sums are exact."""
    parts = [torch.randint(-8, 8, (num_elements,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    own, expected = parts[rank].to(device, dtype), sum(parts).to(device, dtype)
    for _ in range(2):
        x = own.clone()
        summed(x)
        assert torch.equal(x, expected)
    graph, x = torch.cuda.CUDAGraph(), own.clone()
    with torch.cuda.graph(graph):
        summed(x)
    for _ in range(2):
        x.copy_(own)
        graph.replay()
        assert torch.equal(x, expected)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3]))
