"""The fake KV device: a Worker without arithmetic that reads its whole cache back in every step.

A slot holds the chain hash of its token and of everything before it. A block is poisoned when it is handed out and when
the last table lets go of it (unless the prefix cache may still serve it), so whatever was aliased, freed too early,
never filled, or filled for another tenant is seen in the step that reads it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.executor.step import BlockCopy, BlockMove, NewSequence, SampledToken, SequenceStep, StepPlan, StepResult
from engine.outputs import pack_top
from tests.fake_device import step_result
from tests.sim.beams import BEAM_SEED, candidates
from tests.sim.model import FakeModel, chain_next, chain_start, root_of
from tests.sim.violation import fail, require

if TYPE_CHECKING:
    from torch import Tensor

    from engine.worker.cache.host_cache import HostCache


SLOW_EVERY, SLOW_SECONDS = 16, 0.015  # one sequence in so many has slow masks


def has_slow_masks(seq_id: int) -> bool:
    return seq_id % SLOW_EVERY == 0


class Row:
    """A live sequence as the Worker knows it. `chain[i]` is what the slot of token i must hold."""

    __slots__ = (
        "adapter_id",
        "chain",
        "failed",
        "fork_of",
        "last_chain",
        "num_blocks",
        "num_candidates",
        "num_computed",
        "num_known",
        "seed",
        "table",
    )

    def __init__(self, new: NewSequence, root: str, max_model_len: int, max_blocks: int) -> None:
        self.chain = np.empty(max_model_len + 1, np.int64)
        self.table = np.empty(max_blocks, np.intp)
        self.num_known = self.num_blocks = 0
        self.num_computed = new.num_computed_tokens
        self.num_candidates = new.params.logprobs  # of a hypothesis; None for all else
        self.seed = new.seed
        self.fork_of = new.fork_of
        self.failed = False
        self.adapter_id = new.adapter_id
        self.last_chain = chain_start(root)
        for token_id in new.token_ids:
            self.append_token(token_id)
        self.append_blocks(new.block_ids)

    def append_token(self, token_id: int) -> None:
        self.last_chain = chain_next(self.last_chain, token_id, self.num_known)
        self.chain[self.num_known] = self.last_chain
        self.num_known += 1

    def append_blocks(self, block_ids: list[int]) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self.table):
            fail("block-table", f"{end} blocks in a table, more than the longest sequence needs")
        self.table[self.num_blocks : end] = block_ids
        self.num_blocks = end


class KvMemory:
    """The memory of a Worker, int64 [blocks, block_size] each: the pool, and the host tier.

    `cache` moves blocks between them, where there is a disk tier.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.slots = np.full((num_blocks, block_size), -1, np.int64)
        self.host = np.full((num_host_blocks, block_size), -1, np.int64)
        self.cache: HostCache | None = None
        self.fetching: set[int] = set()  # slots of the host tier that the disk tier is about to fill


class KvDevice:
    """`salt_of` names the tenant of a sequence, `adapters` has the weights of those that the Worker holds, by id; at
    most `max_loras` of them are in use. `is_kept` says whether a block that no row holds may still be read: it is
    cached, or held by a hypothesis that was not sent yet. Both are things that plans do not say. `holders` counts
    tables per block, from plans alone."""

    def __init__(
        self,
        model: FakeModel,
        memory: KvMemory,
        *,
        max_model_len: int,
        salt_of: Callable[[int], str],
        adapters: dict[int, str],
        max_loras: int,
        is_kept: Callable[[int], bool],
    ) -> None:
        self.model = model
        self.memory = memory
        self.slots, self.host = memory.slots, memory.host
        num_blocks, self.block_size = self.slots.shape
        self.max_model_len = max_model_len
        self.holders = [0] * num_blocks
        self._shared_late: list[int] = []  # blocks of the plan that is executed
        self.rows: dict[int, Row] = {}
        self._max_blocks = -(-max_model_len // self.block_size)
        self._salt_of, self._is_kept = salt_of, is_kept
        self._adapters, self._max_loras = adapters, max_loras
        self._generation = 1

    def execute(self, plan: StepPlan) -> StepResult:
        """As the Worker does: drop, add, offload, copy, load, write every key and value, then read."""
        if any(move.slot in self.memory.fetching for move in (*plan.offloads, *plan.loads)):
            fail("fetch", f"step {plan.step_id} moves a block to or from a slot that the disk tier is about to fill")
        let_go = [block_id for seq_id in plan.removed for block_id in self._remove(seq_id)]
        fresh = {move.block_id for move in plan.loads} | {copy.target for copy in plan.block_copies}
        fresh.update(block_id for step in plan.steps for block_id in step.new_block_ids)
        copied = {(copy.seq_id, copy.source) for copy in plan.block_copies}
        for new in plan.new:
            self._add(new, fresh, copied)
        in_use = {row.adapter_id for row in self.rows.values()} - {0}
        require(len(in_use) <= self._max_loras, "adapter-slots", f"{in_use} are in use, {self._max_loras} slots")
        if self.memory.cache is not None:
            self.memory.cache.offload(plan.offloads, _block_ids(plan.offloads))
        for move in plan.offloads:
            self.host[move.slot] = self.slots[move.block_id]
            if (self.host[move.slot] < 0).any():
                fail("offload", f"{move}: not all of the block was computed")
        let_go += [self._copy(copy) for copy in plan.block_copies]
        self._take_over(plan.new)
        for move in plan.loads:
            self._load(move)
        if self.memory.cache is not None:
            self.memory.cache.load(plan.loads, _block_ids(plan.loads))
        for block_id in let_go:  # not before: what is let go of in a plan may still be moved to the host, or copied
            if not self.holders[block_id] and not self._is_kept(block_id):
                self._poison(block_id)
        self._hand_out(plan)
        drafts = {draft.seq_id: draft.token_ids for draft in plan.drafts}
        for step in plan.steps:
            self._write(step)
            self._write_draft(step.seq_id, drafts.get(step.seq_id, []))
        self._share(plan)
        computing = {step.seq_id for step in plan.steps if step.num_tokens and step.sample}
        samples: list[SampledToken] = []
        failed: dict[int, str] = {}
        verified: list[list[SampledToken]] = []
        for step in plan.steps:
            if not step.num_tokens and self.rows[step.seq_id].fork_of not in computing:
                fail("fork", f"sequence {step.seq_id} draws from the logits of one that computes none in its step")
            if (draft := drafts.get(step.seq_id)) is None:
                self._read(step, samples, failed)
            elif tokens := self._verify(step, draft, failed):
                verified.append(tokens)
        result = step_result(plan, samples, failed)
        slow = {seq_id: SLOW_SECONDS for seq_id in result.seq_ids if has_slow_masks(seq_id)}
        seconds = result.compute_seconds + sum(slow.values())
        return msgspec.structs.replace(result, verified=verified, slow_masks=slow, compute_seconds=seconds)

    def answered(self, seq_id: int) -> None:
        """The Driver knows how many tokens of a draft are right: the blocks behind them are free."""
        if (row := self.rows.get(seq_id)) is None:
            return
        end = -(-row.num_computed // self.block_size)
        for block_id in row.table[end : row.num_blocks].tolist():
            self.holders[block_id] -= 1
            self._poison(block_id)
        row.num_blocks = end

    # Blocks.

    def _remove(self, seq_id: int) -> list[int]:
        """The blocks that it held; an unknown id is fine, as for the Worker."""
        row = self.rows.pop(seq_id, None)
        block_ids = [] if row is None else row.table[: row.num_blocks].tolist()
        for block_id in block_ids:
            self.holders[block_id] -= 1
        return block_ids

    def _load(self, move: BlockMove) -> None:
        if self.holders[move.block_id]:
            fail("handed-out-twice", f"{move}: the block is held by another sequence")
        if (self.host[move.slot] < 0).any():
            fail("load", f"{move}: nothing was ever put there")
        self.slots[move.block_id] = self.host[move.slot]

    def _copy(self, copy: BlockCopy) -> int:
        """Copy-on-write; returns the source, which may have lost its last holder."""
        row = self.rows.get(copy.seq_id)
        if row is None or not row.num_blocks or row.table[row.num_blocks - 1] != copy.source:
            fail("copy", f"{copy}: the source is not the last block of that table")
        if self.holders[copy.target]:
            fail("handed-out-twice", f"{copy}: the target is held by another sequence")
        self.holders[copy.source] -= 1
        self.holders[copy.target] = 1
        self.slots[copy.target] = self.slots[copy.source]
        self._forget(copy.target, row.num_computed % self.block_size)
        row.table[row.num_blocks - 1] = copy.target
        return copy.source

    def _take_over(self, new: list[NewSequence]) -> None:
        """A new sequence that alone holds its last block writes behind the tokens that it shares."""
        for row in (self.rows[one.seq_id] for one in new):
            index, offset = divmod(row.num_computed, self.block_size)
            if offset and self.holders[row.table[index]] == 1:
                self._forget(int(row.table[index]), offset)

    def _hand_out(self, plan: StepPlan) -> None:
        """Fresh blocks first: a sequence may share blocks that another one gets, and fills, in this very plan."""
        for new in plan.new:
            self._hand_out_fresh(new.seq_id, new.block_ids[-(-new.num_computed_tokens // self.block_size) :])
        for step in plan.steps:
            if step.new_block_ids:
                self._hand_out_fresh(step.seq_id, step.new_block_ids)

    def _share(self, plan: StepPlan) -> None:
        """Blocks of a matched prefix or of a fork; after the writes, since the plan that shares one may fill it."""
        for block_id in self._shared_late:
            self.holders[block_id] += 1
        self._shared_late.clear()

    def _hand_out_fresh(self, seq_id: int, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if self.holders[block_id]:
                fail("handed-out-twice", f"block {block_id} goes to sequence {seq_id} while another one holds it")
            self._poison(block_id)
            self.holders[block_id] = 1

    def _poison(self, block_id: int) -> None:
        self._forget(block_id, 0)

    def _forget(self, block_id: int, offset: int) -> None:
        """Poison the slots of a block from `offset` on: a step that reads one of them fails."""
        self._generation += 1
        self.slots[block_id, offset:] = -self._generation

    # Sequences.

    def _add(self, new: NewSequence, fresh: set[int], copied: set[tuple[int, int]]) -> None:
        """`fresh`: the blocks that this very plan hands out. `copied`: (sequence, block), copied first."""
        require(new.seq_id not in self.rows, "worker-rows", f"sequence {new.seq_id} is new and live")
        weights = self._adapters.get(new.adapter_id, "")
        require(bool(weights) or not new.adapter_id, "adapter", f"the Worker holds no adapter {new.adapter_id}")
        root = root_of(self._salt_of(new.seq_id), weights)
        row = self.rows[new.seq_id] = Row(new, root, self.max_model_len, self._max_blocks)
        for start in range(0, new.num_computed_tokens, self.block_size):
            block_id = new.block_ids[start // self.block_size]
            end = min(start + self.block_size, new.num_computed_tokens)
            is_old = new.fork_of is None and (block_id not in fresh or (new.seq_id, block_id) in copied)
            if is_old and (self.slots[block_id, : end - start] == row.chain[start:end]).all():
                self.holders[block_id] += 1  # it is there: a prefix, or a hypothesis that goes on in a new row
            else:
                self._shared_late.append(block_id)

    def _write(self, step: SequenceStep) -> None:
        row = self.rows.get(step.seq_id)
        if row is None:
            fail("worker-rows", f"a step for sequence {step.seq_id}, which the Worker does not hold")
        if step.new_block_ids:
            row.append_blocks(step.new_block_ids)
        start, end = row.num_computed, row.num_computed + step.num_tokens
        if end > row.num_known:
            fail("computed-known", f"sequence {step.seq_id}: {end} tokens computed, {row.num_known} known")
        if end > row.num_blocks * self.block_size:
            fail("block-table", f"sequence {step.seq_id}: {end} tokens in {row.num_blocks} blocks")
        row.num_computed = end
        while start < end:
            index, offset = divmod(start, self.block_size)
            count = min(self.block_size - offset, end - start)
            self._write_block(step.seq_id, int(row.table[index]), offset, row.chain[start : start + count])
            start += count

    def _write_draft(self, seq_id: int, draft: list[int]) -> None:
        row = self.rows[seq_id]
        if row.num_computed + len(draft) > row.num_blocks * self.block_size:
            fail("block-table", f"sequence {seq_id}: a draft of {len(draft)} tokens in {row.num_blocks} blocks")
        chain = row.last_chain
        for position, token_id in enumerate(draft, start=row.num_known):
            chain = chain_next(chain, token_id, position)
            index, offset = divmod(position, self.block_size)
            self._write_block(seq_id, int(row.table[index]), offset, np.array([chain]))

    def _verify(self, step: SequenceStep, draft: list[int], failed: dict[int, str]) -> list[SampledToken]:
        """The tokens of a sequence with a draft. What was written of the others can be read no more."""
        row, tokens = self.rows[step.seq_id], list[SampledToken]()
        end = row.num_computed + len(draft)
        for proposed in (*draft, None):
            if tokens:
                if self.model.fails(row.seed, row.num_known):
                    break
                row.num_computed += 1
            self._read(step, tokens, failed)
            if not tokens or tokens[-1].token_id != proposed:
                break
        for position in range(row.num_computed, end):
            index, offset = divmod(position, self.block_size)
            self._generation += 1
            self.slots[row.table[index], offset] = -self._generation
        return tokens

    def _write_block(self, seq_id: int, block_id: int, offset: int, values: np.ndarray) -> None:
        if self.holders[block_id] != 1:
            fail("shared-write", f"sequence {seq_id} writes block {block_id}, held by {self.holders[block_id]}")
        slots = self.slots[block_id, offset : offset + len(values)]
        if (slots >= 0).any():
            fail("written-twice", f"sequence {seq_id} overwrites block {block_id} from slot {offset} on")
        slots[:] = values

    def _read(self, step: SequenceStep, samples: list[SampledToken], failed: dict[int, str]) -> None:
        row = self.rows[step.seq_id]
        self._check_context(step.seq_id, row)
        if step.sample != (row.num_computed == row.num_known):
            fail("sample-flag", f"{step} at {row.num_computed} of {row.num_known}")
        if not step.sample:
            return
        position = row.num_known
        seed = row.seed if row.num_candidates is None else BEAM_SEED ^ row.last_chain
        if self.model.fails(seed, position) and not row.failed:
            failed[step.seq_id] = "the logits are not finite"
            row.failed = True
            row.append_token(0)  # the next plan may be under way already and count on a token
            return
        if row.num_candidates is not None:
            top = candidates(self.model, row.last_chain, position, row.num_candidates)
            row.append_token(top[0][0])
            samples.append(SampledToken(step.seq_id, *top[0], pack_top(top)))
            return
        token_id = 0 if row.failed else self.model.next_token(row.last_chain, row.seed, position)
        row.append_token(token_id)
        samples.append(SampledToken(step.seq_id, token_id))

    def _check_context(self, seq_id: int, row: Row) -> None:
        """Every slot of the context, through the block table."""
        n = row.num_computed
        table = row.table[: -(-n // self.block_size)]
        found = self.slots[table].reshape(-1)[:n]
        if (wrong := found != row.chain[:n]).any():
            position = int(wrong.argmax())
            kind = "poison" if found[position] < 0 else "another token's content"
            block_id = int(table[position // self.block_size])
            fail("content", f"sequence {seq_id} reads {kind} at position {position}, block {block_id}")


def _block_ids(moves: list[BlockMove]) -> "Tensor":
    import torch  # only runs with a disk tier need it

    return torch.tensor([move.block_id for move in moves], dtype=torch.int64)
