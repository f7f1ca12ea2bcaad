"""The least of a Driver: StepPlans for a ModelRunner, from how many tokens each sequence computes."""

import math

import numpy as np

from engine.config import EngineConfig
from engine.executor.step import NewSequence, SequenceStep, StepPlan
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


CONFIG = EngineConfig(device="cpu", dtype="float32", block_size=8, num_blocks=64, max_num_seqs=8, cpu_threads=1)


PROMPTS = {1: [5, 6, 7, 8, 9], 2: list(range(10, 31)), 3: [40], 4: list(range(50, 90)), 5: [91, 3] * 8}


class MiniDriver:
    """The least of a Driver: gives out blocks and remembers tokens."""

    def __init__(self, runner, num_blocks=64):
        self.runner = runner
        self.free = list(np.random.default_rng(0).permutation(num_blocks))
        self.tokens, self.prompts, self.computed, self.blocks, self.params = {}, {}, {}, {}, {}
        self.adapters = {}
        self.pending = {}  # sampled by plans whose results were not taken in
        self.removed, self.new, self.step_id = [], [], 0

    def add(self, seq_id, prompt, params=GREEDY, adapter_id=0):
        self.tokens[seq_id], self.prompts[seq_id], self.params[seq_id] = list(prompt), list(prompt), params
        self.adapters[seq_id] = adapter_id
        self.start(seq_id)

    def start(self, seq_id):
        self.computed[seq_id], self.blocks[seq_id], self.pending[seq_id] = 0, [], 0
        self.new.append(seq_id)

    def remove(self, seq_id):
        self.free += self.blocks.pop(seq_id)
        self.removed.append(seq_id)

    def plan(self, counts):
        """counts: seq_id -> number of tokens to compute next."""
        new, steps = [], []
        for seq_id, n in counts.items():
            end = self.computed[seq_id] + n
            blocks = [int(self.free.pop()) for _ in range(math.ceil(end / 8) - len(self.blocks[seq_id]))]
            self.blocks[seq_id] += blocks
            if seq_id in self.new:
                tokens, prompt = self.tokens[seq_id], self.prompts[seq_id]
                new.append(
                    NewSequence(
                        seq_id=seq_id,
                        token_ids=list(tokens),
                        num_prompt_tokens=len(prompt),
                        num_computed_tokens=0,
                        block_ids=list(blocks),
                        params=self.params[seq_id],
                        seed=1000 + seq_id,
                        adapter_id=self.adapters[seq_id],
                    )
                )
                self.new.remove(seq_id)
                blocks = []
            sample = end == len(self.tokens[seq_id]) + self.pending[seq_id]
            self.computed[seq_id] = end
            self.pending[seq_id] += sample
            steps.append(SequenceStep(seq_id, n, sample, blocks))
        removed, self.removed = self.removed, []
        self.step_id += 1
        return StepPlan(self.step_id, removed, new, [], steps)

    def update(self, result):
        for sample in result.samples:
            if sample.seq_id in self.blocks:
                self.tokens[sample.seq_id].append(sample.token_id)
                self.pending[sample.seq_id] -= 1

    def step(self, counts):
        result = self.runner.result(self.runner.launch(self.plan(counts)))
        self.update(result)
        return result

    def output(self, seq_id):
        return self.tokens[seq_id][len(self.prompts[seq_id]) :]


def in_columns(plan):
    """The same plan as the scheduler writes it."""
    new = {sequence.seq_id for sequence in plan.new}
    decodes = [s for s in plan.chunks if s.num_tokens == 1 and s.sample and s.seq_id not in new]
    blocks = [x for s in decodes for block_id in s.new_block_ids for x in (s.seq_id, block_id)]
    chunks = [s for s in plan.chunks if s not in decodes]
    return StepPlan(
        step_id=plan.step_id,
        removed=plan.removed,
        new=plan.new,
        block_copies=plan.block_copies,
        chunks=chunks,
        offloads=[],
        loads=[],
        decodes=[s.seq_id for s in decodes],
        decode_blocks=blocks,
    )


class ColumnDriver(MiniDriver):
    """`ahead` plans are launched before the first result is taken in."""

    def __init__(self, runner, ahead=1):
        super().__init__(runner)
        self.ahead, self.launched = ahead, []

    def plan(self, counts):
        return in_columns(super().plan(counts))

    def step(self, counts):
        self.launched.append(self.runner.launch(self.plan(counts)))
        return self.take(self.ahead)

    def take(self, leave=0):
        result = None
        while len(self.launched) > leave:
            result = self.runner.result(self.launched.pop(0))
            self.update(result)
        return result


def remove_all(runner):
    """Let all sequences of a runner leave, as the next test finds it."""
    runner.result(runner.launch(StepPlan(0, list(runner.batch.row_of), [], [], [])))
