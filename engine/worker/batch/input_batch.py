"""InputBatch: the Worker's mirror of the live sequences; makes the tensors of a step.

Every sequence has a fixed row from the plan that brings it to the plan that removes it, so a step costs a few
vectorised gathers and no Python code per token. On a GPU all arrays of a step are uploaded in one copy (StepBuffer). A
token that was sampled but has not reached the host yet is -(row + 1) in its sequence's row; the device replaces it by
the real token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.executor.step import Draft, NewSequence, SequenceStep
from engine.models.layers.attention import BatchMetadata, OutputRows
from engine.worker.batch.bucket_buffers import BucketInputs
from engine.worker.batch.device_rows import DeviceRows, Put
from engine.worker.batch.step_buffer import IntArray, StepBuffer
from kernels.attention.flashinfer import PlannedPrefill
from kernels.attention.plan import AttentionPlan

DISAGREE = "the plan and the Worker disagree on the number of known tokens"
NO_OFFSETS = np.zeros(0, np.int64)
# Tokens: sequences that share the blocks there begin alike. The first block of a chat template is everybody's.
SORTED_BY = (64, 500)
NO_BLOCK = "the plan computes tokens that have no KV block"


@dataclass(frozen=True, slots=True)
class SampleTargets:
    """The tokens that a step samples, one entry each: sequence id, row in the batch, position (number of tokens
    before)."""

    seq_ids: IntArray
    rows: IntArray
    positions: IntArray


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The draft tokens of a step as rows beside its decodes: each computes one token, as a decode does.

    rows, offsets int64 [num_draft_tokens]: the row in the batch, and the distance from the token that the sequence
    decodes, 1 and up. All keys and values of a layer are written before any is read, so a draft token reads those of
    the tokens before it.
    """

    rows: IntArray
    offsets: IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the decoder and the sampler for one step.

    input_ids int64 [num_tokens]: a negative id (has_pending) stands for the last token of row -id - 1, which is on the
    device only. sample_indices: the rows of the hidden states to sample; None if these are all rows in order. slots
    int64 [num_tokens]: where the step writes, on the host. rows, starts, ends: for each sequence that computes tokens,
    its row in the batch, the position of its first such token, and the end of its tokens among those of the step.
    prepare: call it in the device's queue before the forward pass.
    """

    input_ids: Tensor
    metadata: BatchMetadata
    has_pending: bool
    targets: SampleTargets
    sample_indices: Tensor | None
    slots: IntArray
    rows: IntArray
    starts: IntArray
    ends: IntArray
    prepare: Callable[[], None]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step as arrays of the host: first the sequences that compute one token, then the chunks. Each draft token
    counts as a sequence.

    rows, starts, ends: as in StepInputs. counts: tokens that each sequence computes. seq_lens: tokens in the cache,
    this step's included. One entry per token: input_ids (negative: see StepInputs), positions, slots. sampled: the
    index in `rows` of each sequence that samples. parents: the index in `rows` of each fork's parent. targets:
    `sampled`, then the forks. All int64.
    """

    rows: IntArray
    starts: IntArray
    ends: IntArray
    counts: IntArray
    seq_lens: IntArray
    num_decodes: int
    input_ids: IntArray
    positions: IntArray
    slots: IntArray
    sampled: IntArray
    parents: IntArray
    targets: SampleTargets

    def fill(self, arrays: BucketInputs[IntArray], first_input: int) -> None:
        """Write a step without forks to the start of the arrays of a bucket; first_input: see BucketInputs.sources."""
        num_tokens, num_seqs, num_outputs = len(self.positions), len(self.rows), len(self.sampled)
        arrays.input_ids[:num_tokens] = self.input_ids
        arrays.sources[:num_tokens] = _sources(self.input_ids, first_input)
        arrays.positions[:num_tokens] = self.positions
        arrays.slots[:num_tokens] = self.slots
        arrays.seq_rows[:num_seqs] = self.rows
        arrays.seq_lens[:num_seqs] = self.seq_lens
        arrays.cu_seqlens_q[0] = 0
        arrays.cu_seqlens_q[1 : num_seqs + 1] = self.ends
        arrays.rows[:num_outputs] = self.rows[self.sampled]
        arrays.outputs[:num_outputs] = self.ends[self.sampled] - 1
        arrays.output_lens[:num_outputs] = self.seq_lens[self.sampled]


def _sources(input_ids: IntArray, first_input: int) -> IntArray:
    """BucketInputs.sources: a negative id stands for the last token of a row, which is on the device."""
    return np.where(input_ids < 0, -1 - input_ids, np.arange(first_input, first_input + len(input_ids)))


class DecodePlaces(NamedTuple):
    """The tokens of decodes, int64 [rows] each: their positions, the lengths with them, and their slots."""

    positions: IntArray
    seq_lens: IntArray
    slots: IntArray


def nothing() -> None:
    """The preparation of tables that the host uploads."""


@dataclass(frozen=True, slots=True)
class StepTables:
    """Block tables int32 of a step's sequences and of its output rows. `prepare`, in the device's queue, fills them."""

    of_sequences: Tensor
    of_outputs: Tensor | None
    prepare: Callable[[], None] = nothing


class InputBatch:
    """Rows of host arrays, one per live sequence.

    `token_ids` int32 [max_num_seqs, max_model_len + 1] holds the known tokens, also those that the Worker sampled;
    `block_table` int32 [max_num_seqs, max_blocks]. Pages of rows that were never used take no memory.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, attention_plan: AttentionPlan | None = None
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.attention_plan = attention_plan
        self._slots_per_block = np.int64(block_size)
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)  # known tokens
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.seq_ids = np.full(max_num_seqs, -1, np.int64)
        self.parent_row = np.full(max_num_seqs, -1, np.int64)  # for a fork, the row that computes its logits
        self.row_of: dict[int, int] = {}
        # Changed entries of the block table (row * max_blocks + index), for a device with a copy of the table; None: no
        # copy.
        self.changed_cells: list[int] | None = None
        self._decodes: tuple[list[int], IntArray] | None = None  # decodes of the last step, and their rows
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._no_prefills = torch.zeros(1, dtype=torch.int32)  # cu_seqlens_q of a step on a CPU without chunks

    def add(self, new: NewSequence) -> int:
        """Give a sequence a row and return it. EngineError if the Worker cannot hold the sequence."""
        if new.seq_id in self.row_of:
            raise EngineError(f"sequence {new.seq_id} was sent as new while it is live")
        if not self._free_rows:
            raise EngineError(f"the plan brings more than max_num_seqs={len(self.num_tokens)} live sequences")
        if len(new.token_ids) > self.token_ids.shape[1]:
            raise EngineError(f"sequence {new.seq_id} has {len(new.token_ids)} tokens, more than max_model_len")
        row = self._free_rows.pop()
        self._decodes = None
        self.row_of[new.seq_id] = row
        self.parent_row[row] = -1 if new.fork_of is None else self.row_of[new.fork_of]
        self.seq_ids[row] = new.seq_id
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_computed[row] = new.num_computed_tokens
        self.num_prompt[row] = new.num_prompt_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        return row

    def remove(self, seq_id: int) -> int | None:
        """Free a row and return it; None for an unknown id: a sequence may be removed before it reached the Worker."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self._decodes = None
            self.seq_ids[row] = -1
            self._free_rows.append(row)
        return row

    def replace_last_block(self, seq_id: int, block_id: int) -> None:
        """Copy-on-write: the sequence writes to `block_id` from here on, in place of its last block."""
        row = self.row_of[seq_id]
        self._set_blocks(row, int(self.num_blocks[row]) - 1, [block_id])

    def fill_decodes(
        self,
        decodes: list[int],
        blocks: list[int],
        first_input: int,
        arrays: BucketInputs[IntArray],
        drafts: Sequence[Draft],
    ) -> SampleTargets:
        """`build` for a step of decodes alone, whose inputs go into the arrays of BucketBuffers; first_input: see
        BucketInputs.sources."""
        before = self._decodes
        rows = self.decode_rows(decodes, blocks)
        rows, places = self._places_with(rows, drafts) if drafts else (rows, self._decode_places(rows))
        n = len(rows)
        arrays.rows[:n] = rows
        arrays.positions[:n] = places.positions
        arrays.seq_lens[:n] = places.seq_lens
        arrays.slots[:n] = places.slots
        if self._decodes is before and not drafts:  # the step before sampled all of these tokens on the device
            arrays.sources[:n] = rows
        else:
            arrays.input_ids[:n] = input_ids = self.token_ids[rows, places.positions]
            arrays.sources[:n] = _sources(input_ids, first_input)
        return self._count_decodes(rows, places.seq_lens)

    def build_decodes(self, rows: IntArray, buffer: StepBuffer, drafts: Sequence[Draft]) -> StepInputs:
        """`build` for a step of decodes alone on a CPU, which has all tokens: no array per token is made twice. rows:
        decode_rows of the plan."""
        rows, places = self._places_with(rows, drafts) if drafts else (rows, self._decode_places(rows))
        positions, seq_lens, slots = places
        input_ids = self.token_ids[rows, positions].astype(np.int64)
        put, n = buffer.put, len(rows)
        metadata = BatchMetadata(
            positions=put(positions),
            slot_mapping=put(slots),
            num_decodes=n,
            block_tables=put(self.block_table[rows, : -(-int(seq_lens.max()) // self.block_size)]),
            seq_lens=put(seq_lens.astype(np.int32)),
            cu_seqlens_q=self._no_prefills,
            max_seqlen_q=0,
            plan=self.attention_plan,
        )
        return StepInputs(
            input_ids=put(input_ids),
            metadata=metadata,
            has_pending=bool((input_ids < 0).any()),
            targets=self._count_decodes(rows, seq_lens),
            sample_indices=None,
            slots=slots,
            rows=rows,
            starts=positions,
            ends=np.arange(1, n + 1),
            prepare=nothing,
        )

    def take_changed_cells(self) -> list[int]:
        changed, self.changed_cells = self.changed_cells or [], []
        return changed

    def lay_out(
        self, decodes: list[int], blocks: list[int], chunks: Sequence[SequenceStep], drafts: Sequence[Draft] = ()
    ) -> StepLayout:
        """The arrays of a step, sequences with one token first; counts its tokens as computed and as sampled.

        `decodes`, `blocks`, `chunks` and `drafts` are those of StepPlan. The place of a sampled token holds a
        placeholder until `store_tokens`.
        """
        decode_rows = self.decode_rows(decodes, blocks)
        entered = self._enter_drafts(drafts)
        rows, counts, samples = self._step_rows(np.concatenate([decode_rows, entered.rows]), chunks)
        offsets = np.zeros(len(rows), np.int64)  # from the next token to compute; not 0 for draft tokens alone
        offsets[len(decode_rows) : len(decode_rows) + len(entered.rows)] = entered.offsets
        self._decodes = None
        if chunks:
            order = np.argsort(np.where(counts == 0, 2, counts > 1), kind="stable")  # decodes, prefills, forks
            order, forks = np.split(order, [len(counts) - np.count_nonzero(counts == 0)])
            forks, rows, counts, samples = rows[forks], rows[order], counts[order], samples[order]
            offsets = offsets[order]
        else:
            forks = rows[:0]
        starts = self.num_computed[rows] + offsets
        seq_lens = starts + counts
        self._check(rows, seq_lens, samples, offsets)

        ends = np.cumsum(counts)
        token_rows = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        sampled, parents = np.flatnonzero(samples), self._parents(rows, samples, forks)
        sample_rows = np.concatenate([rows[samples], forks])
        layout = StepLayout(
            rows=rows,
            starts=starts,
            ends=ends,
            counts=counts,
            seq_lens=seq_lens,
            num_decodes=len(rows) - int(np.count_nonzero(counts > 1)),
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slots=self.slots(token_rows, positions),
            sampled=sampled,
            parents=parents,
            targets=SampleTargets(self.seq_ids[sample_rows], sample_rows, seq_lens[np.concatenate([sampled, parents])]),
        )
        self._advance(rows, seq_lens, sample_rows)
        return layout

    def build(
        self,
        decodes: list[int],
        blocks: list[int],
        chunks: Sequence[SequenceStep],
        buffer: StepBuffer,
        drafts: Sequence[Draft] = (),
        *,
        every_row: bool = False,
        device_rows: DeviceRows | None = None,
    ) -> StepInputs:
        """The inputs of a step that `lay_out` describes. every_row asks for the hidden states of all rows, not of the
        sampled rows alone. device_rows: where a device gathers block tables (StepInputs.prepare); None: the tables are
        part of `buffer`."""
        layout = self.lay_out(decodes, blocks, chunks, drafts)
        put, num_decodes = buffer.put, layout.num_decodes
        chunk_lens = layout.counts[num_decodes:]
        cu_seqlens_q = np.zeros(len(chunk_lens) + 1, np.int32)
        np.cumsum(chunk_lens, out=cu_seqlens_q[1:])
        # A step that samples nothing has one output row too, whose result nothing reads.
        wanted = layout.sampled if len(layout.sampled) else np.zeros(1, np.int64)
        every_row = every_row or len(wanted) == layout.ends[-1]
        tables = self._tables(layout, None if every_row else wanted, put, device_rows)
        outputs = None
        if tables.of_outputs is not None:
            outputs = OutputRows(
                indices=put(layout.ends[wanted] - 1),
                block_tables=tables.of_outputs,
                seq_lens=put(layout.seq_lens[wanted].astype(np.int32)),
            )
        metadata = BatchMetadata(
            positions=put(layout.positions),
            slot_mapping=put(layout.slots),
            num_decodes=num_decodes,
            block_tables=tables.of_sequences,
            seq_lens=put(layout.seq_lens.astype(np.int32)),
            cu_seqlens_q=put(cu_seqlens_q),
            max_seqlen_q=int(chunk_lens.max(initial=0)),
            outputs=outputs,
            plan=self.attention_plan,
            prefill=self._plan_prefills(layout, cu_seqlens_q, put),
        )
        sampled, parents = layout.sampled, layout.parents
        if every_row:
            hidden_rows = layout.ends[np.concatenate([sampled, parents])] - 1
        else:
            hidden_rows = np.concatenate([np.arange(len(sampled)), np.searchsorted(sampled, parents)])
        return StepInputs(
            input_ids=put(layout.input_ids),
            metadata=metadata,
            has_pending=bool((layout.input_ids < 0).any()),
            targets=layout.targets,
            sample_indices=put(hidden_rows) if len(parents) or every_row else None,
            slots=layout.slots,
            rows=layout.rows,
            starts=layout.starts,
            ends=layout.ends,
            prepare=tables.prepare,
        )

    def accept(self, seq_id: int, first: int, token_ids: list[int]) -> None:
        """Enter the verified tokens of a sequence with a draft, the first of them at position `first`. Blocks behind
        its computed tokens, all but the last, are given up. Does nothing for a sequence removed meanwhile."""
        if (row := self.row_of.get(seq_id)) is None:
            return
        end = first + len(token_ids)
        self.token_ids[row, first:end] = token_ids
        self.num_tokens[row], self.num_computed[row] = end, end - 1
        self.num_blocks[row] = -(-(end - 1) // self.block_size)
        self._decodes = None  # its last token is on the host alone

    def store_tokens(self, targets: SampleTargets, token_ids: IntArray) -> None:
        """Enter the sampled tokens of a step once the host knows them; skips sequences removed meanwhile."""
        live = self.seq_ids[targets.rows] == targets.seq_ids
        self.token_ids[targets.rows[live], targets.positions[live]] = token_ids[live]

    def _plan_prefills(self, layout: StepLayout, cu_seqlens_q: IntArray, put: Put) -> PlannedPrefill | None:
        """FlashInfer's plan of a step's prefills, if FlashInfer computes them."""
        rows, seq_lens = layout.rows[layout.num_decodes :], layout.seq_lens[layout.num_decodes :]
        flashinfer = None if self.attention_plan is None else self.attention_plan.flashinfer
        if flashinfer is None or not len(rows):
            return None
        num_blocks = -(-seq_lens // self.block_size)
        widest = int(num_blocks.max())
        block_ids = self.block_table[rows, :widest][np.arange(widest) < num_blocks[:, None]]
        return flashinfer.plan(cu_seqlens_q, seq_lens, put(block_ids))

    def _tables(
        self, layout: StepLayout, outputs: IntArray | None, put: Put, device_rows: DeviceRows | None
    ) -> StepTables:
        """The block tables of the step's sequences, and of those among them with an output row (None: not wanted)."""
        rows, output_rows = layout.rows, None if outputs is None else layout.rows[outputs]
        if device_rows is None:
            tables = self.block_table[:, : -(-int(layout.seq_lens.max()) // self.block_size)]
            return StepTables(put(tables[rows]), None if output_rows is None else put(tables[output_rows]))
        enter = device_rows.stage_cells(self.take_changed_cells(), self.block_table, put)
        on_device = put(rows), None if output_rows is None else put(output_rows)

        def prepare() -> None:
            enter()
            device_rows.gather(*on_device)

        return StepTables(
            device_rows.step_tables[: len(rows)],
            None if output_rows is None else device_rows.output_tables[: len(output_rows)],
            prepare,
        )

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """The slots of tokens, int64: block_id * block_size + offset of each."""
        blocks, offsets = np.divmod(positions, self.block_size)
        slots: IntArray = self.block_table[rows, blocks] * self._slots_per_block + offsets
        return slots

    def enter_blocks(self, blocks: list[int]) -> None:
        """Append blocks to the tables of their sequences: StepPlan.decode_blocks."""
        for seq_id, block_id in zip(blocks[::2], blocks[1::2], strict=True):
            self._append_blocks(self.row_of[seq_id], [block_id])

    def decode_rows(self, decodes: list[int], blocks: list[int]) -> IntArray:
        """The rows of `decodes`, those that begin alike side by side; also enters their new blocks, pairs of sequence
        id and block id.

        Attention reads keys that neighbours share once (kernels/attention/shared.py, kernels/cpu/attention/items.py).
        """
        self.enter_blocks(blocks)
        row_of = self.row_of
        if self._decodes is None or self._decodes[0] != decodes:  # rare: decodes mostly repeat
            rows = np.fromiter(map(row_of.__getitem__, decodes), np.int64, len(decodes))
            self._decodes = decodes, rows[self._by_prefix(rows)]
        return self._decodes[1]

    def _by_prefix(self, rows: IntArray) -> IntArray:
        """An order in which rows with the same blocks at SORTED_BY are neighbours. Rows without such a block, whose
        entry is old, may be anywhere."""
        places = [min(tokens // self.block_size, self.block_table.shape[1] - 1) for tokens in SORTED_BY]
        order: IntArray = np.lexsort([self.block_table[rows, place] for place in reversed(places)])
        return order

    def enter_draft(self, draft: Draft) -> int:
        """Write the tokens of a draft behind the known tokens of its sequence, and return its row. `accept` says later
        which ones are known."""
        row = self.row_of[draft.seq_id]
        end = int(self.num_tokens[row])
        self.token_ids[row, end : end + len(draft.token_ids)] = draft.token_ids
        return row

    def _enter_drafts(self, drafts: Sequence[Draft]) -> DraftRows:
        counts = [len(draft.token_ids) for draft in drafts]
        rows = np.repeat(np.array([self.enter_draft(draft) for draft in drafts], np.int64), counts)
        return DraftRows(rows, np.concatenate([NO_OFFSETS, *[np.arange(1, count + 1) for count in counts]]))

    def _places_with(self, rows: IntArray, drafts: Sequence[Draft]) -> tuple[IntArray, DecodePlaces]:
        """(rows, places) of decodes, then of their draft tokens."""
        entered, num_decodes = self._enter_drafts(drafts), len(rows)
        rows = np.concatenate([rows, entered.rows])
        positions = self.num_computed[rows]
        positions[num_decodes:] += entered.offsets
        seq_lens = positions + 1
        self._check_known(rows[:num_decodes], seq_lens[:num_decodes])
        self._check_blocks(rows, seq_lens)
        self._decodes = None
        return rows, DecodePlaces(positions, seq_lens, self.slots(rows, positions))

    def _step_rows(self, decodes: IntArray, chunks: Sequence[SequenceStep]) -> tuple[IntArray, IntArray, IntArray]:
        if not chunks:
            return decodes, np.ones(len(decodes), np.int64), np.ones(len(decodes), np.bool_)
        rows = np.concatenate([decodes, np.empty(len(chunks), np.int64)])
        counts = np.ones(len(rows), np.int64)
        samples = np.ones(len(rows), np.bool_)
        row_of = self.row_of
        for i, step in enumerate(chunks, start=len(decodes)):
            row = row_of[step.seq_id]
            rows[i], counts[i], samples[i] = row, step.num_tokens, step.sample
            if step.new_block_ids:
                self._append_blocks(row, step.new_block_ids)
        return rows, counts, samples

    def _parents(self, rows: IntArray, samples: IntArray, forks: IntArray) -> IntArray:
        """The index in `rows` (the rows that compute) of the parent of each fork."""
        place = np.full(len(self.num_tokens), -1, np.int64)
        place[rows] = np.arange(len(rows))
        parents = place[self.parent_row[forks]]
        if (parents < 0).any() or not samples[parents].all():
            raise EngineError("the plan forks a sequence that samples nothing in this step")
        return parents

    def _decode_places(self, rows: IntArray) -> DecodePlaces:
        """The places of the next token of each row. EngineError if plan and Worker disagree."""
        positions = self.num_computed[rows]
        seq_lens = positions + 1
        self._check_known(rows, seq_lens)
        self._check_blocks(rows, seq_lens)
        return DecodePlaces(positions, seq_lens, self.slots(rows, positions))

    def _count_decodes(self, rows: IntArray, seq_lens: IntArray) -> SampleTargets:
        """Count one token of each row as computed and the next one as sampled."""
        self.num_computed[rows] = seq_lens
        self.token_ids[rows, seq_lens] = -1 - rows
        self.num_tokens[rows] = seq_lens + 1
        return SampleTargets(self.seq_ids[rows], rows, seq_lens)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[row])
        self._set_blocks(row, start, block_ids)
        self.num_blocks[row] = start + len(block_ids)

    def _set_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        end = start + len(block_ids)
        self.block_table[row, start:end] = block_ids
        if self.changed_cells is not None:
            first = row * self.block_table.shape[1]
            self.changed_cells += range(first + start, first + end)

    def _check_known(self, rows: IntArray, seq_lens: IntArray) -> None:
        """EngineError unless each decode computes the last known token of its sequence."""
        if (seq_lens != self.num_tokens[rows]).any():
            raise EngineError(DISAGREE)

    def _check_blocks(self, rows: IntArray, seq_lens: IntArray) -> None:
        """EngineError if a token has no block."""
        if (seq_lens > self.num_blocks[rows] * self.block_size).any():
            raise EngineError(NO_BLOCK)

    def _check(self, rows: IntArray, seq_lens: IntArray, samples: IntArray, offsets: IntArray) -> None:
        """EngineError if plan and Worker disagree: going on would write into blocks of other sequences. offsets: those
        of draft tokens, 0 for others."""
        known = self.num_tokens[rows] + offsets
        if (seq_lens > known).any() or ((seq_lens == known) != samples).any():
            raise EngineError(DISAGREE)
        self._check_blocks(rows, seq_lens)

    def _advance(self, rows: IntArray, seq_lens: IntArray, sample_rows: IntArray) -> None:
        self.num_computed[rows] = seq_lens
        self.token_ids[sample_rows, self.num_tokens[sample_rows]] = -(sample_rows + 1)
        self.num_tokens[sample_rows] += 1
