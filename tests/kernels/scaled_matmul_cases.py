"""Products in 8 bits in Triton against sums in fp64. Run like triton_cases.py: on a CUDA device as it is, elsewhere by
test_triton.py in the interpreter."""

from dataclasses import replace

import pytest
import torch

from kernels.card import A10, A100, B200, CARDS, H100, KB
from kernels.dispatch import INTERPRET
from kernels.elementwise.quantized_rows import quantize_rows
from kernels.quantized.linear import FEW_ROWS, QuantizedLinear
from kernels.quantized.scaled_matmul import (
    MOST_E4M3_ROWS,
    MOST_INPUTS,
    WARM_UP_ROWS,
    ScaledMatmul,
    library_multiplies,
    multiplies_in_8_bits,
    scaled_matmul_reference,
    scaled_tile,
    supports_scaled_matmul,
)
from kernels.quantized.weight import QuantizedWeight

DEVICE = torch.device("cpu" if INTERPRET else "cuda")
# The interpreter computes bf16 from its bit pattern, silently wrong; on a device bf16 is the dtype that matters.
DTYPE = torch.float16 if INTERPRET else torch.bfloat16
E4M3 = torch.float8_e4m3fn
TYPES = pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)


def make(dtype: torch.dtype, out: int, columns: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out)
    if dtype == torch.int8:
        codes = torch.randint(-128, 128, (out, columns), generator=generator).to(dtype)
    else:
        codes = (torch.randn(out, columns, generator=generator) * 50).to(dtype)
    scales = (torch.rand(out, 1, generator=generator) + 0.5) / 64
    return QuantizedWeight(codes, scales, columns, int8_inputs=dtype == torch.int8).to(DEVICE)


def skip_where_missing(dtype: torch.dtype) -> None:
    if not INTERPRET and not multiplies_in_8_bits(dtype, DEVICE):
        pytest.skip(f"this card has no products of {dtype}")


@TYPES
@pytest.mark.parametrize("out, columns", [(144, 272), (1056, 4096), (16, 16)])
def test_products(dtype, out, columns):
    """Rows and outputs that no tile divides, one input tile and many, rows rounded before and by the product."""
    skip_where_missing(dtype)
    multiply = ScaledMatmul(make(dtype, out, columns))
    for num_rows in (0, 1, 19, 65, 130) if columns < 4096 or not INTERPRET else (3,):
        x, bias = torch.randn(num_rows, columns, device=DEVICE).to(DTYPE), torch.randn(out, device=DEVICE).to(DTYPE)
        rows = quantize_rows(x, dtype)
        found, alone = multiply(x, bias), multiply(rows, None)
        exact = scaled_matmul_reference(rows, multiply.codes, multiply.scales, None).float()
        assert found.dtype == DTYPE and found.shape == (num_rows, out)
        near = 2.0**-10 if DTYPE == torch.float16 else 2.0**-7
        small = near / 8 * float(exact.abs().max()) if num_rows else 0.0
        torch.testing.assert_close(alone.float(), exact, rtol=near, atol=small)
        torch.testing.assert_close(found.float(), exact + bias.float(), rtol=near, atol=small)


def test_the_library_rounds_to_fp16(monkeypatch):
    """torch's kernel for all cards but sm_90 takes the type of its result from the bias, and bf16 without one."""
    skip_where_missing(E4M3)
    library = torch._scaled_mm

    def scaled_mm(*args, bias, out_dtype):
        found = library(*args, bias=bias, out_dtype=out_dtype)
        return found if bias is not None else found.bfloat16().view(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    multiply, x = ScaledMatmul(make(E4M3, 144, 272)), torch.randn(MOST_E4M3_ROWS + 1, 272, device=DEVICE).half()
    rows = quantize_rows(x, E4M3)
    exact = scaled_matmul_reference(rows, multiply.codes, multiply.scales, None)
    torch.testing.assert_close(multiply(rows, None), exact, rtol=2.0**-10, atol=2.0**-13 * float(exact.abs().max()))


def test_our_kernel_multiplies_all_rows_where_the_library_refuses(monkeypatch, caplog):
    """As cuBLASLt does on sm_120. All tiles are compiled before."""
    skip_where_missing(E4M3)

    def refuse(*args, **options):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    library_multiplies.cache_clear()
    try:
        multiply, launched = ScaledMatmul(make(E4M3, 144, 272)), set()
    finally:
        library_multiplies.cache_clear()
    assert "does not multiply e4m3" in caplog.text
    launch = multiply.launch
    monkeypatch.setattr(multiply, "launch", lambda *args: (launched.add(args[-1]), launch(*args)))
    multiply.warm_up(DTYPE, None)
    warm, rows = set(launched), quantize_rows(torch.randn(MOST_E4M3_ROWS + 1, 272, device=DEVICE).to(DTYPE), E4M3)
    exact = scaled_matmul_reference(rows, multiply.codes, multiply.scales, None).float()
    torch.testing.assert_close(multiply(rows, None).float(), exact, rtol=2.0**-7, atol=0.01 * float(exact.abs().max()))
    assert launched == warm


def test_sums_of_int8_are_exact():
    """Sums of 8192 large products, which fp32 would round, and their negatives in another order."""
    skip_where_missing(torch.int8)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(8192, generator=generator)
    x, codes = (torch.randint(64, 128, (n, 8192), generator=generator) for n in (2, 48))
    x[:, 0] = 127  # so the scale of a row is 1
    x, codes = torch.cat([x, -x[:, order]], 1), torch.cat([codes, codes[:, order]], 1)
    x[1, 8192:] += 1
    weight = QuantizedWeight(codes.to(torch.int8), torch.full((48, 1), 2.0**-10), 16384, int8_inputs=True)
    found = ScaledMatmul(weight.to(DEVICE))(x.to(DTYPE).to(DEVICE), None).float().cpu()
    assert (found[0] == 0).all()
    assert torch.equal(found[1], (codes[:, 8192:].sum(1) * 2.0**-10).to(DTYPE).float())


def test_a_row_has_the_same_bits_in_any_batch():
    skip_where_missing(torch.int8)
    multiply, x = ScaledMatmul(make(torch.int8, 96, 160)), torch.randn(150, 160, device=DEVICE).to(DTYPE)
    whole = multiply(x, None)
    for num_rows in (1, 20, 70):
        assert torch.equal(multiply(x[:num_rows], None), whole[:num_rows])


def test_the_linear_layer_uses_it_where_rows_are_many(monkeypatch):
    skip_where_missing(torch.int8)
    monkeypatch.setattr("kernels.quantized.linear.multiplies_in_8_bits", lambda dtype, device: True)
    weight = make(torch.int8, 80, 96)
    layer, plain = (QuantizedLinear(some, None, DTYPE) for some in (weight, replace(weight, int8_inputs=False)))
    assert layer.rounded_inputs == torch.int8 and plain.rounded_inputs is None
    layer.warm_up()
    x = torch.randn(FEW_ROWS + 1, 96, device=DEVICE).to(DTYPE)
    assert torch.equal(layer(x), layer(quantize_rows(x, torch.int8))) and not torch.equal(layer(x), plain(x))
    assert torch.equal(layer(x[:FEW_ROWS]), plain(x[:FEW_ROWS]))
    assert QuantizedLinear(weight, None, torch.float32).rounded_inputs is None


def test_weights_that_it_does_not_take():
    weight = make(torch.int8, 80, 96)
    assert supports_scaled_matmul(weight) and supports_scaled_matmul(make(E4M3, 80, 96))
    assert not supports_scaled_matmul(replace(weight, int8_inputs=False))
    assert not supports_scaled_matmul(replace(weight, offsets=torch.ones_like(weight.scales)))
    assert not supports_scaled_matmul(replace(weight, permutation=torch.arange(96, dtype=torch.int32)))
    assert not supports_scaled_matmul(weight.row_range(0, 79))
    halves = replace(weight, scales=weight.scales.repeat(1, 2), group_size=48)
    assert not supports_scaled_matmul(halves)
    assert MOST_INPUTS * 128**2 < 2**31


@pytest.mark.parametrize(
    "card", [card for card in CARDS.values() if card.capability >= 80], ids=lambda card: f"sm_{card.capability}"
)
def test_tiles_fit_the_card_and_are_warmed_up(card):
    for out in (1024, 4096, 6144, 28672, 128256):
        tiles = {rows: scaled_tile(rows, out, card) for rows in (*range(17, 2048, 31), 8192, 65536)}
        warm = {scaled_tile(rows, out, card) for rows in WARM_UP_ROWS}
        assert set(tiles.values()) <= warm
        for rows, tile in tiles.items():
            buffers = tile.num_stages - (card.matrix_instruction() == "mma")
            assert tile.num_stages >= 2 and buffers * tile.stage_bytes <= card.shared_memory
            assert tile.block_m == 64 if rows <= 64 else tile.block_m == 128


def test_tiles_of_some_launches():
    """As measured on an H100; narrower where few outputs would leave SMs idle."""
    sizes = [(64, 28672), (64, 6144), (64, 4096), (256, 28672), (256, 6144), (256, 4096), (1024, 4096)]
    found = [scaled_tile(*size, H100).block_n for size in sizes]
    assert found == [128, 64, 32, 256, 128, 64, 256]
    assert scaled_tile(MOST_E4M3_ROWS, 28672, H100).block_m == 64
    assert [scaled_tile(64, 4096, card).tma for card in (A100, H100, B200)] == [False, True, False]
    assert A10.shared_memory < 128 * KB and scaled_tile(64, 28672, A10).block_k == 128
