"""BlockReserve: how many blocks must stay free when a waiting sequence starts.

`WatermarkReserve` keeps a watermark free: the running sequences may still outgrow the pool, and then the newest are
preempted and computed again. `PredictedReserve` looks ahead (the idea of Past-Future scheduling: Gong et al. 2025).
From the lengths of past outputs it computes how many blocks the running set will hold after some numbers of steps, when
some sequences have ended and the others have grown. A sequence starts if the peak of that, with the sequence, fits the
pool; a distant peak does not count (HORIZON_SHARE). Preemption covers a wrong prediction.

Both only ever delay a start: the order stays the same, and with nothing running no reserve applies.
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

REFRESH_STEPS = 16  # plans; the forecast hardly ages in so few tokens
SAFETY = 1.0  # standard deviations of the blocks held, added to the mean
# A preemption costs a second computation of the victim's tokens; its generated tokens stay. So a peak counts only if it
# comes before the new sequence has generated this share of the tokens it starts with: for a later peak, starting pays
# even if the sequence is preempted in the end. Without this limit benchmarks/admission.py loses throughput where all
# outputs are long: sequences that start together also end together, and the pool idles in between.
HORIZON_SHARE = 0.25


class BlockReserve(Protocol):
    """Admission asks `spare`, and reports every sequence that starts or stops running."""

    def spare(self, seq: Sequence, prefix: list[Block], num_forks: int, running: list[Sequence]) -> int:
        """Returns the blocks that must stay free beside the known tokens of `seq`.

        `prefix`: blocks of its start that are in the pool. `num_forks`: further samples that wait for its prompt.
        """

    def watermark(self, num_forks: int) -> int:
        """Returns the blocks that must stay free in any case: `spare` is never below."""

    def started(self, seq: Sequence, num_forks: int) -> None:
        """`seq` runs, with its blocks."""

    def forked(self, parent: Sequence, fork: Sequence) -> None:
        """A sample that was counted with `parent` runs, too, on the same blocks."""

    def stopped(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        """A running sequence is about to give up its blocks: for good with `reason`, else by preemption."""

    def planned(self) -> None:
        """A plan is complete."""

    def reset(self, watermark_blocks: int) -> None:
        """The Worker was replaced: no sequence runs, the pool is new. Learned output lengths stay."""


class WatermarkReserve:
    """Keeps `watermark_blocks` free, and one block for every fork."""

    def __init__(self, watermark_blocks: int) -> None:
        self.watermark_blocks = watermark_blocks

    def spare(self, seq: Sequence, prefix: list[Block], num_forks: int, running: list[Sequence]) -> int:
        return self.watermark(num_forks)

    def watermark(self, num_forks: int) -> int:
        return self.watermark_blocks + num_forks  # each fork gets a copy of the block that is not full

    def started(self, seq: Sequence, num_forks: int) -> None:
        pass

    def forked(self, parent: Sequence, fork: Sequence) -> None:
        pass

    def stopped(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        pass

    def planned(self) -> None:
        pass

    def reset(self, watermark_blocks: int) -> None:
        self.watermark_blocks = watermark_blocks


class Forecast:
    """Mean and variance of the number of blocks held, at each of `LengthClass.horizons` (in tokens) from now."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._horizons = horizons(block_size, MAX_LENGTH)  # every class has a prefix of these
        self.mean: list[float] = []
        self.variance: list[float] = []

    def add(self, lengths: LengthClass, bucket: int, num_seqs: int, num_blocks: int, sign: int = 1) -> None:
        """Adds (`sign` 1) or removes (-1) sequences whose next token is in `bucket`, with `num_blocks` blocks in all.

        Each sequence holds its blocks, and those it grows by, until it ends.
        """
        mean, variance = self.mean, self.variance
        missing = len(lengths.horizons) - len(mean)
        mean += [0.0] * missing
        variance += [0.0] * missing
        growth = num_seqs / self._block_size
        for i, (alive, ahead) in enumerate(zip(lengths.alive(bucket), lengths.horizons, strict=True)):
            held = num_blocks + growth * ahead
            expected = sign * alive * held
            mean[i] += expected
            variance[i] += expected * (1.0 - alive) * held / num_seqs

    def peak_with(self, lengths: LengthClass, bucket: int, num_seqs: int, num_blocks: int, max_ahead: float) -> float:
        """Returns the most blocks held up to `max_ahead` tokens from now, with these sequences added, plus SAFETY."""
        peak, growth = 0.0, num_seqs / self._block_size
        rows = zip_longest(self.mean, self.variance, lengths.alive(bucket), fillvalue=0.0)
        for ahead, (mean, variance, alive) in zip(self._horizons, rows, strict=False):
            if ahead > max(max_ahead, self._horizons[0]):
                break
            held = num_blocks + growth * ahead
            expected = alive * held
            variance += expected * (1.0 - alive) * held / num_seqs
            peak = max(peak, mean + expected + SAFETY * math.sqrt(max(0.0, variance)))
        return peak


@dataclass(slots=True)
class _Holder:
    """A running sequence: how many leading blocks it shares, how many samples wait for its prompt.

    `bucket`, `num_seqs` and `num_blocks` are what the forecast counts, so that exactly this can be removed again.
    """

    lengths: LengthClass
    num_shared: int
    num_forks: int
    bucket: int = 1
    num_seqs: int = 0
    num_blocks: int = 0


class PredictedReserve:
    """Makes its forecast anew every REFRESH_STEPS plans; in between, sequences that start or stop change it."""

    def __init__(self, block_manager: BlockManager, watermark_blocks: int) -> None:
        self._blocks = block_manager
        self._watermark = WatermarkReserve(watermark_blocks)
        self.lengths = OutputLengths(block_manager.block_size)
        self.holders: dict[Sequence, _Holder] = {}
        self.forecast = Forecast(block_manager.block_size)
        self._num_shared = 0  # blocks that no single sequence frees for sure when it ends
        self._num_plans = 0
        self._next_refresh = 0

    def spare(self, seq: Sequence, prefix: list[Block], num_forks: int, running: list[Sequence]) -> int:
        if self._num_plans >= self._next_refresh:
            self._refresh(running)
            self._next_refresh = self._num_plans + REFRESH_STEPS
        blocks = self._blocks
        taken = blocks.num_blocks_for(seq.num_tokens) - sum(block.ref_count > 0 for block in prefix)
        lengths = self.lengths.class_of(seq)
        max_ahead = HORIZON_SHARE * seq.num_tokens
        peak = self.forecast.peak_with(lengths, _next_bucket(seq), 1 + num_forks, taken + num_forks, max_ahead)
        growth = math.ceil(self._num_shared + peak) - (blocks.num_blocks - len(blocks.free_blocks)) - taken
        return max(self.watermark(num_forks), growth)

    def watermark(self, num_forks: int) -> int:
        return self._watermark.watermark(num_forks)

    def planned(self) -> None:
        self._num_plans += 1

    def started(self, seq: Sequence, num_forks: int) -> None:
        num_shared = 0
        for block_id in seq.block_table:  # shared blocks form a prefix
            if self._blocks.blocks[block_id].ref_count == 1:
                break
            num_shared += 1
        self.holders[seq] = holder = _Holder(self.lengths.class_of(seq), num_shared, num_forks)
        self._count(seq, holder)
        self.forecast.add(holder.lengths, holder.bucket, holder.num_seqs, holder.num_blocks)

    def forked(self, parent: Sequence, fork: Sequence) -> None:
        holder = self.holders[parent]
        # The prompt's blocks stay until the last sample ends, so no sample is expected to free them.
        holder.num_shared = parent.num_prompt_tokens // self._blocks.block_size
        self.holders[fork] = _Holder(holder.lengths, holder.num_shared, 0)

    def stopped(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        holder = self.holders.pop(seq)
        if holder.num_seqs:  # a fork is counted with its parent until the next refresh
            self.forecast.add(holder.lengths, holder.bucket, holder.num_seqs, holder.num_blocks, sign=-1)
        if reason is not None:
            self.lengths.observe(seq, reason)

    def reset(self, watermark_blocks: int) -> None:
        self._watermark.reset(watermark_blocks)
        self.holders.clear()
        self.forecast = Forecast(self._blocks.block_size)
        self._num_shared = self._num_plans = self._next_refresh = 0

    def _count(self, seq: Sequence, holder: _Holder) -> None:
        """Notes the blocks that `seq` and samples waiting for its prompt need for known tokens, and its length."""
        generated = len(seq.token_ids) + seq.num_pending_tokens - seq.num_prompt_tokens
        num_forks = 0 if generated else holder.num_forks
        num_known = -(-(seq.num_prompt_tokens + generated) // self._blocks.block_size)
        holder.bucket = bucket_of(generated + 1)
        holder.num_seqs = 1 + num_forks
        holder.num_blocks = num_known - holder.num_shared + num_forks

    def _refresh(self, running: list[Sequence]) -> None:
        """Makes the forecast anew: sums up the running set by class and bucket, and refits classes that changed."""
        cells: dict[LengthClass, dict[int, tuple[int, int]]] = {}
        num_owned = 0
        for seq in running:
            holder = self.holders[seq]
            self._count(seq, holder)
            num_owned += len(seq.block_table) - holder.num_shared
            buckets = cells.setdefault(holder.lengths, {})
            before = buckets.get(holder.bucket, (0, 0))
            buckets[holder.bucket] = before[0] + holder.num_seqs, before[1] + holder.num_blocks
        num_used = self._blocks.num_blocks - len(self._blocks.free_blocks)
        self._num_shared = max(0, num_used - num_owned)
        self.forecast = Forecast(self._blocks.block_size)
        for lengths, buckets in cells.items():
            lengths.refit({bucket: num_seqs for bucket, (num_seqs, _) in buckets.items()})
            for bucket, (num_seqs, num_blocks) in buckets.items():
                self.forecast.add(lengths, bucket, num_seqs, num_blocks)


def _next_bucket(seq: Sequence) -> int:
    return bucket_of(seq.num_tokens + 1 - seq.num_prompt_tokens)


def make_reserve(admission: str, block_manager: BlockManager, watermark_blocks: int) -> BlockReserve:
    """Returns the reserve that EngineConfig.admission names: "plain" or "predict"."""
    if admission == "plain":
        return WatermarkReserve(watermark_blocks)
    return PredictedReserve(block_manager, watermark_blocks)
