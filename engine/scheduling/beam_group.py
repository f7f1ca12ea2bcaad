"""BeamGroup: the hypotheses of one beam search as Sequences, which the Scheduler runs, preempts and resumes together.

A hypothesis is a Sequence whose limit is one token past what it knows: once that token is sampled it has nothing to
compute until the whole group has chosen. Then each survivor goes on in its parent's Sequence, or is forked off it and
shares all its blocks (copy-on-write does the rest); Sequences without a survivor give up their blocks at once.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from engine.executor.step import SampledToken
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence, SequenceGroup, SequenceStatus
from engine.outputs import FinishReason
from engine.sampling_params import BeamSearchParams
from engine.scheduling.beam_search import BeamSearch, Hypothesis, Survivor

if TYPE_CHECKING:
    from engine.scheduling.scheduler import Scheduler


class BeamGroup(SequenceGroup):
    """`slots` are `width` Sequences, adjacent in order, that hypotheses live in; the first holds the prompt.

    A slot without a hypothesis has the status FINISHED. When the group has `ended`, slot i holds result number i, best
    first, or `error` says why there is none. All that is needed to go on after the loss of all blocks is here and in
    token_ids.
    """

    inseparable = True

    def __init__(self, slots: list[Sequence], search: BeamSearch) -> None:
        super().__init__(slots)
        self.slots = slots
        self.search = search
        self.error = ""
        self.results: list[Hypothesis] = []
        self._beams = slots[:1]  # in the order of search.running
        self._samples: dict[Sequence, SampledToken] = {}  # of this round
        for slot in slots:
            slot.max_num_tokens = slot.num_prompt_tokens + 1
        for slot in slots[1:]:
            slot.status = SequenceStatus.FINISHED

    @property
    def num_together(self) -> int:
        return len(self.slots)

    @property
    def num_spare_rows(self) -> int:
        num_running = len(self.running)
        return len(self.slots) - num_running if num_running else 0

    @property
    def num_rows_to_start(self) -> int:
        """Rows that must be free before its next sequence may run: all at once, then none."""
        return 0 if self.running else len(self.slots)

    def too_large(self, blocks: BlockManager) -> None:
        """All blocks there are do not suffice for it."""
        self.error = (
            f"The {len(self.slots)} hypotheses of this beam search need more KV cache than there is: "
            f"{blocks.num_blocks} blocks of {blocks.block_size} tokens. Lower n or max_tokens."
        )

    def take(self, seq: Sequence, sample: SampledToken, scheduler: "Scheduler") -> None:
        """The candidates of one hypothesis are back; with the last ones the group chooses."""
        self._samples[seq] = sample
        if all(beam in self._samples and not beam.num_pending_tokens for beam in self._beams):
            survivors = self.search.advance([self._samples[beam].top for beam in self._beams])
            if self.search.done:
                self._end(scheduler)
            else:
                self._go_on(survivors, scheduler)
            self._samples.clear()

    def _go_on(self, survivors: list[Survivor], scheduler: "Scheduler") -> None:
        """The first survivor of a parent, its most likely one, stays in the parent's Sequence."""
        parents, firsts = self._beams, {survivor.parent: survivor for survivor in reversed(survivors)}
        for number, parent in enumerate(parents):
            if number not in firsts:
                scheduler.finish(parent, FinishReason.ABORT)
                parent.finish_reason = None  # an empty slot has none
        empty = [slot for slot in self.slots if slot.status is SequenceStatus.FINISHED]
        self._beams = []
        for survivor in survivors:  # forks before the parents' own token lists grow
            beam = parent = parents[survivor.parent]
            if survivor is not firsts[survivor.parent]:
                beam = empty.pop()
                beam.token_ids = list(parent.token_ids)
                scheduler.fork(parent, beam)
            self._beams.append(beam)
        for beam, survivor in zip(self._beams, survivors, strict=True):
            # Its row in the Worker ends in the token that was sampled there, once all before it is computed.
            stays = beam is parents[survivor.parent] and self._samples[beam].token_id == survivor.token_id
            if not stays or beam.num_computed_tokens < len(beam.token_ids):
                scheduler.resend(beam)
            beam.token_ids.append(survivor.token_id)
            beam.max_num_tokens = len(beam.token_ids) + 1

    def _end(self, scheduler: "Scheduler") -> None:
        self.results = self.search.finished
        for slot, result in zip(self.slots, self.results, strict=True):
            scheduler.finish(slot, FinishReason.ABORT)
            slot.token_ids[slot.num_prompt_tokens :] = [token_id for token_id, _ in result.tokens()]
            slot.finish_reason = result.finish_reason
            stop_ids = slot.params.stop_token_ids
            slot.stop_reason = result.token_id if result.token_id in stop_ids else None
        scheduler.ended_groups.append(self)


def begin_search(params: BeamSearchParams, slots: list[Sequence], eos_token_ids: Collection[int]) -> BeamGroup:
    """Make `width` new Sequences of one prompt the slots of a group; then the first of them may be scheduled."""
    max_tokens = slots[0].max_num_tokens - slots[0].num_prompt_tokens
    search = BeamSearch(params, max_tokens, params.end_token_ids(eos_token_ids))
    for slot in slots:
        slot.params = params.sampling_params(search.num_candidates)
    return BeamGroup(slots, search)
