"""LoRA's grouped kernels against a product for each row. Run like triton_cases.py; test_lora.py runs the same on a CPU
without Triton."""

import pytest
import torch

from kernels.dispatch import INTERPRET, use_triton
from kernels.lora.rows import RowGroups
from kernels.lora.weights import make_lora_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.cuda.is_available() or not INTERPRET  # the interpreter computes bf16 from its bit pattern, silently wrong
DTYPES = [torch.float32, torch.bfloat16 if BF16 else torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MAX_LORAS = 4


def rand(generator, *shape, dtype):
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "in_features", "parts"),
    [
        (1, 64, (48,)),
        (7, 96, (32, 16, 16)),
        (70, 64, (80, 80)),
        (300 if not use_triton(torch.empty(0)) else 20, 32, (16,)),
    ],
    ids=str,
)
def test_against_a_product_for_each_row(num_rows, in_features, parts, dtype):
    """Ranks of 1 to 24 in slots, a slot without rows, parts without factors, rows of the base, a slot filled twice."""
    generator = torch.Generator().manual_seed(num_rows)
    weights = make_lora_weights(in_features, parts, MAX_LORAS, 24, dtype, DEVICE)
    factors = {}
    for slot, rank in ((0, 24), (1, 8), (3, 5), (0, 1), (3, 13)):
        factors[slot] = [
            None if slot == 1 and part == 0 and len(parts) > 1 else
            (rand(generator, rank, in_features, dtype=dtype), rand(generator, rows, rank, dtype=dtype))
            for part, rows in enumerate(parts)
        ]  # fmt: skip
        weights.set(slot, weights.pack(factors[slot]))
    slots = torch.tensor([-1, 0, 1, 3])[torch.randint(0, 4, (num_rows,), generator=generator)]
    slots[0] = 3
    groups = RowGroups(MAX_LORAS, DEVICE)
    groups.set(slots.to(DEVICE), active=True)
    x = rand(generator, num_rows, in_features + 16, dtype=dtype)[:, :in_features]  # rows may be strided
    base = rand(generator, num_rows, sum(parts), dtype=dtype)
    expected = base.float().clone()
    for row, slot in enumerate(slots.tolist()):
        first = 0
        for rows, factor in zip(parts, factors.get(slot, ()), strict=False):
            if factor is not None:
                inner = (factor[0].float() @ x[row].float()).to(dtype).float()
                expected[row, first : first + rows] += factor[1].float() @ inner
            first += rows
    out = base.clone()
    weights.add(out, x, groups)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    alone = slots == -1
    assert torch.equal(out[alone], base[alone])  # a row of the base keeps its bits
