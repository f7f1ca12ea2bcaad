"""Finds keys that neighbours of a step share: the blocks of a common prefix (a system prompt, parallel samples, beams).

The decode kernel then reads them once for a window of sequences and not once for each, as cascade attention does
(Juravsky et al., "Hydragen", 2024; FlashInfer, Ye et al., 2025). The lengths and the block tables of a step are known
on the device only, when a CUDA graph is replayed, so kernels find the windows there, once per step: no plan of the host
has to say who shares what.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration
from kernels.attention.choices import HOPPER, Tile
from kernels.attention.plan import AttentionShape
from kernels.card import known_card
from kernels.dispatch import tl, triton

WINDOW_ROWS = 64  # query rows (sequences x heads of a group) of a window: those of four warps' matrix instructions
LEAST_MEMBERS = 4  # sequences of a window: fewer read shared keys from the L2 cache
LEAST_KEYS = 512  # shared keys of a window: fewer save less than the partial results cost (256, on an H100)
COMPARED = 512  # blocks that a program compares at a time
BLOCK_U = 64  # sequences whose windows a program finds


def window_keys(capability: int) -> int:
    """Keys of a tile of a window. With 32 a program takes no more shared memory than without windows.

    With 64 an SM of an H100 holds two programs, not three. Then 64 sequences of 4096 tokens without windows took 363 us
    in place of 390, 32 of 1024 52 in place of 56, 16 of 1024 31.6 in place of 30.1; with 32 it was 400, 57 and 31.
    """
    return 64 if known_card(capability).matrix_instruction() in HOPPER else 32


def shares_keys(shape: AttentionShape, tile: Tile, num_seqs: int) -> bool:
    """Whether a decode launch looks for windows: one that computes in 16 bits, without masks, in the usual tile."""
    return (
        num_seqs >= LEAST_MEMBERS
        and shape.q_bits == 16
        and shape.kv_format is None
        and not (shape.has_alibi or shape.sliding_window or shape.attention_chunk)
        and shape.group <= WINDOW_ROWS // LEAST_MEMBERS
        and shape.head_dim <= 128  # sums of larger heads leave no registers
        and (tile.block_m, tile.block_n, tile.num_warps) == (16, 64, 4)  # smaller tiles: no shared memory for a window
    )


def find_windows(
    block_tables: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, shape: AttentionShape, tile: Tile
) -> Tensor:
    """int32 [num_seqs, 2]: the first keys that a sequence shares with all others of its window, a multiple of the
    tile's keys and less than its length; and for the first sequence of a window its number of sequences, else 0.

    A window is LEAST_MEMBERS neighbours or more that decode and whose block tables start alike.
    """
    num_seqs = len(seq_lens)
    numbers = torch.empty(3 * num_seqs, dtype=torch.int32, device=seq_lens.device)
    common, windows = numbers.split([num_seqs, 2 * num_seqs])
    common_keys_kernel[(num_seqs,)](
        block_tables, cu_seqlens_q, seq_lens, common, block_tables.stride(0), BLOCK_SIZE=shape.block_size,
        BLOCK_N=tile.block_n, LEAST_KEYS=LEAST_KEYS, COMPARED=COMPARED, num_warps=4,
    )  # fmt: skip
    windows_kernel[(-(-num_seqs // BLOCK_U),)](
        common, windows, num_seqs, **window_constants(shape.group), num_warps=4
    )  # fmt: skip
    return windows.view(-1, 2)


def window_constants(group: int) -> dict[str, int]:
    """The compile-time arguments of windows_kernel."""
    return {"MEMBERS": WINDOW_ROWS // group, "LEAST_MEMBERS": LEAST_MEMBERS, "BLOCK_U": BLOCK_U, "BLOCK_K": WINDOW_ROWS}


@triton.jit(
    do_not_specialize=["block_tables_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "common_ptr"],
)
def common_keys_kernel(
    block_tables_ptr, cu_seqlens_q_ptr, seq_lens_ptr, common_ptr, block_tables_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LEAST_KEYS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Grid (sequences,): the keys that a sequence shares with the one before it, if both decode; 0 if too few."""
    seq = tl.program_id(0)
    before = tl.maximum(seq - 1, 0)
    first, second = tl.load(cu_seqlens_q_ptr + before), tl.load(cu_seqlens_q_ptr + seq)
    decode = (seq > 0) & (second - first == 1) & (tl.load(cu_seqlens_q_ptr + seq + 1) - second == 1)
    # the newest token of either has a block of its own
    tokens = tl.minimum(tl.load(seq_lens_ptr + before), tl.load(seq_lens_ptr + seq)) - 1
    blocks = tl.where(decode & (tokens >= LEAST_KEYS), tokens // BLOCK_SIZE, 0)
    ours = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    theirs = block_tables_ptr + before.to(tl.int64) * block_tables_stride
    equal, at = blocks, blocks * 0
    while at < equal:
        places = at + tl.arange(0, COMPARED)
        mask = places < blocks
        differ = tl.load(ours + places, mask=mask, other=0) != tl.load(theirs + places, mask=mask, other=0)
        equal = tl.minimum(equal, tl.min(tl.where(differ, places, blocks), 0))
        at += COMPARED
    keys = equal * BLOCK_SIZE // BLOCK_N * BLOCK_N
    tl.store(common_ptr + seq, tl.where(keys >= LEAST_KEYS, keys, 0))


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["common_ptr", "windows_ptr"])
def windows_kernel(
    common_ptr, windows_ptr, num_seqs,
    MEMBERS: tl.constexpr, LEAST_MEMBERS: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK_U sequences,): divides runs of sequences that share keys with the one before into windows
    of MEMBERS."""
    seq = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    run = seq * 0  # the first sequence of the run
    for first in range(0, (tl.program_id(0) + 1) * BLOCK_U, BLOCK_U):
        other = first + tl.arange(0, BLOCK_U)
        begins = tl.load(common_ptr + other, mask=other < num_seqs, other=0) == 0
        is_before = begins[None, :] & (other[None, :] <= seq[:, None])
        run = tl.maximum(run, tl.max(tl.where(is_before, other[None, :], 0), 1))
    head = seq - (seq - run) % MEMBERS
    number = tl.arange(0, BLOCK_K)[None, :]
    member = head[:, None] + number
    common = tl.load(common_ptr + member, mask=(member < num_seqs) & (number < MEMBERS), other=0)
    members = tl.min(tl.where((common == 0) & (number > 0), number, MEMBERS), 1)
    keys = tl.min(tl.where((number > 0) & (number < members[:, None]), common, 1 << 30), 1)
    is_window = members >= LEAST_MEMBERS
    tl.store(windows_ptr + seq * 2, tl.where(is_window, keys, 0), mask=seq < num_seqs)
    tl.store(windows_ptr + seq * 2 + 1, tl.where(is_window & (seq == head), members, 0), mask=seq < num_seqs)


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields Llama-3-8B's windows in blocks of 16 and 128 tokens, and those of a model without groups."""
    types = {"block_tables_ptr": "*i32", "cu_seqlens_q_ptr": "*i32", "seq_lens_ptr": "*i32", "common_ptr": "*i32",
             "windows_ptr": "*i32"}  # fmt: skip
    for block_size in (16, 128):
        sizes = {"BLOCK_SIZE": block_size, "BLOCK_N": 64, "LEAST_KEYS": LEAST_KEYS, "COMPARED": COMPARED}
        yield AotConfiguration(
            common_keys_kernel, f"b{block_size}", "int32", sizes, num_warps=4, types=types, quick=block_size == 16
        )
    for group in (1, 4):
        yield AotConfiguration(
            windows_kernel,
            f"g{group}",
            "int32",
            window_constants(group),
            num_warps=4,
            types=types,
            quick=group == 4,
        )
