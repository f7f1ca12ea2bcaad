"""Linear layers over codes against the dequantised matrix, on the compiled path and on the reference's."""

import pytest
import torch

from kernels.cpu.quantized.scales import FACTORED, factorize
from kernels.dispatch import cpu_kernels
from kernels.elementwise.quantized_rows import quantize_rows
from kernels.quantized.linear import PartedLinear, QuantizedLinear
from kernels.quantized.scaled_matmul import ScaledMatmul, supports_scaled_matmul
from kernels.quantized.weight import INT4, UINT4, QuantizedWeight, pack_4bit

IN = 192
KINDS = ["int4", "uint4", "nf4", "int6", "int8", "fp8"]
NF4 = tuple(float(x) for x in torch.linspace(-1, 1, 16).pow(3))  # values that bf16 does not hold
COMPILED = cpu_kernels() is not None and cpu_kernels().features.MULTIPLIES_PAIRS


def make(kind: str, out: int, group: int, offsets: bool = False, permuted: bool = False) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out)
    codebook = {"int4": INT4, "uint4": UINT4, "nf4": NF4}.get(kind)
    codes = torch.randint(256, (out, IN), generator=generator).to(torch.uint8)
    if codebook is not None:
        codes = pack_4bit(codes & 15)
    elif kind == "int6":
        codes = (codes & 63).view(torch.int8) - 32
    elif kind == "fp8":
        codes[codes & 127 == 127] = 3  # NaN
        codes = codes.view(torch.float8_e4m3fn)
    else:
        codes = codes.view(torch.int8)
    scales = torch.rand(out, IN // group, generator=generator) + 0.5
    return QuantizedWeight(
        codes,
        scales if permuted else scales.half(),
        group,
        offsets=torch.randn(out, IN // group, generator=generator).to(torch.float32 if permuted else torch.float16)
        if offsets
        else None,
        codebook=codebook,
        permutation=torch.randperm(IN, generator=generator).int() if permuted else None,
    )


def check(layer, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Up to one rounding of the result, and one of each weight where many rows share decoded weights."""
    found, exact = layer(x).float(), x.float() @ weight.T + (0 if bias is None else bias.float())
    terms = x.float().abs() @ weight.abs().T
    rounding = 2.0**-9 if x.dtype == torch.bfloat16 else 1e-6
    assert found.shape == exact.shape and ((found - exact).abs() <= rounding * (2 * exact.abs() + terms)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out, group, offsets, permuted", [
    (80, 32, False, False), (97, 32, True, True), (64, IN, False, False), (130, 64, True, False), (70, 12, True, False)
])  # fmt: skip
def test_every_kind_of_codes_and_number_of_rows(kind, out, group, offsets, permuted):
    weight = make(kind, out, group, offsets, permuted)
    matrix, bias = weight.dequantize(), torch.randn(out).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        layer = QuantizedLinear(weight, bias.to(dtype), dtype)
        assert (layer.weight is None) == (COMPILED and (dtype == torch.bfloat16 or kind != "nf4"))
        for rows in (1, 2, 5, 6, 7, 20, 30, 200) if dtype == torch.bfloat16 else (1, 3, 70):
            check(layer, matrix, torch.randn(rows, IN).to(dtype), bias)
        plain = layer.with_bias(None)
        check(plain, matrix, torch.randn(3, 2 * IN).to(dtype)[:, IN:], None)


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group, offsets", [(32, True), (16, False), (IN, True)])
def test_a_row_has_the_same_bits_with_any_other_rows(kind, group, offsets):
    """As long as no weight is rounded."""
    code_linear = cpu_kernels().code_linear
    packed = code_linear.PackedCodes(make(kind, 97, group, offsets))
    most = min(code_linear.DECODED_FROM[packed.kind] - 1, 40)
    x = torch.randn(most, IN).bfloat16()
    alone = torch.cat([code_linear.code_linear(row, packed, None) for row in x.split(1)])
    for rows in range(2, most + 1):
        assert torch.equal(code_linear.code_linear(x[:rows], packed, None), alone[:rows])


@pytest.mark.parametrize("kind", ["int4", "int6", "int8"])
@pytest.mark.parametrize("rows", [1, 20])
def test_inputs_of_any_size_in_one_group_and_rows_that_are_no_numbers(kind, rows):
    """On processors that round inputs to integers, an error is a part of the largest input of the group."""
    weight = make(kind, 64, IN)
    layer, x = QuantizedLinear(weight, None, torch.bfloat16), torch.randn(rows, IN) * 2.0 ** torch.arange(-40, 56, 0.5)
    x[:, 5] = 0
    x, matrix = x.bfloat16(), weight.dequantize()
    exact, terms = x.float() @ matrix.T, x.float().abs() @ matrix.abs().T
    largest = x.float().abs().amax(1, keepdim=True) * matrix.abs().sum(1)
    rounding = (2 * exact.abs() + terms) * 2.0**-9
    assert ((layer(x).float() - exact).abs() <= rounding + largest * 2.0**-16).all()
    assert not layer(torch.zeros_like(x)).any()
    for number in (torch.nan, torch.inf, -torch.inf):
        bad = x.clone()
        bad[-1, 7] = number
        found = layer(bad)
        assert not found[-1].isfinite().any() and torch.equal(found[:-1], layer(x)[:-1])


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_a_program_records_the_products(kind, rows):
    cpu = cpu_kernels()
    packed, x = cpu.code_linear.PackedCodes(make(kind, 97, 32, offsets=True)), torch.randn(rows, IN).bfloat16()
    program = cpu.program.record(lambda: cpu.code_linear.code_linear(x, packed, None), cpu.program.Workspace())
    x.copy_(torch.randn(rows, IN))
    assert torch.equal(program(), cpu.code_linear.code_linear(x, packed, None))


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
def test_sums_of_one_large_group_fit():
    """2 * 4093 inputs in one group, which no part of fewer pairs divides, all as large as they can be."""
    weight = QuantizedWeight(torch.full((64, 8186), -32, dtype=torch.int8), torch.ones(64, 1), 8186)
    x = torch.full((3, 8186), 3.0).bfloat16()
    check(QuantizedLinear(weight, None, torch.bfloat16), weight.dequantize(), x, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_read_back_exactly(kind, dtype):
    for offsets in (False, True):
        weight = make(kind, 97, 32, offsets, permuted=offsets)
        rows = torch.tensor([96, 0, 17, 63, 64, 17])
        assert torch.equal(QuantizedLinear(weight, None, dtype).rows(rows), weight.dequantize(dtype)[rows])


def make_factored(kind: str, out: int, group: int, offsets: bool) -> QuantizedWeight:
    """Scales and offsets that are integers times a factor for eight groups, with more bits than fp16 has."""
    generator = torch.Generator().manual_seed(out)

    def draw(least: int, most: int) -> torch.Tensor:
        factors = (torch.rand(out, 512 // group // 8, 1, generator=generator) / 9).half().float()
        return (factors * torch.randint(least, most, (out, 512 // group // 8, 8), generator=generator)).flatten(1)

    codes = torch.randint(256, (out, 512), generator=generator).to(torch.uint8)
    codes = pack_4bit(codes & 15) if kind == "int4" else (codes & 63).view(torch.int8) - 32
    scales = draw(0, 64) if kind == "int4" else draw(-128, 128)
    return QuantizedWeight(codes, scales, group, draw(-64, 1) if offsets else None, INT4 if kind == "int4" else None)


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
@pytest.mark.parametrize("kind", ["int4", "int6"])
@pytest.mark.parametrize("out, group, offsets", [(97, 32, True), (64, 16, False), (130, 16, True)])
def test_scales_with_a_common_factor_are_kept_as_integers_and_codes_in_their_bits(kind, out, group, offsets):
    weight = make_factored(kind, out, group, offsets)
    matrix, bias = weight.dequantize(), torch.randn(out).bfloat16()
    layer = QuantizedLinear(weight, bias, torch.bfloat16)
    packed = cpu_kernels().code_linear.PackedCodes(weight)
    assert packed.form == FACTORED
    panels, parameters = -(-out // 64) * 64 * 512, 1 + offsets
    code_bytes, parameter_bytes = panels * (4 if kind == "int4" else 6) // 8, panels // group * parameters * 5 // 4
    assert packed.num_bytes == code_bytes + parameter_bytes
    for rows in (1, 2, 5, 7, 30, 200):
        check(layer, matrix, torch.randn(rows, 512).bfloat16(), bias)
    rows = torch.tensor([out - 1, 0, 17, 63, 17])
    assert torch.equal(layer.rows(rows), weight.dequantize(torch.bfloat16)[rows])


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
@pytest.mark.parametrize("least, most, bits", [(-32, 31, 6), (-33, 31, 8), (-32, 32, 8)])
def test_codes_take_six_bits_if_all_of_them_fit(least, most, bits):
    codes = torch.zeros(64, IN, dtype=torch.int8)
    codes[5, 3], codes[63, -1] = least, most
    weight = QuantizedWeight(codes, torch.ones(64, 1), IN)
    packed = cpu_kernels().code_linear.PackedCodes(weight)
    assert packed.codes.numel() == 64 * IN * bits // 8
    assert torch.equal(packed.rows(torch.arange(64)), weight.dequantize())


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
def test_factors_are_found_where_there_are_some():
    integers = torch.tensor([-128, 127, 0, 63, 1, -1, 2, 90])
    small, least = torch.tensor(0.0123).half(), torch.tensor(2.0**-24).half()
    scales = torch.zeros(1, 16, 64)
    scales[0, :8, 3] = small.float() * integers
    scales[0, 8:, 63] = least.float() * integers
    scales[0, 8:, 62] = 65504.0 * integers.clamp(min=-1)
    blocks = factorize(scales)
    assert blocks.shape == (1, 2, 160)
    factors, found = (blocks[..., part].contiguous() for part in (slice(32), slice(32, None)))
    factors, found = factors.view(torch.float16).float(), found.view(torch.int8)
    assert torch.equal((factors[:, :, None] * found.view(1, 2, 8, 64)).flatten(1, 2), scales)
    for column, value in [(63, 1.0), (62, torch.nan), (61, torch.inf), (60, 2.0**-25), (60, 2.0**24), (60, 0.0123)]:
        other = scales.clone()
        other[0, 9, column] = value
        assert factorize(other) is None
    assert factorize(scales[:, :4].contiguous()) is None  # no whole block


def test_parts_of_different_kinds():
    parts = [make("int4", 32, 32), make("int8", 16, 64), torch.randn(48, IN).bfloat16()]
    matrix = torch.cat([part.float() if isinstance(part, torch.Tensor) else part.dequantize() for part in parts])
    bias = torch.randn(96).bfloat16()
    layer = PartedLinear(parts, bias, torch.bfloat16)
    assert (layer.out_features, layer.in_features) == (96, IN)
    check(layer, matrix, torch.randn(5, IN).bfloat16(), bias)


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
def test_small_numbers_of_fp8_are_exact():
    """Every code, the subnormal ones included, times one."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    weight = QuantizedWeight(
        codes.view(torch.float8_e4m3fn).view(256, 1).expand(256, 2).contiguous(), torch.ones(256, 1), 2
    )
    x = torch.tensor([[1.0, 0.0]]).bfloat16()
    assert torch.equal(QuantizedLinear(weight, None, torch.bfloat16)(x)[0].float(), weight.dequantize()[:, 0])


def test_products_of_two_fp8_matrices():
    """torch multiplies e4m3 on a CPU, too. The error of rounding x to e4m3 is 2^-4 of a number at most."""
    weight = make("fp8", 64, IN)
    assert supports_scaled_matmul(weight)
    assert not supports_scaled_matmul(make("fp8", 64, 32)) and not supports_scaled_matmul(make("int8", 64, IN))
    x, bias = torch.randn(20, IN).bfloat16(), torch.randn(64).bfloat16()
    x[3] = 0
    rows = quantize_rows(x, torch.float8_e4m3fn)
    codes, scales = rows.codes, rows.scales
    assert ((codes.float() * scales - x.float()).abs() <= x.float().abs() / 16 + scales * 2**-9).all()
    multiply = ScaledMatmul(weight)
    found = multiply(x, bias).float()
    assert torch.equal(found, multiply(rows, bias).float())
    exact = (codes.float() * scales) @ weight.dequantize().T + bias.float()
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2 * float(exact.std()))
