"""What a kernel file tells `python -m kernels.aot` to compile. No torch and no Triton here.

A kernel file takes part by offering

    def aot_configurations(capability: int) -> Iterator[AotConfiguration]: ...

which yields what its launcher can start on that kind of device (80: A100, 90: H100), built with the launcher's own
functions, so that the table and the launches cannot drift apart. kernels/aot.py finds the function by its name, and
refuses a file whose kernels (`*_kernel`) it does not cover.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes


@dataclass(frozen=True)
class AotConfiguration:
    """One kernel as one launch would compile it.

    An argument named in `constants` is compiled in (None: a pointer that is not passed). Of the others, `types` gives
    Triton's name of the type; where it says nothing an argument ending in `_ptr` points to `dtype` and the rest are
    i32. Pointers count as aligned to 16 bytes, as torch allocates them; `multiples_of_16` names integers that are, too.
    What the kernel's decorator exempts from specialisation is never assumed.
    """

    kernel: Any
    label: str  # what tells it from the file's other configurations
    dtype: str  # "bf16", "fp16", "fp32" or a Triton integer type
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    types: Mapping[str, str] = field(default_factory=dict)
    multiples_of_16: tuple[str, ...] = ()
    quick: bool = False  # one of the few that every test run compiles
    max_spill: int = 0  # bytes of stack a thread may use; more fails
    needs: tuple[str, ...] = ()  # of the names in aot.NEEDS: what must be among the instructions


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n: tl.arange takes no other length."""
    return 1 << (n - 1).bit_length()
