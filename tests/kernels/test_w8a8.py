"""Products of int8 codes with inputs rounded to int8, against the same sums in torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu.experts.pairs import sort_pairs
from kernels.dispatch import cpu_kernels
from kernels.elementwise.activation import gated_activation
from kernels.quantized.linear import QuantizedGatedLinear, QuantizedLinear, make_linear, supports_quantized_gate
from kernels.quantized.weight import INT4, QuantizedWeight, concatenate_rows, pack_4bit, stack_experts

cpu = cpu_kernels()
pytestmark = pytest.mark.skipif(cpu is None or not cpu.features.HAS_INT8_DOT, reason="needs AVX512-VNNI")
PART = 256  # inputs that share a scale


def make(out: int, num_inputs: int, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out)
    codes = torch.randint(-128, 128, (out, num_inputs), generator=generator).to(torch.int8)
    scales = (torch.rand(out, 1, generator=generator) + 0.5).to(scale_dtype)
    return QuantizedWeight(codes, scales, num_inputs, int8_inputs=True)


def expected(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs with inputs rounded to 127 steps of the largest of their part, and what half a step of every input
    may change: a quotient on the edge between two steps may be rounded either way."""
    outputs, edges = torch.zeros(2, len(x), weight.shape[0], dtype=torch.float64)
    for part, codes in zip(x.double().split(PART, 1), weight.codes.double().split(PART, 1), strict=True):
        step = part.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        outputs += (part / step).round() @ codes.T * step
        near = ((part / step).frac().abs() - 0.5).abs() < 1e-4
        edges += near.double() @ codes.abs().T * step
    scales = weight.scales.double().squeeze(1)
    return outputs * scales + (0 if bias is None else bias.double()), edges * scales


def check(found: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
    """Up to the rounding of the result to bf16, and a few of fp32 in the sums."""
    exact, edges = expected(x, weight, bias)
    terms = x.double().abs() @ weight.dequantize().double().abs().T
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= 2.0**-8 * found.double().abs() + 1e-6 * terms + edges).all()


@pytest.mark.parametrize("out, num_inputs, scale_dtype", [
    (64, 16, torch.float32), (97, 192, torch.float16), (130, 256, torch.float32), (80, 256 + 16, torch.bfloat16),
    (200, 2048, torch.float32),
])  # fmt: skip
def test_any_shape_and_number_of_rows(out, num_inputs, scale_dtype):
    weight, bias = make(out, num_inputs, scale_dtype), torch.randn(out).bfloat16()
    layer = QuantizedLinear(weight, bias, torch.bfloat16)
    for rows in (1, 2, 6, 7, 8, 9, 13, 24, 97, 200):
        x = (torch.randn(rows, num_inputs) * 2.0 ** torch.randint(-8, 9, (rows, 1))).bfloat16()
        check(layer(x), x, weight, bias)
    wide = torch.randn(30, 3 * num_inputs).bfloat16()
    for x in (wide[:, num_inputs : 2 * num_inputs], wide[:3, num_inputs : 2 * num_inputs], wide[:5, ::3]):
        check(layer.with_bias(None)(x), x, weight)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_gate_of_an_mlp_is_computed_in_the_same_kernel(name, has_bias):
    weight, bias = make(2 * 96, 256), torch.randn(2 * 96).bfloat16() if has_bias else None
    weight = replace(weight, scales=weight.scales / 256)
    apart = QuantizedLinear(weight, bias, torch.bfloat16)
    assert supports_quantized_gate(weight, name, torch.bfloat16)
    layer = QuantizedGatedLinear(weight, bias, name)
    alone = layer(torch.zeros(1, 256).bfloat16())
    for rows in (1, 7, 100):
        x = torch.randn(rows, 3 * 256).bfloat16()[:, 256:512]
        x[-1] = 0
        found, exact = layer(x), gated_activation(apart(x).float(), name)
        torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.01)  # `apart` rounds the sums
        assert torch.equal(found[-1:], alone)


def test_an_mlp_of_other_weights_has_its_gate_apart():
    weight = make(192, 256)
    for other in (
        make(96, 256),
        replace(weight, int8_inputs=False),
        replace(weight, permutation=torch.arange(256).int()),
    ):
        assert not supports_quantized_gate(other, "silu", torch.bfloat16)
    assert not supports_quantized_gate(weight, "silu", torch.float32)
    assert supports_quantized_gate(weight, "silu", torch.bfloat16)


@pytest.mark.parametrize("num_inputs", [192, 768])
def test_a_row_has_the_same_bits_with_any_other_rows(num_inputs):
    layer, x = QuantizedLinear(make(97, num_inputs), None, torch.bfloat16), torch.randn(200, num_inputs).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (2, 3, 6, 7, 8, 9, 12, 13, 18, 19, 25, 96, 97, 200):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:]), alone[-rows:])


def test_the_largest_sums_fit():
    weight = QuantizedWeight(
        torch.full((64, 16384), -128, dtype=torch.int8), torch.ones(64, 1), 16384, int8_inputs=True
    )
    for number in (-3.0, 3.0):
        x = torch.full((7, 16384), number).bfloat16()
        check(QuantizedLinear(weight, None, torch.bfloat16)(x), x, weight)


@pytest.mark.parametrize("rows", [1, 20])
def test_rows_of_zeros_and_rows_that_are_no_numbers(rows):
    weight = make(64, 512)
    layer, x = QuantizedLinear(weight, None, torch.bfloat16), torch.randn(rows, 512).bfloat16()
    x[:, :PART] = 0
    check(layer(x), x, weight)
    assert not layer(torch.zeros_like(x)).any()
    for number in (torch.nan, torch.inf, -torch.inf):
        bad = x.clone()
        bad[-1, 300] = number
        found = layer(bad)
        assert not found[-1].isfinite().any() and torch.equal(found[:-1], layer(x)[:-1])


@pytest.mark.parametrize("num_inputs", [16, 272])
def test_rows_are_read_back_exactly(num_inputs):
    weight, rows = make(97, num_inputs), torch.tensor([96, 0, 17, 63, 64, 17])
    layer = QuantizedLinear(weight, None, torch.bfloat16)
    assert torch.equal(layer.rows(rows), weight.dequantize(torch.bfloat16)[rows])


@pytest.mark.parametrize("rows", [1, 20, 100])
def test_a_program_records_the_products(rows):
    layer, x = QuantizedLinear(make(97, 192), None, torch.bfloat16), torch.randn(rows, 192).bfloat16()
    program = cpu.program.record(lambda: layer(x), cpu.program.Workspace())
    x.copy_(torch.randn(rows, 192))
    assert torch.equal(program(), layer(x))


@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_experts_multiply_as_each_does_alone(tokens):
    matrices, biases = [make(64 * (i + 1), 192).row_range(0, 64) for i in range(3)], torch.randn(3, 64).bfloat16()
    packed = cpu.code_linear.PackedCodes(stack_experts(matrices))
    experts = torch.randint(3, (tokens, 1), dtype=torch.int32)
    groups = sort_pairs(experts, 3, cpu.linear.ROWS_PER_ITEM).groups
    x = torch.randn(tokens, 192).bfloat16()
    found = cpu.code_linear.grouped_code_linear(x, packed, biases, groups)
    parts = x.split(experts.flatten().bincount(minlength=3).tolist())
    alone = [make_linear(matrix, bias, torch.bfloat16) for matrix, bias in zip(matrices, biases, strict=True)]
    assert torch.equal(found, torch.cat([layer(part) for layer, part in zip(alone, parts, strict=True) if len(part)]))


def test_inputs_keep_their_dtype_where_the_product_does_not_serve_them():
    """Groups of columns, offsets, rows of no whole vectors, 4-bit codes, and inputs in fp32."""
    weight = make(64, 192)
    halves = replace(weight, scales=weight.scales.repeat(1, 2), group_size=96)
    offsets = replace(weight, offsets=torch.zeros_like(weight.scales))
    narrow = make(64, 24)
    four = QuantizedWeight(pack_4bit(torch.full((64, 192), 9).byte()), weight.scales, 192, None, INT4, int8_inputs=True)
    for other in (halves, offsets, narrow, four):
        x = torch.randn(5, other.in_features).bfloat16()
        exact = x.float() @ other.dequantize().T
        found = QuantizedLinear(other, None, torch.bfloat16)(x).float()
        terms = x.float().abs() @ other.dequantize().abs().T
        assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-9 * terms).all()
    x = torch.randn(5, 192)
    exact = x @ weight.dequantize().T
    torch.testing.assert_close(QuantizedLinear(weight, None, torch.float32)(x), exact, rtol=1e-4, atol=1e-2)
    rounded = QuantizedLinear(weight, None, torch.bfloat16)(x.bfloat16())
    assert (rounded.float() - exact).abs().max() > 1, "the same weight in bfloat16 rounds its inputs"


def test_weights_with_and_without_int8_inputs_stay_apart():
    weight = make(64, 192)
    assert concatenate_rows([weight, replace(weight, int8_inputs=False)]) is None
    joined = concatenate_rows([weight, weight])
    assert joined is not None and joined.int8_inputs and joined.row_range(0, 64).int8_inputs
