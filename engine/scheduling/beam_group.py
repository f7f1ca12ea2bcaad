"""BeamGroup: the hypotheses of one beam search as Sequences, which the Scheduler runs, preempts and resumes together.

The limit of a hypothesis (`max_num_tokens`) is one token past its known tokens: once that token is sampled, the
sequence has nothing to compute until the whole group has chosen. Then each survivor goes on in the Sequence of its
parent, or in a fork of it that shares all its blocks (copy-on-write does the rest). Sequences without a survivor give
up their blocks at once.
"""

from collections.abc import Collection

from engine.executor.step import SampledToken
from engine.memory.sequence import GroupChoice, Sequence, SequenceGroup, SequenceStatus
from engine.sampling_params import BeamSearchParams
from engine.scheduling.beam_search import BeamSearch, Hypothesis, Survivor


class BeamGroup(SequenceGroup):
    """`slots` are `width` Sequences, adjacent in order, which hold the hypotheses; the first one holds the prompt.

    An empty slot has the status FINISHED. After the end, slot i holds result number i, best first, or `error` says why
    there is none. This object and the slots' token_ids hold all that is needed to go on after the loss of all blocks.
    """

    inseparable = True
    member_name = "hypotheses of this beam search"

    def __init__(self, slots: list[Sequence], search: BeamSearch) -> None:
        super().__init__(slots)
        self.slots = slots
        self.search = search
        self.results: list[Hypothesis] = []
        self.beams = slots[:1]  # in the order of search.running
        self._samples: dict[Sequence, SampledToken] = {}  # candidates of this round, by hypothesis
        for slot in slots:
            slot.max_num_tokens = slot.num_prompt_tokens + 1
        for slot in slots[1:]:
            slot.status = SequenceStatus.FINISHED

    @property
    def max_new_tokens(self) -> int:
        return self.search.max_tokens

    @property
    def num_together(self) -> int:
        return len(self.slots)

    @property
    def num_spare_rows(self) -> int:
        num_running = len(self.running)
        return len(self.slots) - num_running if num_running else 0

    @property
    def num_rows_to_start(self) -> int:
        """Rows that must be free before the next hypothesis may run: all for the first one, then none."""
        return 0 if self.running else len(self.slots)

    def add_candidates(self, seq: Sequence, token: SampledToken) -> GroupChoice:
        """Adds the candidates of one hypothesis. With the last ones of a round, returns what the group chose."""
        self._samples[seq] = token
        if not all(beam in self._samples and not beam.num_pending_tokens for beam in self.beams):
            return GroupChoice()
        survivors = self.search.advance([self._samples[beam].top for beam in self.beams])
        choice = self._end() if self.search.done else self._go_on(survivors)
        self._samples.clear()
        return choice

    def write_results(self) -> None:
        """Writes the results of the search into the slots, which have given up their blocks."""
        for slot, result in zip(self.slots, self.results, strict=True):
            slot.token_ids[slot.num_prompt_tokens :] = [token_id for token_id, _ in result.tokens()]
            slot.finish_reason = result.finish_reason
            stop_ids = slot.params.stop_token_ids
            slot.stop_reason = result.token_id if result.token_id in stop_ids else None

    def _go_on(self, survivors: list[Survivor]) -> GroupChoice:
        """The first survivor of a parent, its most likely one, stays in the parent's Sequence."""
        parents, firsts = self.beams, {survivor.parent: survivor for survivor in reversed(survivors)}
        choice = GroupChoice(finished=[parent for number, parent in enumerate(parents) if number not in firsts])
        empty = [slot for slot in self.slots if slot.status is SequenceStatus.FINISHED or slot in choice.finished]
        self.beams = []
        for survivor in survivors:
            beam = parent = parents[survivor.parent]
            stays = survivor is firsts[survivor.parent]
            if not stays:
                beam = empty.pop()
                choice.forked.append((parent, beam))
            # The Worker's row ends in the token that it sampled itself, once everything before it is computed.
            elif self._samples[beam].token_id != survivor.token_id or beam.num_computed_tokens < len(beam.token_ids):
                choice.resent.append(beam)
            choice.appended.append((beam, survivor.token_id))
            self.beams.append(beam)
        return choice

    def _end(self) -> GroupChoice:
        self.results = self.search.finished
        return GroupChoice(finished=list(self.slots), ended=True)


def begin_search(params: BeamSearchParams, slots: list[Sequence], eos_token_ids: Collection[int]) -> BeamGroup:
    """Makes `width` new Sequences of one prompt the slots of a group. Then the first of them may be scheduled."""
    max_tokens = slots[0].max_num_tokens - slots[0].num_prompt_tokens
    search = BeamSearch(params, max_tokens, params.end_token_ids(eos_token_ids))
    for slot in slots:
        slot.params = params.sampling_params(search.num_candidates)
    return BeamGroup(slots, search)
