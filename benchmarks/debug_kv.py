"""Measures the time of one GET /debug/kv and one /debug/steps on the event loop, by the size of the pool.

    python -m benchmarks.debug_kv [--num-blocks 16384 262144] [--repeats 21]

The pool is busy: six tenths of the blocks are held by running sequences of 40 blocks each, three tenths are cached.
Prints milliseconds for the view and its JSON together (median and worst), the size of the body, and for how long it is
used. The last two lines are for steps: the view of 256 of them, and what recording one adds to a step, in microseconds,
watched and not. Processor time of one core.
"""

import argparse
import random
import statistics
import time

from engine.executor.step import StepPlan, StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.kv_view import kv_view
from engine.telemetry.step_log import NUM_RECORDS, StepLog
from server.http.body import encode_json
from server.routes.debug_kv import COST_FACTOR, MIN_AGE

BLOCK_SIZE = 16
PROMPT_TOKENS = 40 * BLOCK_SIZE - 5


def busy_scheduler(num_blocks: int) -> Scheduler:
    """Fills nine tenths of the pool with prompts that differ, then ends a third of them, drawn at random."""
    num_seqs = num_blocks * 9 // 10 // 40
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE), max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * PROMPT_TOKENS
    )
    rng = random.Random(0)
    seqs = []
    for number in range(num_seqs):
        tokens = [rng.randrange(50_000) for _ in range(PROMPT_TOKENS)]
        limit = PROMPT_TOKENS + 100
        seqs.append(Sequence(number, tokens, SamplingParams(), seed=0, max_num_tokens=limit, arrival=number))
        scheduler.add(seqs[-1])
    scheduler.schedule()
    for seq in rng.sample(seqs, num_seqs // 3):
        scheduler.finish(seq, FinishReason.ABORT)
    return scheduler


def owner_of(seq_id: int) -> tuple[str, int]:
    """As if each sequence were the only sample of a request."""
    return "chatcmpl-" + "0" * 32 + "-0", 0


def seconds_per_record(scheduler: Scheduler, log: StepLog, num_seqs: int = 256) -> float:
    """To record a step of decodes that is sent and comes back."""
    steps = [
        (StepPlan(i, [], [], [], [], decodes=[*range(num_seqs)]), StepResult(i, [], {}, 0.01)) for i in range(2000)
    ]
    started = time.process_time()
    for plan, result in steps:
        log.sent(plan, scheduler)
        log.done(result, 0.0)
    return (time.process_time() - started) / len(steps)


def print_costs_of_steps(scheduler: Scheduler, repeats: int) -> None:
    log = StepLog()
    unwatched = seconds_per_record(scheduler, log)
    log.view(scheduler)
    watched = seconds_per_record(scheduler, log)
    seconds, size = [], 0
    for _ in range(repeats):
        started = time.process_time()
        size = len(encode_json(log.view(scheduler)))
        seconds.append(time.process_time() - started)
    median, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    print(f"{NUM_RECORDS} steps: {median:.2f} ms, worst {worst:.2f}, {size / 1024:.0f} KiB")
    print(f"recording a step: {watched * 1e6:.2f} us watched, {unwatched * 1e6:.2f} us not")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[16_384, 262_144])
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    print(f"{'blocks':>8}{'median ms':>11}{'worst ms':>10}{'KiB':>7}{'used for ms':>13}")
    for num_blocks in options.num_blocks:
        scheduler = busy_scheduler(num_blocks)
        seconds, size = [], 0
        for _ in range(options.repeats):
            started = time.process_time()
            size = len(encode_json(kv_view(scheduler, owner_of)))
            seconds.append(time.process_time() - started)
        median = statistics.median(seconds)
        age = max(MIN_AGE, COST_FACTOR * median)
        print(f"{num_blocks:8}{median * 1e3:11.2f}{max(seconds) * 1e3:10.2f}{size / 1024:7.0f}{age * 1e3:13.0f}")
    print_costs_of_steps(scheduler, options.repeats)


if __name__ == "__main__":
    main()
