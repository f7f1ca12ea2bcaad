"""Beam searches in the Scheduler, driven without asyncio, and the plain search that gives the expected hypotheses."""

import pytest

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.scheduling.beam_group import begin_search
from tests.engine.scheduling.loop import Loop
from tests.fake_device import EOS_TOKEN_ID, VOCAB_SIZE, top_candidates


def expected_hypotheses(prompt_ids, params, max_tokens):
    """[(token_ids, score)], best first: every step over all tokens of the vocabulary, nothing shared, nothing kept."""
    width, ends = params.beam_width, set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_TOKEN_ID})
    running, finished = [((), 0.0)], []
    while True:
        ranked = sorted(
            (
                ((*ids, token), total + logprob)
                for ids, total in running
                for token, logprob in top_candidates([*prompt_ids, *ids], VOCAB_SIZE)
                if len(ids) >= params.min_tokens or token not in ends
            ),
            key=lambda candidate: -candidate[1],
        )
        over = [len(ids) == max_tokens or ids[-1] in ends for ids, _ in ranked]
        finished += [
            (ids, total / len(ids) ** params.length_penalty)
            for (ids, total), is_over in zip(ranked[:width], over, strict=False)
            if is_over
        ]
        finished = sorted(finished, key=lambda found: -found[1])[:width]
        running = [candidate for candidate, is_over in zip(ranked, over, strict=True) if not is_over][:width]
        if not running or (len(finished) == width and no_hope(running[0], finished[-1][1], params, max_tokens)):
            return finished


def no_hope(best, worst_score, params, max_tokens):
    if params.early_stopping is True:
        return True
    ids, total = best
    length = max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else len(ids)
    return total / length**params.length_penalty <= worst_score


class BeamLoop(Loop):
    def add_beams(self, tokens, width, max_tokens=8, priority=0, **params):
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **params)
        slots = []
        for _ in range(width):
            number, self._next_id = self._next_id, self._next_id + 1
            limit = len(tokens) + max_tokens
            ignored = SamplingParams()
            slots.append(
                Sequence(number, tokens, ignored, seed=0, max_num_tokens=limit, arrival=number, priority=priority)
            )
        group = begin_search(params, slots, self.scheduler.eos_token_ids)
        self.scheduler.add(slots[0])
        return group

    def check_groups(self, groups):
        for group in groups:
            slot = group.slots[0]
            params = group.search.params
            assert not group.error
            wanted = expected_hypotheses(slot.token_ids[: slot.num_prompt_tokens], params, params.max_tokens)
            found = [tuple(slot.token_ids[slot.num_prompt_tokens :]) for slot in group.slots]
            assert found == [ids for ids, _ in wanted]
            scores = [result.score(params.length_penalty) for result in group.results]
            assert scores == pytest.approx([score for _, score in wanted])
            assert all(slot.finish_reason is result_reason(slot, params) for slot in group.slots)
        assert sorted(map(id, self.scheduler.ended_groups)) == sorted(map(id, groups))
        assert not self.scheduler.admission.inseparable_groups and not self.scheduler.has_work
        blocks = self.scheduler.block_manager
        assert len(blocks.free_blocks) == blocks.num_blocks, "an idle engine holds no blocks"

    def peak_blocks(self):
        blocks, peak = self.scheduler.block_manager, 0
        while self.step():
            peak = max(peak, blocks.num_blocks - len(blocks.free_blocks))
        return peak


def result_reason(slot, params):
    ends = {EOS_TOKEN_ID, *params.stop_token_ids} if not params.ignore_eos else set(params.stop_token_ids)
    return FinishReason.STOP if slot.token_ids[-1] in ends else FinishReason.LENGTH
