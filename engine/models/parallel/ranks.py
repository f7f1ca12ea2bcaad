"""Ranks: the group of processes that compute one model together. A model on one device has none, and pays nothing."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from engine.models.parallel.symmetric_memory import open_symmetric_sum

# torch 2.13 renames the call, and warns of its old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
FOREVER = timedelta(days=30)  # the Driver watches for ranks that hang and ends them


class Ranks:
    """Sums and collects tensors over all ranks, which must make the same calls in the same order.

    Every rank gets the same bits. `num_calls` and `num_bytes` count what this rank gave, for benchmarks.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size = rank, size
        self.num_calls = self.num_bytes = 0
        self._group = group
        self._sum: Callable[[Tensor], None] = self._sum_by_backend

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors of one shape; x may be overwritten."""
        self._count(x)
        self._sum(x)
        return x

    def _sum_by_backend(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self._group)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors of one shape, [size, *shape]."""
        self._count(x)
        out = x.new_empty((self.size, *x.shape))
        _all_gather(out.view(-1), x.contiguous().view(-1), group=self._group)
        return out

    def broadcast(self, x: Tensor) -> None:
        """Copy the first rank's tensor into those of the other ranks, which have its shape and dtype."""
        self._count(x)
        dist.broadcast(x, 0, group=self._group)

    def least(self, numbers: Sequence[int]) -> list[int]:
        """For each number the least that a rank gives: how ranks agree on sizes at start."""
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        given = torch.tensor(numbers, dtype=torch.int64, device=device)
        least: list[int] = self.all_gather(given).amin(0).tolist()
        return least

    def choose_sum(self, device: torch.device, dtype: torch.dtype) -> None:
        """Let all_reduce go through symmetric memory where that is faster for tensors of `dtype`. GPUs only: all ranks
        must call this at once, before CUDA graphs are recorded."""
        indices = self.all_gather(torch.tensor([device.index], device=device)).flatten().tolist()
        devices = [torch.device(device.type, index) for index in indices]
        summed = open_symmetric_sum(self._group, devices, dtype, self._sum_by_backend, self.least)
        self._sum = summed or self._sum_by_backend

    def _count(self, x: Tensor) -> None:
        self.num_calls += 1
        self.num_bytes += x.numel() * x.itemsize


def join_ranks(rank: int, size: int, rendezvous: str, device: torch.device) -> Ranks | None:
    """Wait for all `size` ranks to meet at the file `rendezvous`, which none of them has used before; None for one
    rank. gloo connects processors over the loopback interface, NCCL connects GPUs."""
    if size == 1:
        return None
    on_gpu = device.type == "cuda"
    if not on_gpu:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(rendezvous, size)
    options: dict[str, Any] = {"device_id": device} if on_gpu else {}
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER, **options)
    assert dist.group.WORLD is not None
    return Ranks(rank, size, dist.group.WORLD)


class Summed:
    """The sum over the ranks of a layer's output, each from its own columns."""

    __slots__ = ("layer", "ranks")

    def __init__(self, layer: Callable[[Tensor], Tensor], ranks: Ranks) -> None:
        self.layer, self.ranks = layer, ranks

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in] -> [num_tokens, out]"""
        return self.ranks.all_reduce(self.layer(x))


class GatheredColumns:
    """The logits of the whole vocabulary from a linear layer for the rank's share of it."""

    __slots__ = ("layer", "ranks", "vocab_size", "width")

    def __init__(self, layer: Callable[[Tensor], Tensor], vocab_size: int, ranks: Ranks) -> None:
        self.layer, self.ranks, self.vocab_size = layer, ranks, vocab_size
        self.width = -(-vocab_size // ranks.size)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, vocab_size]"""
        own = self.layer(x)
        if own.shape[1] < self.width:  # the last ranks may have fewer tokens
            own = torch.nn.functional.pad(own, (0, self.width - own.shape[1]))
        shares = self.ranks.all_gather(own)  # [size, rows, width]
        return shares.transpose(0, 1).reshape(len(x), -1)[:, : self.vocab_size].contiguous()


class VocabularyRows:
    """Rows of an embedding of which every rank has a share of the tokens."""

    __slots__ = ("look_up", "ranks", "tokens")

    def __init__(self, look_up: Callable[[Tensor], Tensor], tokens: range, ranks: Ranks) -> None:
        self.look_up, self.tokens, self.ranks = look_up, tokens, ranks

    def __call__(self, input_ids: Tensor) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, width]"""
        own = input_ids - self.tokens.start
        elsewhere = (own < 0) | (own >= len(self.tokens))
        rows = self.look_up(own.masked_fill(elsewhere, 0))
        return self.ranks.all_reduce(rows.masked_fill(elsewhere[:, None], 0.0))
