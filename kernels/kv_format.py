"""KVFormat: how a quantised KV cache stores its rows.

A row is the key or the value of one token and KV head: head_dim numbers. Each row has its own 32-bit parameter, made
when the row is written and never changed. So the numbers read back do not depend on neighbouring tokens, on the batch
or on the chunks of the prompt.

A page is one block of one KV head: block_size rows of codes, then block_size parameters. So a block is one run of bytes
in each cache tensor, and its id is enough to copy, swap or store it. The shape of the tensor, [num_blocks,
num_kv_heads, block_size, row_bytes + 4], gives the number of bytes but not their division into codes and parameters.
Its dtype names the format.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # families and `pageserve plan` read formats without torch
    from torch import Tensor

MIN_MAGNITUDE = 1e-30  # a smaller largest magnitude of a row counts as this: else 1 / scale would overflow

PARAMETER_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVFormat:
    """name: value of --kv-cache-dtype; code: KV_FORMAT in Triton kernels; bits per number; dtype_name: torch's
    dtype."""

    name: str
    code: int
    bits: int
    dtype_name: str

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row's codes, without its parameter. ValueError if they do not fill whole bytes."""
        if head_dim * self.bits % 8:
            raise ValueError(f"{self.name} packs two numbers into a byte and head_dim {head_dim} is odd")
        return head_dim * self.bits // 8

    def width(self, head_dim: int) -> int:
        """Bytes of a row with its parameter: the last axis of a cache tensor."""
        return self.row_bytes(head_dim) + PARAMETER_BYTES


# fp32 scale; code = round(x / scale) in -127 .. 127.
INT8 = KVFormat("int8", 1, 8, "int8")
# fp32 scale; code = e4m3(x / scale), largest magnitude 448.
FP8 = KVFormat("fp8", 2, 8, "float8_e4m3fn")
# Two bf16, scale in the low half and minimum in the high half; code = round((x - minimum) / scale) in 0 .. 15. Byte i
# has number i in its low half and number head_dim / 2 + i in its high half. Perplexity of the bundled model on 600
# held-out documents: 1.4376 unquantised, 1.4465 in this format, 1.4608 with one symmetric fp32 scale in the same four
# bytes, 1.4463 with a scale and a minimum per 16 numbers. So the minimum pays and groups do not (nor could scores
# absorb group scales).
INT4 = KVFormat("int4", 3, 4, "uint8")

KV_FORMATS = {kv_format.name: kv_format for kv_format in (INT8, FP8, INT4)}
_FORMATS = {f"torch.{kv_format.dtype_name}": kv_format for kv_format in KV_FORMATS.values()}  # by str(dtype)


def find_kv_format(kv_cache_dtype: str) -> KVFormat | None:
    """The format named by --kv-cache-dtype; None for "auto", rows of the model's dtype."""
    return None if kv_cache_dtype == "auto" else KV_FORMATS[kv_cache_dtype]


def kv_format_of(cache: "Tensor") -> KVFormat | None:
    """The format of a cache tensor; None for plain floats."""
    return _FORMATS.get(str(cache.dtype))
