"""Penalties and the most likely token on a GPU, without a sort and without host synchronisation.

Draws are in kernels/sampling/draw.py. The reference is the engine's torch sampler (engine/worker/sampling/sampler.py);
the kernels keep its order, ties and random numbers, so the same logits, seed and position give the same token in any
batch. Rows are cut into fixed chunks of the vocabulary with one program each, so that many multiprocessors read a
single row and no sum depends on the batch.

Logits stay in the model's dtype and are never written. Rows that a request changes get an fp32 copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.dispatch import tl, triton

CHUNK = 4096  # tokens per program
NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class ChangedLogits:
    """Changed logits: values fp32 [rows, vocab_size]; only rows with a 1 in flags int32 [rows] are defined."""

    values: Tensor
    flags: Tensor


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """Penalties. rows int64 [n] ascending: rows of the logits; batch_rows int64 [n]: their rows in generated int32 and
    in_prompt bool [max_num_seqs, vocab_size]; repetition, presence, frequency fp32 [n]."""

    rows: Tensor
    batch_rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    generated: Tensor
    in_prompt: Tensor


def num_chunks(vocab_size: int) -> int:
    return -(-vocab_size // CHUNK)


def change_logits(
    logits: Tensor,
    changed_rows: Tensor,
    bias: tuple[Tensor, Tensor] | None,
    penalties: TokenPenalties | None,
    banned: Tensor | None,
) -> ChangedLogits:
    """Apply bias, then repetition, frequency and presence penalties, then bans of tokens, in an fp32 copy.

    logits [rows, vocab_size] of any float dtype; changed_rows int64 [n] ascending. bias (indices int64, values fp32)
    and banned (indices) are flat, row * vocab_size + token, their rows ascending and among changed_rows. A row that
    holds NaN or +inf keeps a +inf, so that it still fails. Memory traffic per row: one read of the logits, 5 bytes of
    counts per token with penalties, and 4 bytes written per token.
    """
    rows, vocab_size = logits.shape
    values = torch.empty((rows, vocab_size), dtype=torch.float32, device=logits.device)
    flags = torch.zeros(rows, dtype=torch.int32, device=logits.device).index_fill_(0, changed_rows, 1)
    # An absent argument has no entries; any tensor of its type stands in for it, so that the kernel is compiled once.
    bias_at, bias_values = bias or (changed_rows, values)
    banned_at = changed_rows if banned is None else banned
    if penalties is None:
        counts = values.view(torch.int32), flags.view(torch.bool)
        penalty = (changed_rows, changed_rows, values, values, values, *counts)
    else:
        p = penalties
        penalty = (p.rows, p.batch_rows, p.repetition, p.presence, p.frequency, p.generated, p.in_prompt)
    change_logits_kernel[(len(changed_rows), num_chunks(vocab_size))](
        logits, values, changed_rows, bias_at, bias_values, banned_at, *penalty,
        0 if bias is None else len(bias_at), 0 if banned is None else len(banned_at),
        0 if penalties is None else len(penalties.rows), logits.stride(0),
        VOCAB=vocab_size, BLOCK=CHUNK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return ChangedLogits(values, flags)


def largest_logits(logits: Tensor, changed: ChangedLogits | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely token of each row: (token_ids int64, their logits fp32, failed bool), [rows] each.

    Ties give the lowest id. A row with NaN, with +inf or without a logit above -inf fails; its token is 0. Two
    launches, one read of the logits.
    """
    rows, vocab_size = logits.shape
    device, n = logits.device, num_chunks(vocab_size)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    largest = torch.empty(rows, dtype=torch.float32, device=device)
    failed = torch.empty(rows, dtype=torch.bool, device=device)
    tops = torch.empty((rows, n), dtype=torch.float32, device=device)
    places = torch.empty((rows, n), dtype=torch.int32, device=device)
    values, flags = (changed.values, changed.flags) if changed else (None, None)
    if rows:
        chunk_top_kernel[(rows, n)](
            logits, values, flags, tops, places, logits.stride(0), VOCAB=vocab_size, BLOCK=CHUNK, num_warps=NUM_WARPS
        )
        row_top_kernel[(rows,)](
            tops, places, token_ids, largest, failed, NUM_CHUNKS=n, BLOCK_C=power_of_2(n), num_warps=1
        )
    return token_ids, largest, failed


@triton.jit
def load_logits(
    logits_ptr, values_ptr, flags_ptr, row, offs, logits_stride, VOCAB: tl.constexpr
):  # fmt: skip
    """fp32 logits of one row (int64) at `offs`; -inf past the vocabulary, +inf for NaN: both fail a row."""
    mask = offs < VOCAB
    if flags_ptr is None:
        x = tl.load(logits_ptr + row * logits_stride + offs, mask=mask, other=float("-inf")).to(tl.float32)
    else:
        flags = tl.zeros_like(offs) + tl.load(flags_ptr + row)
        logits_at = logits_ptr + row * logits_stride + offs
        x = tl.load(logits_at, mask=mask & (flags == 0), other=float("-inf")).to(tl.float32)
        changed = tl.load(values_ptr + row * VOCAB + offs, mask=mask & (flags != 0), other=float("-inf"))
        x = tl.where(flags == 0, x, changed)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _lower_bound(ptr, n, target):
    """Index of the first of n ascending int64 numbers that is not below `target`; n if all are."""
    low = n * 0
    high = n
    while low < high:
        middle = (low + high) // 2
        below = tl.load(ptr + middle) < target
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit(do_not_specialize=["num_bias", "num_banned", "num_penalties"])
def change_logits_kernel(
    logits_ptr,
    values_ptr,
    changed_rows_ptr,
    bias_at_ptr,
    bias_values_ptr,
    banned_at_ptr,
    penalty_rows_ptr,
    batch_rows_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    generated_ptr,
    in_prompt_ptr,
    num_bias,
    num_banned,
    num_penalties,
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_changed_rows, num_chunks)."""
    row = tl.load(changed_rows_ptr + tl.program_id(0))
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < VOCAB
    x = tl.load(logits_ptr + row * logits_stride + offs, mask=mask, other=float("-inf")).to(tl.float32)
    bad = (x != x) | (x == float("inf"))
    first = _lower_bound(bias_at_ptr, num_bias, row * VOCAB)
    # These loops count from zero: Triton 3.4 and 3.5 compile no range that starts at the result of a while loop.
    for i in range(_lower_bound(bias_at_ptr, num_bias, (row + 1) * VOCAB) - first):
        token = tl.load(bias_at_ptr + first + i) - row * VOCAB
        x += tl.where(offs == token, tl.load(bias_values_ptr + first + i), 0.0)
    place = _lower_bound(penalty_rows_ptr, num_penalties, row)
    if place < num_penalties:
        if tl.load(penalty_rows_ptr + place) == row:
            at = tl.load(batch_rows_ptr + place) * VOCAB + offs
            generated = tl.load(generated_ptr + at, mask=mask, other=0)
            in_prompt = tl.load(in_prompt_ptr + at, mask=mask, other=0).to(tl.int32) != 0
            repetition = tl.load(repetition_ptr + place)
            repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where((generated > 0) | in_prompt, repeated, x)
            present = tl.where(generated > 0, tl.load(presence_ptr + place), 0.0)
            x -= tl.load(frequency_ptr + place) * generated.to(tl.float32) + present
    first = _lower_bound(banned_at_ptr, num_banned, row * VOCAB)
    for i in range(_lower_bound(banned_at_ptr, num_banned, (row + 1) * VOCAB) - first):
        x = tl.where(offs == tl.load(banned_at_ptr + first + i) - row * VOCAB, float("-inf"), x)
    tl.store(values_ptr + row * VOCAB + offs, tl.where(bad, float("inf"), x), mask=mask)


@triton.jit
def chunk_top_kernel(
    logits_ptr,
    values_ptr,
    flags_ptr,
    tops_ptr,
    places_ptr,
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, num_chunks): finds the largest logit of a chunk and the first token that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr, values_ptr, flags_ptr, row, offs, logits_stride, VOCAB)
    top = tl.max(x, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(tops_ptr + at, top)
    tl.store(places_ptr + at, tl.min(tl.where(x == top, offs, 2147483647), 0))


@triton.jit
def row_top_kernel(
    tops_ptr,
    places_ptr,
    token_ids_ptr,
    largest_ptr,
    failed_ptr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (rows,): finds the largest logit over the chunks."""
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_C)
    mask = chunk < NUM_CHUNKS
    tops = tl.load(tops_ptr + row * NUM_CHUNKS + chunk, mask=mask, other=float("-inf"))
    places = tl.load(places_ptr + row * NUM_CHUNKS + chunk, mask=mask, other=2147483647)
    top = tl.max(tops, 0)
    failed = (top == float("inf")) | (top == float("-inf"))
    token_id = tl.where(failed, 0, tl.min(tl.where(tops == top, places, 2147483647), 0))
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
    tl.store(largest_ptr + row, top)
    tl.store(failed_ptr + row, failed)


CHANGED_TYPES = {
    "values_ptr": "*fp32",
    "flags_ptr": "*i32",
}  # arguments of load_logits, for kernels.aot


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the vocabularies of Llama 3 (a multiple of the chunk's 16 bytes) and of GPT-2 (odd)."""
    counts = dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr", "bias_values_ptr"), "*fp32")
    counts |= dict.fromkeys(("changed_rows_ptr", "bias_at_ptr", "banned_at_ptr", "penalty_rows_ptr"), "*i64")
    counts |= {"batch_rows_ptr": "*i64", "generated_ptr": "*i32", "in_prompt_ptr": "*i1"}
    for dtype, vocab_size in (("bf16", 128256), ("fp16", 50257), ("fp32", 262144)):
        label, quick, n = f"vocabulary {vocab_size}", dtype == "bf16", num_chunks(vocab_size)
        more = {"num_warps": NUM_WARPS, "multiples_of_16": ("logits_stride",) * (vocab_size % 16 == 0), "quick": quick}
        sizes = {"VOCAB": vocab_size, "BLOCK": CHUNK}
        yield AotConfiguration(change_logits_kernel, label, dtype, sizes, types=CHANGED_TYPES | counts, **more)
        types = CHANGED_TYPES | {"tops_ptr": "*fp32", "places_ptr": "*i32"}
        absent = dict.fromkeys(CHANGED_TYPES)
        yield AotConfiguration(chunk_top_kernel, label, dtype, sizes | absent, types=types, **more)
        yield AotConfiguration(chunk_top_kernel, f"{label} changed", dtype, sizes, types=types, **more)
        yield AotConfiguration(
            row_top_kernel, label, dtype, {"NUM_CHUNKS": n, "BLOCK_C": power_of_2(n)}, num_warps=1, quick=quick,
            types=types | {"token_ids_ptr": "*i64", "largest_ptr": "*fp32", "failed_ptr": "*i1"},
        )  # fmt: skip
