"""DraftDriver: a ColumnDriver whose plans bring drafts, and the texts of two sequences that it runs."""

import math

from engine.executor.step import Draft
from tests.engine.worker.mini_driver import PROMPTS, ColumnDriver, remove_all

LENGTH = 14


class DraftDriver(ColumnDriver):
    """`drafts` of the next plan: proposed tokens by sequence id."""

    def __init__(self, runner, ahead=0):
        super().__init__(runner, ahead)
        self.drafts, self.lengths = {}, []

    def plan(self, counts):
        more = {}
        for seq_id, tokens in self.drafts.items():
            end = self.computed[seq_id] + 1
            held = max(len(self.blocks[seq_id]), math.ceil(end / 8))
            more[seq_id] = [int(self.free.pop()) for _ in range(math.ceil((end + len(tokens)) / 8) - held)]
        plan = super().plan(counts)
        for seq_id, tokens in self.drafts.items():
            self.blocks[seq_id] += more[seq_id]
            plan.decode_blocks.extend(x for block_id in more[seq_id] for x in (seq_id, block_id))
            plan.drafts.append(Draft(seq_id, tokens))
        self.drafts = {}
        return plan

    def update(self, result):
        super().update(result)
        for tokens in result.verified:
            seq_id = tokens[0].seq_id
            self.pending[seq_id] = 0
            self.computed[seq_id] += len(tokens) - 1
            end = math.ceil(self.computed[seq_id] / 8)
            self.free += self.blocks[seq_id][end:]
            del self.blocks[seq_id][end:]
            self.lengths.append(len(tokens))


def texts(runner, params, propose):
    """The samples of two sequences by id, and the lengths of what was verified. propose(seq_id, place): a draft."""
    remove_all(runner)
    driver = DraftDriver(runner)
    found = {seq_id: [] for seq_id in (1, 2)}
    for seq_id in found:
        driver.add(seq_id, PROMPTS[seq_id], params)
    counts = {seq_id: len(PROMPTS[seq_id]) for seq_id in found}
    while counts:
        result = driver.step(counts)
        assert not result.failed
        for sample in result.samples:
            found[sample.seq_id].append((sample.token_id, sample.logprob, sample.top))
        counts = {seq_id: 1 for seq_id, samples in found.items() if len(samples) < LENGTH}
        drafts = {seq_id: propose(seq_id, len(found[seq_id])) for seq_id in counts}
        driver.drafts = {seq_id: tokens for seq_id, tokens in drafts.items() if tokens}
    return {seq_id: samples[:LENGTH] for seq_id, samples in found.items()}, driver.lengths
