"""Admission: how many blocks must stay free when a waiting sequence is admitted.

`PlainAdmission` keeps a watermark free: the running sequences may then outgrow the pool, and the last of them are
preempted and computed again. `PredictedAdmission` looks ahead (the idea of Past-Future scheduling: Gong et al. 2025):
from the lengths that outputs had so far it works out how many blocks the running set will hold after each of some
numbers of steps, when some have ended and the others have grown, and lets a sequence in while the peak of that, with
it, fits the pool; a peak far away does not count (HORIZON_SHARE). Where it is wrong, preemption is there as before.

Both only ever delay an admission: order stays first come, first served, and with nothing running they are not asked.
"""

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from engine.memory.block_manager import BlockManager
from engine.memory.free_list import Block
from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.scheduling.output_lengths import MAX_LENGTH, LengthClass, OutputLengths, bucket_of, horizons

REFRESH_STEPS = 16  # a curve of the future does not age much in so few tokens
SAFETY = 1.0  # standard deviations of the blocks held, added to the mean
# A preemption costs the victim's tokens computed again; those it generated before stay. So a peak counts only where it
# comes before the newcomer has generated this share of the tokens it starts with: farther away, letting it in pays even
# when it is preempted in the end. With no such end to the look ahead, benchmarks/admission.py loses throughput where
# all outputs are long: what was admitted together then also ends together, and the pool is idle in between.
HORIZON_SHARE = 0.25


class Admission(Protocol):
    """What the Scheduler asks and tells."""

    num_delayed: int  # sequences that a watermark alone would have let in sooner

    def spare(self, seq: Sequence, prefix: list[Block], num_forks: int, running: list[Sequence], step: int) -> int:
        """Blocks that must stay free beside the known tokens of `seq`, whose cached start is `prefix`.

        `num_forks` further samples wait for its prompt; `step` counts plans.
        """

    def admitted(self, seq: Sequence, num_forks: int) -> None:
        """`seq` runs, with its blocks."""

    def forked(self, parent: Sequence, fork: Sequence) -> None:
        """A sample that was counted with `parent` runs, too, on the same blocks."""

    def stopped(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        """A running sequence is about to give up its blocks: for good with `reason`, else preempted."""

    def reset(self, watermark_blocks: int) -> None:
        """Nothing runs any more, and the pool is another: what was learned of lengths stays."""


class PlainAdmission:
    def __init__(self, watermark_blocks: int) -> None:
        self.num_delayed = 0
        self.watermark_blocks = watermark_blocks

    def spare(self, seq: Sequence, prefix: list[Block], num_forks: int, running: list[Sequence], step: int) -> int:
        return self.watermark_blocks + num_forks  # each fork gets a copy of a block that is not full

    def admitted(self, seq: Sequence, num_forks: int) -> None:
        pass

    def forked(self, parent: Sequence, fork: Sequence) -> None:
        pass

    def stopped(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        pass

    def reset(self, watermark_blocks: int) -> None:
        self.watermark_blocks = watermark_blocks


class Forecast:
    """Mean and variance of the number of blocks held after each of `LengthClass.horizons`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._horizons = horizons(block_size, MAX_LENGTH)  # those of every class are a start of it
        self._mean: list[float] = []
        self._variance: list[float] = []

    def add(self, lengths: LengthClass, bucket: int, num_seqs: int, num_blocks: int, sign: int = 1) -> None:
        """Sequences whose next token is in `bucket` come, or (`sign` -1) go; `num_blocks` in all are theirs.

        Each holds its blocks, and those it grows by, until it ends.
        """
        mean, variance = self._mean, self._variance
        missing = len(lengths.horizons) - len(mean)
        mean += [0.0] * missing
        variance += [0.0] * missing
        growth = num_seqs / self._block_size
        for i, (alive, ahead) in enumerate(zip(lengths.alive(bucket), lengths.horizons, strict=True)):
            held = num_blocks + growth * ahead
            expected = sign * alive * held
            mean[i] += expected
            variance[i] += expected * (1.0 - alive) * held / num_seqs

    def peak_with(self, lengths: LengthClass, bucket: int, num_seqs: int, num_blocks: int, within: float) -> float:
        """The most blocks held, `within` some tokens from now, were these there, too; with the margin of safety."""
        peak, growth = 0.0, num_seqs / self._block_size
        rows = zip_longest(self._mean, self._variance, lengths.alive(bucket), fillvalue=0.0)
        for ahead, (mean, variance, alive) in zip(self._horizons, rows, strict=False):
            if ahead > max(within, self._horizons[0]):
                break
            held = num_blocks + growth * ahead
            expected = alive * held
            variance += expected * (1.0 - alive) * held / num_seqs
            peak = max(peak, mean + expected + SAFETY * math.sqrt(max(0.0, variance)))
        return peak


@dataclass(slots=True)
class _Holder:
    """A running sequence: the leading blocks that it shares, the samples that wait for its prompt.

    The rest is how the forecast counts it: it is taken out as what it was put in.
    """

    lengths: LengthClass
    num_shared: int
    num_forks: int
    bucket: int = 1
    num_seqs: int = 0
    num_blocks: int = 0


class PredictedAdmission:
    """The forecast is made anew every REFRESH_STEPS; between, who comes is added and who goes is taken out."""

    def __init__(self, block_manager: BlockManager, watermark_blocks: int) -> None:
        self.num_delayed = 0
        self._blocks = block_manager
        self._plain = PlainAdmission(watermark_blocks)
        self._lengths = OutputLengths(block_manager.block_size)
        self._holders: dict[Sequence, _Holder] = {}
        self._forecast = Forecast(block_manager.block_size)
        self._num_shared = 0  # blocks held that no one's end gives back for sure
        self._next_refresh = 0
        self._last_delayed: Sequence | None = None

    def spare(self, seq: Sequence, prefix: list[Block], num_forks: int, running: list[Sequence], step: int) -> int:
        if step >= self._next_refresh:
            self._refresh(running)
            self._next_refresh = step + REFRESH_STEPS
        blocks = self._blocks
        taken = blocks.num_blocks_for(seq.num_tokens) - sum(block.ref_count > 0 for block in prefix)
        lengths = self._lengths.class_of(seq)
        within = HORIZON_SHARE * seq.num_tokens
        peak = self._forecast.peak_with(lengths, _next_bucket(seq), 1 + num_forks, taken + num_forks, within)
        num_free = len(blocks.free_blocks)
        growth = math.ceil(self._num_shared + peak) - (blocks.num_blocks - num_free) - taken
        plain = self._plain.spare(seq, prefix, num_forks, running, step)
        if plain <= num_free - taken < growth and seq is not self._last_delayed:
            self._last_delayed = seq
            self.num_delayed += 1
        return max(plain, growth)

    def admitted(self, seq: Sequence, num_forks: int) -> None:
        num_shared = 0
        for block_id in seq.block_table:  # what is shared is a prefix
            if self._blocks.blocks[block_id].ref_count == 1:
                break
            num_shared += 1
        self._holders[seq] = holder = _Holder(self._lengths.class_of(seq), num_shared, num_forks)
        self._look_at(seq, holder)
        self._forecast.add(holder.lengths, holder.bucket, holder.num_seqs, holder.num_blocks)

    def forked(self, parent: Sequence, fork: Sequence) -> None:
        holder = self._holders[parent]
        # The prompt stays until the last of them ends, so the end of none is counted on to give it back.
        holder.num_shared = parent.num_prompt_tokens // self._blocks.block_size
        self._holders[fork] = _Holder(holder.lengths, holder.num_shared, 0)

    def stopped(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        holder = self._holders.pop(seq)
        if holder.num_seqs:  # a fork is counted with its parent until the next refresh
            self._forecast.add(holder.lengths, holder.bucket, holder.num_seqs, holder.num_blocks, -1)
        if reason is not None:
            self._lengths.observe(seq, reason)

    def reset(self, watermark_blocks: int) -> None:
        self._plain.reset(watermark_blocks)
        self._holders.clear()
        self._forecast = Forecast(self._blocks.block_size)
        self._num_shared = self._next_refresh = 0

    def _look_at(self, seq: Sequence, holder: _Holder) -> None:
        """Note how many blocks `seq`, and samples that wait for it, need for known tokens, and how far it got."""
        generated = len(seq.token_ids) + seq.num_pending_tokens - seq.num_prompt_tokens
        num_forks = 0 if generated else holder.num_forks
        num_known = -(-(seq.num_prompt_tokens + generated) // self._blocks.block_size)
        holder.bucket = bucket_of(generated + 1)
        holder.num_seqs = 1 + num_forks
        holder.num_blocks = num_known - holder.num_shared + num_forks

    def _refresh(self, running: list[Sequence]) -> None:
        """Sum up the running set by class and bucket, fit the classes that have changed, and look ahead."""
        cells: dict[LengthClass, dict[int, tuple[int, int]]] = {}
        num_owned = 0
        for seq in running:
            holder = self._holders[seq]
            self._look_at(seq, holder)
            num_owned += len(seq.block_table) - holder.num_shared
            buckets = cells.setdefault(holder.lengths, {})
            before = buckets.get(holder.bucket, (0, 0))
            buckets[holder.bucket] = before[0] + holder.num_seqs, before[1] + holder.num_blocks
        num_used = self._blocks.num_blocks - len(self._blocks.free_blocks)
        self._num_shared = max(0, num_used - num_owned)
        self._forecast = Forecast(self._blocks.block_size)
        for lengths, buckets in cells.items():
            lengths.refit({bucket: num_seqs for bucket, (num_seqs, _) in buckets.items()})
            for bucket, (num_seqs, num_blocks) in buckets.items():
                self._forecast.add(lengths, bucket, num_seqs, num_blocks)


def _next_bucket(seq: Sequence) -> int:
    return bucket_of(seq.num_tokens + 1 - seq.num_prompt_tokens)


def make_admission(name: str, block_manager: BlockManager, watermark_blocks: int) -> Admission:
    """By the value of EngineConfig.admission."""
    if name == "plain":
        return PlainAdmission(watermark_blocks)
    return PredictedAdmission(block_manager, watermark_blocks)
