"""Both aims of fair sharing in virtual time: the real scheduler, and a device that is a model of step times.

`make fairness` measures the same on a real server, where the load of the machine decides the last digits.
"""

import math
import random

import pytest

from engine.config import EngineConfig
from engine.executor.step import StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence, SequenceStatus
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler

BASE, PER_DECODE, PER_TOKEN = 3e-3, 1.3e-3, 2e-4  # seconds: 32 decodes take 45 ms, a step of 512 tokens up to 140
WARM_UP, MEASURED = 3.0, 9.0  # seconds
LEARNING = 10  # first visits, until it is known how long steps take
NUM_FLOOD, FLOOD_PROMPT, FLOOD_OUTPUT = 48, 200, 60
PAUSE, OUTPUT = 0.05, 2


class Clock:
    """A flood of one tenant, the visits of another one, or both, on a device that computes one step at a time."""

    def __init__(self, prompts, with_flood, with_visits, seed=1):
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(
            BlockManager(4000, 16),
            max_num_seqs=32,
            max_num_batched_tokens=512,
            step_seconds=EngineConfig(model="any").fair_step_seconds,
        )
        self.now, self.next_id, self.num_tokens = 0.0, 0, 0
        self.prompts, self.first_tokens = prompts, []
        self.visitor, self.came_at = None, 0.0
        self.next_visit = WARM_UP if with_visits else math.inf
        if with_flood:
            for _ in range(NUM_FLOOD):
                self.send("flood", FLOOD_PROMPT, self.rng.randint(1, FLOOD_OUTPUT))

    def send(self, tenant, length, max_tokens):
        token_ids = [self.rng.randrange(1000) for _ in range(length)]
        params = SamplingParams(max_tokens=max_tokens)
        limit, self.next_id = length + max_tokens, self.next_id + 1
        seq = Sequence(
            self.next_id, token_ids, params, seed=0, max_num_tokens=limit, arrival=self.next_id, tenant=tenant
        )
        self.scheduler.add(seq)
        return seq

    def run(self):
        while self.now < WARM_UP + MEASURED:
            if self.visitor is None and self.next_visit <= self.now:
                number, self.came_at = len(self.first_tokens), self.next_visit
                self.visitor = self.send("visitor", self.prompts[number % len(self.prompts)], OUTPUT)
            plan = self.scheduler.schedule()
            if plan is None:
                self.now = self.next_visit
                continue
            num_decodes = len(plan.decodes)
            seconds = BASE + PER_DECODE * num_decodes + PER_TOKEN * (plan.num_tokens - num_decodes)
            self.now += seconds
            seq_ids = [step.seq_id for step in plan.steps if step.sample]
            for seq, _ in self.scheduler.update(StepResult(plan.step_id, [], {}, seconds, seq_ids, [5] * len(seq_ids))):
                self.take(seq)
        return self

    def take(self, seq):
        ended = seq.status is SequenceStatus.FINISHED
        if seq.tenant == "flood":
            self.num_tokens += self.now >= WARM_UP
            if ended:
                self.send("flood", FLOOD_PROMPT, FLOOD_OUTPUT)
            return
        if seq.num_generated_tokens == 1:
            self.first_tokens.append(self.now - self.came_at)
        if ended:
            self.visitor, self.next_visit = None, self.now + self.rng.expovariate(1 / PAUSE)

    @property
    def p99(self):
        return sorted(self.first_tokens[LEARNING:])[math.ceil(0.99 * len(self.first_tokens[LEARNING:])) - 1]


@pytest.mark.parametrize("prompts", [(8,), (8, 200)], ids=["short prompts", "short and long prompts"])
def test_first_tokens_come_soon_and_the_flood_keeps_most_of_its_throughput(prompts):
    quiet = Clock(prompts, with_flood=False, with_visits=True).run()
    alone = Clock(prompts, with_flood=True, with_visits=False).run()
    both = Clock(prompts, with_flood=True, with_visits=True).run()
    assert len(both.first_tokens) > 50
    assert both.p99 <= max(1.5 * quiet.p99, quiet.p99 + 0.05), (both.p99, quiet.p99)
    assert both.num_tokens >= 0.7 * alone.num_tokens, (both.num_tokens, alone.num_tokens)
