"""Admission by prediction in the simulation: its books follow the running set, and it only ever delays."""

import math
from typing import TYPE_CHECKING

from engine.memory.sequence import Sequence, num_forks_of
from engine.scheduling.block_reserve import PredictedReserve
from tests.sim.violation import fail

if TYPE_CHECKING:
    from tests.sim.watched import WatchedScheduler

TOLERANCE = 1e-6  # blocks; sums of some dozen floats that were added and taken away


def check_admission(scheduler: "WatchedScheduler") -> None:
    """It holds a book of exactly those that run, and its forecast is the sum of what each of them was counted as."""
    reserve = scheduler.admission.reserve
    if not isinstance(reserve, PredictedReserve):
        return
    if set(reserve.holders) != set(scheduler.running):
        fail("admission", f"{len(reserve.holders)} sequences are counted, {len(scheduler.running)} run")
    if any(holder.num_blocks < 0 or holder.num_shared < 0 for holder in reserve.holders.values()):
        fail("admission", "a sequence counts for less than no block")
    found = reserve.forecast.mean
    wanted = [0.0] * len(found)
    for holder in reserve.holders.values():
        if holder.num_seqs:
            growth = holder.num_seqs / scheduler.block_manager.block_size
            lengths = holder.lengths
            for i, (alive, ahead) in enumerate(zip(lengths.alive(holder.bucket), lengths.horizons, strict=True)):
                wanted[i] += alive * (holder.num_blocks + growth * ahead)
    if any(abs(a - b) > TOLERANCE * (1 + b) for a, b in zip(found, wanted, strict=True)):
        fail("admission", f"the forecast is {found}, that of what runs {wanted}")


def check_spare(scheduler: "WatchedScheduler", seq: Sequence, spare: int) -> None:
    """No less stays free than the watermark and a block for each fork, unless nothing else runs."""
    least = math.ceil(scheduler._watermark * scheduler.block_manager.num_blocks) + num_forks_of(seq)
    if not scheduler.admission.is_alone(seq) and spare < least:
        fail("admission", f"{seq} is let in where {spare} blocks stay free, the watermark and forks ask for {least}")
