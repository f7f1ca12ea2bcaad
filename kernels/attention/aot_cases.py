"""The attention shapes that `make kernels-aot` compiles: head sizes, groups, dtypes, cache formats and options."""

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.aot_configuration import ELEMENT_SIZES, matrix_needs, power_of_2
from kernels.attention.choices import Tile, shared_memory
from kernels.attention.plan import AttentionShape
from kernels.card import known_card
from kernels.kv_format import FP8, INT4, INT8, KVFormat

POINTERS = {"block_tables_ptr": "*i32", "seq_lens_ptr": "*i32", "cu_seqlens_q_ptr": "*i32", "items_ptr": "*i32",
            "rows_ptr": "*i32", "windows_ptr": "*i32", "alibi_slopes_ptr": "*fp32", "sinks_ptr": "*fp32",
            "partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The attention of one model. every_tile: also compile the tiles of short chunks and the batch-invariant tile."""

    dtype: str
    shape: AttentionShape
    quick: bool = False
    every_tile: bool = False

    @property
    def types(self) -> dict[str, str]:
        """Argument types. Quantised pages are passed as bytes."""
        if self.shape.kv_format is None:
            return POINTERS
        pages = "*i8" if self.shape.kv_format is INT8 else "*u8"
        return POINTERS | {"k_cache_ptr": pages, "v_cache_ptr": pages}

    def copied(self, tile: Tile) -> dict[str, str]:
        """Argument types of the caches where the tile is fetched by TMA."""
        if not tile.tma:
            return {}
        rows = f"tensordesc<{self.dtype}[{tile.block_n}, {max(16, power_of_2(self.shape.head_dim))}]>"
        return {"k_cache_ptr": rows, "v_cache_ptr": rows}

    @property
    def absent(self) -> dict[str, None]:
        """Pointers that a launch of this model does not pass."""
        pointers = {"alibi_slopes_ptr": self.shape.has_alibi, "sinks_ptr": self.shape.has_sinks}
        return {name: None for name, is_passed in pointers.items() if not is_passed}

    def label(self, tile: Tile) -> str:
        """Label of a configuration: group, head size, block size, tile and options."""
        shape = self.shape
        names = [shape.kv_format.name] if shape.kv_format else []
        names += ["alibi"] * shape.has_alibi + ["softcap"] * shape.has_softcap + ["window"] * (shape.sliding_window > 0)
        names += ["sinks"] * shape.has_sinks + ["chunk"] * (shape.attention_chunk > 0)
        text = f"g{shape.group} d{shape.head_dim} b{shape.block_size} {tile.block_m}x{tile.block_n} w{tile.num_warps}"
        names += ["tma"] * tile.tma
        return " ".join([text, *names])

    def needs(self, capability: int, tile: Tile) -> tuple[str, ...]:
        """Needed instructions: 16-byte loads of keys and values that overlap with computation, and matrix instructions;
        a later card's own if the tile has the 64 rows that they take. fp32 has none with its precision, and is not
        tuned."""
        if self.dtype == "fp32":
            return ("async_copies",)
        if tile.tma:
            return "tma", *matrix_needs(known_card(capability), tile.block_m)
        return "async_copies", "wide", "ahead", *matrix_needs(known_card(capability), tile.block_m)

    def max_shared_memory(self, capability: int, tile: Tile) -> int:
        """Bytes that the table counts on."""
        return shared_memory(tile, max(16, power_of_2(self.shape.head_dim)), self.shape.q_bits, known_card(capability))


def case(
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    kv_format: KVFormat | None = None,
    options: str = "",
    *,
    quick: bool = False,
    every_tile: bool = False,
) -> Case:
    """A case; `options` are words of "alibi softcap window sinks chunk". q is a view into the rows of a fused qkv
    projection."""
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        q_strides=((num_heads + 2 * num_kv_heads) * head_dim, head_dim),
        q_bits=8 * ELEMENT_SIZES[dtype],
        kv_format=kv_format,
        has_alibi="alibi" in options,
        has_softcap="softcap" in options,
        sliding_window=4096 if "window" in options else 0,
        has_sinks="sinks" in options,
        attention_chunk=8192 if "chunk" in options else 0,
    )
    return Case(dtype, shape, quick, every_tile)


def attention_cases(capability: int) -> Iterator[Case]:
    """Yields the shapes of today's models: every head size, block size, dtype, cache format and option, and most
    pairs of them."""
    yield case("bf16", 32, 8, 128, quick=True, every_tile=True)  # Llama-3-8B
    for kv_format in (INT8, FP8, INT4):
        yield case("bf16", 32, 8, 128, kv_format=kv_format, quick=True, every_tile=True)
        yield case("fp16", 14, 2, 64, 32, kv_format, every_tile=True)
        yield case("bf16", 32, 32, 80, 128, kv_format)
        yield case("bf16", 16, 8, 256, 64, kv_format, every_tile=True)
        yield case("fp16", 32, 8, 128, 64, kv_format, "alibi softcap window")
        yield case("fp32", 8, 4, 32, 16, kv_format)
    yield case("bf16", 32, 8, 128, 64)
    yield case("bf16", 32, 8, 128, 128, quick=True)
    yield case("bf16", 14, 2, 64, every_tile=True)  # Qwen2-0.5B
    yield case("bf16", 32, 32, 80)  # Phi-2
    yield case("fp16", 32, 32, 96, 32)  # Phi-3-mini
    yield case("bf16", 32, 4, 112, 64)
    yield case("fp16", 40, 40, 128, 128)  # Llama-13B, OPT-13B
    yield case("bf16", 28, 4, 128)  # Qwen2-7B
    yield case("fp32", 32, 8, 128)
    yield case("bf16", 16, 8, 256, every_tile=True)
    for kv_format in (None, INT8, FP8, INT4):
        yield case("bf16", 16, 8, 256, kv_format=kv_format, options="softcap window", every_tile=True)  # Gemma-2-9B
    yield case("bf16", 4, 1, 256, options="window", every_tile=True)  # Gemma-3-1B
    yield case("bf16", 71, 1, 64)  # Falcon-7B
    yield case("bf16", 48, 1, 128)  # StarCoder
    for options in ("alibi", "softcap", "window", "alibi softcap window"):
        for head_dim in (64, 128, 256):
            yield case("bf16", 16, 8, head_dim, options=options)
    for kv_format in (None, INT8):
        yield case("bf16", 64, 8, 64, kv_format=kv_format, options="sinks", every_tile=True)  # gpt-oss
        yield case("bf16", 64, 8, 64, kv_format=kv_format, options="window sinks", every_tile=True)
        yield case("bf16", 40, 8, 128, kv_format=kv_format, options="chunk", every_tile=True)  # Llama 4
    yield case("bf16", 32, 8, 128, options="sinks")
    if capability >= 80:  # the shared memory of older cards holds no tile of this head size
        for kv_format in (None, INT8, FP8, INT4):
            yield case("bf16", 32, 4, 512, kv_format=kv_format, every_tile=True)  # full layers of Gemma-4-31B
        yield case("bf16", 8, 1, 512, 64, every_tile=True)  # those of Gemma-4-E2B
        yield case("fp32", 8, 1, 512)
