"""The matrix-vector kernel against fp32. Run like triton_cases.py: on a CUDA device as it is, elsewhere by
test_triton.py in the interpreter."""

import pytest
import torch

from kernels.dispatch import INTERPRET
from kernels.linear.gemv import TILES, gemv, supports_gemv
from kernels.linear.matmul import matmul_reference

DEVICE = "cpu" if INTERPRET else "cuda"
# The interpreter computes bf16 from its bit pattern, silently wrong; on a device bf16 is the dtype that matters.
DTYPES = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rand(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(5, 8), (64, 2048), (33, 1032)], ids=str)
@pytest.mark.parametrize("num_rows", range(1, TILES[-1].rows + 1))
def test_against_fp32(num_rows, shape, has_bias, dtype):
    """Less than a tile, whole tiles, and rests of outputs and of K."""
    x, weight = rand(num_rows, shape[1], dtype=dtype), rand(*shape, dtype=dtype)
    bias = rand(shape[0], dtype=dtype) if has_bias else None
    assert supports_gemv(weight, num_rows)
    out = gemv(x, weight, bias)
    assert out.dtype == dtype and out.shape == (num_rows, shape[0])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, matmul_reference(x, weight, bias), atol=tolerance * 4, rtol=tolerance)


def test_sums_are_fp32():
    """1 and 4095 times 2**-12: the sum is 1 + 0.99976; in fp16 it stays at 1."""
    x = torch.ones(1, 4096, dtype=torch.float16, device=DEVICE)
    weight = torch.full((3, 4096), 2.0**-12, dtype=torch.float16, device=DEVICE)
    weight[:, 0] = 1.0
    for num_rows in (1, 2, 5):
        assert torch.equal(gemv(x.expand(num_rows, -1), weight).float(), torch.full((num_rows, 3), 2.0, device=DEVICE))


def test_rows_with_gaps_and_unaligned_memory():
    wide, weight = rand(4, 80, dtype=torch.float16), rand(33, 40, dtype=torch.float16)
    expected = gemv(wide[:, :40].contiguous(), weight)
    assert torch.equal(gemv(wide[:, :40], weight), expected)
    shifted = torch.cat([wide.new_zeros(1), wide[:, :40].reshape(-1)])[1:].view(4, 40)
    assert torch.equal(gemv(shifted, weight), expected)


def test_what_is_not_supported():
    weight = rand(16, 64, dtype=torch.float16)
    assert supports_gemv(weight, 1) and supports_gemv(weight, 8)
    assert not supports_gemv(weight, 0) and not supports_gemv(weight, 9)
    assert not supports_gemv(weight.float(), 1) and not supports_gemv(weight.t(), 1)
    assert not supports_gemv(weight[:, :60].contiguous(), 1), "rows of 120 bytes do not start at 16 bytes"
    assert not supports_gemv(rand(16 * 64 + 1, dtype=torch.float16)[1:].view(16, 64), 1)
