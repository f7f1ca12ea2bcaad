#!/usr/bin/env python3
"""Plain admission against admission by prediction, where the pool is too small for all that is asked.

    python -m benchmarks.admission [--json FILE] [--requests 600] [--seeds 3]

The real scheduler and block manager under a virtual clock: a step takes --step-ms and --token-us for each token that it
computes, and a sequence ends when it has the length that was drawn for it. Requests come all at once, or
as a Poisson process at 95 % of what plain admission served of the same requests all at once. Figures are sums (counts)
and means over the seeds.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.executor.step import SampledToken, StepPlan, StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 1024, 16, 256, 2048
EOS, MAX_TOKENS = 1, 1024


def short(rng: random.Random) -> float:
    return rng.expovariate(1 / 32)


def long(rng: random.Random) -> float:
    return rng.uniform(300, 700)


def bimodal(rng: random.Random) -> float:
    return rng.gauss(800, 60) if rng.random() < 0.2 else rng.gauss(24, 8)


def at_limit(rng: random.Random) -> float:
    return math.inf


def heavy_tail(rng: random.Random) -> float:
    return rng.lognormvariate(math.log(80), 1.2)


LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "short": short, "long": long, "bimodal": bimodal, "at limit": at_limit, "heavy tail": heavy_tail
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One request: when it comes (seconds), its prompt, and how many tokens it generates."""

    arrival: float
    prompt: list[int]
    length: int


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, and of each token that it computes."""

    step: float = 0.004
    token: float = 0.0001


@dataclass(frozen=True)
class Outcome:
    preemptions: int
    delayed: int
    recomputed_tokens: int
    requests_per_s: float
    tokens_per_s: float
    mean_latency_s: float
    p99_latency_s: float
    mean_running: float
    schedule_us: float  # processor time per step


def make_work(lengths: str, num_requests: int, rate: float | None, seed: int) -> list[Work]:
    """`rate` in requests per second; None: all at once."""
    rng = random.Random(seed)
    works, now = [], 0.0
    for _ in range(num_requests):
        num_prompt = round(min(1024, max(8, rng.lognormvariate(math.log(150), 0.8))))
        length = min(MAX_TOKENS, max(1, round(min(MAX_TOKENS, LENGTHS[lengths](rng)))))
        works.append(Work(now, [rng.randrange(2, 32_000) for _ in range(num_prompt)], length))
        now += rng.expovariate(rate) if rate else 0.0
    return works


class Simulation:
    """One run of `works`; every sequence is checked to get exactly its tokens."""

    def __init__(self, works: list[Work], admission: str, cost: StepCost = StepCost()) -> None:
        self._cost = cost
        self.scheduler = Scheduler(
            BlockManager(NUM_BLOCKS, BLOCK_SIZE),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            eos_token_ids=[EOS],
            admission=admission,
        )
        self._coming = [(work.arrival, index) for index, work in enumerate(works)]
        heapq.heapify(self._coming)
        self._works = works
        self._sequences: dict[int, Sequence] = {}
        self._latencies: list[float] = []
        self._now = self._cpu = 0.0
        self._num_steps = self._num_computed = self._num_running = 0

    def run(self) -> Outcome:
        while self._coming or self.scheduler.has_work:
            self._arrive()
            started = time.process_time()
            plan = self.scheduler.schedule()
            self._cpu += time.process_time() - started
            assert plan is not None, "work is left but nothing can be planned"
            self._step(plan)
        return self._outcome()

    def _arrive(self) -> None:
        if not self.scheduler.has_work:
            self._now = max(self._now, self._coming[0][0])
        while self._coming and self._coming[0][0] <= self._now:
            _, index = heapq.heappop(self._coming)
            prompt, params = self._works[index].prompt, SamplingParams(max_tokens=MAX_TOKENS)
            limit = len(prompt) + MAX_TOKENS
            seq = Sequence(index, prompt, params, seed=index, max_num_tokens=limit, arrival=index)
            self._sequences[index] = seq
            self.scheduler.add(seq)

    def _step(self, plan: StepPlan) -> None:
        num_tokens = sum(step.num_tokens for step in plan.steps)
        self._now += self._cost.step + self._cost.token * num_tokens
        self._num_steps += 1
        self._num_computed += num_tokens
        self._num_running += len(plan.steps)
        samples = []
        for step in plan.steps:
            if step.sample:
                seq = self._sequences[step.seq_id]
                last = seq.num_generated_tokens + 1 == self._works[step.seq_id].length
                samples.append(SampledToken(step.seq_id, EOS if last else 2 + seq.num_tokens % 30_000))
        self.scheduler.update(StepResult(plan.step_id, samples, {}, 0.0))
        for sample in samples:
            if (seq := self._sequences[sample.seq_id]).finish_reason is not None:
                work = self._works[sample.seq_id]
                assert seq.num_generated_tokens == work.length
                self._latencies.append(self._now - work.arrival)

    def _outcome(self) -> Outcome:
        assert len(self._latencies) == len(self._works)
        needed = sum(len(work.prompt) + work.length - 1 for work in self._works)
        tokens = sum(work.length for work in self._works)
        return Outcome(
            preemptions=self.scheduler.num_preemptions,
            delayed=self.scheduler.admission.num_delayed,
            recomputed_tokens=self._num_computed - needed,
            requests_per_s=len(self._works) / self._now,
            tokens_per_s=tokens / self._now,
            mean_latency_s=statistics.mean(self._latencies),
            p99_latency_s=sorted(self._latencies)[math.ceil(0.99 * len(self._latencies)) - 1],
            mean_running=self._num_running / self._num_steps,
            schedule_us=1e6 * self._cpu / self._num_steps,
        )


def merged(outcomes: list[Outcome]) -> dict[str, float]:
    """Counts added up, the rest averaged."""
    rows = [asdict(outcome) for outcome in outcomes]
    return {
        name: sum(row[name] for row in rows) if isinstance(value, int) else statistics.mean(row[name] for row in rows)
        for name, value in rows[0].items()
    }


def compare(lengths: str, num_requests: int, seeds: int, cost: StepCost) -> list[dict[str, object]]:
    """Rows of the table: two ways to arrive, each plain and predicted."""
    rows: list[dict[str, object]] = []
    rate = None
    for arrival in ("at once", "poisson"):
        for admission in ("plain", "predict"):
            outcomes = [
                Simulation(make_work(lengths, num_requests, rate, seed), admission, cost).run() for seed in range(seeds)
            ]
            rows.append({"lengths": lengths, "arrival": arrival, "admission": admission, **merged(outcomes)})
        rate = 0.95 * float(str(rows[0]["requests_per_s"]))
    return rows


COLUMNS = {
    "preemptions": "9.0f", "recomputed_tokens": "10.0f", "delayed": "7.0f", "tokens_per_s": "8.0f",
    "mean_latency_s": "8.2f", "p99_latency_s": "8.2f", "mean_running": "8.1f", "schedule_us": "8.0f",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--token-us", type=float, default=100.0)
    parser.add_argument("--lengths", choices=LENGTHS, action="append", help="only these; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON, too")
    arguments = parser.parse_args()
    print(f"{'lengths':11}{'arrival':9}{'':8}preempted recomputed delayed tokens/s mean lat  p99 lat  running us/step")
    cost, rows = StepCost(arguments.step_ms / 1e3, arguments.token_us / 1e6), []
    for lengths in arguments.lengths or LENGTHS:
        for row in compare(lengths, arguments.requests, arguments.seeds, cost):
            rows.append(row)
            figures = " ".join(format(row[name], spec) for name, spec in COLUMNS.items())
            print(f"{lengths:11}{row['arrival']:9}{row['admission']:8}{figures}", flush=True)
    if arguments.json:
        pool = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": MAX_NUM_SEQS}
        text = json.dumps({"arguments": vars(arguments), "pool": pool, "rows": rows}, indent=1)
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
