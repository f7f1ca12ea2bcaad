"""The batch-invariant GEMM against fp32, and bit for bit against itself. Run like triton_cases.py: on a CUDA device as
it is, elsewhere by test_triton.py in the interpreter."""

import pytest
import torch

from kernels.dispatch import INTERPRET
from kernels.linear.invariant import InvariantLinear, RowCounts
from kernels.linear.matmul import matmul, matmul_kernel, matmul_reference, matmul_tile

DEVICE = "cpu" if INTERPRET else "cuda"
# The interpreter computes bf16 from its bit pattern, silently wrong; on a device bf16 is the dtype that matters.
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]
# (out_features, in_features): less than a tile, tiles exactly, odd, a long sum
SHAPES = [(5, 3), (128, 128), (97, 131), (70, 500)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    torch.manual_seed(0)
    return request.param


def rand(*shape, dtype):
    return torch.randn(*shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 67])
def test_against_fp32(dtype, num_rows, shape, has_bias):
    x, weight = rand(num_rows, shape[1], dtype=dtype), rand(*shape, dtype=dtype)
    bias = rand(shape[0], dtype=dtype) if has_bias else None
    out = matmul(x, weight, bias)
    assert out.dtype == dtype and out.shape == (num_rows, shape[0])
    tolerance = TOLERANCE[dtype] * shape[1] ** 0.5
    torch.testing.assert_close(out, matmul_reference(x, weight, bias), atol=tolerance, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_a_row_has_the_same_bits_alone_and_anywhere_in_any_batch(dtype, shape):
    """More row tiles than one group has; the sum of every row cancels, so that only its rounding error is left."""
    half = shape[1] // 2
    x, weight, bias = (
        rand(300, shape[1], dtype=dtype),
        rand(*shape, dtype=dtype),
        torch.zeros(shape[0], dtype=dtype, device=DEVICE),
    )
    x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half].flip(1), -weight[:, :half].flip(1)
    full = matmul(x, weight, bias)
    for start, end in [(0, 1), (299, 300), (63, 64), (5, 38), (100, 231)]:
        assert torch.equal(matmul(x[start:end], weight, bias), full[start:end])
    order = torch.randperm(300).to(DEVICE)
    assert torch.equal(matmul(x[order], weight, bias), full[order])


def test_rows_with_gaps_leading_axes_and_unaligned_memory(dtype):
    wide, weight = rand(2, 9, 80, dtype=dtype), rand(33, 40, dtype=dtype)
    expected = matmul(wide[..., :40].contiguous(), weight)
    assert expected.shape == (2, 9, 33)
    assert torch.equal(matmul(wide[..., :40], weight), expected)
    shifted = torch.cat([wide.new_zeros(1), wide[..., :40].reshape(-1)])[1:].view(2, 9, 40)
    assert torch.equal(matmul(shifted, weight), expected)


def test_a_layer_takes_the_kernel_with_one_tile_whatever_the_rows(dtype, monkeypatch):
    launches, run = [], type(matmul_kernel).__getitem__

    def watched(kernel, grid):
        def launch(*args, **options):
            launches.append({key: value for key, value in options.items() if not key.startswith("_")})
            return run(kernel, grid)(*args, **options)

        return launch

    monkeypatch.setattr(type(matmul_kernel), "__getitem__", watched)
    weight, bias = rand(40, 48, dtype=dtype), rand(40, dtype=dtype)
    layer, x = InvariantLinear(weight, bias, RowCounts()), rand(200, 48, dtype=dtype)
    for num_rows in (1, 17, 200):
        assert torch.equal(layer(x[:num_rows]), matmul(x, weight, bias)[:num_rows])
    assert len(launches) == 6 and all(launch == launches[0] for launch in launches)


def test_wgmma_takes_the_tiles_of_16_bits():
    for capability in (80, 90):
        assert matmul_tile(16, capability).block_m == 64, "the least that wgmma takes"
