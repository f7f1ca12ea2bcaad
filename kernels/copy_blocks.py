"""Copy whole blocks of the paged KV cache, all layers in one launch: what copy-on-write needs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import tl, triton, use_triton

WORDS_PER_PROGRAM = 2048  # of 4 bytes


class BlockCopier:
    """Copies blocks within the tensors of a KV cache, keys and values of every layer.

    Each tensor is contiguous and has the blocks along its first axis; all lie on one device and stay where they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        if use_triton(tensors[0]):
            num_bytes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
            if any(n % 4 for n in num_bytes) or not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError("blocks must be contiguous and whole words of 4 bytes")
            self._max_words = max(num_bytes) // 4
            table = [(tensor.data_ptr(), n // 4) for tensor, n in zip(tensors, num_bytes, strict=True)]
            self._table = torch.tensor(table, dtype=torch.int64, device=tensors[0].device)

    def __call__(self, sources: Tensor, targets: Tensor) -> None:
        """Make block targets[i] a copy of sources[i], int64 [num_copies]; no target is a source or named twice."""
        if not use_triton(self._tensors[0]):
            copy_blocks_reference(self._tensors, sources, targets)
            return
        grid = len(sources), len(self._tensors), triton.cdiv(self._max_words, WORDS_PER_PROGRAM)
        copy_blocks_kernel[grid](self._table, sources, targets, WORDS=WORDS_PER_PROGRAM, num_warps=4)


@triton.jit
def copy_blocks_kernel(table_ptr, sources_ptr, targets_ptr, WORDS: tl.constexpr):
    """Grid (num_copies, num_tensors, parts of a block); table int64 [num_tensors, 2]: address, words of a block."""
    copy, tensor = tl.program_id(0), tl.program_id(1)
    base = tl.load(table_ptr + 2 * tensor).to(tl.pointer_type(tl.int32))
    num_words = tl.load(table_ptr + 2 * tensor + 1)
    offsets = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    mask = offsets < num_words
    words = tl.load(base + tl.load(sources_ptr + copy) * num_words + offsets, mask=mask)
    tl.store(base + tl.load(targets_ptr + copy) * num_words + offsets, words, mask=mask)


def copy_blocks_reference(tensors: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """The same in torch."""
    for tensor in tensors:
        tensor[targets] = tensor[sources]
