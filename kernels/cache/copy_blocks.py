"""Moves whole blocks of the paged KV cache, all layers in one launch: copy-on-write, and to and from the host."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.dispatch import tl, triton, use_triton

WORDS_PER_PROGRAM = 2048  # words of 4 bytes


class BlockCopier:
    """Copies blocks of the tensors of a KV cache, keys and values of every layer.

    Each tensor is contiguous, with the blocks along its first axis; all are on one device and never move.
    `block_bytes` is the size of a block over all tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        num_bytes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        if any(n % 4 for n in num_bytes) or not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("blocks must be contiguous and whole words of 4 bytes")
        self.block_bytes = sum(num_bytes)
        self._tensors = tensors
        if use_triton(tensors[0]):
            self._grid = len(tensors), triton.cdiv(max(num_bytes) // 4, WORDS_PER_PROGRAM)
            rows, start = [], 0
            for tensor, n in zip(tensors, num_bytes, strict=True):
                rows.append((tensor.data_ptr(), n // 4, start // 4))
                start += n
            self._table = torch.tensor(rows, dtype=torch.int64, device=tensors[0].device)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Make block targets[i] a copy of block sources[i], int64 [n]. No target may be a source or occur twice."""
        if use_triton(self._tensors[0]):
            copy_blocks_kernel[(len(sources), *self._grid)](
                self._table, sources, targets, WORDS=WORDS_PER_PROGRAM, num_warps=4
            )
        else:
            copy_blocks_reference(self._tensors, sources, targets)

    def pack(self, blocks: Tensor, packed: Tensor | None = None) -> Tensor:
        """The bytes of blocks int64 [n], tensor after tensor: uint8 [n, block_bytes], written into `packed` if
        given."""
        if not use_triton(self._tensors[0]):
            return pack_blocks_reference(self._tensors, blocks, packed)
        if packed is None:
            packed = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, device=blocks.device)
        self._pack(blocks, packed, True)
        return packed

    def unpack(self, packed: Tensor, blocks: Tensor) -> None:
        """Fill blocks int64 [n] with bytes made by `pack`."""
        if use_triton(self._tensors[0]):
            self._pack(blocks, packed, False)
        else:
            unpack_blocks_reference(self._tensors, packed, blocks)

    def _pack(self, blocks: Tensor, packed: Tensor, pack: bool) -> None:
        pack_blocks_kernel[(len(blocks), *self._grid)](
            self._table, blocks, packed, self.block_bytes // 4, PACK=pack, WORDS=WORDS_PER_PROGRAM, num_warps=4
        )


@triton.jit
def copy_blocks_kernel(table_ptr, sources_ptr, targets_ptr, WORDS: tl.constexpr):
    """Grid (num_copies, num_tensors, parts of a block).

    table int64 [num_tensors, 3]: address, words of a block, offset of these words in a packed block.
    """
    copy, tensor = tl.program_id(0), tl.program_id(1)
    base = tl.load(table_ptr + 3 * tensor).to(tl.pointer_type(tl.int32))
    num_words = tl.load(table_ptr + 3 * tensor + 1)
    offsets = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    mask = offsets < num_words
    words = tl.load(base + tl.load(sources_ptr + copy) * num_words + offsets, mask=mask)
    tl.store(base + tl.load(targets_ptr + copy) * num_words + offsets, words, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr"])  # a slice of any alignment
def pack_blocks_kernel(table_ptr, blocks_ptr, packed_ptr, packed_words, PACK: tl.constexpr, WORDS: tl.constexpr):
    """Grid (num_blocks, num_tensors, parts of a block): copies blocks to rows of packed, or back."""
    row, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = tl.load(table_ptr + 3 * tensor).to(tl.pointer_type(tl.int32))
    num_words = tl.load(table_ptr + 3 * tensor + 1)
    offsets = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    mask = offsets < num_words
    in_cache = base + tl.load(blocks_ptr + row) * num_words + offsets
    in_packed = packed_ptr.to(tl.pointer_type(tl.int32)) + row * packed_words
    in_packed += tl.load(table_ptr + 3 * tensor + 2) + offsets
    if PACK:
        tl.store(in_packed, tl.load(in_cache, mask=mask), mask=mask)
    else:
        tl.store(in_cache, tl.load(in_packed, mask=mask), mask=mask)


def copy_blocks_reference(tensors: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """BlockCopier.copy in torch."""
    for tensor in tensors:
        tensor[targets] = tensor[sources]


def pack_blocks_reference(tensors: Sequence[Tensor], blocks: Tensor, packed: Tensor | None = None) -> Tensor:
    """BlockCopier.pack in torch."""
    return torch.cat([tensor[blocks].flatten(1).view(torch.uint8) for tensor in tensors], dim=1, out=packed)


def unpack_blocks_reference(tensors: Sequence[Tensor], packed: Tensor, blocks: Tensor) -> None:
    """BlockCopier.unpack in torch."""
    start = 0
    for tensor in tensors:
        shape = len(blocks), *tensor.shape[1:]
        end = start + tensor[0].numel() * tensor.element_size()
        tensor[blocks] = packed[:, start:end].contiguous().view(tensor.dtype).view(shape)
        start = end


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields one configuration per kernel: they copy words, so it serves every cache."""
    words = {"WORDS": WORDS_PER_PROGRAM}
    yield AotConfiguration(copy_blocks_kernel, "any", "i64", words, num_warps=4, quick=True)
    for pack in (True, False):
        label = "pack" if pack else "unpack"
        constants = words | {"PACK": pack}
        types = {"packed_ptr": "*u8"}
        yield AotConfiguration(pack_blocks_kernel, label, "i64", constants, num_warps=4, types=types, quick=pack)
