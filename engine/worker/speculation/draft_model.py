"""DraftModel: a small decoder in the Worker, which proposes tokens for the served model (`--speculative MODEL:K`).

It has a KV cache of its own with the same block ids, so the block tables of sequences serve both caches, and copies and
moves of blocks take both along. It computes nothing until the Driver wants a draft. Then it catches up first: the slots
that it has written are known, and the tokens from a sequence's first unknown slot on are computed in one pass. So a
cached prefix, a preempted sequence, and steps too full for drafts need no care of their own, and a step without a draft
costs no pass. A proposal is the most likely token after each other, one pass per token.

The proposals decide only how many tokens a step keeps, never which: DraftRounds verifies them as any other draft.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.executor.step import OPEN_TOKEN, Draft, StepPlan
from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata, KVCache
from engine.worker.batch.input_batch import InputBatch
from engine.worker.batch.step_buffer import IntArray
from kernels.sampling.greedy import most_likely

MAX_ROWS = 64  # a pass of so few tokens computes each as a decode, with its own row; a longer pass in chunks
NO_SLOTS: IntArray = np.zeros(0, np.int64)


class NoDraftModel:
    """No draft model. The runner calls `propose` for each plan, and `computed` with the slots that its step writes."""

    def propose(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with tokens in place of the drafts that the Driver left open."""
        return plan

    def computed(self, slots: Tensor) -> None:
        """The step writes the keys and values of new tokens to `slots`, int64 [T]."""

    def warm_up_plans(self, num_prompt_tokens: int) -> list[StepPlan]:
        """Plans that run what a draft needs, for sequence 0 once it has computed a prompt and one token in block 0."""
        return []


class DraftModel(NoDraftModel):
    """`batch`: the rows of the served model. A CPU alone has one."""

    def __init__(
        self,
        decoder: Decoder,
        kv_caches: Sequence[KVCache],
        batch: InputBatch,
        *,
        max_num_tokens: int,
        num_host_blocks: int = 0,
    ) -> None:
        """max_num_tokens: tokens of one pass, which bounds how far it catches up in one step."""
        self._decoder, self._kv_caches, self._batch = decoder, kv_caches, batch
        self._max_num_tokens = max_num_tokens
        # Slots whose keys and values are those of the token that the served model has there; of the host tier, too.
        self._known = np.zeros((len(kv_caches[0][0]), batch.block_size), np.bool_)
        self._known_on_host = np.zeros((num_host_blocks, batch.block_size), np.bool_)
        self._proposed = NO_SLOTS  # slots of the step's own tokens that are written already

    def propose(self, plan: StepPlan) -> StepPlan:
        self._move(plan)
        open_drafts = [draft for draft in plan.drafts if draft.is_open]
        if not open_drafts:
            return plan
        self._batch.enter_blocks(plan.decode_blocks)
        rows = np.array([self._batch.row_of[draft.seq_id] for draft in open_drafts], np.int64)
        proposed = self._proposals(rows, np.array([len(draft.token_ids) for draft in open_drafts]))
        found = dict(zip([draft.seq_id for draft in open_drafts], proposed, strict=True))
        drafts = [Draft(draft.seq_id, found.get(draft.seq_id, draft.token_ids)) for draft in plan.drafts]
        return msgspec.structs.replace(plan, drafts=drafts, decode_blocks=[])

    def computed(self, slots: Tensor) -> None:
        known = self._known.reshape(-1)
        known[slots.numpy()] = False
        known[self._proposed] = True
        self._proposed = NO_SLOTS

    def warm_up_plans(self, num_prompt_tokens: int) -> list[StepPlan]:
        if num_prompt_tokens + 4 > min(self._batch.block_size, self._batch.max_model_len):
            return []
        return [StepPlan(0, [], [], [], [], decodes=[0], drafts=[Draft(0, [OPEN_TOKEN, OPEN_TOKEN])])]

    def _move(self, plan: StepPlan) -> None:
        for move in plan.offloads:
            self._known_on_host[move.slot] = self._known[move.block_id]
        for move in plan.loads:
            self._known[move.block_id] = self._known_on_host[move.slot]
        for copy in plan.block_copies:
            self._known[copy.target] = self._known[copy.source]

    def _proposals(self, rows: IntArray, lengths: IntArray) -> list[list[int]]:
        """`lengths` tokens for each row. A row that has too far to catch up gets tokens 0, which will be wrong."""
        tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
        last = self._batch.num_computed[rows]  # the position of the last known token, which this step computes
        starts, ends = self._part_to_catch_up(rows, last + 1)
        ready = np.flatnonzero(ends == last + 1)
        begun = np.flatnonzero(ends > starts)
        inputs = self._batch.token_ids
        tokens[begun, 0] = self._next_tokens(rows[begun], starts[begun], ends[begun], inputs)
        slots = [self._slots(rows[ready], last[ready])]
        for place in range(1, tokens.shape[1]):
            if not len(ready := ready[lengths[ready] > place]):
                break
            inputs[rows[ready], last[ready] + place] = tokens[ready, place - 1]
            positions = last[ready] + place
            tokens[ready, place] = self._next_tokens(rows[ready], positions, positions + 1, inputs)
            slots.append(self._slots(rows[ready], positions))
        self._proposed = np.concatenate(slots)
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]

    def _part_to_catch_up(self, rows: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """(starts, ends) of the positions that a pass computes: from the first unknown slot, in all at most
        `max_num_tokens`."""
        starts, room = np.empty_like(ends), self._max_num_tokens
        stops = ends.copy()
        for i, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            blocks = self._batch.block_table[row, : -(-end // self._batch.block_size)]
            known = self._known[blocks].reshape(-1)[: end - 1]
            starts[i] = end - 1 if known.all() else int(known.argmin())
            stops[i] = min(end, int(starts[i]) + room)
            room -= int(stops[i] - starts[i])
            caught_up = np.arange(starts[i], min(stops[i], end - 1))
            self._known.reshape(-1)[self._slots(np.full(len(caught_up), row), caught_up)] = True
        return starts, stops

    def _slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        blocks, offsets = np.divmod(positions, self._batch.block_size)
        slots: IntArray = self._batch.block_table[rows, blocks].astype(np.int64) * self._batch.block_size + offsets
        return slots

    def _next_tokens(self, rows: IntArray, starts: IntArray, ends: IntArray, inputs: IntArray) -> IntArray:
        """Computes the positions from `starts` to `ends` of each row, at least one. Returns the most likely token after
        each row's last one, int64 [rows]. inputs: the token of each row and position."""
        counts = ends - starts
        if counts.sum() <= MAX_ROWS:  # each token as a decode of its own
            lasts = np.cumsum(counts) - 1
            rows, starts = np.repeat(rows, counts), _positions(starts, counts)
            counts = np.ones_like(starts)
        else:
            order = np.argsort(counts > 1, kind="stable")  # decodes first
            rows, starts, counts = rows[order], starts[order], counts[order]
            lasts = np.empty(len(order), np.int64)
            lasts[order] = np.cumsum(counts) - 1
        seq_lens, positions = starts + counts, _positions(starts, counts)
        token_rows, num_decodes = np.repeat(rows, counts), int(np.count_nonzero(counts == 1))
        cu_seqlens = np.concatenate([[0], np.cumsum(counts[num_decodes:])])
        put = torch.from_numpy
        metadata = BatchMetadata(
            positions=put(positions),
            slot_mapping=put(self._slots(token_rows, positions)),
            num_decodes=num_decodes,
            block_tables=put(self._batch.block_table[rows, : -(-int(seq_lens.max()) // self._batch.block_size)]),
            seq_lens=put(seq_lens.astype(np.int32)),
            cu_seqlens_q=put(cu_seqlens.astype(np.int32)),
            max_seqlen_q=int(counts[num_decodes:].max(initial=0)),
        )
        hidden = self._decoder.forward(put(inputs[token_rows, positions].astype(np.int64)), metadata, self._kv_caches)
        logits = self._decoder.compute_logits(hidden.index_select(0, put(lasts)))
        tokens: IntArray = most_likely(logits).clamp_(min=0).numpy()  # a draft that failed is a wrong one
        return tokens


def _positions(starts: IntArray, counts: IntArray) -> IntArray:
    """The positions from each of `starts` on, as many as `counts` says, one after the other."""
    ends = np.cumsum(counts)
    positions: IntArray = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return positions
