"""AttentionPlan: fixed launch parameters of the attention kernels for one model on one device (no StepPlan is
involved).

Made once at start, it owns the memory for the partial results of sequences whose keys several programs share
(kernels/attention/work.py), and says whether results may depend on the batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.aot_configuration import power_of_2
from kernels.attention.choices import ANY, PREFILL, Tile, tile_choice
from kernels.attention.flashinfer import FlashInferPrefill
from kernels.cache.quantize import read_code
from kernels.card import known_card
from kernels.dispatch import device_sizes
from kernels.kv_format import KVFormat, kv_format_of
from kernels.tile_choice import TileChoice

# Programs that an SM runs at once, as the choice of chunks counts them. Two of decode fit at least, but one took 0.95
# and 0.98 of the time of two on an H100 (geometric means of 8 and of 13 batches: 0.83 to 1.03, but 1.19 for 8 sequences
# of 1024 tokens). Codes are bound by instructions: in fp8, 16 such sequences took 20.9 us with two, and 30.8 with one
# in another call.
PROGRAMS_PER_SM = {"decode": 1, "prefill": 1}
PROGRAMS_OF_CODES = 2
# Chunks with partial results, times KV heads, that a step may have for each program that the device runs at once. More
# chunks balance a mix of lengths better, but each is a program that starts also where it has nothing to do. On an H100,
# steps of Qwen3-0.6B took from 1.2 % less to 0.8 % more with 2 than with 8; with 1, one of 16 sequences of mixed
# lengths took 5 % more. That of prefill is not measured yet.
CHUNKS_PER_PROGRAM = {"decode": 2, "prefill": 2}
# Rows of partial results for chunks of the keys of windows (kernels/attention/shared.py), beside two for each sequence:
# 16 sequences that share all keys, which are one window, may have 16 chunks each. An estimate.
WINDOW_CHUNKS = 256
SMALL_ROWS = 64  # query tokens x heads of a group: the largest tile of prefill whose units are divided into chunks


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Launch parameters that all attention calls of a model share.

    capability: 80 for an A100 (and for the interpreter), 90 for an H100. partial fp32: scratch space of chunks, shared
    by all layers because they run one after the other. row_starts int32 [at least max_num_seqs + 1] = 0, 1, 2, ...:
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

    def slots(self, use: str, kv_format: KVFormat | None = None) -> int:
        """Programs of "decode" or "prefill" that the device runs at once."""
        return self.num_sms * (PROGRAMS_OF_CODES if kv_format and use == "decode" else PROGRAMS_PER_SM[use])

    def max_chunks(self, use: str, num_kv_heads: int, num_rows: int, head_dim: int) -> int:
        """The largest number of chunks with partial results of a step; num_rows: rows of each (tokens x heads)."""
        room = self.partial.numel() // (num_rows * (head_dim + 1))
        return min(room, CHUNKS_PER_PROGRAM[use] * self.slots(use) // num_kv_heads)

    def window_rows(self, shape: "AttentionShape") -> int:
        """Rows of partial results that a step of windows may have; at least two for each sequence."""
        return self.partial.numel() // (shape.num_heads * (shape.head_dim + 1))

    def decode_starts(self, num_seqs: int) -> Tensor:
        """cu_seqlens_q of a batch that only decodes, int32 [num_seqs + 1]. ValueError if the plan was made for fewer
        sequences."""
        if num_seqs >= len(self.row_starts):
            raise ValueError(f"the attention plan was made for {len(self.row_starts) - 1} sequences, not {num_seqs}")
        return self.row_starts[: num_seqs + 1]

    def partial_results(self, num_chunks: int, num_rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Views of `partial`: fp32 [num_chunks, num_rows, head_dim] and [num_chunks, num_rows]."""
        count = num_chunks * num_rows
        values = self.partial[: count * head_dim].view(num_chunks, num_rows, head_dim)
        return values, self.partial[count * head_dim : count * (head_dim + 1)].view(num_chunks, num_rows)


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
    # a power of two: a CUDA graph may have room for more sequences than a step has
    row_starts = torch.arange(power_of_2(max_num_seqs) + 1, dtype=torch.int32, device=device)
    plan = AttentionPlan(capability, num_sms, torch.empty(0), row_starts, batch_invariant, flashinfer)
    rows = {"decode": num_heads, "prefill": max(1, SMALL_ROWS * num_kv_heads // num_heads) * num_heads}
    chunks = {use: CHUNKS_PER_PROGRAM[use] * plan.slots(use) // num_kv_heads for use in rows}
    num_rows = max(*(chunks[use] * rows[use] for use in rows), (2 * max_num_seqs + WINDOW_CHUNKS) * num_heads)
    size = 0 if batch_invariant else num_rows * (head_dim + 1)
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
    has_sinks: bool = False
    attention_chunk: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def tile(self, use: str, capability: int, num_rows: int = 0) -> Tile:
        """The tile that a launch uses now: see `choice`."""
        return self.choice(use, capability, num_rows).tile

    def choice(self, use: str, capability: int, num_rows: int = 0) -> TileChoice[Tile]:
        """The tiles of a launch from the table. use: "decode", "prefill" or "invariant"; num_rows: see
        Rule.max_rows."""
        kv_bits = self.q_bits if self.kv_format is None else self.kv_format.bits
        masks = self.sliding_window > 0 or self.attention_chunk > 0
        extras = self.has_alibi or self.has_softcap or masks or self.group & (self.group - 1) > 0
        # Positional: a cached function looks up keywords more slowly, and launches call this.
        card = known_card(capability)
        return tile_choice(
            use, card, self.q_bits, kv_bits, self.head_dim, self.group, num_rows, extras, self.block_size
        )

    def prefill_lengths(self, capability: int) -> list[int]:
        """Chunk lengths, 2 and more, each with a tile of its own: together they launch every variant, in layers with
        and without a window."""
        tiles: dict[tuple[Tile, Tile], int] = {}
        windowed = replace(self, sliding_window=1)
        for length in sorted({max(2, rule.max_rows // self.group) for rule in PREFILL if rule.max_rows < ANY}):
            for n in (length, length + 1):
                both = (shape.tile("prefill", capability, n * self.group) for shape in (self, windowed))
                tiles.setdefault(tuple(both), n)  # type: ignore[arg-type]
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
            "CHUNK": self.attention_chunk,
        }


def attention_shape(
    q: Tensor, cache: Tensor, alibi_slopes: Tensor | None, sliding_window: int, softcap: float,
    sinks: Tensor | None = None, attention_chunk: int = 0,
) -> AttentionShape:  # fmt: skip
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
        has_sinks=sinks is not None,
        attention_chunk=attention_chunk,
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
