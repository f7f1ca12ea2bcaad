"""DraftRounds: samples a step with drafts, and finds how many tokens of each draft are right.

The forward pass computes the hidden states of a decode and of all tokens of its draft at once. The token at each of
these positions is the ordinary draw of that position. A sequence whose draw depends only on its own logits and position
is sampled at all positions together, in the first round. With penalties, bad words, a grammar or a thinking budget the
draw also depends on the tokens before: then each round samples one position, and goes on while the token drawn equals
the draft. So the sampler itself does not know of drafts, and what it remembers of a sequence (counts, the state of a
grammar) is made from tokens that are kept.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from engine.executor.step import Draft, SampledToken, StepPlan
from engine.worker.batch.input_batch import InputBatch, SampleTargets
from engine.worker.batch.step_buffer import IntArray
from engine.worker.sampling.results import ResultBuilder, SamplerRun

NOBODY = -2  # takes the place of a sequence id: no row has it


class DraftRounds:
    """The rounds of one step. A place is an index in `targets`: decodes come first, then the tokens of the drafts."""

    def __init__(self, plan: StepPlan, targets: SampleTargets, depends_on_tokens: Callable[[int], bool]) -> None:
        """depends_on_tokens: of a row, whether the tokens before a position change its draw."""
        self.targets = targets
        self._drafts = plan.drafts
        self._places: list[list[int]] = []  # for each draft: the place of its decode, then those of its tokens
        start = len(plan.decodes)
        decodes = {seq_id: place for place, seq_id in enumerate(targets.seq_ids[:start].tolist())}  # in their own order
        for draft in plan.drafts:
            end = start + len(draft.token_ids)
            self._places.append([decodes[draft.seq_id], *range(start, end)])
            start = end
        self._open = [i for i, places in enumerate(self._places) if depends_on_tokens(int(targets.rows[places[0]]))]
        later = [place for i in self._open for place in self._places[i][1:]]
        self.first = np.arange(len(targets.rows))
        if later:
            self.first = np.setdiff1d(self.first, np.array(later, np.int64))
        self._num_done = 0
        self._runs: list[tuple[list[int], tuple[SamplerRun, ...]]] = []
        self._token_ids: IntArray | None = None

    @property
    def has_more(self) -> bool:
        """True if a further round may come, which needs the tokens of the last one."""
        return bool(self._open)

    def part(self, places: IntArray) -> SampleTargets:
        targets = self.targets
        return SampleTargets(targets.seq_ids[places], targets.rows[places], targets.positions[places])

    def noted(self, places: IntArray) -> SampleTargets:
        """`part` for those that remember tokens before `results`: without the tokens that may still be dropped."""
        part = self.part(places)
        in_rounds = {place for i in self._open for place in self._places[i]}
        unsure = {place for places in self._places for place in places} - in_rounds
        seq_ids = np.where(np.isin(places, list(unsure)), NOBODY, part.seq_ids)
        return SampleTargets(seq_ids, part.rows, part.positions)

    def add(self, places: IntArray, runs: tuple[SamplerRun, ...]) -> None:
        """The runs of the round that sampled `places`; from a GPU: with tensors on their way to the host."""
        self._runs.append((places.tolist(), runs))

    def add_all(self, token_ids: IntArray) -> None:
        """The tokens of all places, none of which depends on tokens before it; below 0: failed. From a GPU: valid once
        the step is done."""
        self._token_ids = token_ids

    def next_places(self) -> IntArray:
        """The places of the next round, none at the end. The tokens of the last round are on the host."""
        places, runs = self._runs[-1]
        token_ids = [token_id for run in runs for token_id in run.output.token_ids.tolist()]
        drawn = dict(zip(places, token_ids, strict=True))
        done, self._num_done = self._num_done, self._num_done + 1
        self._open = [i for i in self._open if drawn[self._places[i][done]] == self._drafts[i].token_ids[done]]
        found = np.array([self._places[i][done + 1] for i in self._open], np.int64)
        self._open = [i for i in self._open if done + 1 < len(self._drafts[i].token_ids)]
        return found

    def results(self, builder: ResultBuilder, batch: InputBatch) -> list[list[SampledToken]]:
        """StepResult.verified, once the step is done; tokens of other sequences go to `builder`. Enters the tokens of
        sequences with a draft into `batch`."""
        sampled, failed = self._by_place()
        seq_ids = self.targets.seq_ids.tolist()
        drafted = {place for places in self._places for place in places}
        for place, seq_id in enumerate(seq_ids):
            if place in drafted or seq_id in builder.failed:
                continue
            if place in failed:
                builder.failed[seq_id] = failed[place]
            else:
                builder.add_token(_of(seq_id, sampled[place]))
        verified = []
        for draft, places in zip(self._drafts, self._places, strict=True):
            if places[0] in failed:
                builder.failed.setdefault(draft.seq_id, failed[places[0]])
            if draft.seq_id not in builder.failed:
                tokens = _up_to_the_first_wrong(draft, places, sampled, failed)
                verified.append(tokens)
                first = int(self.targets.positions[places[0]])
                batch.accept(draft.seq_id, first, [token.token_id for token in tokens])
        return verified

    def _by_place(self) -> tuple[dict[int, SampledToken], dict[int, str]]:
        """(tokens, reasons of failures), both by place."""
        builder = ResultBuilder({}, [], [], [])
        if self._token_ids is not None:
            builder.add_tokens(list(range(len(self._token_ids))), self._token_ids.tolist())
        for places, runs in self._runs:
            remaining = iter(places)
            for run in runs:
                builder.add_run(remaining, run)
        plain = map(SampledToken, builder.seq_ids, builder.token_ids)
        return {token.seq_id: token for token in (*plain, *builder.detailed)}, builder.failed


def _up_to_the_first_wrong(
    draft: Draft, places: list[int], sampled: Mapping[int, SampledToken], failed: Collection[int]
) -> list[SampledToken]:
    """The tokens sampled at the places of a draft, up to the first that differs from it. A failure ends them, too: the
    next step finds it again, at its first position."""
    tokens: list[SampledToken] = []
    for place, proposed in zip(places, [*draft.token_ids, None], strict=True):
        if place in failed:
            break
        tokens.append(_of(draft.seq_id, sampled[place]))
        if tokens[-1].token_id != proposed:
            break
    return tokens


def _of(seq_id: int, token: SampledToken) -> SampledToken:
    return SampledToken(seq_id, token.token_id, token.logprob, token.packed_top)
