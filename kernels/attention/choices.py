"""The tiles of the attention kernels: one table, looked up by the shape of a launch and the card. No autotuning at run
time.

A tile is taken if its shared memory, as `shared_memory` counts it, fits the card. The entries compile for every
architecture in kernels/card.py, all but a few without spilling (`make kernels-aot` prints that, and checks the count).
Those of decode and the long prompts of Hopper were timed on an H100; the others are not timed on a GPU yet.
"""

from dataclasses import dataclass
from functools import cache

from kernels.aot_configuration import power_of_2
from kernels.card import Card
from kernels.dispatch import TRITON_VERSION
from kernels.tile_choice import TileChoice


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
    overlaps: bool = False  # prefill by kernels/attention/overlap.py: the softmax overlaps the tensor cores
    tma: bool = False  # with `overlaps`: the card's copy engine (TMA) fetches keys and values, block_n of a block each


FMA, MMA, WGMMA, TCGEN05 = ("fma",), ("mma",), ("wgmma",), ("tcgen05",)
HOPPER = WGMMA + TCGEN05  # one instruction of a group of four warps multiplies 64 rows or more
TENSOR_CORES = MMA + HOPPER


@dataclass(frozen=True, slots=True)
class Rule:
    """The tile for launches with at most these sizes, on cards with one of these matrix instructions
    (Card.matrix_instruction). The first matching rule whose tile fits the card wins."""

    instructions: tuple[str, ...]
    q_bits: int  # bits of a number of q: 16 or 32
    kv_bits: int  # bits of a stored number: 4, 8, 16 or 32
    block_d: int  # the head size, as a power of two
    max_rows: int  # prefill: query tokens of the longest sequence x heads of a group; decode: heads of a group
    tile: Tile
    # False: only for launches without ALiBi, soft cap, window and groups that are no power of 2, which take registers
    extras: bool = True
    programs: int = 1  # programs that an SM must have shared memory for
    block_size: int = 1  # the smallest block of the KV cache, in tokens


ANY = 1 << 30
FEWEST_ROWS = 4 if TRITON_VERSION >= (3, 5) else 16  # Triton 3.4 multiplies no smaller tile

# Decode reads every key once for a few rows. An SM holds two programs (A100) or three (H100); each computes one tile
# while another tile of 32 KB is on its way. An SM needs 32 to 40 KB under way to keep its share of the memory busy, and
# 5 to 7 KB on cards with GDDR, whose 100 KB of shared memory hold two programs with half the keys.
# Codes that become floats take instructions, and with more keys at a time fewer of them for each: on an H100, 64
# sequences of 4096 tokens in int8, fp8 and int4 took 228, 214 and 390 us, and with 32 keys 316, 355 and 405 (the last
# tile of a chunk apart, two programs per SM); this kernel took 223, 216 and 418 with one program. Masks and head size
# 256 leave registers for fewer keys.
DECODE = (
    Rule(TENSOR_CORES, 16, 8, 64, 64, Tile(16, 64, 4, 5), programs=2),
    Rule(TENSOR_CORES, 16, 4, 128, 64, Tile(16, 64, 4, 5), programs=2),
    Rule(TENSOR_CORES, 16, 8, 128, 64, Tile(16, 128, 4, 5), extras=False),
    Rule(TENSOR_CORES, 16, 8, 128, 64, Tile(16, 64, 4, 5), programs=2),
    Rule(TENSOR_CORES, 16, 8, 256, 64, Tile(16, 32, 4, 5), programs=2),
    Rule(TENSOR_CORES, 16, 16, 128, 64, Tile(16, 64, 4, 5), programs=2),
    Rule(TENSOR_CORES, 16, 16, 256, 64, Tile(16, 32, 4, 5), programs=2),
    Rule(TENSOR_CORES, 16, 16, 256, 64, Tile(16, 16, 4, 5)),
    Rule(TENSOR_CORES, 16, 16, 128, ANY, Tile(128, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, ANY, Tile(64, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, ANY, Tile(64, 16, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 512, ANY, Tile(16, 16, 8, 5)),
    Rule(FMA, 16, 16, 128, 32, Tile(FEWEST_ROWS, 32, 4, 2)),
    Rule(FMA, 16, 4, 256, ANY, Tile(16, 16, 8, 2)),
    Rule(FMA, 16, 16, 256, 32, Tile(FEWEST_ROWS, 16, 4, 2)),
    Rule(FMA, 16, 16, 256, ANY, Tile(16, 16, 8, 2)),
    Rule(FMA + TENSOR_CORES, 32, 32, 256, ANY, Tile(16, 16, 8, 3)),
    Rule(TENSOR_CORES, 32, 32, 512, ANY, Tile(16, 16, 8, 3)),
)

# Prefill is bound by arithmetic, in 8 warps of 16 rows each: with fewer rows than the head size, Triton divides a row
# among warps, which then meet at 11 barriers per step instead of 2 (sm_80). On H100 the softmax takes about as long as
# one of the two products (estimated), so its tile overlaps them: 224 registers; 128 keys at a time would spill. sm_100
# takes 128 keys: a quarter fewer instructions per key, and queries are read from shared memory half as often. H100's
# copy engine fetches tiles where a block of the cache holds a whole tile of 128 keys: no thread computes addresses, so
# they fit the registers, with 39 % fewer instructions per key (PTX). A prompt of 8192 tokens takes 1,314 us so, 1,448
# without, and 1,738 with 64 keys, which the table therefore lacks. Short chunks use tiles with fewer rows, because rows
# past the end of a chunk are computed for nothing. Tiles of head size 512 (Gemma 4's full layers) are limited by shared
# memory: 64 rows on A100, 32 on cards with less and on those whose instructions take a second copy of the queries; int4
# codes leave registers for 16 rows. Cards of compute capability 7.5 have room for none.
PREFILL = (
    Rule(HOPPER, 16, 8, 128, 32, Tile(32, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 8, 128, 32, Tile(32, 32, 4, 5)),
    Rule(TENSOR_CORES, 16, 8, 256, 16, Tile(16, 16, 8, 5)),
    Rule(TENSOR_CORES, 16, 8, 256, 32, Tile(32, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 128, 16, Tile(16, 64, 4, 5), programs=2),
    Rule(TENSOR_CORES, 16, 16, 128, 16, Tile(16, 32, 4, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, 16, Tile(16, 64, 4, 5)),
    Rule(TCGEN05, 16, 16, 128, 32, Tile(32, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 128, 32, Tile(32, 32, 4, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, 32, Tile(32, 32, 4, 5)),
    Rule(HOPPER, 16, 4, 128, 64, Tile(64, 32, 4, 5)),
    Rule(TCGEN05, 16, 8, 64, 64, Tile(64, 64, 8, 5)),
    Rule(HOPPER, 16, 16, 128, 64, Tile(64, 64, 4, 5)),
    Rule(HOPPER, 16, 8, 128, ANY, Tile(128, 64, 8, 5)),
    Rule(WGMMA, 16, 16, 128, ANY, Tile(128, 128, 8, 3, overlaps=True, tma=True), extras=False, block_size=128),
    Rule(WGMMA, 16, 16, 128, ANY, Tile(128, 64, 8, 5, overlaps=True), extras=False),
    Rule(TCGEN05, 16, 16, 128, ANY, Tile(128, 128, 8, 5), extras=False),
    Rule(HOPPER, 16, 16, 128, ANY, Tile(128, 64, 8, 5)),
    Rule(TENSOR_CORES, 16, 8, 64, 64, Tile(64, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 8, 64, ANY, Tile(128, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 4, 128, ANY, Tile(64, 32, 8, 5), extras=False),
    Rule(TENSOR_CORES, 16, 4, 128, ANY, Tile(32, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 8, 128, ANY, Tile(64, 64, 8, 5)),
    Rule(TENSOR_CORES, 16, 4, 256, ANY, Tile(32, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 64, 64, Tile(64, 64, 4, 5), extras=False),
    Rule(TENSOR_CORES, 16, 16, 64, 64, Tile(64, 32, 4, 5)),  # 64 keys with a window spill 48 bytes on sm_120
    Rule(TENSOR_CORES, 16, 16, 64, ANY, Tile(128, 64, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 128, 64, Tile(64, 32, 4, 5)),
    Rule(TENSOR_CORES, 16, 16, 128, ANY, Tile(128, 64, 8, 7), extras=False),
    Rule(TENSOR_CORES, 16, 16, 128, ANY, Tile(128, 64, 8, 5), extras=False),
    Rule(TENSOR_CORES, 16, 16, 128, ANY, Tile(128, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, ANY, Tile(64, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, ANY, Tile(64, 16, 8, 5)),
    Rule(TENSOR_CORES, 16, 4, 512, ANY, Tile(16, 16, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 512, 16, Tile(16, 16, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 512, 32, Tile(32, 16, 8, 5)),
    Rule(HOPPER, 16, 16, 512, ANY, Tile(32, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 512, ANY, Tile(64, 16, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 512, ANY, Tile(32, 16, 8, 5)),
    Rule(FMA, 16, 4, 128, ANY, Tile(32, 16, 8, 2)),
    Rule(FMA, 16, 16, 128, 16, Tile(16, 16, 4, 2)),
    Rule(FMA, 16, 16, 128, ANY, Tile(32, 16, 8, 2)),
    Rule(FMA, 16, 16, 256, ANY, Tile(16, 16, 8, 2)),
    Rule(FMA + TENSOR_CORES, 32, 32, 256, ANY, Tile(32, 16, 8, 3)),
    Rule(FMA, 32, 32, 256, ANY, Tile(16, 16, 8, 2)),
    Rule(TENSOR_CORES, 32, 32, 512, ANY, Tile(16, 16, 8, 3)),
)

# Batch-invariant attention: one tile for every row of decode and prefill.
INVARIANT = (
    Rule(TENSOR_CORES, 16, 4, 256, ANY, Tile(32, 32, 8, 5)),
    Rule(TCGEN05, 16, 8, 64, ANY, Tile(64, 32, 4, 5)),
    Rule(TENSOR_CORES, 16, 8, 128, ANY, Tile(64, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 64, ANY, Tile(64, 64, 4, 5)),
    Rule(HOPPER, 16, 16, 128, ANY, Tile(64, 64, 4, 5)),
    Rule(TENSOR_CORES, 16, 16, 128, ANY, Tile(64, 32, 4, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, ANY, Tile(64, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 256, ANY, Tile(64, 16, 8, 5)),
    Rule(TENSOR_CORES, 16, 4, 512, ANY, Tile(16, 16, 8, 5)),
    Rule(TCGEN05, 16, 16, 512, ANY, Tile(32, 32, 8, 5)),
    Rule(TENSOR_CORES, 16, 16, 512, ANY, Tile(32, 16, 8, 5)),
    Rule(FMA, 16, 16, 128, ANY, Tile(32, 16, 8, 2)),
    Rule(FMA, 16, 16, 256, ANY, Tile(16, 16, 8, 2)),
    Rule(FMA + TENSOR_CORES, 32, 32, 256, ANY, Tile(32, 16, 8, 3)),
    Rule(FMA, 32, 32, 256, ANY, Tile(16, 16, 8, 2)),
    Rule(TENSOR_CORES, 32, 32, 512, ANY, Tile(16, 16, 8, 3)),
)

RULES = {"decode": DECODE, "prefill": PREFILL, "invariant": INVARIANT}


def shared_memory(tile: Tile, block_d: int, q_bits: int, card: Card) -> int:
    """An upper bound on the bytes of shared memory of a program with this tile, whatever the format of the cache.

    Triton holds the tiles of keys and values that are under way, the queries (Hopper also their copy in the layout of
    its instruction, and the output), and probabilities that move between warps because rows are divided among them.
    """
    row = block_d * q_bits // 8
    scores = tile.block_m * tile.block_n * q_bits // 8
    if card.capability < 80:  # operands of both products, in turn in registers and in shared memory
        return 2 * (tile.block_m + tile.block_n) * row + (scores if tile.block_m > block_d else 0)
    buffers = max(1, (tile.num_stages - 1) // 2)
    keys = 2 * buffers * tile.block_n * row
    queries = tile.block_m * row * (3 if card.matrix_instruction(tile.block_m) in HOPPER else 1)
    probabilities = scores if tile.block_m < block_d else 0
    return keys + queries + probabilities + 2048


@cache
def tile_choice(
    use: str, card: Card, q_bits: int, kv_bits: int, head_dim: int, group: int, num_rows: int, extras: bool,
    block_size: int = 1,
) -> TileChoice[Tile]:  # fmt: skip
    """The tiles of the rules of RULES[use] that cover the launch and fit the card, with room for one token's heads
    (`group`); the first is preferred.

    ValueError if the head size is beyond the table, or no tile fits.
    """
    block_d, tiles = max(16, power_of_2(head_dim)), []
    for rule in RULES[use]:
        if (
            card.matrix_instruction() in rule.instructions
            and q_bits == rule.q_bits
            and kv_bits <= rule.kv_bits
            and (kv_bits == q_bits or not rule.tile.overlaps)
            and block_d <= rule.block_d
            and num_rows <= rule.max_rows
            and (rule.extras or not extras)
            and block_size >= rule.block_size
            and (head_dim % 8 == 0 or not rule.tile.tma)  # it copies rows of a multiple of 16 bytes
        ):
            tile = rule.tile
            if tile.block_m < group:
                tile = Tile(power_of_2(group), tile.block_n, 8, tile.num_stages)
            needed = shared_memory(tile, block_d, q_bits, card)
            if card.programs(needed, tile.num_warps) >= rule.programs and tile not in tiles:
                tiles.append(tile)
    if tiles:
        return TileChoice(f"{use} attention of head size {head_dim}", tiles)
    widest = max(rule.block_d for rule in RULES[use])
    if block_d > widest:
        raise ValueError(f"the attention kernels take head sizes of up to {widest}, not {head_dim}")
    raise ValueError(
        f"no tile of {use} attention with head size {head_dim} and {group} heads per KV head fits the "
        f"{card.shared_memory // 1024} KB of shared memory of this GPU (compute capability {card.capability / 10})"
    )
