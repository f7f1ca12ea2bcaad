"""The passes of a draft model: one that catches up with its sequences, then one for each further token of a draft.

All passes of a step are known before the first: the host knows every position, and each pass takes the most likely
tokens of the pass before.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata, KVCache, OutputRows
from engine.worker.batch.device_rows import Put
from engine.worker.batch.input_batch import InputBatch
from engine.worker.batch.step_buffer import IntArray
from kernels.attention.plan import AttentionPlan
from kernels.sampling.greedy import most_likely

# The most tokens of a pass on a CPU that computes each token as a decode, in its own row. Longer passes have chunks.
MAX_DECODES = 64


@dataclass(frozen=True)
class DraftWork:
    """The tokens that the passes of a step compute; int64 [sequences] each.

    The first pass computes the positions from `starts` to `ends` of each of `rows` (of InputBatch), at least one, all
    of whose tokens are known. lengths: tokens to propose behind the last of them, 0 for a row that has further to catch
    up.
    """

    rows: IntArray
    starts: IntArray
    ends: IntArray
    lengths: IntArray

    @cached_property
    def num_passes(self) -> int:
        return max(1, int(self.lengths.max()))

    @cached_property
    def counts(self) -> IntArray:
        """Tokens of each row in the first pass."""
        counts: IntArray = self.ends - self.starts
        return counts


class DraftPasses(Protocol):
    """Runs the passes of a step."""

    max_rows: int  # the most that a DraftWork may have

    def run(self, work: DraftWork) -> tuple[IntArray, float]:
        """(the tokens proposed, int64 [sequences, num_passes], and the seconds that the passes took). Entries of a row
        from its length on mean nothing."""

    def warm_up(self, max_model_len: int) -> None:
        """Compile what sequences of up to so many tokens may need."""


def first_pass(
    batch: InputBatch, work: DraftWork, put: Put, plan: AttentionPlan | None = None
) -> tuple[Tensor, BatchMetadata]:
    """(input ids, metadata) of the first pass in chunks; its output rows are the last tokens of work.rows, in order."""
    order = np.argsort(work.counts > 1, kind="stable")  # decodes first
    rows, starts, counts = work.rows[order], work.starts[order], work.counts[order]
    num_decodes = int(np.count_nonzero(counts == 1))
    lasts = np.empty(len(order), np.int64)
    lasts[order] = np.cumsum(counts) - 1
    token_rows, positions = np.repeat(rows, counts), positions_of(starts, counts)
    tables = batch.block_table[:, : -(-int(work.ends.max()) // batch.block_size)]
    metadata = BatchMetadata(
        positions=put(positions),
        slot_mapping=put(batch.slots(token_rows, positions)),
        num_decodes=num_decodes,
        block_tables=put(tables[rows]),
        seq_lens=put((starts + counts).astype(np.int32)),
        cu_seqlens_q=put(np.cumsum([0, *counts[num_decodes:]], dtype=np.int32)),
        max_seqlen_q=int(counts[num_decodes:].max(initial=0)),
        outputs=OutputRows(put(lasts), put(tables[work.rows]), put(work.ends.astype(np.int32))),
        plan=plan,
    )
    return put(batch.token_ids[token_rows, positions].astype(np.int64)), metadata


def positions_of(starts: IntArray, counts: IntArray) -> IntArray:
    """The positions from each of `starts` on, as many as `counts` says, one after the other."""
    ends = np.cumsum(counts)
    positions: IntArray = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return positions


class HostPasses:
    """Passes on a CPU."""

    def __init__(self, decoder: Decoder, kv_caches: Sequence[KVCache], batch: InputBatch) -> None:
        self._decoder, self._kv_caches, self._batch = decoder, kv_caches, batch
        self.max_rows = len(batch.num_tokens)
        self._no_prefills = torch.zeros(1, dtype=torch.int32)

    def run(self, work: DraftWork) -> tuple[IntArray, float]:
        started = time.perf_counter()
        tokens = np.zeros((len(work.rows), work.num_passes), np.int64)
        if work.counts.sum() <= MAX_DECODES:
            rows, positions = np.repeat(work.rows, work.counts), positions_of(work.starts, work.counts)
            after = self._decode(rows, positions, self._batch.token_ids[rows, positions].astype(np.int64))
            tokens[:, 0] = after[np.cumsum(work.counts) - 1]
        else:
            tokens[:, 0] = self._most_likely(*first_pass(self._batch, work, torch.from_numpy))
        for place in range(1, work.num_passes):
            going = np.flatnonzero(work.lengths > place)
            positions = work.ends[going] - 1 + place
            tokens[going, place] = self._decode(work.rows[going], positions, tokens[going, place - 1])
        return tokens, time.perf_counter() - started

    def warm_up(self, max_model_len: int) -> None:
        pass  # a CPU's kernels are compiled for any shape

    def _decode(self, rows: IntArray, positions: IntArray, input_ids: IntArray) -> IntArray:
        """The most likely token after each of a pass of decodes, int64 [rows]."""
        put, batch = torch.from_numpy, self._batch
        metadata = BatchMetadata(
            positions=put(positions),
            slot_mapping=put(batch.slots(rows, positions)),
            num_decodes=len(rows),
            block_tables=put(batch.block_table[rows, : int(positions.max()) // batch.block_size + 1]),
            seq_lens=put((positions + 1).astype(np.int32)),
            cu_seqlens_q=self._no_prefills,
            max_seqlen_q=0,
        )
        return self._most_likely(put(input_ids), metadata)

    def _most_likely(self, input_ids: Tensor, metadata: BatchMetadata) -> IntArray:
        """The most likely token after each output row, int64 [rows]; 0, a wrong one, where there is none."""
        decoder, caches = self._decoder, self._kv_caches
        if (next_tokens := decoder.decode_tokens(input_ids, metadata, caches)) is not None:
            found = next_tokens.token_ids
        else:
            found = most_likely(decoder.compute_logits(decoder.forward(input_ids, metadata, caches))).numpy()
        tokens: IntArray = found.clip(min=0)
        return tokens
