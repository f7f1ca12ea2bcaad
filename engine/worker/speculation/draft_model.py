"""DraftModel: a small decoder in the Worker, which proposes tokens for the served model (`--speculative MODEL:K`).

It has a KV cache of its own with the same block ids, so the block tables of sequences serve both caches, and copies and
moves of blocks take both along. It computes nothing until the Driver wants a draft. Then it catches up first: the slots
that it has written are known, and the tokens from a sequence's first unknown slot on are computed in one pass. So a
cached prefix, a preempted sequence, and steps too full for drafts need no care of their own, and a step without a draft
costs no pass. A proposal is the most likely token after each other, one pass per token.

The proposals decide only how many tokens a step keeps, never which: DraftRounds verifies them as any other draft.
"""

import msgspec
import numpy as np

from engine.executor.step import OPEN_TOKEN, Draft, StepPlan
from engine.worker.batch.input_batch import InputBatch
from engine.worker.batch.step_buffer import IntArray
from engine.worker.speculation.draft_passes import DraftPasses, DraftWork, positions_of

NO_SLOTS: IntArray = np.zeros(0, np.int64)


class NoDraftModel:
    """No draft model. The runner calls `propose` for each plan, and `computed` with the slots that its step writes.
    reads_tokens: whether the rows of InputBatch must hold every token that the host knows."""

    reads_tokens = False

    def propose(self, plan: StepPlan) -> tuple[StepPlan, float]:
        """Returns the plan with tokens in place of the drafts that the Driver left open, and the seconds that took."""
        return plan, 0.0

    def computed(self, slots: IntArray) -> None:
        """The step writes the keys and values of new tokens to `slots`, int64 [T]."""

    def warm_up(self) -> None:
        """Run every kernel that a pass may need and that warm_up_plans do not reach."""

    def run_largest_pass(self) -> None:
        """Run the pass that takes the most memory, on block 0."""

    def warm_up_plans(self, num_prompt_tokens: int) -> list[StepPlan]:
        """Plans that run what a draft needs, for sequence 0 once it has computed a prompt and one token in block 0."""
        return []


class DraftModel(NoDraftModel):
    """`batch`: the rows of the served model."""

    reads_tokens = True

    def __init__(
        self,
        passes: DraftPasses,
        batch: InputBatch,
        *,
        num_blocks: int,
        max_num_tokens: int,
        num_host_blocks: int,
    ) -> None:
        """max_num_tokens: tokens of one pass, which bounds how far it catches up in one step."""
        self._passes, self._batch = passes, batch
        self._max_num_tokens = max_num_tokens
        # Slots whose keys and values are those of the token that the served model has there; of the host tier, too.
        self._known = np.zeros((num_blocks, batch.block_size), np.bool_)
        self._known_on_host = np.zeros((num_host_blocks, batch.block_size), np.bool_)
        self._proposed = NO_SLOTS  # slots of the step's own tokens that are written already

    def propose(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self._move(plan)
        open_drafts = [draft for draft in plan.drafts if draft.is_open]
        if not open_drafts:
            return plan, 0.0
        self._batch.enter_blocks(plan.decode_blocks)
        rows = np.array([self._batch.row_of[draft.seq_id] for draft in open_drafts], np.int64)
        proposed, seconds = self._proposals(rows, np.array([len(draft.token_ids) for draft in open_drafts]))
        found = dict(zip([draft.seq_id for draft in open_drafts], proposed, strict=True))
        drafts = [Draft(draft.seq_id, found.get(draft.seq_id, draft.token_ids)) for draft in plan.drafts]
        return msgspec.structs.replace(plan, drafts=drafts, decode_blocks=[]), seconds

    def computed(self, slots: IntArray) -> None:
        known = self._known.reshape(-1)
        known[slots] = False
        known[self._proposed] = True
        self._proposed = NO_SLOTS

    def warm_up(self) -> None:
        self._passes.warm_up(self._batch.max_model_len)

    def run_largest_pass(self) -> None:
        longest = min(self._batch.max_model_len, self._max_num_tokens)
        rows = np.arange(min(-(-self._max_num_tokens // longest), self._passes.max_rows))
        self._passes.run(DraftWork(rows, 0 * rows, 0 * rows + longest, 0 * rows))

    def warm_up_plans(self, num_prompt_tokens: int) -> list[StepPlan]:
        if num_prompt_tokens + 4 > min(self._batch.block_size, self._batch.max_model_len):
            return []
        length = min(2, len(self._batch.num_tokens) - 1)  # a step has as many rows as the batch, and one is the decode
        return [StepPlan(0, [], [], [], [], decodes=[0], drafts=[Draft(0, [OPEN_TOKEN] * length)])]

    def _move(self, plan: StepPlan) -> None:
        for move in plan.offloads:
            self._known_on_host[move.slot] = self._known[move.block_id]
        for copy in plan.block_copies:
            self._known[copy.target] = self._known[copy.source]
        for move in plan.loads:
            self._known[move.block_id] = self._known_on_host[move.slot]

    def _proposals(self, rows: IntArray, lengths: IntArray) -> tuple[list[list[int]], float]:
        """(`lengths` tokens for each row, the seconds they took). A row that has too far to catch up, and rows beyond
        those that the passes take, get tokens 0, which will be wrong."""
        tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
        last = self._batch.num_computed[rows]  # the position of the last known token, which this step computes
        starts, ends = self._part_to_catch_up(rows[: self._passes.max_rows], last + 1)
        begun = np.flatnonzero(ends > starts)
        wanted = np.where(ends == last[: len(ends)] + 1, lengths[: len(ends)], 0)[begun]
        work = DraftWork(rows[begun], starts[begun], ends[begun], wanted)
        found, seconds = self._passes.run(work)
        tokens[begun, : work.num_passes] = found
        self._proposed = self._batch.slots(np.repeat(work.rows, wanted), positions_of(last[begun], wanted))
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)], seconds

    def _part_to_catch_up(self, rows: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """(starts, ends) of the positions that a pass computes: from the first unknown slot, in all at most
        `max_num_tokens`."""
        starts, stops, room = np.empty(len(rows), np.int64), ends[: len(rows)].copy(), self._max_num_tokens
        for i, (row, end) in enumerate(zip(rows.tolist(), stops.tolist(), strict=True)):
            blocks = self._batch.block_table[row, : -(-end // self._batch.block_size)]
            known = self._known[blocks].reshape(-1)[: end - 1]
            starts[i] = end - 1 if known.all() else int(known.argmin())
            stops[i] = min(end, int(starts[i]) + room)
            room -= int(stops[i] - starts[i])
            caught_up = np.arange(starts[i], min(stops[i], end - 1))
            self._known.reshape(-1)[self._batch.slots(np.full(len(caught_up), row), caught_up)] = True
        return starts, stops
