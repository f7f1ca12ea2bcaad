"""Ranks whose processes are threads of this one: a tensor-parallel model in a test without torch.distributed."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loading.load import load_model
from engine.models.parallel.shard import shard_model

T = TypeVar("T")
TIMEOUT = 60.0


class Meeting:
    """The place where `size` threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)


class ThreadRanks:
    """See engine.models.parallel.ranks.Ranks."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        self.num_calls = self.num_bytes = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.num_bytes += x.numel() * x.itemsize
        self._meeting.given[self.rank] = x.clone()
        self._meeting.barrier.wait()
        together = torch.stack(list(self._meeting.given))
        self._meeting.barrier.wait()
        return together

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.all_gather(x)[0])

    def leave(self) -> None:
        """Fail: nobody waits any more."""
        self._meeting.barrier.abort()

    def least(self, numbers: list[int]) -> list[int]:
        least: list[int] = self.all_gather(torch.tensor(numbers)).amin(0).tolist()
        return least


def load_shards(folder: Path, config: ModelConfig, size: int, **options: Any) -> list[Decoder]:
    """The decoders of all ranks, fp32 on the CPU; of one rank as without tensor parallelism."""
    meeting = Meeting(size)
    given = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "auto", "seed": 0, **options}
    shards = [shard_model(config, rank, size) for rank in range(size)]
    ranks = [None if size == 1 else ThreadRanks(rank, meeting) for rank in range(size)]
    return [load_model(folder, shard, ranks=own, **given) for shard, own in zip(shards, ranks, strict=True)]


def together(work: Callable[[Decoder], T], decoders: list[Decoder]) -> list[T]:
    """`work` on every rank at once."""

    def guarded(decoder: Decoder) -> T:
        try:
            return work(decoder)
        except BaseException:
            if decoder.operators.ranks is not None:
                decoder.operators.ranks.leave()
            raise

    with ThreadPoolExecutor(len(decoders)) as pool:
        futures = [pool.submit(guarded, decoder) for decoder in decoders]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
