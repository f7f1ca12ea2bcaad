"""Measures how long computing and loading tokens takes, for the choice between recomputation and swapping.

Kwon et al. 2023, section 4.5, define the two. The model, the length and the path to host memory decide which is faster
(section 7.3), so the Worker measures both when it starts.
"""

import time
from typing import TYPE_CHECKING

from engine.executor.step import CacheCosts, NewSequence, SequenceStep, StepPlan
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.worker.model_runner import ModelRunner

MEASURED_TOKENS = 512


def measure_cache_costs(runner: "ModelRunner") -> CacheCosts | None:
    """Costs from a short and a four times longer prompt, and from loads of the same lengths. Writes over the first
    blocks of the pool.

    None if a step or the host tier holds less than two blocks: then there is no choice.
    """
    size = runner.batch.block_size
    longest = min(MEASURED_TOKENS, runner.max_prompt_tokens, runner.host_cache.num_slots * size)
    long = longest // size
    if long < 2:
        return None
    short = -(-long // 4)
    compute = [_prompt_seconds(runner, n * size) / (n * size) for n in (short, long)]
    load = [runner.host_cache.measure_load(n) for n in (short, long)]
    quadratic = max(0.0, (compute[1] - compute[0]) / ((long - short) * size))
    linear = max(0.0, (load[1] - load[0]) / ((long - short) * size))
    return CacheCosts(
        compute_linear=compute[1] - quadratic * long * size,
        compute_quadratic=quadratic,
        load_fixed=max(0.0, load[0] - linear * short * size),
        load_linear=linear,
    )


def _prompt_seconds(runner: "ModelRunner", num_tokens: int) -> float:
    """Seconds of a step that computes a prompt, the median of three."""
    blocks = list(range(num_tokens // runner.batch.block_size))
    new = NewSequence(
        seq_id=0,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=blocks,
        params=SamplingParams(temperature=0.0),
        seed=0,
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        runner.result(runner.launch(StepPlan(0, [], [new], [], [SequenceStep(0, num_tokens, True, [])])))
        seconds.append(time.perf_counter() - started)
        runner.launch(StepPlan(0, [0], [], [], []))
    return sorted(seconds)[1]
