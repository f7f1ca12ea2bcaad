"""AotConfiguration: one variant of a kernel for `python -m kernels.aot` to compile. Imports no torch and no Triton.

A kernel file takes part if it defines

    def aot_configurations(capability: int) -> Iterator[AotConfiguration]: ...

which yields the variants that its launcher can start on that kind of device (80: A100, 90: H100). It builds them with
the launcher's own functions, so that the table and the launches cannot drift apart. kernels/aot.py finds the function
by its name, and refuses a file if the configurations leave out one of its kernels (`*_kernel`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.card import Card

ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes


@dataclass(frozen=True)
class AotConfiguration:
    """One kernel with the types and constants of one launch.

    An argument named in `constants` is compiled in (None: a pointer that is not passed). For the others, `types` gives
    Triton's name of the type; by default an argument ending in `_ptr` points to `dtype`, and any other is i32. Pointers
    count as aligned to 16 bytes, which torch guarantees; `multiples_of_16` names integers that are multiples too.
    Arguments that the kernel's decorator exempts from specialisation are never specialised.
    """

    kernel: Any
    label: str  # distinguishes it from the file's other configurations
    dtype: str  # "bf16", "fp16", "fp32" or a Triton integer type
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    types: Mapping[str, str] = field(default_factory=dict)
    multiples_of_16: tuple[str, ...] = ()
    quick: bool = False  # every test run compiles it
    max_spill: int = 0  # bytes of stack that a thread may use
    max_shared_memory: int = 1 << 30  # bytes that the launcher counts on; the card has its own limit
    needs: tuple[str, ...] = ()  # names in aot.NEEDS: instructions that the code must have


def matrix_needs(card: "Card", rows: int) -> tuple[str, ...]:
    """`needs` of a kernel that multiplies tiles of that many rows: the card's instruction for them, if it has one."""
    instruction = card.matrix_instruction(rows)
    return () if instruction == "fma" else (instruction,)


def power_of_2(n: int) -> int:
    """The smallest power of two >= n: tl.arange accepts no other length."""
    return 1 << (n - 1).bit_length()
