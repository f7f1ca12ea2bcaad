"""FlashInfer's attention for the prompts of an eager step, where the package flashinfer-python is installed.

`plan` divides a step's queries and keys among the SMs on the host, once per step and distinct window; every layer then
runs the plan. A CUDA graph cannot hold the division, so decode steps and steps in a graph use the Triton kernels.

FlashInfer as of version 0.7.2: BatchPrefillWithPagedKVCacheWrapper, layout HND, which is the layout of our KV cache.
https://docs.flashinfer.ai/api/attention.html
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MIN_VERSION = (0, 7, 2)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)

# Steps whose launches the device may not have reached yet. A plan stays in host memory until its copy is done.
NUM_TURNS = 2
# Partial results where the keys of a tile are divided, in the size that FlashInfer recommends. A plan writes at most
# two tiles of 128 rows per SM in fp32: an estimate of 35 MB for head size 256 on 132 SMs.
WORKSPACE_BYTES = 128 << 20
# Each wrapper allocates these bytes for its plan, and 32768 sequence lengths.
WRAPPER_BYTES = (8 << 20) + (128 << 10)


class Mark(Protocol):
    def wait(self) -> None:
        """Block until all work before this place of the queue is done."""


class Queue(Protocol):
    """The part of a DeviceQueue that plans need."""

    device: torch.device

    def host_bytes(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of pinned host memory."""

    def mark(self) -> Mark:
        """A mark behind all work queued so far."""


@dataclass(frozen=True, slots=True)
class PromptAttention:
    """The sizes that all prompts of a model share. windows: the distinct sliding windows of its layers, 0 for none.
    softcap: 0 for none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    softcap: float
    windows: tuple[int, ...]

    def problem(self) -> str:
        """Why FlashInfer's kernels do not serve this model; "" if they do. They run on every card that ours run on."""
        if self.dtype not in DTYPES:
            return f"FlashInfer computes in float16 and bfloat16, not in {str(self.dtype).removeprefix('torch.')}"
        if self.head_dim not in HEAD_DIMS:
            return f"FlashInfer takes head sizes of {', '.join(map(str, HEAD_DIMS))}, not {self.head_dim}"
        return ""


def device_bytes(num_windows: int) -> int:
    """Bytes of device memory that a FlashInferPrefill allocates."""
    return WORKSPACE_BYTES + NUM_TURNS * num_windows * WRAPPER_BYTES


def import_flashinfer() -> Any:
    """The package. ImportError if it is missing or too old; the message is a sentence with the fix."""
    try:
        package = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            raise ImportError(f"FlashInfer needs the package {error.name}: pip install flashinfer-python") from error
        raise ImportError("FlashInfer is not installed: pip install flashinfer-python") from error
    numbers = package.__version__.split(".")[:3]
    if tuple(int(number) if number.isdigit() else 0 for number in numbers) < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise ImportError(
            f"FlashInfer {package.__version__} is older than {needed}: pip install 'flashinfer-python>={needed}'"
        )
    return package


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """The plan of one step's prompts, by sliding window. Valid until NUM_TURNS more steps are planned."""

    wrappers: dict[int, Any]

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, sliding_window: int, out: Tensor | None = None
    ) -> Tensor:
        """prefill_attention (kernels/attention/prefill.py) with the step's lengths and block tables."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        self.wrappers[sliding_window].run(q, (k_cache, v_cache), out=out)
        return out


class FlashInferPrefill:
    """Plans the prompts of steps. All wrappers share one workspace, because the device runs them in order.

    A wrapper keeps its plan in pinned host memory that it overwrites in the next `plan`, and so do the arrays here. So
    each of NUM_TURNS steps has wrappers of its own, and waits for the copies of the step that had them before.
    """

    def __init__(self, queue: Queue, attention: PromptAttention, max_num_seqs: int) -> None:
        """Allocates device_bytes(len(attention.windows)). ImportError as in import_flashinfer."""
        wrapper = import_flashinfer().BatchPrefillWithPagedKVCacheWrapper
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=queue.device)
        self.attention = attention
        self.num_bytes = device_bytes(len(attention.windows))
        self._queue = queue
        self._turns = [
            PlannedPrefill({window: wrapper(workspace, "HND") for window in attention.windows})
            for _ in range(NUM_TURNS)
        ]
        num_bytes = 4 * 4 * (max_num_seqs + 1)
        self._hosts = [queue.host_bytes(num_bytes).view(torch.int32).view(4, -1) for _ in range(NUM_TURNS)]
        self._copied: list[Mark | None] = [None] * NUM_TURNS
        self._turn = 0

    def plan(self, cu_seqlens_q: npt.NDArray[Any], seq_lens: npt.NDArray[Any], block_ids: Tensor) -> PlannedPrefill:
        """Queue the plan of prompts on the device.

        Sequence i has the query rows cu_seqlens_q[i]:cu_seqlens_q[i+1], at least one, and seq_lens[i] tokens in the
        cache, this step's included. block_ids: int32 on the device, the blocks of all sequences one after the other,
        ceil(seq_lens[i] / block_size) for each; it is read when the step runs.
        """
        self._turn = (self._turn + 1) % NUM_TURNS
        if (copied := self._copied[self._turn]) is not None:
            copied.wait()
        attention, host, n = self.attention, self._hosts[self._turn], len(seq_lens)
        num_blocks = -(-seq_lens // attention.block_size)
        first_rows, first_blocks, last_lens, lens = host[0, : n + 1], host[1, : n + 1], host[2, :n], host[3, :n]
        first_rows.numpy()[:] = cu_seqlens_q
        first_blocks.numpy()[0] = 0
        np.cumsum(num_blocks, out=first_blocks.numpy()[1:])
        last_lens.numpy()[:] = seq_lens - (num_blocks - 1) * attention.block_size
        lens.numpy()[:] = seq_lens
        planned = self._turns[self._turn]
        for window, wrapper in planned.wrappers.items():
            wrapper.plan(
                first_rows, first_blocks, block_ids, last_lens,
                attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.block_size,
                causal=True, sm_scale=attention.scale, logits_soft_cap=attention.softcap,
                window_left=window - 1,  # without the query's own token; -1: no window
                q_data_type=attention.dtype, kv_data_type=attention.dtype, seq_lens=lens,
            )  # fmt: skip
        self._copied[self._turn] = self._queue.mark()
        return planned

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and run every kernel once, and wait for it. Raises whatever FlashInfer raises."""
        attention, device = self.attention, self._queue.device
        q = torch.zeros(2, attention.num_heads, attention.head_dim, dtype=attention.dtype, device=device)
        shape = (1, attention.num_kv_heads, attention.block_size, attention.head_dim)
        cache = torch.zeros(shape, dtype=attention.dtype, device=device)
        block_ids = torch.zeros(1, dtype=torch.int32, device=device)
        planned = self.plan(np.array([0, 2]), np.array([2]), block_ids)
        for window in attention.windows:
            planned.attend(q, cache, cache, window)
        self._queue.mark().wait()
