"""The tiles of the attention kernels: one table, looked up by the shape of a launch. No autotuning at run time.

The entries compile without spilling and leave several programs on an SM where memory is the limit (`make kernels-aot`
prints both). They are not timed on a GPU yet.
"""

from dataclasses import dataclass
from functools import cache

from kernels.aot_configuration import power_of_2


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m rows (query tokens x heads that share a KV head) against block_n keys at a time.

    num_stages is Triton's, and the block table takes half of them: its entries are loads that the keys' addresses wait
    for. With 3 or 4 stages a tile is fetched once the tile before it is done; 5 stages fetch one tile ahead, 7 two.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Rule:
    """The tile for launches with at most these sizes on at least this capability. The first matching rule wins."""

    capability: int  # 80: A100 and later; 90: H100 and later
    q_bits: int  # bits of a number of q: 16 or 32
    kv_bits: int  # bits of a stored number: 4, 8, 16 or 32
    block_d: int  # the head size, as a power of two
    max_rows: int  # prefill: query tokens of the longest sequence x heads of a group; decode: heads of a group
    tile: Tile
    # False: only for launches without ALiBi, soft cap, window and groups that are no power of 2, which take registers
    extras: bool = True


ANY = 1 << 30

# Decode reads every key once for a few rows. An SM holds two programs (A100) or three (H100); each computes one tile
# while another tile of 32 KB is on its way. An SM needs 32 to 40 KB under way to keep its share of the memory busy.
# Codes that become floats need registers too, so quantised caches take fewer keys at a time.
DECODE = (
    Rule(80, 16, 8, 64, 64, Tile(16, 64, 4, 5)),
    Rule(80, 16, 8, 256, 64, Tile(16, 32, 4, 5)),
    Rule(80, 16, 16, 128, 64, Tile(16, 64, 4, 5)),
    Rule(80, 16, 16, 256, 64, Tile(16, 32, 4, 5)),
    Rule(80, 16, 16, 128, ANY, Tile(128, 32, 8, 5)),
    Rule(80, 16, 16, 256, ANY, Tile(64, 32, 8, 5)),
    Rule(80, 32, 32, 256, ANY, Tile(16, 16, 8, 2)),
)

# Prefill is bound by arithmetic, in 8 warps of 16 rows each: with fewer rows than the head size, Triton divides a row
# among warps, which then meet at 11 barriers per step instead of 2 (sm_80). Hopper's wgmma takes 128 keys if registers
# allow: a quarter fewer instructions per key, and queries are read from shared memory half as often. Short chunks use
# tiles with fewer rows, because rows past the end of a chunk are computed for nothing.
PREFILL = (
    Rule(80, 16, 8, 128, 32, Tile(32, 32, 4, 5)),
    Rule(80, 16, 8, 256, 16, Tile(16, 16, 8, 5)),
    Rule(80, 16, 4, 256, 32, Tile(32, 32, 8, 5)),
    Rule(80, 16, 8, 256, 32, Tile(32, 32, 4, 5)),
    Rule(80, 16, 16, 256, 16, Tile(16, 64, 4, 5)),
    Rule(80, 16, 16, 128, 32, Tile(32, 32, 4, 5)),
    Rule(80, 16, 16, 256, 32, Tile(32, 32, 4, 5)),
    Rule(90, 16, 4, 128, 64, Tile(64, 32, 4, 5)),
    Rule(90, 16, 16, 128, 64, Tile(64, 64, 4, 5)),
    Rule(90, 16, 8, 128, ANY, Tile(128, 64, 8, 5)),
    Rule(90, 16, 16, 128, ANY, Tile(128, 128, 8, 5), extras=False),
    Rule(90, 16, 16, 128, ANY, Tile(128, 64, 8, 5)),
    Rule(80, 16, 8, 64, 64, Tile(64, 32, 8, 5)),
    Rule(80, 16, 8, 64, ANY, Tile(128, 32, 8, 5)),
    Rule(80, 16, 4, 128, ANY, Tile(64, 32, 8, 5), extras=False),
    Rule(80, 16, 4, 128, ANY, Tile(32, 32, 8, 5)),
    Rule(80, 16, 8, 128, ANY, Tile(64, 64, 8, 5)),
    Rule(80, 16, 4, 256, ANY, Tile(32, 32, 8, 5)),
    Rule(80, 16, 16, 64, 64, Tile(64, 64, 4, 5)),
    Rule(80, 16, 16, 64, ANY, Tile(128, 64, 8, 5)),
    Rule(80, 16, 16, 128, 64, Tile(64, 32, 4, 5)),
    Rule(80, 16, 16, 128, ANY, Tile(128, 64, 8, 7), extras=False),
    Rule(80, 16, 16, 128, ANY, Tile(128, 32, 8, 5)),
    Rule(80, 16, 16, 256, ANY, Tile(64, 32, 8, 5)),
    Rule(80, 32, 32, 256, ANY, Tile(32, 16, 8, 3)),
)

# Batch-invariant attention: one tile for every row of decode and prefill.
INVARIANT = (
    Rule(80, 16, 4, 256, ANY, Tile(32, 32, 8, 5)),
    Rule(80, 16, 8, 128, ANY, Tile(64, 32, 8, 5)),
    Rule(80, 16, 16, 64, ANY, Tile(64, 64, 4, 5)),
    Rule(90, 16, 16, 128, ANY, Tile(64, 64, 4, 5)),
    Rule(80, 16, 16, 128, ANY, Tile(64, 32, 4, 5)),
    Rule(80, 16, 16, 256, ANY, Tile(64, 32, 8, 5)),
    Rule(80, 32, 32, 256, ANY, Tile(32, 16, 8, 3)),
)

RULES = {"decode": DECODE, "prefill": PREFILL, "invariant": INVARIANT}


@cache
def find_tile(
    use: str, capability: int, q_bits: int, kv_bits: int, head_dim: int, group: int, num_rows: int, extras: bool
) -> Tile:
    """The tile of the first rule of RULES[use] that covers the launch, with room for one token's heads (`group`).

    ValueError if the head size is beyond the table.
    """
    for rule in RULES[use]:
        if (
            capability >= rule.capability
            and q_bits == rule.q_bits
            and kv_bits <= rule.kv_bits
            and power_of_2(head_dim) <= rule.block_d
            and num_rows <= rule.max_rows
            and (rule.extras or not extras)
        ):
            tile = rule.tile
            return tile if tile.block_m >= group else Tile(power_of_2(group), tile.block_n, 8, tile.num_stages)
    widest = max(rule.block_d for rule in RULES[use])
    raise ValueError(f"the attention kernels take head sizes of up to {widest}, not {head_dim}")
