"""AttentionPlan: fixed launch parameters of the attention kernels for one model on one device (no StepPlan is
involved).

Made once at start, it fixes the number of splits of a decode step, so that a CUDA graph can be replayed with any
lengths; owns the memory for the partial results of splits; and says whether results may depend on the batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.aot_configuration import power_of_2
from kernels.attention.choices import ANY, PREFILL, Tile, find_tile
from kernels.attention.flashinfer import FlashInferPrefill
from kernels.cache.quantize import read_code
from kernels.card import known_card
from kernels.dispatch import device_sizes
from kernels.kv_format import KVFormat, kv_format_of

# More splits only add work to the reduction, which reads one row of every split at once.
MAX_SPLITS = 32
# To merge a split costs more than to read fewer tiles of keys than this. Not measured yet.
MIN_SPLIT_TILES = 2
# Programs per SM that the splits of a decode step may add up to. Both kinds of device hold that many at once, so no
# split waits for another to end. Each has 32 KB under way while it computes: about twice the need of the memory. A
# batch with more than half as many programs is not split, which saves the launch that merges. Not measured yet.
PROGRAMS_PER_SM = 2


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Launch parameters that all attention calls of a model share.

    capability: 80 for an A100 (and for the interpreter), 90 for an H100. partial fp32: scratch space of decode splits,
    shared by all layers because they run one after the other. row_starts int32 [max_num_seqs + 1] = 0, 1, 2, ...:
    cu_seqlens_q of a step that only decodes.

    batch_invariant: a row's result has the same bits whether its token was decoded or part of a prefill chunk of any
    length, alone or with others, after a prefix hit or a preemption. One kernel with one tile then serves decode and
    prefill, walks the keys of a sequence from its first token in the same steps, and never splits.

    flashinfer: computes the prefills of the steps that the host plans, in place of the prefill kernel here.
    """

    capability: int
    num_sms: int
    partial: Tensor
    row_starts: Tensor
    batch_invariant: bool = False
    flashinfer: FlashInferPrefill | None = None

    def num_splits(self, num_seqs: int, num_kv_heads: int, max_tokens: int, block_n: int) -> int:
        """Splits per sequence of a decode step. Depends only on sizes known when a graph is captured, not on lengths.

        max_tokens: the tokens that the block tables have room for.
        """
        wanted = PROGRAMS_PER_SM * self.num_sms // (num_seqs * num_kv_heads)
        return max(1, min(wanted, MAX_SPLITS, max_tokens // (block_n * MIN_SPLIT_TILES)))

    def decode_starts(self, num_seqs: int) -> Tensor:
        """cu_seqlens_q of a batch that only decodes, int32 [num_seqs + 1]. ValueError if the plan was made for fewer
        sequences."""
        if num_seqs >= len(self.row_starts):
            raise ValueError(f"the attention plan was made for {len(self.row_starts) - 1} sequences, not {num_seqs}")
        return self.row_starts[: num_seqs + 1]

    def partial_results(self, num_rows: int, num_splits: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Views of `partial` for num_rows = num_seqs * num_heads: fp32 [num_rows, num_splits, head_dim] and
        [num_rows, num_splits]. ValueError if the plan was made for less."""
        count = num_rows * num_splits
        if count * (head_dim + 1) > self.partial.numel():
            raise ValueError(
                f"the attention plan has room for {self.partial.numel()} numbers of partial results and this step "
                f"writes {count * (head_dim + 1)}: make the plan with the largest batch and this model's heads"
            )
        values = self.partial[: count * head_dim].view(num_rows, num_splits, head_dim)
        return values, self.partial[count * head_dim : count * (head_dim + 1)].view(num_rows, num_splits)


def attention_plan(
    device: torch.device,
    *,
    max_num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    batch_invariant: bool = False,
    flashinfer: FlashInferPrefill | None = None,
) -> AttentionPlan:
    """The plan for steps of up to max_num_seqs sequences on a CUDA device, or on the CPU in Triton's interpreter."""
    capability, num_sms = device_sizes(device)
    row_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
    plan = AttentionPlan(capability, num_sms, torch.empty(0), row_starts, batch_invariant, flashinfer)
    # An upper bound for any step: an endless block table, and tiles of one key. Larger batches have one split and write
    # no partial results.
    batches = range(1, min(max_num_seqs, PROGRAMS_PER_SM * num_sms) + 1)
    splits = [plan.num_splits(n, num_kv_heads, 1 << 40, 1) for n in batches]
    rows = max((n * count for n, count in zip(batches, splits, strict=True) if count > 1), default=0)
    size = 0 if batch_invariant else rows * num_heads * (head_dim + 1)
    return replace(plan, partial=torch.empty(size, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters that a launch is compiled for. A layer of a model fixes all of them, so no later step compiles.

    q_strides: strides of the first two axes of q, a view into the rows of a projection. q_bits: bits of a number of q.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    q_strides: tuple[int, int]
    q_bits: int
    kv_format: KVFormat | None = None
    has_alibi: bool = False
    has_softcap: bool = False
    sliding_window: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def tile(self, use: str, capability: int, num_rows: int = 0) -> Tile:
        """The tile of a launch from the table. use: "decode", "prefill" or "invariant"; num_rows: see Rule.max_rows."""
        kv_bits = self.q_bits if self.kv_format is None else self.kv_format.bits
        extras = self.has_alibi or self.has_softcap or self.sliding_window > 0 or self.group & (self.group - 1) > 0
        # Positional: a cached function looks up keywords more slowly, and launches call this.
        return find_tile(use, known_card(capability), self.q_bits, kv_bits, self.head_dim, self.group, num_rows, extras)

    def prefill_lengths(self, capability: int) -> list[int]:
        """Chunk lengths, 2 and more, each with a tile of its own: together they launch every variant."""
        tiles: dict[Tile, int] = {}
        for length in sorted({max(2, rule.max_rows // self.group) for rule in PREFILL if rule.max_rows < ANY}):
            for n in (length, length + 1):
                tiles.setdefault(self.tile("prefill", capability, n * self.group), n)
        return sorted(tiles.values())

    def constants(self, tile: Tile, capability: int) -> dict[str, int | bool]:
        """The compile-time arguments that decode and prefill kernels share."""
        return {
            "Q_STRIDE_ROW": self.q_strides[0],
            "Q_STRIDE_HEAD": self.q_strides[1],
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": max(16, power_of_2(self.head_dim)),
            "BLOCK_SIZE": self.block_size,
            "KV_FORMAT": read_code(self.kv_format, capability),
            "HAS_ALIBI": self.has_alibi,
            "HAS_SOFTCAP": self.has_softcap,
            "WINDOW": self.sliding_window,
        }


def attention_shape(
    q: Tensor, cache: Tensor, alibi_slopes: Tensor | None, sliding_window: int, softcap: float
) -> AttentionShape:
    """The shape of queries [tokens, num_heads, head_dim] and one of the two caches."""
    return AttentionShape(
        num_heads=q.shape[1],
        num_kv_heads=cache.shape[1],
        head_dim=q.shape[2],
        block_size=cache.shape[2],
        q_strides=(q.stride(0), q.stride(1)),
        q_bits=8 * q.element_size(),
        kv_format=kv_format_of(cache),
        has_alibi=alibi_slopes is not None,
        has_softcap=softcap > 0,
        sliding_window=sliding_window,
    )


def plan_for_call(q: Tensor, shape: AttentionShape) -> AttentionPlan:
    """A plan for one call, for callers without one (tests, the memory profile)."""
    return attention_plan(
        q.device,
        max_num_seqs=len(q),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
