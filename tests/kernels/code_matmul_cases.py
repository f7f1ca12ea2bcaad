"""Products with 4-bit and 8-bit codes in Triton against the dequantised matrix. Run like triton_cases.py: on a CUDA
device as it is, elsewhere by test_triton.py in the interpreter."""

from dataclasses import replace

import pytest
import torch

from kernels.dispatch import INTERPRET
from kernels.quantized.code_matmul import MOST_ROWS, CodeMatmul, spans, supports_code_matmul
from kernels.quantized.linear import QuantizedLinear
from kernels.quantized.weight import INT4, UINT4, QuantizedWeight, pack_4bit

DEVICE = "cpu" if INTERPRET else "cuda"
# The interpreter computes bf16 from its bit pattern, silently wrong; on a device bf16 is the dtype that matters.
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
NF4 = tuple(float(x) for x in torch.linspace(-1, 1, 16).pow(3))


def make(kind: str, out: int, columns: int, group: int, offsets: bool, permuted: bool = False) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out)
    codebook = {"int4": INT4, "uint4": UINT4, "nf4": NF4}.get(kind)
    codes = torch.randint(256, (out, columns), generator=generator).to(torch.uint8)
    if codebook is not None:
        codes = pack_4bit(codes & 15)
    elif kind == "fp8":
        codes[codes & 127 == 127] = 3  # NaN
        codes = codes.view(torch.float8_e4m3fn)
    else:
        codes = codes.view(torch.int8)
    weight = QuantizedWeight(
        codes,
        (torch.rand(out, columns // group, generator=generator) + 0.5) / 64,
        group,
        offsets=torch.randn(out, columns // group, generator=generator) / 64 if offsets else None,
        codebook=codebook,
        permutation=torch.randperm(columns, generator=generator).int() if permuted else None,
    )
    return weight.to(torch.device(DEVICE))


def check(found: torch.Tensor, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    matrix = weight.dequantize()
    exact = x.float() @ matrix.T + (0 if bias is None else bias.float())
    terms = x.float().abs() @ matrix.abs().T
    assert found.dtype == x.dtype and found.shape == exact.shape
    assert ((found.float() - exact).abs() <= ROUNDING[x.dtype] * (2 * exact.abs() + 2 * terms)).all()


def each_kind_and_group():
    """Every shape in every kind and dtype, for parametrize. Those that are not slow have each shape in each kind, in
    the interpreter in one dtype."""
    kinds = ["int4", "uint4", "nf4", "int8", "fp8"]
    shapes = [(160, 32, False), (192, 16, True), (320, 64, True), (256, 128, True), (90, 90, False)]
    return [
        pytest.param(dtype, kind, *shape, marks=[pytest.mark.slow] * ((i + j + k) % 2))
        for i, dtype in enumerate(DTYPES)
        for j, kind in enumerate(kinds)
        for k, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("dtype, kind, columns, group, offsets", each_kind_and_group())
def test_every_kind_and_group(dtype, kind, columns, group, offsets):
    weight = make(kind, 70, columns, group, offsets)
    bias = torch.randn(70, device=DEVICE).to(dtype) if offsets else None
    assert supports_code_matmul(weight)
    multiply = CodeMatmul(weight)
    for num_rows in (0, 1, 2, 19, 70, MOST_ROWS + 1):
        x = torch.randn(num_rows, 2 * columns, device=DEVICE).to(dtype)[:, columns:]
        check(multiply(x, bias), weight, x, bias)


@pytest.mark.parametrize("kind, group", [("int4", 128), ("int8", 2560)])
def test_few_outputs_divide_their_columns(kind, group):
    weight = make(kind, 70, 2560, group, offsets=kind == "int4")
    multiply = CodeMatmul(weight)
    assert spans(2, 132, multiply.codes.shape[1], 128)[0] > 1
    x, bias = torch.randn(3, 2560, device=DEVICE).half(), torch.randn(70, device=DEVICE).half()
    check(multiply(x, bias), weight, x, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offsets_that_are_integer_zeros(dtype):
    """Exactly the scale times an integer, as in GPTQ and AWQ: they are added to the codes, and found again."""
    plain = make("int4", 70, 192, 32, False)
    zeros = torch.arange(70 * 6, device=DEVICE).view(70, 6) % 16 - 7
    scales = plain.scales.half().float()
    scales[3] = 0
    weight = replace(plain, scales=scales, offsets=scales * zeros)
    multiply = CodeMatmul(weight)
    assert multiply.offsets.dtype == torch.int8 and multiply.scales.dtype == torch.float16
    for num_rows in (1, 33, MOST_ROWS + 1):
        x = torch.randn(num_rows, 192, device=DEVICE).to(dtype)
        check(multiply(x, None), weight, x, None)
    rows = torch.tensor([69, 3, 0], device=DEVICE)
    found = multiply.rows(rows)
    assert torch.equal(found.offsets, weight.offsets[rows]) and found.scales.dtype == torch.float32
    assert torch.equal(found.dequantize(), weight.dequantize()[rows])
    other = replace(weight, offsets=weight.offsets + 1e-3)
    assert CodeMatmul(other).offsets.dtype == torch.float32


def test_the_linear_layer_uses_it_and_permutes_its_input():
    weight = make("int4", 48, 128, 32, True, permuted=True)
    layer = QuantizedLinear(weight, None, torch.float16)
    x = torch.randn(5, 128, device=DEVICE).half()
    check(layer(x), weight, x, None)
    rows = torch.tensor([3, 47, 0], device=DEVICE)
    assert torch.equal(layer.rows(rows), weight.dequantize(torch.float16)[rows])


def test_every_e4m3_number_is_exact():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    wide = codes.view(256, 1).expand(256, 16).contiguous().view(torch.float8_e4m3fn)
    weight = QuantizedWeight(wide, torch.ones(256, 1), 16).to(torch.device(DEVICE))
    x = torch.eye(16, device=DEVICE)[:1]
    assert torch.equal(CodeMatmul(weight)(x, None)[0], weight.dequantize()[:, 0])


def test_groups_of_other_sizes_are_left_to_the_reference():
    weight = make("int8", 48, 96, 24, False)
    assert not supports_code_matmul(weight)
    x = torch.randn(3, 96, device=DEVICE)
    check(QuantizedLinear(weight, None, torch.float32)(x), weight, x, None)
